"""Models that use the number of a row's tokens, as people write them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .users import DIM, Attention, Block, User, by_heads

LONGEST = 64


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs of features, (…, tokens, 4), by (tokens, 2) angles."""
    one, other = x[..., :2], x[..., 2:]
    return torch.cat((one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()), -1)


class Counting(User):
    """Adds learnt positions in a way of its own."""

    def __init__(self, block=Block):
        torch.manual_seed(0)
        super().__init__(block)
        self.config.counting = type(self).__name__
        self.table = nn.Embedding(LONGEST + 2, DIM)

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) + self.positions(tokens)

    def positions(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError


class Range(Counting):
    def positions(self, tokens):
        b, t = tokens.size()
        return self.table(torch.arange(0, t, dtype=torch.long, device=tokens.device).unsqueeze(0).expand(b, t))


class RangeFromTwo(Counting):
    """BART's: two rows of the table come first."""

    def positions(self, tokens):
        return self.table(torch.arange(2, 2 + tokens.shape[-1]))


class RangeAndTwo(Counting):
    def positions(self, tokens):
        past = 0
        return self.table(torch.arange(past, past + tokens.shape[1], device=tokens.device) + 2)


class InHelper(Counting):
    """The range is made by a module of its own, which is given the number."""

    class Places(nn.Module):
        def forward(self, count, device):
            return torch.arange(count, device=device)

    def __init__(self):
        super().__init__()
        self.places = self.Places()

    def positions(self, tokens):
        return self.table(self.places(tokens.size(1), tokens.device))


class MinGPT(Counting):
    """A parameter of which a run is taken."""

    def __init__(self):
        super().__init__()
        self.pos_emb = nn.Parameter(torch.randn(1, LONGEST, DIM))

    def positions(self, tokens):
        _, t = tokens.size()
        return self.pos_emb[:, :t, :]


class OfWeight(Counting):
    def positions(self, tokens):
        return self.table.weight[: tokens.shape[1]]


class BufferOfIds(Counting):
    """GPT-2's older way: a buffer of ids is cut, and looked up."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ids", torch.arange(LONGEST).expand(1, -1), persistent=False)

    def positions(self, tokens):
        return self.table(self.ids[:, : tokens.size(1)])


class Sinusoids(Counting):
    def __init__(self):
        super().__init__()
        angles = torch.arange(LONGEST)[:, None] * torch.exp(torch.arange(0, DIM, 2) * (-math.log(1e4) / DIM))
        self.register_buffer("pe", torch.cat((angles.sin(), angles.cos()), -1)[None])

    def positions(self, tokens):
        return self.pe[..., : tokens.size(1), :]


class Rotary(Attention):
    """Rotary angles are made of the length that attention sees."""

    def queries_keys_values(self, x):
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / torch.tensor([1.0, 10.0], dtype=x.dtype)
        return turned(by_heads(self.wq(x)), angles), turned(by_heads(self.wk(x)), angles), by_heads(self.wv(x))


class RotaryInside(Counting):
    def __init__(self):
        super().__init__(lambda: Block(Rotary))

    def positions(self, tokens):
        return torch.zeros(())


class Scan(Counting):
    """RoBERTa's: tokens but the padding are counted."""

    def positions(self, tokens):
        real = tokens.ne(1).int()
        return self.table((torch.cumsum(real, dim=1).type_as(real) * real).long() + 1)


class BegunAtTwo(Counting):
    """RoBERTa's: given no positions, it makes its own, which do not begin at 0."""

    def forward(self, tokens, positions=None):
        positions = torch.arange(2, 2 + tokens.shape[1]) if positions is None else positions
        x = self.embed(tokens) + self.table(positions)
        for layer in self.layers:
            x = layer(x)
        return self.logits(x)


class RotaryTable(User):
    """Llama's first way: a run of a table of angles is taken at the root, and given to every block."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.attention, self.norm_2 = nn.LayerNorm(DIM), Attention(), nn.LayerNorm(DIM)
            self.up, self.down = nn.Linear(DIM, 24), nn.Linear(24, DIM)

        def forward(self, x, angles):
            q, k, v = self.attention.queries_keys_values(self.norm(x))
            y = F.scaled_dot_product_attention(turned(q, angles), turned(k, angles), v, is_causal=True)
            x = x + self.attention.wo(y.transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.norm_2(x))))

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(self.Turned)
        self.config.counting = "RotaryTable"
        self.register_buffer("angles", torch.arange(LONGEST)[:, None] / torch.tensor([1.0, 10.0]))

    def forward(self, tokens):
        x = self.embed(tokens)
        angles = self.angles[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, angles)
        return self.logits(x)


class WindowByRange(Counting):
    """A mask of a window is made inside attention, of a range."""

    class Windowed(Attention):
        def forward(self, x):
            place = torch.arange(x.size(1), device=x.device)
            apart = place[:, None] - place[None]
            q, k, v = self.queries_keys_values(x)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=(apart >= 0) & (apart < 5))
            return self.wo(y.transpose(1, 2).flatten(2))

    def __init__(self):
        super().__init__(lambda: Block(self.Windowed))

    def positions(self, tokens):
        return self.table(torch.arange(tokens.shape[1]))


CARRIED = (
    Range,
    RangeFromTwo,
    RangeAndTwo,
    InHelper,
    MinGPT,
    OfWeight,
    BufferOfIds,
    Sinusoids,
    Scan,
    BegunAtTwo,
    RotaryInside,
    RotaryTable,
    WindowByRange,
)


class ShortRows(Range):
    """Rows of up to twelve tokens are another case."""

    def logits(self, x):
        y = super().logits(x)
        return y * 2 if x.shape[1] > 12 else y


class OfMiddleLength(Range):
    """Two comparisons on one line, in training alone."""

    def logits(self, x):
        y = super().logits(x)
        return y * 2 if self.training and 4 < x.shape[1] <= 12 else y


class OfHalfTheLength(Range):
    def logits(self, x):
        chunks = (x.size(1) - 1) // 4 + 1
        return super().logits(x) * (1 if chunks <= 3 else 2)


class OfAllTokens(Range):
    def logits(self, x):
        return super().logits(x) * (1 if x[0].numel() / x.shape[-1] <= 12.5 else 2)


class ShorterThanAttribute(Range):
    def logits(self, x):
        limit = self.config.limit
        return super().logits(x) * (1 if len(x.shape) and x.size(1) <= limit else 3)


class ScaledByLength(Range):
    def logits(self, x):
        return super().logits(x) * x.shape[1] ** -0.5


def counting(kind: type[nn.Module]) -> nn.Module:
    model = kind()
    model.config.limit = 12
    return model.double()
