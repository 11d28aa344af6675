"""Build a TensorPlan from a measured structure, the requested techniques and plans by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from meshwright.core.dtypes import bytes_text
from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean, is_within, owner, pattern
from meshwright.introspection.blocks import NONE, Hints, hints_of
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.module_kinds import ModuleKind, module_kinds, own_tensor_plan, tied_modules
from meshwright.introspection.structure.adapters import SCALED
from meshwright.introspection.structure.local_search import LocalForm
from meshwright.introspection.structure.structure import BlockKind, Measured
from meshwright.planning.techniques import TensorStyleRequest

from .plan import BlocksPlan, RegionPlan, TensorPlan
from .styles import GivenStyles, differences, given_styles

# --- collect tensor-parallel plans by name, from the user or from the model itself


@dataclass(frozen=True)
class Words:
    """The named plans of a model, beside its measured structure.

    Attributes:
        given: a user's plan; None: the measured structure decides.
        own: the model's own plan, patterns -> names of styles; the measured structure decides, and notes report the
            differences.
        kinds: kinds of the model's modules.
        tied: groups of modules that share their weight.
        hints: hints of the model's author.
        elsewhere: modules that are distributed over another axis.
    """

    given: GivenStyles | None = None
    own: Mapping[str, str] = field(default_factory=dict)
    kinds: Mapping[str, ModuleKind] = field(default_factory=dict)
    tied: tuple[tuple[str, ...], ...] = ()
    hints: Hints = NONE
    elsewhere: tuple[str, ...] = ()


def words_for(facts: ModelFacts, requested: tuple[TensorStyleRequest, ...]) -> Words:
    """Read the user's plan if there is one, else the regions of the model's hints, else its own plan.

    Raises:
        ConfigError, UnsupportedError: the user's plan does not fit the model.
    """
    model = facts.module
    assert model is not None
    kinds = module_kinds(model)
    tied, hints = tuple(tied_modules(model)), hints_of(model)
    requested = requested or tuple(TensorStyleRequest(wildcard, style) for wildcard, style in hints.regions.items())
    if not requested:
        return Words(own=own_tensor_plan(model), kinds=kinds, tied=tied, hints=hints)
    linears = {
        clean(path): (m.out_features, m.in_features) for path, m in model.named_modules() if isinstance(m, nn.Linear)
    }
    return Words(given_styles(requested, kinds, linears), kinds=kinds, tied=tied, hints=hints)


# --- build a TensorPlan from a measured structure and the requested techniques


def make_tensor_plan(
    measured: Measured, *, sequence_parallel: bool = True, regather: bool = True, words: Words | None = None
) -> tuple[TensorPlan, tuple[str, ...]]:
    """Derive the plan from a measured structure, with notes about it.

    Raises:
        UnsupportedError: nothing of the model can be cut.
        ConfigError: the styles of a given plan do not fit together.
    """
    structure, words = measured.structure, words or Words()
    given = words.given
    notes: list[str] = []
    kinds = [_blocks_plan(measured, kind, words, notes) for kind in structure.kinds]
    if not any(kind.regions for kind in kinds):
        why = "the given plan cuts no layers of the blocks. Name a region, or set layout.tp = 1: " if given else ""
        if any(SCALED in note for note in notes):
            why = "set layout.tp = 1, adapters.kind = lora, or adapters.targets that leave layers out: "
        raise UnsupportedError(
            f"layout.tp: {why}no layers of this model were found that could be cut: " + "; ".join(notes)
        )
    pairs = zip(structure.kinds, kinds, strict=True)
    obstacle = next(filter(None, (_sequence_obstacle(kind, planned, given) for kind, planned in pairs)), "")
    if sequence_parallel and obstacle:
        notes.append(f"every rank holds the whole sequence between blocks: {obstacle}")
    for what, path in (("embedding", structure.embedding), ("head", structure.head)):
        if path is None:
            notes.append(f"the {what} was not recognised and stays whole on every rank")
    embedding, head = given.ends(structure, words.tied) if given else (structure.embedding or "", structure.head or "")
    embedding, head = ("" if path and words.hints.keeps_whole(path) else path for path in (embedding, head))
    for what, path, cut in (("embedding", structure.embedding, embedding), ("head", structure.head, head)):
        if path and not cut:
            notes.append(
                f"the {what} {path} stays whole: the plan does not cut it; {_bytes_of(measured, (path,))} on every rank"
            )
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
        tied=_other_names(measured, (embedding, head)),
        alike_behind=() if head else tuple(name for name in _outside(measured) if name not in structure.before),
        tail=structure.tail,
        of_images=structure.of_images,
    )
    if words.own and not given:
        here: dict[str, ModuleKind] = {
            path: kind
            for path, kind in words.kinds.items()
            if not any(is_within(path, other) for other in words.elsewhere)
        }
        notes += dict.fromkeys(differences(words.own, here, _cut_modules(plan)))
    return plan, tuple(notes)


def _blocks_plan(measured: Measured, kind: BlockKind, words: Words, notes: list[str]) -> BlocksPlan:
    """Decide how blocks of one kind are cut, and note what stays whole."""
    first, name, given = kind.blocks[0], pattern(kind.blocks[0]), words.given
    kept: list[RegionPlan] = []
    if given is not None:
        given.check_alike(kind)
    for region in kind.regions:
        where = ".".join(filter(None, (name, region.container)))
        hinted = any(words.hints.keeps_whole(f"{first}.{path}") for path in region.linears)
        if hinted or (given is not None and not given.cuts(first, region)):
            paths = tuple(f"{block}.{path}" for block in kind.blocks for path in region.linears)
            why = "hints say so" if hinted else "the plan does not cut it"
            notes.append(f"{where} stays whole: {why}; {_bytes_of(measured, paths)} on every rank")
            continue
        form = measured.forms[first, region.consumer]
        if form is None and given is not None:
            raise UnsupportedError(
                f"tensor plan: {where}: {LEFT_WHOLE[region.kind]}. Leave its layers out of the plan."
            )
        if form is None:
            line = measured.line_that_stops(first, region)
            change = f" (at {line}; a number of heads that is -1 there, as in view(b, t, -1, head_dim), fits any rank)"
            is_attention = bool(line) and region.kind == "attention"
            notes.append(f"{where}: {LEFT_WHOLE[region.kind]}{change if is_attention else ''}")
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
    return BlocksPlan(
        kind.blocks, kind.hidden, tuple(kept), gathers, summed, kind.norms if gathers == kind.gathers else ()
    )


def _outside(measured: Measured) -> list[str]:
    """List parameters outside the blocks by all their names, which the small copy has too."""
    sample = measured.sample
    names = (clean(name) for name, _ in sample.model.named_parameters(remove_duplicate=False))
    return [name for name in names if not any(is_within(name, block) for block in sample.blocks)]


def _other_names(measured: Measured, paths: tuple[str, ...]) -> tuple[str, ...]:
    """List names under which other modules have parameters of the modules at ``paths``."""
    named = [
        (clean(name), parameter) for name, parameter in measured.sample.model.named_parameters(remove_duplicate=False)
    ]
    of_paths = {id(parameter) for name, parameter in named if owner(name) in paths and owner(name)}
    return tuple(name for name, parameter in named if id(parameter) in of_paths and owner(name) not in paths)


def _bytes_of(measured: Measured, paths: tuple[str, ...]) -> str:
    return bytes_text(sum(size for name, size in measured.parameter_bytes.items() if owner(name) in paths))


def _cut_modules(plan: TensorPlan) -> dict[str, str]:
    """Map each cut module to column, row or embedding; for a layer with adapters, the module around them."""
    found = {path: what for path, what in ((plan.embedding, "embedding"), (plan.head, "column")) if path}
    for kind in plan.kinds:
        for block in kind.blocks:
            for planned in kind.regions:
                found |= {f"{block}.{planned.region.place_of(path)}": "column" for path in planned.region.producers}
                found[f"{block}.{planned.region.place_of(planned.region.consumer)}"] = "row"
    return found


LEFT_TO_EVERY_RANK = "so every rank computes"
LEFT_WHOLE = {
    "attention": f"its heads could not be computed apart, {LEFT_TO_EVERY_RANK} this attention whole",
    "feed_forward": f"it could not be computed in parts, {LEFT_TO_EVERY_RANK} it whole",
}


def _sequence_obstacle(kind: BlockKind, planned: BlocksPlan, given: GivenStyles | None) -> str:
    """Return the reason why activations between these blocks cannot be cut along the sequence; "" if they can."""
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
