"""Tensor parallelism, decided: what is cut, how each region runs on one of several ranks, and what stays whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from torch import nn

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean, is_within, owner, pattern
from meshwright.core.parts import Part, is_plain, ranges
from meshwright.core.units import bytes_text
from meshwright.introspection.module_kinds import ModuleKind
from meshwright.introspection.structure import Measured
from meshwright.introspection.structure.local_form import LocalForm
from meshwright.introspection.structure.region import Cut, Region, resized, shapes_of
from meshwright.introspection.structure.sample import Sample
from meshwright.introspection.structure.structure import BlockKind
from meshwright.introspection.structure.tail import Tail

from .tensor_styles import GivenStyles, differences


@dataclass(frozen=True)
class RegionPlan:
    """A region that is cut, and how it runs on one rank."""

    region: Region
    form: LocalForm


@dataclass(frozen=True)
class BlocksPlan:
    """Blocks that are cut alike. See ``introspection.structure.BlockKind``.

    Attributes:
        blocks: their paths.
        hidden: which argument of a block is the residual stream.
        regions: what is cut.
        gathers: layers that begin regions and share one gathered input.
        summed: row-parallel layers that are reduced together, the last one last; empty: each by itself.
        norms: of the block's input, one before each of ``gathers``: it is gathered once, and normed whole; empty: what norms give is.
    """

    blocks: tuple[str, ...]
    hidden: int | str
    regions: tuple[RegionPlan, ...]
    gathers: tuple[tuple[str, ...], ...]
    summed: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()

    def cuts(self) -> Iterator[Cut]:
        """Of parameters, by their names within a block. Norms over all features are computed whole."""
        for planned in self.regions:
            for cut in planned.region.cuts:
                if owner(cut.name) not in planned.region.spanning:
                    yield cut


@dataclass(frozen=True)
class TensorPlan:
    """What every rank of the tensor axis does.

    Attributes:
        ranks: size of the axis.
        source: where the plan comes from, in words.
        blocks: all of them, in forward order.
        sequence_parallel: between blocks each rank has its part of the sequence only.
        regather: gathered activations are not kept for backward but gathered again.
        kinds: of blocks.
        begins: the first block is given what follows from the token ids; else what another pipeline stage gave, cut already.
        embedding: the module that turns ids into vectors, its rows shared out; "": it stays whole.
        embedding_is_hidden: nothing lies between it and the first block.
        gathers_after_blocks: the whole sequence is gathered behind the last block, since what follows counts its tokens; else at the head.
        before: whole parameters that the first block's input follows from: all ranks compute them alike.
        head: the layer that gives the logits, its rows shared out; "": it stays whole.
        alike_behind: whole parameters behind the blocks that all ranks use alike, for the whole sequence: all of them where the head is
            whole.
        tail: what the model does to the logits.
        async_tensor_parallel: products overlap with the messages beside them.
    """

    ranks: int
    source: str
    blocks: tuple[str, ...]
    sequence_parallel: bool
    regather: bool
    kinds: tuple[BlocksPlan, ...]
    begins: bool = True
    embedding: str = ""
    embedding_is_hidden: bool = False
    gathers_after_blocks: bool = False
    before: tuple[str, ...] = ()
    head: str = ""
    alike_behind: tuple[str, ...] = ()
    tail: Tail = field(default_factory=Tail)
    async_tensor_parallel: bool = False

    @property
    def last_block(self) -> str:
        return self.blocks[-1]

    def kind_of(self, block: str) -> BlocksPlan:
        return next(kind for kind in self.kinds if block in kind.blocks)

    def for_sample(self, sample: Sample, model: nn.Module) -> TensorPlan:
        """The same for a small copy of the ``model`` that it was made for."""
        kinds = []
        for kind in self.kinds:
            block = next(block for block in kind.blocks if block in sample.blocks)
            before, after = shapes_of(model.get_submodule(block)), shapes_of(sample.model.get_submodule(block))
            sizes = before, after, Fraction(1, sample.heads)
            kinds.append(replace(kind, regions=tuple(replace(r, region=resized(r.region, *sizes)) for r in kind.regions)))
        return replace(self, kinds=tuple(kinds)).only(sample.blocks)

    def only(self, blocks: tuple[str, ...]) -> TensorPlan:
        """The same for a model with these blocks alone."""
        kinds = tuple(replace(k, blocks=tuple(block for block in k.blocks if block in blocks)) for k in self.kinds)
        return replace(self, blocks=blocks, kinds=kinds)

    def cut_of(self, name: str, shape: Sequence[int]) -> tuple[int, tuple[Part, ...]] | None:
        """(dim, parts) of a parameter of that shape, if it is cut; None of one that stays whole."""
        path = owner(name)
        if path and path in (self.embedding, self.head):
            return 0, (Part(shape[0], shape[0]),)
        for kind in self.kinds:
            block = next((block for block in kind.blocks if is_within(name, block)), None)
            if block is not None:
                within = name[len(block) + 1 :]
                return next(((cut.dim, cut.parts) for cut in kind.cuts() if cut.name == within), None)
        return None

    def local_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Of the first rank's part of a parameter."""
        cut = self.cut_of(name, shape)
        if cut is None:
            return tuple(shape)
        dim, parts = cut
        size = (
            -(-shape[dim] // self.ranks) if is_plain(parts, self.ranks) else sum(high - low for low, high in ranges(parts, 0, self.ranks))
        )
        return (*shape[:dim], size, *shape[dim + 1 :])

    def is_summed(self, name: str) -> bool:
        """Whether the gradient of a parameter that stays whole is a sum over the ranks, of what each finds for its part."""
        if name in self.before or name in self.alike_behind:
            return False
        if self.sequence_parallel:
            return True
        for kind in self.kinds:
            block = next((block for block in kind.blocks if is_within(name, block)), None)
            if block is not None:
                within = name[len(block) + 1 :]
                return owner(within) in kind.norms or any(_sees_some_groups(planned.region, within) for planned in kind.regions)
        return False


def _sees_some_groups(region: Region, name: str) -> bool:
    """Whether a whole parameter is used by a region for the groups of one rank only."""
    return name in region.shared or owner(name) in region.spanning


@dataclass(frozen=True)
class Words:
    """What is said of a model by name, beside what was measured.

    Attributes:
        given: a user's plan; None: what was measured is done.
        own: the plan that the model brings along: patterns -> words of styles. What was measured is done, and where it differs is said.
        kinds: of the model's modules.
        tied: modules that share their weight, together.
        elsewhere: modules that are shared out over another axis.
    """

    given: GivenStyles | None = None
    own: Mapping[str, str] = field(default_factory=dict)
    kinds: Mapping[str, ModuleKind] = field(default_factory=dict)
    tied: tuple[tuple[str, ...], ...] = ()
    elsewhere: tuple[str, ...] = ()


def make_tensor_plan(
    measured: Measured, *, sequence_parallel: bool = True, regather: bool = True, words: Words | None = None
) -> tuple[TensorPlan, tuple[str, ...]]:
    """The plan that follows from a measured structure, and what has to be said of it.

    Raises:
        UnsupportedError: nothing of the model can be cut.
        ConfigError: what a plan in words asks for does not fit together.
    """
    structure, words = measured.structure, words or Words()
    given = words.given
    notes: list[str] = []
    kinds = [_blocks_plan(measured, kind, given, notes) for kind in structure.kinds]
    if not any(kind.regions for kind in kinds):
        why = "the given plan cuts no layers of the blocks. Name a region, or set layout.tp = 1: " if given else ""
        raise UnsupportedError(f"layout.tp: {why}no layers of this model were found that could be cut: " + "; ".join(notes))
    pairs = zip(structure.kinds, kinds, strict=True)
    obstacle = next(filter(None, (_sequence_obstacle(kind, planned, given) for kind, planned in pairs)), "")
    if sequence_parallel and obstacle:
        notes.append(f"every rank holds the whole sequence between blocks: {obstacle}")
    for what, path in (("embedding", structure.embedding), ("head", structure.head)):
        if path is None:
            notes.append(f"the {what} was not recognised and stays whole on every rank")
    embedding, head = given.ends(structure, words.tied) if given else (structure.embedding or "", structure.head or "")
    for what, path, cut in (("embedding", structure.embedding, embedding), ("head", structure.head, head)):
        if path and not cut:
            notes.append(f"the {what} {path} stays whole: the plan does not cut it; {_bytes_of(measured, (path,))} on every rank")
    plan = TensorPlan(
        ranks=measured.ranks,
        source="given" if given else "the model's own plan, as measured" if words.own else "measured",
        blocks=structure.blocks,
        sequence_parallel=sequence_parallel and not obstacle,
        regather=regather,
        kinds=tuple(kinds),
        embedding=embedding,
        embedding_is_hidden=structure.embedding_is_hidden and bool(embedding),
        gathers_after_blocks=structure.counts_tokens_behind or not head,
        before=structure.before,
        head=head,
        alike_behind=() if head else tuple(name for name in _outside(measured) if name not in structure.before),
        tail=structure.tail,
    )
    if words.own and not given:
        here: dict[str, ModuleKind] = {
            path: kind for path, kind in words.kinds.items() if not any(is_within(path, other) for other in words.elsewhere)
        }
        notes += dict.fromkeys(differences(words.own, here, structure, _cut_modules(plan)))
    return plan, tuple(notes)


def _blocks_plan(measured: Measured, kind: BlockKind, given: GivenStyles | None, notes: list[str]) -> BlocksPlan:
    """How blocks of one kind are cut; what stays whole is noted."""
    first, name = kind.blocks[0], pattern(kind.blocks[0])
    kept: list[RegionPlan] = []
    if given is not None:
        given.check_alike(kind)
    for region in kind.regions:
        if given is not None and not given.cuts(first, region):
            paths = tuple(f"{block}.{path}" for block in kind.blocks for path in region.linears)
            where = ".".join(filter(None, (name, region.container)))
            notes.append(f"{where} stays whole: the plan does not cut it; {_bytes_of(measured, paths)} on every rank")
            continue
        form = measured.forms[first, region.consumer]
        if form is None and given is not None:
            raise UnsupportedError(f"tensor plan: {name}.{region.container}: {LEFT_WHOLE[region.kind]}. Leave its layers out of the plan.")
        if form is None:
            notes.append(f"{name}.{region.container}: {LEFT_WHOLE[region.kind]}")
        else:
            kept.append(RegionPlan(region, form))
    built = given.built(kind, measured.ranks) if given is not None else ()
    kept += [RegionPlan(region, measured.form_of(first, region) or LocalForm()) for region in built]
    notes += [f"{name}.{text}" for text in kind.strange]
    if not kind.regions and not built:
        notes.append(f"{name}: no layers were found whose features fall into groups; every rank computes it whole")
    begins = {path for planned in kept for path in planned.region.begins}
    gathers = tuple(paths for group in kind.gathers if (paths := tuple(path for path in group if path in begins)))
    gathers += tuple((path,) for region in built for path in region.producers)
    consumers = {planned.region.consumer for planned in kept}
    summed = kind.summed if consumers.issuperset(kind.summed) and not built else ()
    return BlocksPlan(kind.blocks, kind.hidden, tuple(kept), gathers, summed, kind.norms if gathers == kind.gathers else ())


def _outside(measured: Measured) -> list[str]:
    """Parameters outside the blocks, by all their names; those of the small copy have the same."""
    sample = measured.sample
    names = (clean(name) for name, _ in sample.model.named_parameters(remove_duplicate=False))
    return [name for name in names if not any(is_within(name, block) for block in sample.blocks)]


def _bytes_of(measured: Measured, paths: tuple[str, ...]) -> str:
    """What the weights and biases of these modules take."""
    return bytes_text(sum(size for name, size in measured.parameter_bytes.items() if owner(name) in paths))


def _cut_modules(plan: TensorPlan) -> dict[str, str]:
    """Path -> column, row or embedding of every module that is cut; for a layer with adapters, of the module around them."""
    found = {path: what for path, what in ((plan.embedding, "embedding"), (plan.head, "column")) if path}
    for kind in plan.kinds:
        for block in kind.blocks:
            for planned in kind.regions:
                found |= {f"{block}.{planned.region.place_of(path)}": "column" for path in planned.region.producers}
                found[f"{block}.{planned.region.place_of(planned.region.consumer)}"] = "row"
    return found


LEFT_WHOLE = {
    "attention": "its heads could not be computed apart, so every rank computes this attention whole",
    "feed_forward": "it could not be computed in parts, so every rank computes it whole",
}


def _sequence_obstacle(kind: BlockKind, planned: BlocksPlan, given: GivenStyles | None) -> str:
    """Why activations between these blocks cannot be cut along the sequence; empty where they can."""
    name = pattern(kind.blocks[0])
    if kind.mixes_outside:
        return f"tokens meet in {name} outside the layers that are cut"
    cut = {region.region.consumer for region in planned.regions}
    if any(region.consumer not in cut and (given is None or region.kind == "attention") for region in kind.regions):
        return f"a part of {name} stays whole"
    for region in planned.regions:
        if region.region.kind == "attention" and not region.form.hidden:
            return f"the attention of {name} has no module of its own that is given the gathered sequence"
    return ""


def words_of_cut(dim: int, parts: tuple[Part, ...]) -> str:
    """A cut in several parts, or with copies, as a plan writes it: the sizes of its parts, and the shares in each."""
    return f"Shard({dim}: {' + '.join(f'{part.size}/{part.groups}' for part in parts)})"


def placement_words(cut: tuple[int, tuple[Part, ...]] | None, ranks: int) -> str:
    """Where a parameter lies on the tensor axis."""
    if cut is None:
        return "Replicate()"
    return f"Shard({cut[0]})" if is_plain(cut[1], ranks) else words_of_cut(*cut)
