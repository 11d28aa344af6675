"""Find how activations flow from block to block, and the modules before and after, on the measured small copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean, is_within, owner
from meshwright.introspection.small.configs import WIDTH, stated_width
from meshwright.introspection.small.sample import Sample
from meshwright.introspection.structure import Measured
from meshwright.introspection.structure.region import shapes_of


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
    handles = [
        sample.model.get_submodule(path).register_forward_hook(
            lambda module, args, output, path=path: outputs.setdefault(path, output)
        )
        for path in sample.blocks
    ]
    try:
        with torch.no_grad():
            sample.model(**sample.inputs[0])
    finally:
        for handle in handles:
            handle.remove()
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
    apart = (*sample.blocks, *structure.of_images)
    before, behind = _ends(sample.model, apart, structure.embedding, structure.head, structure.before)
    return Flow(tuple(kinds), before, behind, _real_width(model, sample, width), structure.counts_tokens_behind)


def _ends(
    model: nn.Module, apart: tuple[str, ...], embedding: str | None, head: str | None, before: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    first: list[str] = []
    last: list[str] = []
    for name, _ in model.named_parameters(remove_duplicate=False):
        path = owner(clean(name))
        if any(is_within(path, module) for module in apart):
            continue
        (first if path == embedding or (clean(name) in before and path != head) else last).append(path)
    return tuple(dict.fromkeys(first)), tuple(path for path in dict.fromkeys(last) if path not in first)


def _real_width(model: nn.Module, sample: Sample, width: int) -> int:
    """Return the model's width: the small copy's if its blocks are as large, else the one that the config states."""
    block = sample.blocks[0]
    if shapes_of(model.get_submodule(block)) == shapes_of(sample.model.get_submodule(block)):
        return width
    found = stated_width(model)
    if found is None or stated_width(sample.model) != width:
        raise UnsupportedError(
            f"{type(model).__name__} cannot be cut into pipeline stages: no key of its config ({', '.join(WIDTH)}) says"
            f" how many features its blocks hand on. Set layout.pp = 1."
        )
    return found
