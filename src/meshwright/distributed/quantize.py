"""Hold the weights of frozen linear layers in 4 bits."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.core.errors import ConfigError
from meshwright.core.record import note, remember
from meshwright.planning.plan import Plan
from meshwright.planning.values import stored_shape

from .nf4 import QuantizedLinear, Rounded, pack


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Round the planned weights in place; modules, names and hooks stay as they are.

    Weights on meta become bytes on meta, packed by ``Destinations`` when their values are written.
    """
    assert plan.quantize is not None
    for path in plan.quantize.modules:
        linear = model.get_submodule(path)
        if "forward" in vars(linear):
            raise ConfigError(
                f"{path} has a forward that was put there from outside, and it would compute with the bytes of a weight"
                f" in 4 bits. Apply quantize_frozen first."
            )
        weight = linear.get_parameter("weight").detach()
        shape = stored_shape((weight.shape[0], weight.shape[1]))
        packed = torch.empty(shape, dtype=torch.uint8, device="meta") if weight.is_meta else pack(weight)
        linear.__class__ = QuantizedLinear  # bias and class but for the forward stay
        remember(linear, Rounded(path, weight.dtype))
        linear._parameters["weight"] = nn.Parameter(packed, requires_grad=False)
        note(linear, "weight in 4 bits (nf4)")
    remember(model, plan.quantize)
    return model
