"""Measure a model's structure: its kinds of blocks with their regions, and the modules before and after them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean, is_within, pattern
from meshwright.core.record import argument
from meshwright.introspection.blocks import hints_of, repeated_blocks
from meshwright.introspection.calls import Call, SeenEnough, watching
from meshwright.introspection.deferred_logits import Tail, find_tail
from meshwright.introspection.signature import logits_of
from meshwright.introspection.small.sample import Sample, layouts_of, on_samples
from meshwright.introspection.structure.local_search import LocalForm, line_that_stops, local_form
from meshwright.introspection.structure.probe import ROUNDING, Probe, find_others, record, side_by_side
from meshwright.introspection.structure.regions import Region, find_regions, resized, shapes_of


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
    own = [block for block in repeated_blocks(sample.model) if _is_of_images(sample, block)]
    if own and sample.pictured is None:  # blocks that images do not reach either are those of videos and sound
        raise UnsupportedError(
            f"{type(model).__name__} takes images in a way that is not known here, so what it computes of them cannot"
            f" be rehearsed on a small copy: its modules {', '.join(sample.of_images)} are not called in a forward of"
            f" token ids alone. Set layout.tp = 1 and layout.pp = 1."
        )
    blocks = tuple(path for path in repeated_blocks(model) if not _is_of_images(sample, path))
    paths = {key: [path for path in paths if path in blocks] for key, paths in layouts_of(model).items()}
    kinds: list[BlockKind] = []
    tried: Tried = []
    for key, every in layouts_of(sample.model).items():
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
        far = record(sample.model, sample.long, [called], residual=residual)[0].get(called, first_probes[called])
        kind = _kind(first_probes[called], far, tuple(paths[key]))
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
    embedding, head = _ends(sample, outside)
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


def _kind(probe: Probe, far: Probe, blocks: tuple[str, ...]) -> BlockKind:
    """Describe a kind of blocks by a probe of one, and another probe of it, ``far``, called with long rows."""
    hidden = probe.hidden  # checked first, since the rest takes long
    probe.refuse_slow()
    regions = find_regions(probe)
    # the layers that begin regions, by the identity of their input
    by_input: dict[int, list[str]] = {}
    for path in (path for region in regions for path in region.begins):
        by_input.setdefault(id(next(iter(probe.calls[path][0].tensors.values()))), []).append(path)
    gathers = tuple(map(tuple, by_input.values()))
    norms: tuple[str, ...] = ()
    if not probe.adapted and not any(region.latent for region in regions):
        norms = side_by_side(probe, gathers, hidden)
    # the consumers, if the last one may output the sum of all with the same result
    consumers, summed = [region.consumer for region in regions], tuple[str, ...]()
    order = [path for path in probe.calls if path in consumers]  # of completion
    if len(order) > 1 and not any(producer in order for producer, _ in probe.influence(order, list(probe.linears))):
        shape, last = probe.output_of(order[0]).shape, order[-1]
        total = torch.stack([probe.output_of(path).view(shape) for path in order]).sum(0)
        moved = {path: torch.zeros_like(total) for path in order[:-1]}
        with torch.no_grad(), probe.giving(moved | {last: total.view(probe.output_of(last).shape)}):
            found = probe.rerun()
        left = probe.call.left
        summed = tuple(order) if left is not None and torch.allclose(found, left, rtol=1e-6, atol=1e-9) else ()
    # With the ends of all regions held, pushes of the residual stream at two tokens reach others. The first token is
    # pushed in one row, and the last in the other: each distance is between them and some token, or between the second
    # one of a row, at a third of it, and some token.
    places, third = torch.zeros(far.shape, dtype=torch.bool), far.shape[1] // 3
    places[0, [0, third]] = places[1, [-1, -1 - third]] = True

    def push(x: Tensor) -> Tensor:
        pushed = x.clone()  # not equal for all features: a norm that centres would hide it
        pushed[places] += torch.randn(pushed.shape[-1], dtype=pushed.dtype, generator=torch.Generator().manual_seed(0))
        return pushed

    with torch.no_grad(), far.giving({path: far.output_of(path) for path in consumers}):
        rest = far.rerun()
        found = far.rerun(push)
    reached = ((found - rest).abs() > ROUNDING * rest.abs().amax()).flatten(2).any(-1)
    return BlockKind(
        blocks=blocks,
        hidden=hidden,
        regions=regions,
        gathers=gathers,
        norms=norms,
        summed=summed,
        mixes_outside=bool(reached[~places].any()),
        strange=tuple(
            find_others(probe.block, probe.calls, [path for path in probe.linears if path not in probe.adapted])
        ),
    )


def _ends(sample: Sample, outside: dict[str, list[Call]]) -> tuple[str | None, str | None]:
    """Find the embedding and the head of a model.

    The one is called once, with token ids, and returns rows of its weight times one factor; the other is the last
    linear layer outside the blocks, if its output has the shape of the logits.
    """
    tokens, embedding = next(iter(sample.inputs[0].values())), None
    for path, calls in outside.items():
        weight, call = sample.model.get_submodule(path)._parameters.get("weight"), calls[0]
        if weight is None or weight.dim() != 2 or len(calls) != 1 or call.left is None or call.entered is None:
            continue
        if call.entered.shape == tokens.shape and torch.equal(call.entered, tokens):
            rows = weight[tokens]
            factor = (call.left * rows).sum() / rows.square().sum()
            if call.left.shape == rows.shape and torch.allclose(call.left, rows * factor, rtol=1e-6):
                embedding = path
                break
    with torch.no_grad():
        logits = logits_of(sample.model(**sample.inputs[0]))
    probe = Probe(sample.model, {path: calls for path, calls in outside.items() if path})
    last = [path for path, is_in_out in probe.linears.items() if not is_in_out]
    last = [path for path in last if probe.output_of(path).shape == logits.shape]
    return embedding, last[-1] if last and last[-1] not in probe.adapted else None


def _counts_tokens_behind(sample: Sample, head: str) -> bool:
    """Return whether the head's input for the first half of the tokens changes if the last block returns only it."""
    entered: list[Tensor] = []
    half, last = next(iter(sample.long.values())).shape[1] // 2, sample.blocks[-1]

    def note(path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        entered.append(args[0].clone())

    def cut(path: str, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        return output[:, :half] if isinstance(output, Tensor) else type(output)((output[0][:, :half], *output[1:]))

    with watching([(head, sample.model.get_submodule(head))], note):
        for watched in ((), [(last, sample.model.get_submodule(last))]):
            # the model's code may raise anything if its sizes do not fit
            with contextlib.suppress(Exception), torch.no_grad(), watching(watched, after=cut):
                sample.model(**sample.long)
    whole, *part = entered
    return not part or part[0].shape != whole[:, :half].shape or not torch.equal(part[0], whole[:, :half])


def _before(sample: Sample, hidden: int | str) -> list[str]:
    """List the parameters outside the blocks that move the first block's input."""
    entered: list[Tensor] = []

    def note(path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        entered.append(argument(args, kwargs, hidden).clone())
        raise SeenEnough

    def run() -> Tensor:
        with contextlib.suppress(SeenEnough), torch.no_grad():
            sample.model(**sample.inputs[0])
        return entered.pop()

    found = []
    with watching([(sample.blocks[0], sample.model.get_submodule(sample.blocks[0]))], note):
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
    return found


def legal_degrees(structure: Structure) -> list[int]:
    """List the sizes of the tensor axis by which every region can be sharded."""
    regions = [region for kind in structure.kinds for region in kind.regions]
    return [ranks for ranks in range(1, 65) if all(region.fits(ranks) for region in regions)]


@dataclass(frozen=True)
class Measured:
    """The measured structure of a model.

    Attributes:
        structure: possible cuts of the model.
        ranks: size of the tensor axis.
        forms: how each region runs on one of ``ranks``, by (first block of its kind, consumer); None where it cannot.
        sample: the small copy that was measured.
        probes: probes of the sample's first block of each kind, by its path.
        parameter_bytes: bytes of each parameter of the model itself, by its names.
        shapes: shapes of parameters and buffers in the model's first block of each kind, by block and local name.
    """

    structure: Structure
    ranks: int
    forms: dict[tuple[str, str], LocalForm | None]
    sample: Sample
    probes: dict[str, list[Probe]] = field(default_factory=dict)
    parameter_bytes: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, dict[str, torch.Size]] = field(default_factory=dict)

    def form_of(self, block: str, region: Region, *, without_mask: bool = False) -> LocalForm | None:
        """Find how a region that was not measured runs on one rank; None if no way is found.

        Args:
            without_mask: in forwards that are given no padding mask.
        """
        probes = self.probes.get(block, [])[: 1 if without_mask else None]
        known = {path for probe in probes for path in probe.calls}
        if not probes or not known.issuperset((region.container, *region.linears)):
            return None
        return local_form(probes, self._small(block, region), self.ranks)

    def line_that_stops(self, block: str, region: Region) -> str:
        """Return the model's line at which a region of these sizes does not compute on one rank; "" if none stops."""
        small = self._small(block, region)
        fits = region.fits(self.ranks) and small.fits(self.ranks)
        return line_that_stops(self.probes[block][0], small, self.ranks) if fits else ""

    def _small(self, block: str, region: Region) -> Region:
        """Return a region in the sample's sizes."""
        shapes = shapes_of(self.probes[block][0].block)
        return resized(region, self.shapes[block], shapes, Fraction(1, self.sample.heads))


def measured(model: nn.Module, ranks: int) -> Measured:
    """Measure a small copy of ``model``, which takes tenths of a second; raise UnsupportedError with the reason."""
    failed = f"the structure of {type(model).__name__} could not be measured: its code failed on a small copy of it"
    sample, structure, tried = on_samples(
        model, ranks, lambda sample: (sample, *measure(sample, model)), failed, few_experts=True
    )
    sizes = {clean(name): p.numel() * p.element_size() for name, p in model.named_parameters(remove_duplicate=False)}
    probes = {kind.blocks[0]: found for kind, (found, _) in zip(structure.kinds, tried, strict=True)}
    shapes = {block: shapes_of(model.get_submodule(block)) for block in probes}
    forms: dict[tuple[str, str], LocalForm | None] = {}
    for (found, regions), kind in zip(tried, structure.kinds, strict=True):
        for small, region in zip(regions, kind.regions, strict=True):
            fits = region.fits(ranks) and small.fits(ranks)
            forms[kind.blocks[0], region.consumer] = local_form(found, small, ranks) if fits else None
    return Measured(structure, ranks, forms, sample, probes, sizes, shapes)
