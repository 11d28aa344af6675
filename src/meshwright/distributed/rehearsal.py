"""Judge a rehearsal: the loss and the gradients that ranks compute on a small copy, beside those of one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.core.names import clean
from meshwright.introspection.small.copies import widened

LARGEST_ERROR = 1e-6
"""Relative, in fp64; models that compute in fp32 inside reach about 1e-7."""

Errors = dict[str, float]
"""The relative error of the loss ("loss") and of each parameter's gradient."""


def labels_of(shape: Sequence[int]) -> Tensor:
    """Return flat labels for logits (rows, seq, vocabulary) or (rows, classes), spread over the last dim."""
    return torch.arange(math.prod(shape[:-1])) * 7 % shape[-1]


def loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels_of(logits.shape))


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {clean(name): parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def errors_of(
    losses: Sequence[float], loss: float, reference: nn.Module, found: Callable[[str, Tensor], Sequence[Tensor]]
) -> Errors:
    """Compare losses and gradients with those of one process; an error is NaN if one of the numbers is.

    ``found`` gives the whole gradients that ranks found, for a parameter's name and its gradient in one process.
    """
    errors = {"loss": float((torch.tensor(losses, dtype=torch.float64) / loss - 1).abs().amax())}
    expected = gradients_of(reference)
    scale = float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
    for name, gradient in expected.items():
        off = torch.stack([(whole - gradient).norm() for whole in found(name, gradient)]).amax()
        errors[name] = float(off / gradient.norm().clamp(min=1e-6 * scale))
    return errors


def wrong(errors: Errors) -> str:
    """Name the largest error; "" where all are rounding."""
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    if errors[worst] <= LARGEST_ERROR:
        return ""
    what = "the loss" if worst == "loss" else f"the gradient of {worst}"
    return f"{what} is wrong (relative error {errors[worst]:.1e})"


def why_wrong(model: nn.Module, rehearse: Callable[[nn.Module], Errors]) -> str:
    """Rehearse with a model, and with its float64 all along where that is wrong: its code may round to float32."""
    return wrong(rehearse(model)) and wrong(rehearse(widened(model)))
