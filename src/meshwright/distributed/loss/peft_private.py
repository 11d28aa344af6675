"""Reach private parts of peft, which no other module touches."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def adapted_layers(models: Iterable[nn.Module]) -> list[nn.Module]:
    """List the modules of peft that add an adapter's output to that of a layer inside."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return []
    return [module for model in models for module in model.modules() if isinstance(module, tuners.BaseTunerLayer)]


@contextmanager
def switched_off(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Let layers compute without their adapters.

    Waits for: a switch that leaves ``requires_grad`` alone. Under FSDP2 a parameter that is gathered while it needs no
    gradient would never need one again.
    """
    held: list[tuple[Any, bool]] = [(layer, layer._disable_adapters) for layer in layers]  # type: ignore[misc]
    for layer, _ in held:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, before in held:
            layer._disable_adapters = before
