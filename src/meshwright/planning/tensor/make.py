"""Build a TensorPlan from a measured structure, the requested techniques and plans by name, and check it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from meshwright.core.devices import CUDA
from meshwright.core.dtypes import bytes_text
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.names import clean, is_within, owner, pattern
from meshwright.introspection.adapted_model import host_of_magnitude
from meshwright.introspection.blocks import NONE, Hints, hints_of
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.module_kinds import ModuleKind, module_kinds, own_tensor_plan, tied_modules
from meshwright.introspection.structure.local_search import LocalForm
from meshwright.introspection.structure.probe import SCALED
from meshwright.introspection.structure.structure import BlockKind, Measured, legal_degrees
from meshwright.planning.techniques import TensorStyleRequest
from meshwright.planning.tensor.plan import BlocksPlan, RegionPlan, TensorPlan
from meshwright.planning.tensor.styles import STYLES, GivenStyles, differences, given_styles, unknown_style
from meshwright.planning.values import Case, Found, no_blocks

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
    named = [
        (clean(name), parameter) for name, parameter in measured.sample.model.named_parameters(remove_duplicate=False)
    ]
    of_ends = {id(parameter) for name, parameter in named if owner(name) and owner(name) in (embedding, head)}
    inside = (*structure.before, *measured.sample.blocks)
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
        # names under which other modules have the parameters of embedding and head
        tied=tuple(name for name, p in named if id(p) in of_ends and owner(name) not in (embedding, head)),
        # parameters outside the blocks, by all their names, which the small copy has too
        alike_behind=() if head else tuple(n for n, _ in named if not any(is_within(n, path) for path in inside)),
        tail=structure.tail,
        of_images=structure.of_images,
    )
    if words.own and not given:
        here: dict[str, ModuleKind] = {
            path: kind
            for path, kind in words.kinds.items()
            if not any(is_within(path, other) for other in words.elsewhere)
        }
        # each cut module, for a layer with adapters the module around them
        cut_as = {path: what for path, what in ((embedding, "embedding"), (head, "column")) if path}
        for planned, block in ((kind, block) for kind in kinds for block in kind.blocks):
            for region in (each.region for each in planned.regions):
                cut_as |= {f"{block}.{region.place_of(path)}": "column" for path in region.producers}
                cut_as[f"{block}.{region.place_of(region.consumer)}"] = "row"
        notes += dict.fromkeys(differences(words.own, here, cut_as))
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


def _bytes_of(measured: Measured, paths: tuple[str, ...]) -> str:
    return bytes_text(sum(size for name, size in measured.parameter_bytes.items() if owner(name) in paths))


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


# --- check tensor parallelism


def tensor_words(case: Case) -> Found:
    for i, request in enumerate(case.techniques.tensor_plan):
        if request.style not in STYLES:
            yield ConfigError(unknown_style(f"techniques.tensor_plan[{i}].style = '{request.style}'", request.style))


def tensor_fits(case: Case) -> Found:
    ranks = case.layout.tp
    if ranks == 1 or case.facts.applied_plan(TensorPlan) is not None:
        return
    if not case.facts.blocks:
        yield ConfigError(no_blocks(f"layout.tp = {ranks}", case.facts))
        return
    if case.facts.vocab_size is not None and case.facts.vocab_size < ranks:
        yield ConfigError(
            f"layout.tp = {ranks}: the vocabulary has {case.facts.vocab_size} ids, fewer than there are ranks to"
            f" share it out to"
        )
        return
    structure = case.facts.measurements.structure(ranks).structure
    legal = ", ".join(map(str, legal_degrees(structure)))
    requested = case.techniques.tensor_plan
    given = (
        words_for(case.facts, requested).given
        if requested and all(request.style in STYLES for request in requested)
        else None
    )
    for kind in structure.kinds:
        for region in kind.regions:
            if not region.fits(ranks) and (given is None or given.cuts(kind.blocks[0], region)):
                what = f"{region.groups} heads" if region.kind == "attention" else f"{region.groups} hidden features"
                fewer = (
                    f" (and {region.joint} of keys and values)"
                    if region.kind == "attention" and region.joint < region.groups
                    else ""
                )
                where = ".".join(filter(None, (pattern(kind.blocks[0]), region.container)))
                yield ConfigError(
                    f"layout.tp = {ranks}: {where} has {what}{fewer}, which {ranks} ranks cannot share. Legal: {legal}."
                )
                return


def lengths_of_whole_rows(case: Case) -> Found:
    """Refuse DoRA beside embedding and head, whose rows are cut: its lengths are those of whole weights."""
    if case.layout.tp == 1:
        return
    blocks = case.facts.blocks
    for host in (host_of_magnitude(p.name) for p in case.facts.parameters):
        if host is not None and not any(is_within(host, block) for block in blocks):
            yield UnsupportedError(
                f"layout.tp = {case.layout.tp} cuts {host.removesuffix('.base_layer.weight')}, and adapters.kind = dora"
                f" trains the lengths of its whole rows. Leave it out of adapters.targets, or set adapters.kind = lora"
                f" or layout.tp = 1."
            )
            return


def tensor_companions(case: Case) -> Found:
    t = case.techniques
    if case.layout.tp > 1 and case.technique == "ddp":
        yield UnsupportedError(
            f"techniques.data_parallel = ddp does not go with layout.tp = {case.layout.tp}: its buckets know no"
            f" tensor-parallel parameters."
            f" Set techniques.data_parallel = fully_shard, which replicates over layout.dp_replicate too."
        )
    if t.loss_chunks > 1:
        structure = case.facts.measurements.structure(case.layout.tp).structure
        why = structure.tail.obstacle_if_cut if case.layout.tp > 1 else structure.tail.obstacle
        if structure.head is None or why:
            yield UnsupportedError(
                f"techniques.loss_chunks = {t.loss_chunks}: what {case.facts.kind} does to its logits cannot be done"
                f" piece by piece ({why}). Set techniques.loss_chunks = 1."
            )


def async_tensor_fits(case: Case) -> Found:
    if not case.techniques.async_tensor_parallel:
        return
    request = "techniques.async_tensor_parallel = true"
    if case.layout.tp == 1:
        yield ConfigError(
            f"{request} acts on the tensor axis, and layout.tp = 1. Set it false, or layout.tp = 2 or more."
        )
    elif not case.techniques.sequence_parallel:
        yield ConfigError(
            f"{request} needs cut sequences. Set techniques.sequence_parallel = true, or async_tensor_parallel = false."
        )
    if case.device != CUDA:
        yield UnsupportedError(
            f"{request} needs CUDA with symmetric memory (GPUs joined by NVLink), and this plan is for {case.device}."
            f" Set techniques.async_tensor_parallel = false: the numbers are the same."
        )
