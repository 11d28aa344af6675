"""All-reduce amax over the tensor axis, so that a sharded operand has one tensorwise scale.

Each shard is then rounded with the scale of the whole operand, as in one process. No message is sent if no operand
is sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.distributed.exchange import RankGroup
from meshwright.introspection.module_kinds import is_rounded
from meshwright.planning.tensor.plan import WHOLE

from .products import OWN, Largest, Products


def before_outputs(x: Tensor, weights: Sequence[Tensor], ways: Sequence[Products], group: RankGroup) -> list[Largest]:
    """Return the amax values that layers of one input need for their outputs, with one message; or ``OWN``."""
    if _all_own(ways):
        return [OWN] * len(ways)
    operands = [part for weight, way in zip(weights, ways, strict=True) for part in _of_forward(x, weight, way)]
    found = _agreed(operands, group)
    return [Largest(x, weight) for x, weight in zip(found[::2], found[1::2], strict=True)]


def before_gradients(
    gradients: Sequence[Tensor],
    ways: Sequence[Products],
    earlier: Sequence[Largest],
    needed: Sequence[bool],
    group: RankGroup,
) -> list[Largest]:
    """Add to ``earlier`` the amax values that layers of one input need for their gradients, with one message.

    Args:
        gradients: gradients of the layers' outputs.
        earlier: values that ``before_outputs`` returned.
        needed: for each layer, whether its gradients are needed.
    """
    if _all_own(ways):
        return list(earlier)
    operands = [
        g if asked and way.parts.gradient else None for g, way, asked in zip(gradients, ways, needed, strict=True)
    ]
    return [before._replace(gradient=found) for before, found in zip(earlier, _agreed(operands, group), strict=True)]


def to_save(largest: Sequence[Largest]) -> list[Tensor | None]:
    """Flatten the values of ``before_outputs`` into a list of tensors that a node can save for backward."""
    return [] if largest[0] is OWN else [tensor for one in largest for tensor in (one.x, one.weight)]


def saved(tensors: Sequence[Tensor | None], layers: int) -> list[Largest]:
    """Invert ``to_save`` for so many layers."""
    if not tensors:
        return [OWN] * layers
    return [Largest(x, weight) for x, weight in zip(tensors[::2], tensors[1::2], strict=True)]


def _all_own(ways: Sequence[Products]) -> bool:
    """Return whether every layer rounds its operands, if at all, by this rank's own values."""
    return all(way.parts == WHOLE for way in ways)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, way: Products, group: RankGroup) -> Tensor:
    """Compute a linear layer, differentiable: this rank's output features, or its partial sum."""
    if way.parts is WHOLE or way.parts == WHOLE:
        return way.linear(x, weight, bias)
    made = _AgreedLinear.apply(x, weight, way, group)
    return made if bias is None else made + bias.to(made.dtype)


class _AgreedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, way: Products, group: RankGroup) -> Tensor:
        (largest,) = before_outputs(x, [weight], [way], group)
        ctx.save_for_backward(x, weight, *to_save([largest]))
        ctx.way, ctx.group = way, group
        return way.output(x, weight, None, largest)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        (gradient,) = grad_outputs
        x, weight, *rest = ctx.saved_tensors
        (largest,) = before_gradients([gradient], [ctx.way], saved(rest, 1), [True], ctx.group)
        grad_x = ctx.way.of_input(gradient, weight, largest) if ctx.needs_input_grad[0] else None
        grad_weight = ctx.way.of_weight(gradient, x, largest) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None, None


def _of_forward(x: Tensor, weight: Tensor, way: Products) -> tuple[Tensor | None, Tensor | None]:
    return x if way.parts.x else None, weight if way.parts.weight and not is_rounded(weight) else None


def _agreed(operands: Sequence[Tensor | None], group: RankGroup) -> list[Tensor | None]:
    """Return the largest magnitude of each operand over the ranks of ``group``."""
    found = [operand.abs().max().float() for operand in operands if operand is not None]
    if not found:
        return [None] * len(operands)
    together = iter(group.largest(torch.stack(found)).unbind())
    return [None if operand is None else next(together) for operand in operands]
