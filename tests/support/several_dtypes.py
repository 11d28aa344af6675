"""Models whose parameters have several dtypes, each of another kind."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .users import DIM, VOCABULARY, Attention, User


class InFront(User):
    """A float64 parameter that is registered first."""

    def __init__(self):
        nn.Module.__init__(self)
        self.temperature = nn.Parameter(torch.ones(1, dtype=torch.float64))
        before = self.temperature
        super().__init__()
        self.temperature = before
        self._parameters["temperature"] = self._parameters.pop("temperature")

    def logits(self, x):
        return super().logits(x) * self.temperature


class Behind(User):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def logits(self, x):
        return super().logits(x) * self.temperature


class WideNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x):
        return F.layer_norm(x.to(self.weight.dtype), (DIM,), self.weight).to(x.dtype)


class Gated(nn.Module):
    """A block with a gate as routers are: computed in a wider dtype than the rest."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.gate = WideNorm(), Attention(), nn.Linear(DIM, 2)

    def opened(self, x):
        return self.gate(x)

    def forward(self, x):
        gate = torch.sigmoid(self.opened(x.to(self.gate.weight.dtype))).mean(-1, keepdim=True)
        return x + (self.attention(self.norm(x)) * gate).to(x.dtype)


class ReadsItsGate(Gated):
    """The gate is not called: its weight is read by the block."""

    def opened(self, x):
        return F.linear(x, self.gate.weight, self.gate.bias)


class Scaled(Gated):
    """Wide parameters of the block itself."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, x):
        return super().forward(x) * self.scale.to(x.dtype)


class InLists(Gated):
    """Wide parameters in a container that is never called."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(DIM), torch.ones(DIM)])

    def forward(self, x):
        return super().forward(x) * (self.scales[0] * self.scales[1]).to(x.dtype)


class Tied(User):
    def __init__(self):
        super().__init__(Gated)
        self.norm = WideNorm()
        self.head.weight = self.embed.weight


class FromNarrow(User):
    """An embedding in another dtype than all that follows."""

    def __init__(self):
        super().__init__(Gated)

    def embedded(self, tokens):
        return self.embed(tokens).to(self.head.weight.dtype)


class OneModule(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class InOne(Gated):
    """Two dtypes in one module, which no unit can part."""

    def __init__(self):
        super().__init__()
        self.gate = OneModule(DIM, 2)


class Even(User):
    """One whose shards need no padding."""

    def __init__(self):
        super().__init__(Gated)
        self.embed, self.head = nn.Embedding(VOCABULARY + 1, DIM), nn.Linear(DIM, VOCABULARY + 1, bias=False)


def mixed(block, *, narrow=torch.float32, wide=torch.float64, frozen=(), named=("norm", "gate", "scale"), kind=None):
    """A model in ``narrow``, but for modules and parameters ``named`` so.

    Args:
        frozen: parts of names.
        named: without the s of a plural.
    """
    torch.manual_seed(0)
    model = User(block) if kind is None else kind()
    model.norm = WideNorm()
    for name, parameter in model.named_parameters():
        of = {step.rstrip("s") for step in name.split(".")}
        parameter.data = parameter.data.to(wide if of & set(named) else narrow)
        parameter.requires_grad_(not any(part in name for part in frozen))
    return model


VARIANTS = {
    "float64 in front": (InFront,),
    "float64 behind": (Behind,),
    "wide norms and gates": (mixed, Gated),
    "wide norms": (mixed, Gated, {"named": ("norm",)}),
    "a weight that is read elsewhere": (mixed, ReadsItsGate),
    "a block's own": (mixed, Scaled),
    "in a list": (mixed, InLists),
    "tied ends": (mixed, None, {"kind": Tied}),
    "narrow base frozen": (mixed, Gated, {"frozen": ("attention", "embed")}),
    "wide norms frozen": (mixed, Gated, {"frozen": ("norm", "gate")}),
    "narrow embedding": (mixed, None, {"kind": FromNarrow, "named": ("layer", "norm", "head")}),
    "narrow embedding frozen": (
        *(mixed, None),
        {"kind": FromNarrow, "named": ("layer", "norm", "head"), "frozen": ("embed",)},
    ),
    "even shards": (mixed, None, {"kind": Even}),
    "even shards, wide norms": (mixed, None, {"kind": Even, "named": ("norm",)}),
    "even shards, base frozen": (mixed, None, {"kind": Even, "frozen": ("attention", "embed")}),
    "even shards, wide frozen": (mixed, None, {"kind": Even, "frozen": ("norm", "gate")}),
    "one dtype trained in a module": (mixed, InOne, {"named": ("norm", "bia"), "frozen": ("gate.weight",)}),
    "two dtypes trained in a module": (mixed, InOne, {"named": ("norm", "bia")}),
    "all but the head frozen": (mixed, Gated, {"frozen": ("layers", "embed", "norm")}),
}
HALF = {"narrow": torch.bfloat16, "wide": torch.float32}
IN_HALF = ("wide norms and gates", "narrow base frozen", "wide norms frozen", "tied ends", "narrow embedding frozen")
REFUSED = "two dtypes trained in a module"


def made(variant, half=False):
    torch.manual_seed(0)
    make, *arguments = VARIANTS[variant] if isinstance(variant, str) else (variant,)
    options = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
    return make(*arguments, **options, **(HALF if half else {}))
