"""Detect whether a model computes anywhere in a narrower dtype than its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.core.names import clean
from meshwright.introspection.small.copies import copy_of

ROUNDED, LARGEST_ROUNDED = 10.0, 1e-4
"""Limits for models that compute in fp32 inside: a multiple of the change caused by rounding the weights to fp32, and
the largest relative error.
"""


def narrows(forward: Callable[[], Any]) -> bool:
    """Return whether a forward narrows results of its parameters; reordered sums then agree in that dtype only."""
    with _Narrowing() as watch:
        forward()
    return watch.found


class _Narrowing(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.requires_grad and args and isinstance(args[0], Tensor):
            given = args[0].dtype
            self.found |= (
                given.is_floating_point and result.is_floating_point() and result.dtype.itemsize < given.itemsize
            )
        return result


def is_rounding(
    errors: Mapping[str, float], largest: float, model: nn.Module, loss_of: Callable[[nn.Module], Tensor]
) -> bool:
    """Return whether errors are explained by fp32 arithmetic inside the model.

    Args:
        errors: relative, of the loss ("loss") and of gradients.
        largest: the error that is allowed anyway.
        model: in fp64; it is copied.
        loss_of: runs a copy's forward, and returns its loss.
    """
    if not narrows(lambda: loss_of(copy_of(model))):
        return False
    gradients: list[dict[str, Tensor]] = []
    for rounds in (False, True):
        one = copy_of(model)
        if rounds:
            for parameter in one.parameters():
                parameter.data = parameter.data.float().double()
        loss = loss_of(one)
        loss.backward()
        gradients.append(
            {clean(name): p.grad for name, p in one.named_parameters() if p.grad is not None} | {"loss": loss.detach()}
        )
    exact, rounded = gradients
    moved = {name: float((rounded[name] - value).norm() / value.norm()) for name, value in exact.items()}
    return all(
        error <= max(largest, min(ROUNDED * moved.get(name, 0.0), LARGEST_ROUNDED)) for name, error in errors.items()
    )
