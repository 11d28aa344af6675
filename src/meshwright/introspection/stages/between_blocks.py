"""Find reads of a forward between its blocks: a pipeline's stages cut the way from one block to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.core.names import clean, is_within
from meshwright.core.torch_private import tree_leaves

EARLIER = "a tensor made before the first block"


def read_outside(model: nn.Module, blocks: Sequence[str], inputs: Mapping[str, Any]) -> str:
    """Describe the first things besides a block's output that the forward reads after it; "" if there are none.

    Parameters of the model itself that the forward reads outside the modules that it calls are reported too.

    Args:
        model: a small model, with weights; its forward runs once.
        blocks: paths of the repeated blocks, in forward order.
        inputs: keyword arguments of the model's forward.
    """
    watch = _ReadsBetweenBlocks(
        {id(parameter): f"the parameter {clean(name)}" for name, parameter in model.named_parameters()}
    )
    handles = []
    for path, module in model.named_modules():
        holds_blocks = any(is_within(block, path) for block in blocks if block != path)
        if path in blocks or (path and not holds_blocks and next(module.parameters(recurse=False), None) is not None):
            handles.append(module.register_forward_pre_hook(lambda *_: watch.enter()))
            handles.append(
                module.register_forward_hook(
                    lambda _m, _in, output, path=path: watch.leave(path, output, path in blocks)
                )
            )
    try:
        with torch.no_grad(), watch:
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    own = [name for name, _ in model.named_parameters(recurse=False)]
    if own and not watch.description():
        return f"its forward reads the parameter {', '.join(own)} itself, outside of the modules that it calls"
    return watch.description()


class _ReadsBetweenBlocks(TorchFunctionMode):
    def __init__(self, named: dict[int, str]):
        super().__init__()
        self._known = named
        self._kept: list[Tensor] = []  # held, so that no id is reused
        self._last, self._inside, self._ended = "", 0, False
        self._read: list[str] = []

    def enter(self) -> None:
        self._inside += 1

    def leave(self, path: str, output: Any, is_block: bool) -> None:
        self._inside -= 1
        if is_block:
            self._ended = bool(self._read)
        if is_block and not self._ended:
            self._last = path
        if is_block or not self._last:
            for given in tree_leaves(output):
                if isinstance(given, Tensor):
                    self._learn(given, f"the output of {path}" if is_block else EARLIER)

    def description(self) -> str:
        return f"behind {self._last} its forward reads {', '.join(self._read)}" if self._read else ""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self._inside or self._ended or getattr(function, "__name__", "") == "__get__":
            return result
        for argument in tree_leaves((args, kwargs)):
            origin = self._known.get(id(argument)) if isinstance(argument, Tensor) else None
            if self._last and origin and origin != f"the output of {self._last}" and origin not in self._read:
                self._read.append(origin)
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and made.is_floating_point() and not self._last:
                self._learn(made, EARLIER)
        return result

    def _learn(self, tensor: Tensor, origin: str) -> None:
        self._known.setdefault(id(tensor), origin)
        self._kept.append(tensor)
