"""Find where a model can be cut into pipeline stages: tensors between blocks, and other reads of a forward."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import WIDTH, clean, is_within, owner
from meshwright.core.torch_private import tree_leaves
from meshwright.introspection.calls import watching
from meshwright.introspection.logits_tape import model_line, shown
from meshwright.introspection.premises.playing import Decisions, FixedDraws, Line
from meshwright.introspection.signature import Signature
from meshwright.introspection.small.configs import stated_width
from meshwright.introspection.small.copies import copy_of
from meshwright.introspection.small.sample import Sample, ids_of
from meshwright.introspection.structure.regions import shapes_of
from meshwright.introspection.structure.structure import Measured

# --- find reads of a forward between its blocks

EARLIER = "a tensor made before the first block"


def read_outside(sample: Sample, branch: Branch) -> str:
    """Describe the first things besides a block's output that the forward reads after it; "" if there are none.

    Parameters of the model itself that the forward reads outside the modules that it calls are reported too.
    """
    blocks, (model, way) = sample.blocks, branch.copied(sample)
    watch = _ReadsBetweenBlocks(
        {id(parameter): f"the parameter {clean(name)}" for name, parameter in model.named_parameters()}
    )
    watched = [
        (path, module)
        for path, module in model.named_modules()
        if path in blocks
        or (
            path
            and not any(is_within(block, path) for block in blocks)
            and next(module.parameters(recurse=False), None) is not None
        )
    ]
    hooks = watching(
        watched, lambda *_: watch.enter(), lambda path, _m, _a, _k, output: watch.leave(path, output, path in blocks)
    )
    with torch.no_grad(), hooks, way, watch:
        model(**branch.inputs)
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
        self._read, self._line = list[str](), ""

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
        what = f"behind {self._last} its forward reads {', '.join(self._read)}"
        return f"{what}, first at {self._line}" if self._read else ""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self._inside or self._ended or getattr(function, "__name__", "") == "__get__":
            return result
        for argument in tree_leaves((args, kwargs)):
            origin = self._known.get(id(argument)) if isinstance(argument, Tensor) else None
            if self._last and origin and origin != f"the output of {self._last}" and origin not in self._read:
                self._read.append(origin)
                self._line = self._line or shown(*model_line())
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and made.is_floating_point() and not self._last:
                self._learn(made, EARLIER)
        return result

    def _learn(self, tensor: Tensor, origin: str) -> None:
        self._known.setdefault(id(tensor), origin)
        self._kept.append(tensor)


# --- list the branches that a forward can take

READS = 24
"""The largest number of lines that are inverted, one at a time."""
MANY = 320
"""The largest number of ids, beside those with which code compares ids."""


@dataclass(frozen=True, eq=False)
class Branch:
    """A forward of a small copy: its mode, its arguments, and the line beside the blocks that reads another value."""

    inputs: Mapping[str, Any]
    training: bool = False
    inverted: Line | None = None

    def copied(self, sample: Sample) -> tuple[nn.Module, AbstractContextManager[Any]]:
        """Return a copy of the model in this mode, and what to run the copy's forward under, once."""
        made = copy_of(sample.model).train(self.training)
        if self.inverted is None:
            return made, FixedDraws() if self.training else nullcontext()
        return made, self.watch(made, sample)

    def watch(self, model: nn.Module, sample: Sample) -> Decisions:
        given = [value for value in self.inputs.values() if isinstance(value, Tensor)]
        return Decisions(given, model, sample.blocks, self.inverted)


def branches_of(sample: Sample) -> list[Branch]:
    """List the branches of a sample: its arguments and packed documents; many ids, in training mode; inverted lines.

    A condition on data that the sample's rows do not meet, or always meet, takes its other branch so.
    """
    if sample.branches:
        return sample.branches
    plain, takes = sample.inputs[0], Signature.of(sample.model).takes
    name, tokens = next(iter(plain.items()))
    places, half = torch.arange(tokens.shape[1]).expand_as(tokens), tokens.shape[1] // 2
    packed = {"positions": places % half, "document_ids": places // half}
    own = {str(takes[key]): value for key, value in packed.items() if takes[key]}
    compared = set[int]()
    for inputs in (*sample.inputs, *filter(None, [sample.pictured])):
        sample.branches += [Branch(inputs), *_inverted(sample, Branch(inputs), compared)]
    # rows of all ids, or of the first, and of those with which the code compares ids
    ids, length = ids_of(sample.model), tokens.shape[1]
    beside = {one + near for one in compared for near in (-1, 0, 1)}
    chosen = torch.tensor(sorted({*range(min(ids, MANY)), *beside} & set(range(ids))))
    rows = -(-len(chosen) // length)
    many = chosen.repeat(length)[: rows * length].view(length, rows).T.contiguous()
    for branch in (Branch(plain | own) if own else None, Branch(plain | {name: many}, training=True)):
        if branch is not None and _lines(sample, branch, compared) is not None:
            sample.branches += [branch, *_inverted(sample, branch, compared)]
    return sample.branches


def _inverted(sample: Sample, branch: Branch, compared: set[int]) -> list[Branch]:
    """List a branch's other branches: each line that reads data, inverted; a line that checks the data has none."""
    others = [replace(branch, inverted=line) for line in (_lines(sample, branch, compared) or ())[:READS]]
    return [other for other in others if _lines(sample, other, compared) is not None]


def _lines(sample: Sample, branch: Branch, compared: set[int]) -> tuple[Line, ...] | None:
    """List the lines beside the blocks that read data; None where the model's code does not take the branch.

    Args:
        compared: gets the numbers with which the code compares data.
    """
    model = copy_of(sample.model).train(branch.training)
    try:
        with torch.no_grad(), (watch := branch.watch(model, sample)):
            model(**branch.inputs)
    except Exception:  # noqa: BLE001  (whatever a model's code raises of documents, or of a wrong number)
        return None
    compared |= watch.compared
    return tuple(watch.seen)


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
        counts_tokens_behind: whether the code after the blocks cannot take fewer tokens than the sequence has.
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

    def note(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        outputs.setdefault(path, output)

    modules = [(path, sample.model.get_submodule(path)) for path in sample.blocks]
    with torch.no_grad(), watching(modules, after=note):
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
    before: list[str] = []
    behind: list[str] = []
    for name, _ in sample.model.named_parameters(remove_duplicate=False):
        path = owner(clean(name))
        if not any(is_within(path, apart) for apart in (*sample.blocks, *structure.of_images)):
            is_before = clean(name) in structure.before and path != structure.head
            (before if is_before or path == structure.embedding else behind).append(path)
    behind = [path for path in dict.fromkeys(behind) if path not in before]
    block = sample.blocks[0]
    if shapes_of(model.get_submodule(block)) != shapes_of(sample.model.get_submodule(block)):
        stated = stated_width(model)
        if stated is None or stated_width(sample.model) != width:
            raise UnsupportedError(
                f"{type(model).__name__} cannot be cut into pipeline stages: no key of its config ({', '.join(WIDTH)})"
                f" says how many features its blocks hand on. Set layout.pp = 1."
            )
        width = stated

    def cut(module: nn.Module, args: Any, output: Any) -> Any:
        return output[:, :0] if isinstance(output, Tensor) else (output[0][:, :0], *output[1:])

    # or some branch of a forward fails if the last block returns no tokens
    counts_tokens_behind = structure.counts_tokens_behind
    for branch in () if counts_tokens_behind else branches_of(sample):
        made, way = branch.copied(sample)
        made.get_submodule(sample.blocks[-1]).register_forward_hook(cut)
        try:
            with torch.no_grad(), way:
                made(**branch.inputs)
        except Exception:  # noqa: BLE001  (whatever a model's code raises if its sizes do not fit)
            counts_tokens_behind = True
            break
    return Flow(tuple(kinds), tuple(dict.fromkeys(before)), tuple(behind), width, counts_tokens_behind)
