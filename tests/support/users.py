"""Models as users write them: each computes something that the well-known families do not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, DIM, HEADS, LONGEST = 53, 16, 4, 16
HEAD = DIM // HEADS


def by_heads(x: Tensor) -> Tensor:
    """(rows, seq, features) → (rows, heads, seq, features of a head), whatever heads are here."""
    return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)


def attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    mask = torch.full((q.shape[2], q.shape[2]), -torch.inf, dtype=q.dtype).triu(1)
    mask = mask if bias is None else mask + bias
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Nothing special; others change parts of it."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return by_heads(self.wq(x)), by_heads(self.wk(x)), by_heads(self.wv(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(attended(*self.queries_keys_values(x)))


class Interleaved(Attention):
    """One weight: query, key and value of a head side by side."""

    def __init__(self):
        super().__init__()
        del self.wq, self.wk, self.wv
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, HEAD)).transpose(1, 2).unbind(3)
        return q, k, v


class NormedOverAllHeads(Attention):
    def __init__(self):
        super().__init__()
        self.norm_q, self.norm_k = nn.LayerNorm(DIM), nn.RMSNorm(DIM)

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return by_heads(self.norm_q(self.wq(x))), by_heads(self.norm_k(self.wk(x))), by_heads(self.wv(x))


class Gated(Attention):
    """What attention gives is gated by the token itself, feature by feature."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(attended(*self.queries_keys_values(x)) * torch.sigmoid(self.gate(x)))


class GatedByHead(Attention):
    """One gate for each head."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        mixed = attended(*self.queries_keys_values(x)).unflatten(-1, (-1, HEAD))
        return self.wo((mixed * torch.sigmoid(self.gate(x)).unsqueeze(-1)).flatten(2))


class WithSinks(Attention):
    """A learnt logit for each head that takes weight away from all tokens."""

    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.queries_keys_values(x)
        scores = q @ k.transpose(-1, -2) + torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=x.dtype).triu(1)
        sinks = self.sinks.view(-1, 1, 1).expand(len(x), -1, x.shape[1], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        return self.wo((weights @ v).transpose(1, 2).flatten(2))


class RelativeBias(Attention):
    """A learnt bias for each head and distance."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(LONGEST, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        distance = (place.unsqueeze(1) - place).clamp(min=0)
        return self.wo(attended(*self.queries_keys_values(x), self.bias[distance].permute(2, 0, 1)))


class FixedSlopes(Attention):
    """ALiBi with one number for each head, written into the code: on no rank are there fewer."""

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], dtype=x.dtype)
        slopes = torch.tensor([2.0**-head for head in range(HEADS)], dtype=x.dtype)
        return self.wo(
            attended(*self.queries_keys_values(x), slopes.view(-1, 1, 1) * (place - place.unsqueeze(1)).clamp(max=0))
        )


class TalkingHeads(Attention):
    """Heads exchange what they found (arXiv 2003.02436): they cannot be computed apart."""

    def __init__(self):
        super().__init__()
        self.talk = nn.Parameter(torch.eye(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        found = attended(*self.queries_keys_values(x)).unflatten(-1, (-1, HEAD))
        return self.wo(torch.einsum("bshd,hg->bsgd", found, self.talk).flatten(2))


class OneKeyForAll(Attention):
    """Queries and keys come from the same layer, which is called twice."""

    def __init__(self):
        super().__init__()
        del self.wk

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return by_heads(self.wq(x)), by_heads(self.wq(x.flip(-1))), by_heads(self.wv(x))


class Latent(Attention):
    """Keys and values of all heads come from a few features, the queries do not.

    A part of the key is every head's (arXiv 2405.04434).
    """

    def __init__(self):
        super().__init__()
        del self.wk, self.wv
        self.squeezed = nn.Linear(DIM, 6 + HEAD // 2)
        self.norm = nn.LayerNorm(6)
        self.to_heads = nn.Linear(6, HEADS * (HEAD // 2 + HEAD), bias=False)

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        few, everybodys = self.squeezed(x).split([6, HEAD // 2], dim=-1)
        own, v = (
            self.to_heads(self.norm(few))
            .unflatten(-1, (-1, HEAD // 2 + HEAD))
            .transpose(1, 2)
            .split([HEAD // 2, HEAD], dim=-1)
        )
        return by_heads(self.wq(x)), torch.cat([own, everybodys.unsqueeze(1).expand_as(own)], dim=-1), v


class LatentAndInput(Latent):
    """The few features are gated by the token itself: what heads are made from does not follow from them alone."""

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        few, everybodys = self.squeezed(x).split([6, HEAD // 2], dim=-1)
        few = self.norm(few) * torch.sigmoid(x[..., :6])
        own, v = (
            self.to_heads(few).unflatten(-1, (-1, HEAD // 2 + HEAD)).transpose(1, 2).split([HEAD // 2, HEAD], dim=-1)
        )
        return by_heads(self.wq(x)), torch.cat([own, everybodys.unsqueeze(1).expand_as(own)], dim=-1), v


class LogScaled(Attention):
    """Queries grow with the length of the sequence that they see, and with a learnt factor of all heads."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().queries_keys_values(x)
        growth = torch.log(torch.arange(x.shape[1], dtype=x.dtype) + 2).view(-1, 1)
        return q * growth * self.factor, k, v


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 24), nn.Linear(24, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class ThreeLinears(nn.Module):
    """A chain: the middle layer is whole for every rank, or nothing is cut."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(DIM, 24), nn.Linear(24, 24), nn.Linear(24, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.three(F.gelu(self.two(F.gelu(self.one(x)))))


class LowRank(nn.Module):
    """A low-rank correction beside a feed-forward, as adapters have it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 24), nn.Linear(24, DIM)
        self.a, self.b = nn.Linear(DIM, 2, bias=False), nn.Linear(2, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x) + self.b(self.a(x))))


class NormedHidden(nn.Module):
    """A norm over the hidden features, with parameters of its own, before the last layer (as in NormFormer, arXiv
    2110.09456).
    """

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(DIM, 24), nn.LayerNorm(24), nn.Linear(24, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(F.gelu(self.up(x))))


class Block(nn.Module):
    def __init__(
        self, attention: Callable[[], nn.Module] = Attention, feed_forward: Callable[[], nn.Module] = FeedForward
    ):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(DIM), nn.RMSNorm(DIM)
        self.attention, self.feed_forward = attention(), feed_forward()

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))


class WithoutModule(nn.Module):
    """Attention lies directly on the block."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.norm, self.feed_forward = nn.LayerNorm(DIM), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.wo(attended(by_heads(self.wq(h)), by_heads(self.wk(h)), by_heads(self.wv(h))))
        return x + self.feed_forward(x)


class PostNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_1(x + self.attention(x))
        return self.norm_2(x + self.feed_forward(x))


class GivesTuple(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


class Scaled(Block):
    """LayerScale (arXiv 2103.17239), and a learnt weight of the residual stream."""

    def __init__(self):
        super().__init__()
        self.gain, self.keep = nn.Parameter(torch.ones(DIM)), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.keep * x + self.gain * self.attention(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))


class Parallel(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm_1(x)
        return x + self.attention(h) + self.feed_forward(h)


class TwoNorms(Block):
    """Both branches in parallel, each behind a norm of its own, of another class than the other."""

    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(DIM), nn.RMSNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm_1(x)) + self.feed_forward(self.norm_2(x))


class LatentTwoNorms(TwoNorms):
    def __init__(self):
        super().__init__()
        self.attention = Latent()


class OneNormRead(TwoNorms):
    """What one of them gives is added too."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm_2(x)
        return x + self.attention(self.norm_1(x)) + self.feed_forward(h) + h


class Dropping(nn.LayerNorm):
    """A norm that draws in training: computed once more, it would be another."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


class OneNormDrops(TwoNorms):
    def __init__(self):
        super().__init__()
        self.norm_2 = Dropping(DIM)


class ParallelAndNormed(Block):
    """Both branches in parallel, each through a norm before they are added: they may not be summed first."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm_1(self.attention(x)) + self.norm_2(self.feed_forward(x))


class Convolved(Block):
    """Each token takes from the one before it, outside attention."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Conv1d(DIM, DIM, 2, groups=DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.filter(F.pad(x.transpose(1, 2), (1, 0))).transpose(1, 2)
        return super().forward(x)


class Placed(Block):
    """Every block adds positions, from the number of tokens that it is given."""

    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.zeros(LONGEST, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.places[: x.shape[1]])


class NoEpsilon(Block):
    """A norm that divides by zero where a token is zero, as those are that fill up a rank's part of the sequence."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1.weight * x / x.square().mean(-1, keepdim=True).sqrt())
        return x + self.feed_forward(self.norm_2(x))


class ReadsWeight(Block):
    """Reads a layer's weight without calling the layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * F.linear(x, self.attention.wo.weight)


class User(nn.Module):
    """forward(tokens) → logits, with what the subclasses and the arguments make otherwise."""

    def __init__(self, block: Callable[[], nn.Module] = Block, blocks: int = 2, bias: bool = False):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCABULARY)
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(block() for _ in range(blocks))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=bias)

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.logits(x)


class TwoEmbeddings(User):
    """Learnt positions are added, and the sum is scaled by a learnt factor."""

    def __init__(self):
        super().__init__()
        self.places, self.factor = nn.Embedding(LONGEST, DIM), nn.Parameter(torch.ones(()))

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.factor * (self.embed(tokens) + self.places(torch.arange(tokens.shape[1])))


class TiedAndScaled(User):
    """T5's way: the head is the embedding, and its input is scaled."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x) * DIM**-0.5)


class WithHeadBias(User):
    def __init__(self):
        super().__init__(bias=True)


class LearntScale(User):
    """Logits are scaled by a learnt number behind the head."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x) * self.scale


class Capped(User):
    """Logits are centred, which needs all of them."""

    def logits(self, x: Tensor) -> Tensor:
        logits = super().logits(x)
        return logits - logits.mean(-1, keepdim=True)


class Repeated(User):
    """Every block computes twice (arXiv 1909.11942)."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return self.logits(x)


class SharedBias(User):
    """A bias of heads and distances that all blocks are given, as in T5."""

    def __init__(self):
        super().__init__(TakesBias)
        self.bias = nn.Embedding(LONGEST, HEADS)

    def forward(self, tokens: Tensor) -> Tensor:
        place = torch.arange(tokens.shape[1])
        bias = self.bias((place.unsqueeze(1) - place).clamp(min=0)).permute(2, 0, 1)
        x = self.embedded(tokens)
        for layer in self.layers:
            x = layer(x, bias)
        return self.logits(x)


class AttentionTakesBias(Attention):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.wo(attended(*self.queries_keys_values(x), bias))


class TakesBias(Block):
    def __init__(self):
        super().__init__(AttentionTakesBias)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), bias)
        return x + self.feed_forward(self.norm_2(x))


class Skipping(User):
    """What the embedding gave is added once more behind the blocks."""

    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.embedded(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.logits(x + first)


class OneBlock(User):
    """No block is repeated."""

    def __init__(self):
        super().__init__(blocks=0)
        self.only = Block()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.only(self.embedded(tokens)))


class MixedBetween(User):
    """Between its blocks the stream is mixed with what the embedding gave, by learnt numbers."""

    def __init__(self):
        super().__init__()
        self.mixes = nn.Parameter(torch.tensor([[1.0, 0.1], [0.9, 0.2]]))

    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.embedded(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(self.mixes[number, 0] * x + self.mixes[number, 1] * first)
        return self.logits(x)


class Hourglass(User):
    """The later blocks are given what the earlier ones gave, too."""

    def __init__(self):
        super().__init__(blocks=4)

    def forward(self, tokens: Tensor) -> Tensor:
        x, kept = self.embedded(tokens), []
        for number, layer in enumerate(self.layers):
            x = layer(x if number < 2 else x + kept.pop())
            kept += [x] * (number < 2)
        return self.logits(x)


class OneNorm(User):
    """All blocks have one norm."""

    def __init__(self):
        super().__init__()
        for layer in self.layers[1:]:
            layer.norm_1 = self.layers[0].norm_1


class Pooled(User):
    """The last token alone has logits that all get."""

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x + x.mean(1, keepdim=True))


def of(
    attention: Callable[[], nn.Module] = Attention, feed_forward: Callable[[], nn.Module] = FeedForward
) -> Callable[[], nn.Module]:
    return lambda: User(lambda: Block(attention, feed_forward))


def with_block(block: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: User(block)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": User,
    "interleaved": of(Interleaved),
    "norms over all heads": of(NormedOverAllHeads),
    "gated": of(Gated),
    "latent": of(Latent),
    "latent, gated by its input": of(LatentAndInput),
    "latent, two norms": with_block(LatentTwoNorms),
    "gated by head": of(GatedByHead),
    "sinks": of(WithSinks),
    "relative bias": of(RelativeBias),
    "fixed slopes": of(FixedSlopes),
    "talking heads": of(TalkingHeads),
    "one layer for queries and keys": of(OneKeyForAll),
    "log-scaled": of(LogScaled),
    "three linears": of(feed_forward=ThreeLinears),
    "low rank": of(feed_forward=LowRank),
    "hidden norm": of(feed_forward=NormedHidden),
    "no module of its own": with_block(WithoutModule),
    "post-norm": with_block(PostNorm),
    "tuple": with_block(GivesTuple),
    "scaled": with_block(Scaled),
    "parallel": with_block(Parallel),
    "two norms": with_block(TwoNorms),
    "two norms, one read": with_block(OneNormRead),
    "two norms, one draws": with_block(OneNormDrops),
    "parallel, normed": with_block(ParallelAndNormed),
    "convolved": with_block(Convolved),
    "placed": with_block(Placed),
    "no epsilon": with_block(NoEpsilon),
    "reads a weight": with_block(ReadsWeight),
    "two embeddings": TwoEmbeddings,
    "tied and scaled": TiedAndScaled,
    "head with bias": WithHeadBias,
    "learnt scale": LearntScale,
    "centred": Capped,
    "repeated": Repeated,
    "shared bias": SharedBias,
    "skipping": Skipping,
    "one block": OneBlock,
    "pooled": Pooled,
    "mixed between": MixedBetween,
    "hourglass": Hourglass,
    "one norm": OneNorm,
}


def build(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(1)
        return MODELS[name]()
