"""Decoders whose constructors initialise their weights in the ways that people write; what they compute is the same."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS, LENGTH = 48, 16, 4, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln_1(x)
        q, k, v = (layer(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class Plain(nn.Module):
    """Each module's own initialiser and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCABULARY)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Applied(Plain):
    """``self.apply``, then the projections into the residual stream again, smaller (GPT-2)."""

    def __init__(self) -> None:
        super().__init__()
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith(("o.weight", "down.weight")):
                nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(2 * len(self.blocks)))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class Tied(Applied):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.tokens.weight


class TiedBefore(Plain):
    """Tied, and then drawn: the shared weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens.weight = self.head.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.xavier_uniform_(module.weight)


class Truncated(Plain):
    """Rejection sampling, which looks at what it drew."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.trunc_normal_(parameter, std=0.02, a=-0.03, b=0.03)


class Orthogonal(Plain):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.orthogonal_(parameter)


class ByData(Plain):
    """Through ``.data``, slices, and tensors that become parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.data.uniform_(-0.1, 0.1)
        self.tokens.weight.data = torch.randn(VOCABULARY, WIDTH) * 0.02
        self.tokens.weight.data[0] = 0
        self.norm.weight.data *= 0.5
        self.blocks[0].q.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t().contiguous() / WIDTH)
        with torch.no_grad():
            self.blocks[1].up.weight[3:5].normal_()
            self.blocks[1].up.weight.div_(self.blocks[1].up.weight.norm(dim=1, keepdim=True))


class Zeroed(Plain):
    """Blocks that begin as identities."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            nn.init.zeros_(block.o.weight)
            nn.init.constant_(block.down.weight, 0.0)
            nn.init.eye_(block.q.weight)


class Scaled(Plain):
    """By what numbers computed from tables say."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0.5, 1.0, len(self.blocks))]
        with torch.no_grad():
            for block, rate in zip(self.blocks, rates, strict=True):
                block.down.weight *= rate


class Tables(Plain):
    """Sines in a buffer and in a weight, from numpy too; a mask that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        place, rate = (
            torch.arange(LENGTH).unsqueeze(1).float(),
            torch.exp(torch.arange(0, WIDTH, 2).float() * (-math.log(1e4) / WIDTH)),
        )
        with torch.no_grad():
            self.places.weight[:, 0::2] = torch.sin(place * rate)
            self.places.weight[:, 1::2] = torch.cos(place * rate)
        self.register_buffer("sines", torch.from_numpy(np.sin(np.arange(WIDTH))).float())
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH)) == 0, persistent=False)
        self.head.weight.data.copy_(torch.from_numpy(np.random.randn(VOCABULARY, WIDTH)))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.sines.sum() * self.mask[0, 0]


class Copied(Plain):
    """One block, copied: all begin alike."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(copy.deepcopy(self.blocks[0]) for _ in range(2))


class Halved(Plain):
    """Converted behind its initialisation."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16).to(torch.float32)


class InFloat64(Plain):
    """Drawn in another default dtype than that of the model."""

    def __init__(self) -> None:
        torch.set_default_dtype(torch.float64)
        try:
            super().__init__()
            self.head.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) / 10)
        finally:
            torch.set_default_dtype(torch.float32)
        self.to(torch.float32)


class Permuted(Plain):
    """Random integers, random masks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.randperm(VOCABULARY))
        nn.init.sparse_(self.head.weight, 0.3)
        self.tokens.weight.data.mul_(torch.bernoulli(torch.full((VOCABULARY, WIDTH), 0.5)))
        nn.init.kaiming_normal_(self.places.weight)


class Seeded(Plain):
    """It brings its own seed, and no other may change it."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            super().__init__()


class OwnGenerator(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(3))


class Retried(Plain):
    """Draws again until it likes what it has."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.head.weight, 0, 0.06)
        while self.head.weight.abs().max() > 0.2:
            nn.init.normal_(self.head.weight, 0, 0.06)


class FromNumpy(Plain):
    """Its weight is given the memory of an array."""

    def __init__(self) -> None:
        super().__init__()
        drawn = np.random.default_rng(0).normal(size=(VOCABULARY, WIDTH)).astype("float32")
        self.head.weight.data = torch.from_numpy(drawn)


class InOtherWords(Plain):
    """It catches torch's error, and raises its own."""

    def __init__(self) -> None:
        super().__init__()
        try:
            scale = float(self.head.weight.abs().max())
        except Exception as error:
            raise RuntimeError("the initial weights cannot be scaled") from error
        self.head.weight.data.div_(scale)


class Checked(Plain):
    """It asserts what no tensor without values has."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.from_numpy(np.arange(4 * WIDTH, dtype="float32").reshape(4, WIDTH))
        self.register_buffer("table", table)
        assert self.head.weight.device.type == "cpu", "weights are made on the CPU"


RECORDED = (
    Plain,
    Applied,
    Tied,
    TiedBefore,
    Truncated,
    Orthogonal,
    ByData,
    Zeroed,
    Scaled,
    Tables,
    Copied,
    Halved,
    InFloat64,
    Permuted,
    Checked,
)
RUN_WHOLE = (Seeded, OwnGenerator)
"""What they do cannot be carried out later."""
NEED_VALUES = (Retried, FromNumpy, InOtherWords)
"""They fail, or never end, on tensors without values."""


class Forgetful(Plain):
    """A table of which one row is never written."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(3, WIDTH))
        with torch.no_grad():
            self.table[:2].normal_()

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.table.sum()
