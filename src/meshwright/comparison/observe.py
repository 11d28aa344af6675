"""Observing a step: of every module's output, and of the gradient that comes back to it, a small sketch per row.

Rows are told apart, so that ranks with different rows can be put together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.names import clean

from .sketch import sketch_rows


@dataclass
class Observed:
    """Sketches by module, in the order in which modules first ended (forward) and were first reached (backward).

    A module that is called several times in a forward has a name for each call: ``norm``, ``norm (call 2)``. Outputs without a row for
    each row of the batch, such as a table of positions, are not observed.
    """

    forward: dict[str, list[Tensor]] = field(default_factory=dict)
    backward: dict[str, list[Tensor]] = field(default_factory=dict)
    _calls: Counter[str] = field(default_factory=Counter)
    _n_rows: int = 0

    def rows(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(rows, ROW_WIDTH) float64 for each module, where it computed: all microbatches one behind the other."""
        forward = {name: torch.cat(parts) for name, parts in self.forward.items()}
        return forward, {name: torch.cat(parts) for name, parts in self.backward.items()}

    def begin(self, root: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """A forward of the whole model begins (one per microbatch)."""
        if not _is_recomputing():
            self._calls.clear()
            self._n_rows = next((len(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), 0)

    def note(self, name: str, output: Any) -> None:
        """A module ended."""
        tensor = _tensor_of(output)
        if tensor is None or len(tensor) != self._n_rows or _is_recomputing():
            return
        self._calls[name] += 1
        call = name if self._calls[name] == 1 else f"{name} (call {self._calls[name]})"
        self.forward.setdefault(call, []).append(sketch_rows(tensor.detach()))
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self.backward.setdefault(call, []).append(sketch_rows(gradient)))


def _is_recomputing() -> bool:
    """Whether a backward is under way: what modules compute there was computed before."""
    return torch._C._current_graph_task_id() != -1


def _noted(observed: Observed, name: str, module: nn.Module, args: Any, output: Any) -> None:
    observed.note(name, output)


@contextmanager
def observing(model: nn.Module) -> Iterator[Observed]:
    """Sketch what ``model`` computes inside the block. What recomputation does once more in the backward is passed over."""
    observed = Observed()
    handles = [model.register_forward_pre_hook(observed.begin, with_kwargs=True)]
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            handles.append(module.register_forward_hook(partial(_noted, observed, clean(name))))
    try:
        yield observed
    finally:
        for handle in handles:
            handle.remove()


def _tensor_of(output: Any) -> Tensor | None:
    """The floating-point tensor that an output is, or is led by."""
    if isinstance(output, tuple | list) and output:
        output = output[0]
    output = getattr(output, "logits", output)
    return output if isinstance(output, Tensor) and output.is_floating_point() and output.dim() >= 2 else None
