"""Read the numbers that modules count in, and set them far ahead."""

from __future__ import annotations

from torch import nn

from meshwright.core.names import clean

FAR = 1_000_000
"""Increment of a counter of calls, to see a behaviour that begins late."""


def numbers(model: nn.Module) -> dict[str, float]:
    """Return the numbers that modules hold as attributes."""
    return {
        f"{clean(path)}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in (int, float)
    }


def forward_to(model: nn.Module, counters: tuple[str, ...]) -> None:
    for path, module in model.named_modules():
        for name, value in list(vars(module).items()):
            if f"{clean(path)}.{name}".lstrip(".") in counters:
                setattr(module, name, value + FAR)
