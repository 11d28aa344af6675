"""Find users' hooks on parameters: a layout may call them with a part of the gradient, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.names import clean
from meshwright.core.torch_private import accumulation_hooks, gradient_hooks
from meshwright.introspection.constructor.recording import seeded

LARGEST_GRADIENT = 1 << 24
"""Elements of a parameter beyond which its hooks are not tried."""


def lies_on_mesh(model: nn.Module) -> bool:
    """Return whether a model is laid out, at least in part: some of its parameters are DTensors."""
    return any(hasattr(parameter, "placements") for parameter in model.parameters())


@dataclass(frozen=True)
class HookFact:
    """A hook on a parameter.

    ``kind``: "gradient", or "accumulated" for a hook that is called with the parameter once its gradient is there.
    ``adds_up``: on random numbers, the hook of a sum was the sum of the hooks.
    """

    parameter: str
    kind: str
    adds_up: bool = False


def hooks_of(model: nn.Module) -> tuple[HookFact, ...]:
    """List the user's hooks on parameters; none if the model is laid out in part, with meshwright's among them."""
    if lies_on_mesh(model):
        return ()
    found = []
    for name, parameter in model.named_parameters():
        if hooks := gradient_hooks(parameter):
            found.append(HookFact(clean(name), "gradient", _add_up(hooks, parameter)))
        if accumulation_hooks(parameter):
            found.append(HookFact(clean(name), "accumulated"))
    return tuple(found)


def _add_up(hooks: list[Any], parameter: nn.Parameter) -> bool:
    def called(gradient: Tensor) -> Tensor:
        for hook in hooks:
            given = hook(gradient)
            gradient = gradient if given is None else given
        return gradient

    if parameter.is_meta or parameter.numel() > LARGEST_GRADIENT:
        return False
    try:
        with seeded(0), torch.no_grad():
            one, other = (
                torch.randn(parameter.shape, dtype=parameter.dtype, device=parameter.device) for _ in range(2)
            )
            together, apart = called(one + other), called(one.clone()) + called(other.clone())
    except Exception:  # noqa: BLE001  (a hook of the user's; one that cannot be tried has not been seen to add up)
        return False
    return bool(torch.allclose(together, apart, rtol=1e-3, atol=1e-4 * float(together.abs().max())))
