"""Find where a model can be cut into pipeline stages: tensors between blocks, and other reads of a forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.core.config_keys import WIDTH
from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean, is_within, owner
from meshwright.core.torch_private import tree_leaves
from meshwright.introspection.calls import watching
from meshwright.introspection.small.configs import stated_width
from meshwright.introspection.structure.regions import shapes_of
from meshwright.introspection.structure.structure import Measured

# --- find reads of a forward between its blocks

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
    called = [
        (path, module)
        for path, module in model.named_modules()
        if path in blocks
        or (
            path and not any(is_within(block, path) for block in blocks) and any(True for _ in module.parameters(False))
        )
    ]

    def leave(path: str, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        watch.leave(path, output, path in blocks)

    with torch.no_grad(), watching(called, lambda *_: watch.enter(), leave), watch:
        model(**inputs)
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


# --- find how activations flow from block to block, and the modules before and after, on the measured small copy


@dataclass(frozen=True)
class BlockFlow:
    """The way in which blocks of one kind pass on their input.

    Attributes:
        blocks: paths of the blocks.
        hidden: position or name of the argument that is the previous block's output.
        returns_tuple: whether the output is the first item of a tuple.
        linears: (path within the block, whether its weight is stored (in, out)) of the linear layers.
    """

    blocks: tuple[str, ...]
    hidden: int | str
    returns_tuple: bool
    linears: tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class Flow:
    """The flow of activations through a model.

    Attributes:
        kinds: kinds of blocks.
        before, behind: modules with parameters of their own, before and after the blocks.
        width: number of features that blocks pass on.
        counts_tokens_behind: whether the modules after the blocks cannot take fewer tokens than the sequence has.
    """

    kinds: tuple[BlockFlow, ...]
    before: tuple[str, ...]
    behind: tuple[str, ...]
    width: int
    counts_tokens_behind: bool


def flow_of(model: nn.Module, measured: Measured) -> Flow:
    """Find a model's flow; raise UnsupportedError, naming the block, if blocks do not pass on a single tensor."""
    sample, structure = measured.sample, measured.structure
    outputs: dict[str, Any] = {}

    def note(path: str, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        outputs.setdefault(path, output)

    with torch.no_grad(), watching(((path, sample.model.get_submodule(path)) for path in sample.blocks), after=note):
        sample.model(**sample.inputs[0])
    kinds: list[BlockFlow] = []
    width = 0
    for kind in structure.kinds:
        path = next(block for block in kind.blocks if block in sample.blocks)
        output = outputs.get(path)
        first = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(first, Tensor) or first.dim() != 3:
            what = type(output).__name__ if path in outputs else "nothing: it is not called in order"
            raise UnsupportedError(
                f"{type(model).__name__} cannot be cut into pipeline stages: its block {path} gives {what}, and not the"
                f" (rows, seq, features) that the next block takes. Set layout.pp = 1."
            )
        linears = tuple(measured.probes[kind.blocks[0]][0].linears.items())
        kinds.append(BlockFlow(kind.blocks, kind.hidden, isinstance(output, tuple), linears))
        width = first.shape[-1]
    before: dict[str, None] = {}
    behind: dict[str, None] = {}
    for name, _ in sample.model.named_parameters(remove_duplicate=False):
        path = owner(clean(name))
        if not any(is_within(path, module) for module in (*sample.blocks, *structure.of_images)):
            begins = path == structure.embedding or (clean(name) in structure.before and path != structure.head)
            (before if begins else behind)[path] = None
    block = sample.blocks[0]
    if shapes_of(model.get_submodule(block)) != shapes_of(sample.model.get_submodule(block)):
        small, width = width, stated_width(model) or 0
        if not width or stated_width(sample.model) != small:
            raise UnsupportedError(
                f"{type(model).__name__} cannot be cut into pipeline stages: no key of its config ({', '.join(WIDTH)})"
                f" says how many features its blocks hand on. Set layout.pp = 1."
            )
    ends = tuple(before), tuple(path for path in behind if path not in before)
    return Flow(tuple(kinds), *ends, width, structure.counts_tokens_behind)
