"""Build modules on the meta device without drawing random numbers, which have no values there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

DRAWING = {
    *(
        Tensor.normal_,
        Tensor.uniform_,
        Tensor.bernoulli_,
        Tensor.exponential_,
        Tensor.cauchy_,
        Tensor.log_normal_,
        Tensor.geometric_,
    ),
    *(nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, nn.init.kaiming_normal_),
}
"""Functions that fill their first argument. On meta, torch decomposes them in Python and imports its compiler."""


class _WithoutDraws(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in DRAWING:
            filled = args[0] if args else kwargs.get("tensor")
            if isinstance(filled, Tensor) and filled.is_meta:
                return filled
        return function(*args, **kwargs)


@contextmanager
def on_meta() -> Iterator[None]:
    """Create tensors on the meta device, without memory; filling them with random numbers does nothing."""
    with torch.device("meta"), _WithoutDraws():
        yield
