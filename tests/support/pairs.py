"""Models whose attention is given a mask or a bias for pairs of tokens, or makes one, as people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .users import DIM, HEADS, Attention, User, by_heads

LONGEST = 64


class ByHand(Attention):
    """Scores, a bias, a softmax."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = self.queries_keys_values(x)
        return self.wo(((q @ k.mT / 2 + bias).softmax(-1) @ v).transpose(1, 2).flatten(2))


class ByTorch(Attention):
    """The bias is given to torch's attention."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = self.queries_keys_values(x)
        return self.wo(F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q)).transpose(1, 2).flatten(2))


class AsIs(Attention):
    """The bias is given to torch's attention in whatever dtype it has."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = self.queries_keys_values(x)
        return self.wo(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))


class Blocked(Attention):
    """A mask of truths is given, and hides scores."""

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = self.queries_keys_values(x)
        scores = (q @ k.mT).masked_fill(hidden, torch.finfo(q.dtype).min)
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Added(Attention):
    """BLOOM's: heads are rows, what comes in is added to what goes out, and the bias is begun from."""

    def forward(self, x: Tensor, residual: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.flatten(0, 1) for part in self.queries_keys_values(x))
        scores = bias.baddbmm(q, k.mT, alpha=0.5).view(len(x), -1, x.shape[1], x.shape[1]) + mask
        mixed = torch.bmm(scores.softmax(-1).flatten(0, 1), v).view(len(x), -1, *v.shape[1:])
        return residual + self.wo(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attention: type[Attention]):
        super().__init__()
        self.norm, self.attention, self.norm_2 = nn.LayerNorm(DIM), attention(), nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 24), nn.Linear(24, DIM)

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), *given)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GivenPairs(User):
    """Blocks are given what the model makes of the number of tokens."""

    attention: type[Attention] = ByHand

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(lambda: Block(self.attention))
        self.config.pairs = type(self).__name__
        self.table = nn.Embedding(LONGEST, DIM)

    def given(self, tokens: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def forward(self, tokens: Tensor) -> Tensor:
        x, given = self.embed(tokens) + self.table(torch.arange(tokens.shape[1])), self.given(tokens)
        for layer in self.layers:
            x = layer(x, *given)
        return self.logits(x)


def blocking(t: int) -> Tensor:
    return torch.full((t, t), -torch.inf).triu(1)


def slopes() -> Tensor:
    return 2.0 ** -torch.arange(1, HEADS + 1)


class Triangle(GivenPairs):
    def given(self, tokens):
        return (blocking(tokens.shape[1]),)


class TriangleToTorch(Triangle):
    attention = ByTorch


class TriangleInFloat32(Triangle):
    attention = AsIs


class Distances(GivenPairs):
    """ALiBi: each head has a slope."""

    def given(self, tokens):
        t = tokens.shape[1]
        place = torch.arange(t)
        return (blocking(t) - slopes()[:, None, None] * (place[:, None] - place[None, :]).abs(),)


class DistancesToTorch(Distances):
    attention = ByTorch


class SlopesOfBuffer(GivenPairs):
    def __init__(self):
        super().__init__()
        self.register_buffer("slopes", slopes()[:, None, None], persistent=False)

    def given(self, tokens):
        place = torch.arange(tokens.size(1), device=tokens.device)
        return ((place[None, :] - place[:, None])[None] * self.slopes + blocking(tokens.size(1)),)


class OfBuffer(GivenPairs):
    """nanoGPT's buffer, which the model hands to its blocks."""

    attention = Blocked

    def __init__(self):
        super().__init__()
        self.register_buffer("triangle", torch.ones(LONGEST, LONGEST).tril().view(1, 1, LONGEST, LONGEST))

    def given(self, tokens):
        t = tokens.shape[1]
        return (self.triangle[:, :, :t, :t] == 0,)


class WithPadding(GivenPairs):
    """A padding mask joins the triangle."""

    attention = Blocked

    def forward(self, tokens, attention_mask=None):
        t = tokens.shape[1]
        hidden = torch.ones(t, t, dtype=torch.bool).triu(1)[None, None]
        if attention_mask is not None:
            hidden = hidden | (attention_mask == 0)[:, None, None, :]
        x = self.embed(tokens) + self.table(torch.arange(t))
        for layer in self.layers:
            x = layer(x, hidden)
        return self.logits(x)


class Documents(GivenPairs):
    """Tokens of one document see each other."""

    attention = Blocked

    def forward(self, tokens, positions=None, document_ids=None):
        positions = torch.arange(tokens.shape[1]).expand(tokens.shape) if positions is None else positions
        documents = torch.zeros_like(tokens) if document_ids is None else document_ids
        apart = documents[:, :, None] != documents[:, None, :]
        hidden = apart | torch.ones(apart.shape[1:], dtype=torch.bool).triu(1)
        x = self.embed(tokens) + self.table(positions)
        for layer in self.layers:
            x = layer(x, hidden[:, None])
        return self.logits(x)


class Beginning(GivenPairs):
    """BLOOM's: a bias for keys alone, (rows · heads, 1, keys), and a block that hands its input on."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.attention, self.norm_2 = nn.LayerNorm(DIM), Added(), nn.LayerNorm(DIM)
            self.up, self.down = nn.Linear(DIM, 24), nn.Linear(24, DIM)

        def forward(self, x, bias, mask):
            x = self.attention(self.norm(x), x, bias, mask)
            return x + self.down(F.gelu(self.up(self.norm_2(x))))

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Block() for _ in self.layers])

    def given(self, tokens):
        b, t = tokens.shape
        bias = (slopes()[:, None] * torch.arange(t))[None].expand(b, -1, -1).reshape(b * HEADS, 1, t)
        return bias.to(self.table.weight.dtype), blocking(t)


class MadeInside(GivenPairs):
    """Attention makes its bias itself, and gives it to torch's."""

    class attention(Attention):
        def forward(self, x):
            q, k, v = (by_heads(part(x)) for part in (self.wq, self.wk, self.wv))
            place = torch.arange(x.size(1), device=x.device)
            bias = blocking(x.size(1)) + slopes()[: q.shape[1], None, None] * (place[None] - place[:, None])
            return self.wo(F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(x)).transpose(1, 2).flatten(2))

    def given(self, tokens):
        return ()


class Annealed(GivenPairs):
    """Distances count for more from step to step, by an attribute, a buffer and a config."""

    def __init__(self):
        super().__init__()
        self.slope, self.config.width = 0.0, 4
        self.register_buffer("factor", torch.ones(()))

    def given(self, tokens):
        place = torch.arange(tokens.shape[1])
        apart = (place[:, None] - place[None, :]).abs()
        bias = -self.slope * self.factor * apart.clamp(max=self.config.width)
        return (blocking(tokens.shape[1]) + bias,)


class OfKinds(GivenPairs):
    """Tokens of another kind are hidden; there may be none."""

    attention = Blocked

    def forward(self, tokens, kinds=None):
        t = tokens.shape[1]
        hidden = torch.ones(t, t, dtype=torch.bool).triu(1)[None, None]
        if kinds is not None:
            hidden = hidden | (kinds[:, None, :, None] != kinds[:, None, None, :])
        x = self.embed(tokens) + self.table(torch.arange(t))
        for layer in self.layers:
            x = layer(x, hidden)
        return self.logits(x)


class Parallel(GivenPairs):
    """Attention and feed-forward read norms of one input, and their outputs are added."""

    class Block(Block):
        def forward(self, x, *given):
            return x + self.attention(self.norm(x), *given) + self.down(F.gelu(self.up(self.norm_2(x))))

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Block(ByHand) for _ in self.layers])

    def given(self, tokens):
        return (blocking(tokens.shape[1]),)


class FewHeads(Triangle):
    """Two heads, and one of keys and values: four ranks of both axes cannot share them out."""

    class attention(Attention):
        def __init__(self):
            super().__init__()
            self.wk, self.wv = (nn.Linear(DIM, DIM // 2, bias=False) for _ in range(2))

        def forward(self, x, bias):
            q, k, v = (part(x).unflatten(-1, (-1, DIM // 2)).transpose(1, 2) for part in (self.wq, self.wk, self.wv))
            return self.wo(((q @ k.mT / 3 + bias).softmax(-1) @ v).transpose(1, 2).flatten(2))


CARRIED = (
    Parallel,
    FewHeads,
    Triangle,
    TriangleToTorch,
    Distances,
    DistancesToTorch,
    SlopesOfBuffer,
    OfBuffer,
    WithPadding,
    Documents,
    Beginning,
    MadeInside,
)


class Learnt(GivenPairs):
    """T5's: the bias of a distance is a weight."""

    def __init__(self):
        super().__init__()
        self.by_distance = nn.Embedding(LONGEST, HEADS)

    def given(self, tokens):
        place = torch.arange(tokens.shape[1])
        apart = (place[:, None] - place[None, :]).abs()
        return (self.by_distance(apart).permute(2, 0, 1) + blocking(tokens.shape[1]),)


class OfTokens(GivenPairs):
    """Tokens that are equal see each other the less."""

    def given(self, tokens):
        return (blocking(tokens.shape[1]) - 1.0 * (tokens[:, None, :, None] == tokens[:, None, None, :]),)


def paired(kind: type[nn.Module]) -> nn.Module:
    return kind().double()
