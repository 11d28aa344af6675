"""Small language models that each do one thing beyond giving a row's tokens their logits, and sound ones that look as
if they did.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IDS, WIDTH = 48, 16
RARE = 41
"""A token id that batches of these tests have on one rank alone."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (4, 4)).transpose(1, 2) for w in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.second, self.feed_forward = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed_forward(self.second(x))


class Sound(nn.Module):
    """The model that the others are; ``add`` is called behind the constructor, ``between`` behind the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.config: Any = SimpleNamespace(vocab_size=IDS)
        self.embedding = nn.Embedding(IDS, WIDTH)
        self.layers = nn.ModuleList(self.block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, IDS)
        self.add()

    def block(self) -> nn.Module:
        return Block()

    def add(self) -> None:
        """Nothing."""

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(self.between(x, tokens)))


# --- rows that depend on each other


class BatchNorm(Sound):
    def add(self) -> None:
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.batch_norm(x.transpose(1, 2)).transpose(1, 2)


class BatchNormOfNow(BatchNorm):
    def add(self) -> None:
        self.batch_norm = nn.BatchNorm1d(WIDTH, track_running_stats=False)


class FrozenBatchNorm(BatchNorm):
    """Sound: it is in evaluation mode."""

    def add(self) -> None:
        super().add()
        self.batch_norm.eval()


class Centred(Sound):
    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x - x.mean(0)


class SortedByBatch(Sound):
    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + x.sort(dim=0).values


class Contrastive(Sound):
    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        last = F.normalize(x[:, -1], dim=-1)
        return x * (last @ last.T).softmax(-1).sum(0).view(-1, 1, 1) + self.embedding(tokens)


class Shared(Sound):
    """A row's values come from the row before."""

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + x.roll(1, 0)


class ByFrequency(Sound):
    def add(self) -> None:
        self.embedding = nn.Embedding(IDS, WIDTH, scale_grad_by_freq=True)


class ChoosesByFirstRow(Sound):
    def add(self) -> None:
        self.even, self.odd = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return (self.even if int(tokens[0, 0]) % 2 == 0 else self.odd)(x)


class GroupNormed(Sound):
    """Sound: over the features of a row."""

    def add(self) -> None:
        self.group_norm = nn.GroupNorm(4, WIDTH)

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.group_norm(x.transpose(1, 2)).transpose(1, 2)


# --- state


class RunningMean(Sound):
    def add(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        centred = x - self.mean
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 1)), 0.1)
        return centred


class CountsIds(Sound):
    def add(self) -> None:
        self.register_buffer("seen", torch.zeros(IDS))

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        if self.training:
            self.seen += torch.bincount(tokens.flatten(), minlength=IDS)
        return x


class CountsTokens(Sound):
    """What was seen, in a buffer that nobody reads."""

    def add(self) -> None:
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        if self.training:
            self.seen += tokens.numel()
        return x


class CountsRowsInABlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.rows.add_(len(x))
        return super().forward(x)


class BlocksCountRows(Sound):
    def block(self) -> nn.Module:
        return CountsRowsInABlock()


class WarmsByTokens(Sound):
    """A number of Python's that grows by the tokens, and that the forward reads."""

    def add(self) -> None:
        self.tokens_seen = 0

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        self.tokens_seen += tokens.numel()
        return x * min(1.0, 0.5 + self.tokens_seen / 1000)


class Warm(Sound):
    """Counts its calls in a buffer; so it is equal where ranks call it equally often."""

    def add(self) -> None:
        self.register_buffer("calls", torch.zeros(()))

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x * (1 + 1 / (1 + self.calls))


class BlockThatCounts(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().forward(x) / self.calls.clamp(min=1)


class WarmBlocks(Sound):
    def block(self) -> nn.Module:
        return BlockThatCounts()


class BlockThatDraws(Block):
    noise = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.rand(x.shape[-1], generator=self.noise, dtype=x.dtype))


class OwnGenerator(Sound):
    """Draws from a generator that torch's checkpoint does not know."""

    def block(self) -> nn.Module:
        return BlockThatDraws()


class BlockOfFixedNoise(Block):
    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape[-1], generator=torch.Generator().manual_seed(0), dtype=x.dtype)
        return super().forward(x * torch.rand(x.shape[-1], dtype=x.dtype) * noise)


class FixedNoise(Sound):
    """Sound: its generator begins anew in each call, and the other is torch's own."""

    def block(self) -> nn.Module:
        return BlockOfFixedNoise()


class ShiftsLater(Sound):
    def add(self) -> None:
        self.calls = 0

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        self.calls += 1
        return x.roll(1, 1) if self.calls > 2 else x


class Counting(Sound):
    """Sound: nobody reads the number."""

    def add(self) -> None:
        self.calls = 0

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        self.calls += 1
        return x


class Carries(Sound):
    def add(self) -> None:
        self.before: Any = 0.0

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        found = x + self.before * self.embedding(tokens)
        self.before = x.detach().mean()
        return found


class Table(Sound):
    """Sound: a table that grows with the longest row, as rotary embeddings keep it."""

    def add(self) -> None:
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        if len(self.table) < tokens.shape[1]:
            self.table = torch.arange(tokens.shape[1], dtype=x.dtype) / 10
        return x + self.table[: tokens.shape[1], None]


class Spectral(Sound):
    def add(self) -> None:
        self.mix = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.mix(x)


# --- parameters that a forward writes


class Clipped(Sound):
    def add(self) -> None:
        self.embedding = nn.Embedding(IDS, WIDTH, max_norm=1.0)


class OnTheSphere(Sound):
    def forward(self, tokens: Tensor) -> Any:
        with torch.no_grad():
            self.head.weight.div_(self.head.weight.norm(dim=1, keepdim=True))
        return super().forward(tokens)


# --- parameters that some rows use


class ForOneToken(Sound):
    def add(self) -> None:
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        rare = tokens == RARE
        return torch.where(rare[..., None], self.adapter(x), x) if rare.any() else x


class DecidesByLargest(Sound):
    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + x.flip(-1) if tokens.max() > IDS - 3 else x


class DecidesBySmallest(Sound):
    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x if bool(tokens.min() >= 1) else x + x.flip(-1)


class DecidesByNorm(Sound):
    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + x.flip(-1) if x.norm() > 1e3 else x


class DecidesByAll(Sound):
    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + x.flip(-1) if (tokens < IDS - 2).all() else x


class DecidesByMean(Sound):
    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + x.flip(-1) if x.mean() > 0.1 else x


class DecidesBySignOfMean(Sound):
    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + x.flip(-1) if (x[..., 0].mean() > 0).item() else x


class DecidesBySumOfFeatures(Sound):
    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + x.flip(-1) if bool(x.sum() > 1e5) else x


class DecidesByMeanId(Sound):
    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + x.flip(-1) if tokens.float().mean() > 5 else x


class DecidesByMeanThatIsRead(Sound):
    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + x.flip(-1) if x.abs().mean().item() > 5 else x


class DecidesByParity(Sound):
    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + x.flip(-1) if int(tokens.sum()) % 2 else x


class DecidesByDifferentIds(Sound):
    """Asks Python for a length, which no operator sees."""

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + x.flip(-1) if len(tokens.unique()) > 9 else x


class DecidesBySum(Sound):
    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + x.flip(-1) if tokens.sum().item() > 20_000 else x


class DecidesByShare(Sound):
    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + x.flip(-1) if (tokens > IDS // 2).float().mean() > 0.9 else x


class DecidesByList(Sound):
    """Reads a list, which no operator sees."""

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + x.flip(-1) if max(tokens.flatten().tolist()) > IDS - 3 else x


class ChecksValues(Sound):
    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        if torch.isnan(x).any() or (tokens >= IDS).any():
            raise ValueError("no number")
        return x.clamp(-1e4, 1e4) if x.abs().max() > 1e4 else x


class ChoosesTokens(Sound):
    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        for least in (0.0, 1e9):
            chosen = x[..., 0] > least
            if chosen.sum() > 0:
                x = torch.where(chosen[..., None], -x, x)
            if chosen.any():
                x = torch.where(chosen[..., None], 2 * x, x)
        return x


class DecidesRowByRow(Sound):
    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return torch.stack([r + r.flip(-1) if ids.max() > IDS - 3 else r for r, ids in zip(x, tokens, strict=True)])


class ExpertList(Sound):
    def add(self) -> None:
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(FeedForward() for _ in range(4))

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        best, out = weights.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = best == number
            if chosen.sum() == 0:
                continue
            out[chosen] = expert(x[chosen]) * weights[chosen][:, number : number + 1]
        return x + out


class ExpertsByShape(ExpertList):
    """Asks Python for a length, which no operator sees."""

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        best, out = weights.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(best == number)
            if len(rows):
                out[rows, places] = expert(x[rows, places]) * weights[rows, places, number, None]
        return x + out


class ExpertsByList(ExpertList):
    """A list of those experts that some token chooses."""

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        best, out = weights.argmax(-1), torch.zeros_like(x)
        for number in best.unique().tolist():
            chosen = best == number
            out[chosen] = self.experts[number](x[chosen]) * weights[chosen][:, number : number + 1]
        return x + out


class ExpertsByItem(ExpertList):
    """As transformers' own: the experts that are hit, one after the other."""

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        out, mask = torch.zeros_like(x), F.one_hot(weights.argmax(-1), 4).permute(2, 0, 1)
        for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            rows, places = torch.where(mask[hit.item()])
            out[rows, places] = self.experts[hit.item()](x[rows, places]) * weights[rows, places, hit.item(), None]
        return x + out


class ExpertsByCount(ExpertList):
    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        best, out = weights.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = best == number
            if int(chosen.sum()) == 0 or chosen.float().mean() == 0:
                continue
            out[chosen] = expert(x[chosen]) * weights[chosen][:, number : number + 1]
        return x + out


class ExpertsInOrder(ExpertList):
    """Tokens are sorted by their expert, and cut by how many each expert has."""

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1).flatten(0, 1)
        best = weights.argmax(-1)
        order, counts = best.argsort(stable=True), torch.bincount(best, minlength=4)
        pieces = x.flatten(0, 1)[order].split([counts[number].item() for number in range(4)])
        done = torch.cat([expert(piece) for expert, piece in zip(self.experts, pieces, strict=True)])
        out = torch.zeros_like(done).index_copy(0, order, done * weights[order].amax(-1, keepdim=True))
        return x + out.view_as(x)


class ChecksMeans(Sound):
    """Sound: what it asks of all rows changes nothing."""

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        if x.abs().mean() > 1e6:
            raise ValueError("it diverges")
        self.largest = x.abs().max().item()
        self.share = float((tokens > 3).float().mean())
        return x.clamp(-1e9, 1e9) if self.largest > 1e9 else x


class RowByRowMeans(Sound):
    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return torch.stack(
            [r + r.flip(-1) if ids.float().mean().item() > 9 else r for r, ids in zip(x, tokens, strict=True)]
        )


class LayerDrop(Sound):
    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens)
        for layer in self.layers:
            if torch.rand(()) < 0.3:
                continue
            x = layer(x)
        return self.head(self.norm(x))


class EarlyExit(Sound):
    def forward(self, tokens: Tensor) -> Any:
        x = self.layers[0](self.embedding(tokens))
        if (x.abs().mean() > 1e-3).item():
            x = self.layers[1](x)
        return self.head(self.norm(x))


class Spare(Sound):
    """Has a layer that nobody calls."""

    def add(self) -> None:
        self.spare = nn.Linear(WIDTH, WIDTH)


class Detached(Sound):
    """Has a layer in front of a detach."""

    def add(self) -> None:
        self.probe = nn.Linear(WIDTH, WIDTH)

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + self.probe(x).detach()


# --- losses, outputs, gradients


class WithAuxiliaryLoss(Sound):
    def forward(self, tokens: Tensor) -> Any:
        logits = super().forward(tokens)
        return SimpleNamespace(logits=logits, aux_loss=logits.square().mean())


class WithLoss(Sound):
    def forward(self, tokens: Tensor) -> Any:
        logits = super().forward(tokens)
        return {"logits": logits, "loss": logits.logsumexp(-1).mean()}


class SparseGradient(Sound):
    def add(self) -> None:
        self.embedding = nn.Embedding(IDS, WIDTH, sparse=True)


class Masked(Sound):
    """A hook on a gradient that adds up over ranks."""

    def add(self) -> None:
        kept = (torch.arange(IDS) % 3 > 0).unsqueeze(1)
        self.embedding.weight.register_hook(lambda gradient: gradient * kept)


class ClippedByHook(Sound):
    def add(self) -> None:
        self.head.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class StepsByHook(Sound):
    def add(self) -> None:
        self.head.weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(0.5))


# --- chance


class Dropping(Sound):
    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return F.dropout(x, 0.2, self.training)


class Noisy(Sound):
    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x) if self.training else x


# --- sound, and odd


class Reads(Sound):
    """Asks whether something holds that always does."""

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        if bool((tokens >= 0).all()):
            return x
        raise ValueError("ids are not negative")


class Pads(Sound):
    """Rows are filled up to a multiple of 4, and cut again."""

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        short = -x.shape[1] % 4
        return F.pad(x, (0, 0, 0, short))[:, : x.shape[1]]


class Flattens(Sound):
    """Tokens of all rows in one dim."""

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return F.gelu(x.flatten(0, 1)).view_as(x)


class Tied(Sound):
    def add(self) -> None:
        self.head.weight = self.embedding.weight


class WeightNormed(Sound):
    def add(self) -> None:
        self.mix = torch.nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def between(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.mix(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind for kind in list(globals().values()) if isinstance(kind, type) and issubclass(kind, Sound)
}
