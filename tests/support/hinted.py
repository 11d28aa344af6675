"""Models that measurement refuses, and the hints with which they are taken."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from meshwright import Hints

VOCABULARY, WIDTH, HEADS, DEPTH = 61, 32, 4, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(2)])
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norms
        x = x + self.attention(nn.functional.rms_norm(x, (WIDTH,), first))
        return x + self.feed_forward(nn.functional.rms_norm(x, (WIDTH,), second))


class Unrolled(nn.Module):
    """A decoder whose layers are attributes, as code does that was written out by hand: no list shows what repeats."""

    def __init__(self):
        super().__init__()
        self.vocab_size = VOCABULARY
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        for number in range(DEPTH):
            setattr(self, f"layer_{number}", Layer())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number in range(DEPTH):
            x = getattr(self, f"layer_{number}")(x)
        return self.head(x)


UNROLLED = Hints(blocks=("layer_*",))


class Conditioned(nn.Module):
    """A block that is given what it mixes in before it is given the residual stream."""

    def __init__(self):
        super().__init__()
        self.mix, self.layer = nn.Parameter(torch.full((WIDTH,), 0.1)), Layer()

    def forward(self, places: Tensor, stream: Tensor) -> Tensor:
        return self.layer(stream + self.mix * places)


class Remixed(nn.Module):
    """A decoder whose blocks are all given the same sines of positions, in front of the residual stream."""

    def __init__(self):
        super().__init__()
        self.vocab_size = VOCABULARY
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Conditioned() for _ in range(DEPTH)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        angles = torch.arange(tokens.shape[1], device=x.device, dtype=x.dtype)[:, None] / torch.arange(
            1, WIDTH + 1, device=x.device
        )
        places = angles.sin().expand(*tokens.shape, WIDTH)
        for layer in self.layers:
            x = layer(places, x)
        return self.head(x)


REMIXED = Hints(residual="stream")
