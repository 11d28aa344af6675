"""Measure a model's structure: its kinds of blocks with their regions, and the modules before and after them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean, is_within, pattern
from meshwright.introspection.blocks import hints_of, repeated_blocks
from meshwright.introspection.calls import Call
from meshwright.introspection.logits.operation import Tail, find_tail
from meshwright.introspection.signature import logits_of
from meshwright.introspection.small.sample import SEQ, Sample, kinds_of

from .adapters import find_others
from .local_search import LocalForm, local_form
from .probe import PUSHED, ROUNDING, Probe, record, side_by_side
from .regions import Region, find_regions, resized, shapes_of


@dataclass(frozen=True)
class BlockKind:
    """Blocks of the same construction.

    Attributes:
        blocks: paths of the blocks.
        hidden: position or name of a block's argument that is the residual stream.
        regions: regions that can be cut.
        gathers: groups of linear layers that take the very same tensor; paths within the block.
        norms: for each group of ``gathers``, the module between it and the block's input; empty: some lack one.
        summed: consumers whose outputs only meet in a sum, so that they may be reduced together; empty: none.
        mixes_outside: whether tokens meet outside the regions.
        strange: descriptions of modules beside linear layers that are no adapters to be cut with them.
    """

    blocks: tuple[str, ...]
    hidden: int | str
    regions: tuple[Region, ...]
    gathers: tuple[tuple[str, ...], ...]
    norms: tuple[str, ...]
    summed: tuple[str, ...]
    mixes_outside: bool
    strange: tuple[str, ...] = ()


@dataclass(frozen=True)
class Structure:
    """The possible cuts of a model, by the model's paths.

    Attributes:
        blocks: paths of all blocks that take tokens, in forward order.
        kinds: kinds of blocks.
        embedding: module that turns token ids into vectors, by rows of a weight; None where none was found.
        embedding_is_hidden: whether the embedding's output is the first block's input, unchanged.
        counts_tokens_behind: whether modules between last block and head cannot take a part of the sequence as whole.
        before: parameters outside the blocks on which the first block's input depends.
        head: linear layer that returns the logits; None where none was found.
        tail: operations on the logits after the head.
        of_images: modules before the blocks that a forward of tokens alone does not call, with all inside them.
    """

    blocks: tuple[str, ...]
    kinds: tuple[BlockKind, ...]
    embedding: str | None
    embedding_is_hidden: bool
    counts_tokens_behind: bool
    before: tuple[str, ...]
    head: str | None
    tail: Tail
    of_images: tuple[str, ...] = ()

    def kind_of(self, block: str) -> BlockKind:
        return next(kind for kind in self.kinds if block in kind.blocks)


Tried = list[tuple[list[Probe], tuple[Region, ...]]]
"""Each kind's probes of the sample's first block, called in different ways, and regions in the sample's sizes."""


def measure(sample: Sample, model: nn.Module) -> tuple[Structure, Tried]:
    """Measure the structure of ``model`` on a sample of it, and return it with the probes."""
    wide, _ = record(sample.model, sample.repeated, list(sample.blocks))
    residual = hints_of(model).residual
    runs = [record(sample.model, inputs, list(sample.blocks), wide, residual) for inputs in sample.inputs]
    first_probes, outside = runs[0]
    _refuse_untried(sample, model)
    blocks = tuple(path for path in repeated_blocks(model) if not _is_of_images(sample, path))
    paths = {key: [path for path in paths if path in blocks] for key, (_, paths) in _by_layout(model).items()}
    kinds: list[BlockKind] = []
    tried: Tried = []
    for key, (_, every) in _by_layout(sample.model).items():
        here = [path for path in every if path in sample.blocks]
        if not here:
            continue
        called = next((path for path in here if all(path in probes for probes, _ in runs)), None)
        if called is None:
            what = (
                "they seem to be of images or sounds. Only models whose blocks all take tokens are cut over these axes"
                if sample.of_images
                else "some batches seem to pass over them, and parts of a batch would decide so for themselves"
            )
            raise UnsupportedError(
                f"the blocks {pattern(here[0])} of {type(model).__name__} are not called in a forward of token ids"
                f" alone: {what}. Set layout.tp = 1 and layout.pp = 1."
            )
        kind = _kind(first_probes[called], tuple(paths[key]))
        tried.append(([run[0][called] for run in runs], kind.regions))
        sizes = shapes_of(first_probes[called].block), shapes_of(model.get_submodule(paths[key][0]))
        kinds.append(
            replace(kind, regions=tuple(resized(region, *sizes, Fraction(sample.heads)) for region in kind.regions))
        )
    if not kinds:
        raise UnsupportedError(
            f"{type(model).__name__} has no repeated blocks that can be told apart: children of an nn.ModuleList or"
            f" nn.ModuleDict with parameters that no other module shares. Set techniques.loss_chunks = 1, layout.tp = 1"
            f" and layout.pp = 1."
        )
    embedding = _embedding(sample, outside)
    head = _head(sample, outside)
    entry = next(iter(first_probes.values())).call
    hidden = entry.tensors[kinds[0].hidden]
    structure = Structure(
        blocks=blocks,
        kinds=tuple(kinds),
        embedding=embedding,
        # images are put between the embedding and the first block
        embedding_is_hidden=embedding is not None
        and outside[embedding][0].output is hidden
        and sample.pictured is None,
        counts_tokens_behind=head is not None and _counts_tokens_behind(sample, head),
        before=tuple(_before(sample, kinds[0].hidden)),
        head=head,
        tail=find_tail(sample.model, head, sample.inputs[0])
        if head is not None
        else Tail(obstacle="no linear layer gives the logits"),
        of_images=sample.of_images,
    )
    return structure, tried


def _is_of_images(sample: Sample, path: str) -> bool:
    return any(is_within(path, module) for module in sample.of_images)


def _refuse_untried(sample: Sample, model: nn.Module) -> None:
    """Raise UnsupportedError for a model with blocks for images of which none can be made, so that nothing is proven.

    Blocks that images do not reach either are those of videos and sound, which batches may not have.
    """
    if sample.pictured is not None:
        return
    if any(_is_of_images(sample, block) for block in repeated_blocks(sample.model)):
        raise UnsupportedError(
            f"{type(model).__name__} takes images in a way that is not known here, so what it computes of them cannot"
            f" be rehearsed on a small copy: its modules {', '.join(sample.of_images)} are not called in a forward of"
            f" token ids alone. Set layout.tp = 1 and layout.pp = 1."
        )


def _by_layout(model: nn.Module) -> dict[tuple, tuple[int, list[str]]]:
    """Group kinds of blocks by class, parameter names and functions, since a sample may have other widths."""
    found: dict[tuple, tuple[int, list[str]]] = {}
    for (kind, shapes, codes), (index, paths) in kinds_of(model).items():
        found.setdefault((kind, tuple(name for name, _ in shapes), codes), (index, []))[1].extend(paths)
    return found


def _kind(probe: Probe, blocks: tuple[str, ...]) -> BlockKind:
    hidden = probe.hidden  # checked first, since the rest takes long
    probe.refuse_slow()
    regions = find_regions(probe)
    gathers = _gathers(probe, regions)
    return BlockKind(
        blocks=blocks,
        hidden=hidden,
        regions=regions,
        gathers=gathers,
        norms=() if probe.adapted or any(region.latent for region in regions) else side_by_side(probe, gathers, hidden),
        summed=_summed(probe, regions),
        mixes_outside=_mixes_outside(probe, regions),
        strange=tuple(
            find_others(probe.block, probe.calls, [path for path in probe.linears if path not in probe.adapted])
        ),
    )


def _gathers(probe: Probe, regions: tuple[Region, ...]) -> tuple[tuple[str, ...], ...]:
    """Group the layers that begin regions by the identity of their input."""
    found: dict[int, list[str]] = {}
    for region in regions:
        for path in region.begins:
            found.setdefault(id(next(iter(probe.calls[path][0].tensors.values()))), []).append(path)
    return tuple(tuple(paths) for paths in found.values())


def _summed(probe: Probe, regions: tuple[Region, ...]) -> tuple[str, ...]:
    """List the consumers if the last one may output the sum of all with the same result; else nothing."""
    consumers = [region.consumer for region in regions]
    order = [path for path in probe.calls if path in consumers]  # of completion
    if len(order) < 2 or any(producer in order for producer, _ in probe.influence(order, list(probe.linears))):
        return ()
    total = torch.stack([probe.output_of(path).view(probe.output_of(order[0]).shape) for path in order]).sum(0)
    moved = {path: torch.zeros_like(total) for path in order[:-1]} | {
        order[-1]: total.view(probe.output_of(order[-1]).shape)
    }
    rest = probe.call.left
    with torch.no_grad(), probe.giving(moved):
        found = probe.rerun()
    return tuple(order) if rest is not None and torch.allclose(found, rest, rtol=1e-6, atol=1e-9) else ()


def _mixes_outside(probe: Probe, regions: tuple[Region, ...]) -> bool:
    """Return whether, with the ends of all regions held, a push of the residual stream at one token reaches others."""
    held = {region.consumer: probe.output_of(region.consumer) for region in regions}

    def push(hidden: Tensor) -> Tensor:
        pushed = hidden.clone()  # not equal for all features: a norm that centres would hide it
        pushed[:, PUSHED] += torch.randn(
            pushed.shape[-1], dtype=pushed.dtype, generator=torch.Generator().manual_seed(0)
        )
        return pushed

    with torch.no_grad(), probe.giving(held):
        rest = probe.rerun()
        found = probe.rerun(push)
    moved = ((found - rest).abs() > ROUNDING * rest.abs().amax()).flatten(2).any(-1)
    return bool(moved[:, :PUSHED].any() or moved[:, PUSHED + 1 :].any())


def _embedding(sample: Sample, outside: dict[str, list[Call]]) -> str | None:
    """Find a module that is called once, with token ids, and returns rows of its weight times one factor."""
    tokens = next(iter(sample.inputs[0].values()))
    for path, calls in outside.items():
        weight = sample.model.get_submodule(path)._parameters.get("weight")
        if weight is None or weight.dim() != 2 or len(calls) != 1 or calls[0].left is None or calls[0].entered is None:
            continue
        if calls[0].entered.shape == tokens.shape and torch.equal(calls[0].entered, tokens):
            rows = weight[tokens]
            factor = (calls[0].left * rows).sum() / rows.square().sum()
            if calls[0].left.shape == rows.shape and torch.allclose(calls[0].left, rows * factor, rtol=1e-6):
                return path
    return None


def _head(sample: Sample, outside: dict[str, list[Call]]) -> str | None:
    """Find the last linear layer outside the blocks, if its output has the shape of the logits."""
    with torch.no_grad():
        output = sample.model(**sample.inputs[0])
    logits = logits_of(output)
    probe = Probe(sample.model, {path: calls for path, calls in outside.items() if path})
    last = [
        path
        for path, transposed in probe.linears.items()
        if not transposed and probe.output_of(path).shape == logits.shape
    ]
    return last[-1] if last and last[-1] not in probe.adapted else None


def _counts_tokens_behind(sample: Sample, head: str) -> bool:
    """Return whether the head's input for the first half of the tokens changes if the last block returns only it."""
    entered: list[Tensor] = []
    half = SEQ // 2

    def cut(module: nn.Module, args: tuple, output: Any) -> Any:
        return output[:, :half] if isinstance(output, Tensor) else type(output)((output[0][:, :half], *output[1:]))

    def run() -> None:
        # the model's code may raise anything if its sizes do not fit
        with (
            contextlib.suppress(Exception),
            torch.no_grad(),
        ):
            sample.model(**sample.inputs[0])

    note = sample.model.get_submodule(head).register_forward_pre_hook(
        lambda module, args: entered.append(args[0].clone())
    )
    run()
    with contextlib.closing(_Handles([note, sample.model.get_submodule(sample.blocks[-1]).register_forward_hook(cut)])):
        run()
    whole, *part = entered
    return not part or part[0].shape != whole[:, :half].shape or not torch.equal(part[0], whole[:, :half])


class _Handles:
    def __init__(self, handles: list[Any]):
        self.handles = handles

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


def _before(sample: Sample, hidden: int | str) -> list[str]:
    """List the parameters outside the blocks that move the first block's input."""
    first = sample.model.get_submodule(sample.blocks[0])
    entered: list[Tensor] = []

    class Stop(Exception):
        pass

    def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
        entered.append((args[hidden] if isinstance(hidden, int) else kwargs[hidden]).clone())
        raise Stop

    def run() -> Tensor:
        with contextlib.suppress(Stop), torch.no_grad():
            sample.model(**sample.inputs[0])
        return entered.pop()

    handle = first.register_forward_pre_hook(note, with_kwargs=True)
    found = []
    try:
        rest = run()
        for name, parameter in sample.model.named_parameters():
            if any(is_within(name, block) for block in sample.blocks):
                continue
            kept = parameter.detach().clone()
            parameter.data += 1.0
            moved = run()
            parameter.data.copy_(kept)
            if not torch.equal(moved, rest):
                found.append(clean(name))
    finally:
        handle.remove()
    return found


def forms(structure: Structure, tried: Tried, ranks: int) -> dict[tuple[str, str], LocalForm | None]:
    """Find each region's form on one of ``ranks``, by (first block of its kind, consumer); None if there is none."""
    found: dict[tuple[str, str], LocalForm | None] = {}
    for (probes, regions), kind in zip(tried, structure.kinds, strict=True):
        for small, region in zip(regions, kind.regions, strict=True):
            fits = region.fits(ranks) and small.fits(ranks)
            found[kind.blocks[0], region.consumer] = local_form(probes, small, ranks) if fits else None
    return found


def legal_degrees(structure: Structure, most: int = 64) -> list[int]:
    """List the sizes of the tensor axis by which every region can be sharded."""
    regions = [region for kind in structure.kinds for region in kind.regions]
    return [ranks for ranks in range(1, most + 1) if all(region.fits(ranks) for region in regions)]
