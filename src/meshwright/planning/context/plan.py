"""Decide context parallelism: which tokens each rank has, and how attention and mixers reach the others'.

Elements per token that one rank sends, for heads of h_q features in all, keys and values of h_k + h_v, C ranks, and
gradients that are summed in e_g bytes where keys have e:

    all_gather  forward (C - 1) (h_k + h_v) e     backward (C - 1) (h_k + h_v) e_g
    ring        forward (C - 1) (h_k + h_v) e     backward (C - 1) (h_k + h_v) (e + e_g)
    ulysses     forward (C - 1) / C (h_q + h_k + h_v + h_o) e     backward the same
    halo        what the queries reach: by a window of w tokens about w (h_k + h_v) for each run of a rank's tokens

Rows of several documents are cut so that few queries reach beyond their rank; where halo moves less than the method
chosen, such rows go by halo.

heads  each rank computes some heads, or channels, for whole rows: what linear layers give of a rank's own tokens is
       traded for that, as DeepSpeed Ulysses does for attention (arXiv 2309.14509), and back before the last layer
whole  each rank gathers the module's input, computes whole rows, and keeps its own tokens: C times the work
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Literal

from torch import nn

from meshwright.core.dtypes import dtype_bytes
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.names import clean, is_within
from meshwright.core.parts import FusedPart
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.mixing.values import Caller, MaskRule, Mixer, MixerInput, Mixing, Sizes
from meshwright.introspection.signature import core_of
from meshwright.introspection.small.sample import Sample
from meshwright.introspection.structure.local_search import LocalForm
from meshwright.introspection.structure.regions import Cut, Region, resized, shapes_of
from meshwright.introspection.structure.structure import Measured
from meshwright.planning.layout import Layout
from meshwright.planning.techniques import Techniques
from meshwright.planning.values import Case, Found, PrecisionPlan

# --- decide which tokens of a row each context-parallel rank has

Runs = tuple[tuple[int, int], ...]
"""Runs of tokens [start, stop) of a row, in order."""


RowCut = Literal["head_tail", "contiguous"]
"""Each rank has a run from either end of a row, or one run."""


def cut_row(cut: RowCut, length: int, ranks: int) -> tuple[Runs, ...]:
    """Cut a row; one tuple of runs per rank, whose numbers of tokens differ by at most one.

    Contiguous: each rank has one run; where attention reaches little, it needs no more than what is before its first
    token.

    Raises:
        ConfigError: the row has fewer tokens than there are ranks.
    """
    if cut == "head_tail":
        return head_tail(length, ranks)
    refuse_shorter(length, ranks)
    ends = accumulate((length // ranks + (rank < length % ranks) for rank in range(ranks)), initial=0)
    return tuple((run,) for run in pairwise(ends))


def fetched_tokens(cut: RowCut, length: int, ranks: int, rule: MaskRule) -> list[list[int]]:
    """Count the tokens of a row that each rank sends to each other, which fetches those that its queries see.

    Returns:
        By sender and receiver.
    """
    runs = cut_row(cut, length, ranks)
    sent = [[0] * ranks for _ in range(ranks)]
    for rank, mine in enumerate(runs):
        for owner in (other for other in range(ranks) if other != rank):
            for first, end in runs[owner]:
                lowest = min((rule.first(start) for start, _ in mine if start >= end or not rule.causal), default=end)
                sent[owner][rank] += max(0, end - max(first, lowest))
    return sent


def head_tail(length: int, ranks: int) -> tuple[Runs, ...]:
    """Cut a row into 2 · ranks runs of nearly equal length, and give rank r the run r from either end.

    With a causal mask a token's work grows with its place; a run near the head and one near the tail together cost the
    same on every rank (Llama 3, arXiv 2407.21783, section 3.3.2).

    Returns:
        One tuple of runs per rank; the numbers of tokens differ by at most one.

    Raises:
        ConfigError: the row has fewer tokens than there are ranks.
    """
    refuse_shorter(length, ranks)
    counts = [length // ranks + (rank < length % ranks) for rank in range(ranks)]
    heads = [-(-count // 2) for count in counts]
    sizes = [*heads, *reversed([count - head for count, head in zip(counts, heads, strict=True)])]
    ends = list(accumulate(sizes, initial=0))
    runs = list(pairwise(ends))
    return tuple(
        tuple(run for run in (runs[rank], runs[2 * ranks - 1 - rank]) if run[0] < run[1]) for rank in range(ranks)
    )


def refuse_shorter(length: int, ranks: int) -> None:
    if length < ranks:
        raise ConfigError(
            f"layout.cp = {ranks} cuts each row over {ranks} ranks, and the batch has rows of {length} tokens: set"
            f" layout.cp = {max(length, 1)} or less, or give longer rows"
        )


# --- choose how each attention of a model reaches the tokens of other ranks

Kind = Literal["all_gather", "ring", "ulysses", "ulysses_ring", "halo"]
Auto = Literal["auto"]
KINDS: tuple[Kind, ...] = ("all_gather", "ring", "ulysses", "ulysses_ring", "halo")
LARGE = 4
"""Whole rows of keys and values go round a ring where they are this many times larger than a rank's own queries."""


@dataclass(frozen=True)
class Method:
    """How one attention reaches other ranks' tokens.

    Attributes:
        kind: "all_gather": each rank gets keys and values of whole rows; "ring": they pass by, part by part;
            "ulysses": each rank gets some heads of all tokens; "ulysses_ring": so among neighbours, whose parts then
            pass by; "halo": each rank fetches those that its queries reach.
        neighbours: ranks among which tokens are traded for heads; 1: none.
        why: the reason in words.
        asked: the kind was asked for, and is not ours to change.
        bytes: that forward and backward send for each token of a rank; 0: it depends on the mask.
    """

    kind: Kind
    neighbours: int = 1
    why: str = ""
    asked: bool = False
    bytes: int = 0


def summed_dtype(compute: str) -> str:
    """Return the dtype in which gradients are summed, for keys and values in a compute dtype."""
    return "float64" if compute == "float64" else "float32"


def choose(caller: Caller, ranks: int, tensor_ranks: int, compute: str) -> Method:
    """Choose the method that moves fewest bytes; a ring where whole keys and values are large beside the rest."""
    own, element, summed = of_rank(caller.sizes, tensor_ranks), dtype_bytes(compute), dtype_bytes(summed_dtype(compute))
    gathered = (ranks - 1) * keys_and_values(own) * (element + summed)
    all_gather = Method("all_gather", bytes=gathered)
    if caller.arithmetic is None:
        return replace(all_gather, why="it computes scores in a way of its own")
    if caller.rule is None:
        return replace(all_gather, why="its mask follows no known rule")
    if caller.rule.reach:
        return Method("halo", why=f"its mask is {caller.rule}")
    if is_divisible(own.heads, own.key_heads, ranks):
        traded = round(2 * (ranks - 1) / ranks * traded_elements(own, ranks) * element)
        if traded <= gathered:
            return Method("ulysses", ranks, f"{traded} bytes per token instead of {gathered}", bytes=traded)
    if ranks * keys_and_values(own) > LARGE * own.heads * own.key_features:
        passed = (ranks - 1) * keys_and_values(own) * (2 * element + summed)
        return Method("ring", why=f"whole keys and values are over {LARGE} times a rank's queries", bytes=passed)
    return replace(all_gather, why="keys and values are small beside the queries")


def given(kind: Kind, caller: Caller, ranks: int, tensor_ranks: int) -> Method:
    """Return the method that was asked for.

    Raises:
        UnsupportedError: this attention cannot be computed by it; the text says why.
    """
    start = f"techniques.context_parallel_method = {kind}: {caller.path}"
    asked = partial(Method, kind, why="asked for", asked=True)
    if kind == "all_gather":
        return asked()
    if caller.arithmetic is None:
        raise UnsupportedError(f"{start} computes scores in a way of its own, which goes by all_gather alone")
    own = of_rank(caller.sizes, tensor_ranks)
    if kind in ("ring", "halo"):
        return asked()
    fitting = [n for n in range(ranks, 1, -1) if ranks % n == 0 and is_divisible(own.heads, own.key_heads, n)]
    heads = f"{own.heads} heads and {own.key_heads} key heads on a rank"
    sizes = f"layout.cp = {' or '.join(map(str, fitting))}, or " if fitting else ""
    instead = f"Set {sizes}techniques.context_parallel_method = ring"
    if kind == "ulysses":
        if ranks not in fitting:
            raise UnsupportedError(f"{start} has {heads}, which {ranks} ranks cannot share out. {instead}")
        return asked(ranks)
    smaller = [n for n in fitting if n < ranks]
    if not smaller:
        raise UnsupportedError(
            f"{start} has {heads}: no number of ranks between 1 and layout.cp = {ranks} divides both that and them."
            f" {instead}"
        )
    return asked(smaller[0])


def of_rank(sizes: Sizes, tensor_ranks: int) -> Sizes:
    """Return the sizes that one of the ranks has that share the heads; fewer key heads than ranks are copied."""
    heads = sizes.heads // tensor_ranks if sizes.heads % tensor_ranks == 0 else sizes.heads
    return Sizes(heads, -(-sizes.key_heads // tensor_ranks), sizes.key_features, sizes.value_features)


def keys_and_values(sizes: Sizes) -> int:
    """Count the numbers of one token's keys and values."""
    return sizes.key_heads * (sizes.key_features + sizes.value_features)


def traded_elements(sizes: Sizes, neighbours: int) -> int:
    """Count the numbers of one token that are traded for heads: queries, keys, values, outputs.

    Where there are fewer key heads than neighbours, each is counted for every neighbour that needs one.
    """
    key_heads = max(sizes.key_heads, neighbours)
    return (sizes.heads + key_heads) * (sizes.key_features + sizes.value_features)


def is_divisible(heads: int, key_heads: int, ranks: int) -> bool:
    """Return whether heads can be shared out with whole groups of heads for each key head."""
    return heads % ranks == 0 and heads % key_heads == 0 and (key_heads % ranks == 0 or ranks % key_heads == 0)


# --- decide how modules in which tokens meet otherwise than in attention are computed where rows are cut


@dataclass(frozen=True)
class HeadTrade:
    """A mixer whose heads are shared out.

    Attributes:
        block: path of the block around it.
        region: its layers and the cuts of their tensors, by paths within the block.
        form: how the region runs with a rank's share of the heads.
        tensor_ranks: ranks of the tensor axis, which have cut each tensor already.
    """

    block: str
    region: Region
    form: LocalForm
    tensor_ranks: int = 1

    def parts_of(self, cut: Cut) -> tuple[FusedPart, ...]:
        """Return the parts of a tensor as the tensor axis has cut it."""
        ranks = self.tensor_ranks
        return tuple(
            FusedPart(part.size * part.copies(ranks) // ranks, part.groups * part.copies(ranks) // ranks)
            for part in cut.parts
        )

    def cut_of(self, layer: str) -> tuple[FusedPart, ...]:
        """Return the parts of a layer's features."""
        cut = self.region.cut_of(f"{layer}.weight")
        assert cut is not None
        return self.parts_of(cut)

    def inner_cuts(self) -> Iterator[Cut]:
        """Yield the cuts of tensors that are used for some heads each, between the layers that begin and end it."""
        linear = (*self.region.producers, self.region.consumer)
        for cut in self.region.cuts:
            if not any(is_within(cut.name, layer) for layer in linear):
                yield replace(cut, parts=self.parts_of(cut))

    def traded(self, ranks: int) -> dict[str, int]:
        """Return the numbers of one token that each layer's trade moves, those counted that several ranks need."""
        return {
            layer: sum(part.size * part.copies(ranks) for part in self.cut_of(layer))
            for layer in (*self.region.producers, self.region.consumer)
        }


@dataclass(frozen=True)
class MixerPlan:
    """How one mixer is computed.

    Attributes:
        trade: its heads are shared out; None: it is computed whole on each rank.
        reason: why, in words.
        block: path of the block that the module is in; "": outside of all, and called on each stage of a pipeline.
    """

    mixer: Mixer
    trade: HeadTrade | None = None
    reason: str = ""
    block: str = ""

    @property
    def kind(self) -> Literal["heads", "whole"]:
        return "whole" if self.trade is None else "heads"

    @property
    def gathered(self) -> tuple[MixerInput, ...]:
        """The inputs that are gathered: all whose values are read, but those that a trade takes from own tokens."""
        form = None if self.trade is None else self.trade.form
        own = () if form is None else tuple(map(key_in_arguments, (*form.hidden, *form.behind)))
        return tuple(each for each in self.mixer.inputs if each.is_read and each.key not in own)

    def for_sample(self, sample: Sample, model: nn.Module) -> MixerPlan:
        """Adapt the plan of ``model`` to its small copy."""
        if self.trade is None:
            return self
        block = self.trade.block
        sizes = shapes_of(model.get_submodule(block)), shapes_of(sample.model.get_submodule(block))
        region = resized(self.trade.region, *sizes, Fraction(1, sample.heads))
        return replace(self, trade=replace(self.trade, region=region, tensor_ranks=1))


def key_in_arguments(key: int | str) -> str:
    """Return the path of a module's argument, by its position or name, in (arguments, named arguments)."""
    return f"[0][{key}]" if isinstance(key, int) else f"[1]['{key}']"


def _planned(measured: Measured | None, mixer: Mixer, block: str, shares: int, tensor_ranks: int) -> MixerPlan:
    """Plan one mixer, whose heads ``shares`` ranks of both axes would share out."""
    if mixer.has_attention:
        return MixerPlan(mixer, reason="it calls attention in a way of its own")
    if measured is None:
        return MixerPlan(mixer, reason="its heads were not measured")
    kind = measured.structure.kind_of(block) if block in measured.structure.blocks else None
    path = mixer.path[len(block) + 1 :]
    region = next((r for r in kind.regions if r.container == path), None) if kind is not None else None
    if kind is None or region is None:
        return MixerPlan(mixer, reason="it has no heads that were measured apart")
    if region.adapted or region.latent or region.spanning:
        return MixerPlan(mixer, reason="it has adapters, or layers or norms that all heads share")
    mixed = region.cut_of(f"{region.consumer}.weight")
    assert mixed is not None
    # a head that two ranks computed would be added twice
    alone = all(part.fits(shares) and part.copies(shares) == 1 for part in mixed.parts)
    if not alone or not all(part.fits(shares) for cut in region.cuts for part in cut.parts):
        return MixerPlan(mixer, reason=f"its {region.groups} heads cannot be shared out")
    first = kind.blocks[0]
    form = measured.form_of(first, region, without_mask=True)
    if form is None or not form.hidden:
        return MixerPlan(mixer, reason="its code reads its input besides the layers that begin it")
    if form.narrow and tensor_ranks > 1:
        return MixerPlan(mixer, reason="its code divides the features of its input by its heads")
    keys = {*form.hidden, *form.behind}
    others = {each.key for each in mixer.inputs if each.is_read and each.follows and not each.is_integer}
    if others - set(map(key_in_arguments, keys)):
        return MixerPlan(mixer, reason="its code reads several inputs that depend on tokens")
    trade = HeadTrade(block, region, form, tensor_ranks)
    return MixerPlan(mixer, trade, f"its {region.groups} heads are shared out")


# --- describe context parallelism


@dataclass(frozen=True)
class ContextPlan:
    """How rows are cut over the ranks of the context axis, and how attention reaches whole rows.

    Attributes:
        ranks: size of the context axis.
        mixing: the calls by which the model's tokens see each other.
        methods: how each of these calls reaches other ranks' tokens.
        cut: which tokens a rank has of a row that is one document.
        mixers: how each module is computed in which tokens meet otherwise.
    """

    ranks: int
    mixing: Mixing
    methods: tuple[Method, ...]
    cut: RowCut = "head_tail"
    mixers: tuple[MixerPlan, ...] = ()

    @property
    def cuts_documents(self) -> bool:
        """Packed rows are cut by their documents: no attention sees beyond its own, and the whole of it counts."""
        rules = [caller.rule for caller in self.mixing.callers]
        return (
            bool(rules)
            and self.cut == "head_tail"
            and self.mixing.keeps_documents_apart
            and not self.mixing.counts_positions
            and all(r and r.causal for r in rules)
        )

    @property
    def whole_row_modules(self) -> tuple[str, ...]:
        """Paths of modules that compute whole rows, or some heads of them, and return a rank's own tokens."""
        return tuple(planned.mixer.path for planned in self.mixers)

    @property
    def has_pairs(self) -> bool:
        """A module that computes whole rows is given masks or biases of pairs of tokens."""
        return any(planned.mixer.pairs for planned in self.mixers)

    def for_sample(self, sample: Sample, model: nn.Module) -> ContextPlan:
        """Adapt the plan of ``model`` to its small copy."""
        here = {clean(path) for path, _ in sample.model.named_modules()}
        kept = tuple(m.for_sample(sample, model) for m in self.mixers if m.mixer.path in here)
        return replace(self, mixers=kept)

    @cached_property
    def method_of(self) -> dict[str, Method]:
        """The method of each module's attention, by its path."""
        return {caller.path: method for caller, method in zip(self.mixing.callers, self.methods, strict=True)}


def plan_methods(mixing: Mixing, ranks: int, tensor_ranks: int, kind: Kind | Auto, compute: str) -> ContextPlan:
    """Plan the attentions of a model, by what was measured of them: by the method asked for, or with "auto" the best.

    Args:
        compute: dtype of keys and values.

    Raises:
        UnsupportedError: the method asked for cannot be; see ``given``.
    """
    chosen = tuple(
        choose(caller, ranks, tensor_ranks, compute) if kind == "auto" else given(kind, caller, ranks, tensor_ranks)
        for caller in mixing.callers
    )
    near = all(m.kind == "halo" and c.rule and c.rule.reach for c, m in zip(mixing.callers, chosen, strict=True))
    return ContextPlan(ranks, mixing, chosen, "contiguous" if near else "head_tail")


def context_plan(
    facts: ModelFacts, layout: Layout, requested: Techniques, precision: PrecisionPlan
) -> ContextPlan | None:
    """Measure a model's attentions, and plan them; None where rows are not cut.

    Raises:
        UnsupportedError: see ``measure_mixing`` and ``given``.
    """
    if layout.cp == 1:
        return None
    mixing = facts.measurements.mixing()
    measured = None
    if mixing.mixers:
        facts.measurements.sample(layout.cp)  # for rehearsals: a model that is laid out cannot be copied
    if not all(mixer.has_attention for mixer in mixing.mixers):
        with suppress(UnsupportedError):
            measured = facts.measurements.structure(layout.cp)
    mixers = []
    for mixer in mixing.mixers:
        block = next((block for block in facts.blocks if is_within(mixer.path, block)), "")
        mixers.append(replace(_planned(measured, mixer, block, layout.cp * layout.tp, layout.tp), block=block))
    made = plan_methods(mixing, layout.cp, layout.tp, requested.context_parallel_method, precision.compute)
    return replace(made, mixers=tuple(mixers))


# --- check context parallelism


def context_companions(case: Case) -> Found:
    """Refuse techniques and kinds of experts that do not go with rows cut over ranks."""
    facts, ranks, kind = case.facts, case.layout.cp, case.techniques.context_parallel_method
    if ranks == 1:
        if kind != "auto":
            yield ConfigError(
                f"techniques.context_parallel_method = {kind} is about rows that are cut over ranks, and layout.cp = 1."
                f' Leave it at "auto", or set layout.cp = 2 or more.'
            )
        return
    config = getattr(core_of(facts.module), "config", None)
    is_refused = False
    if getattr(config, "is_encoder_decoder", False) is True:
        is_refused = True
        yield UnsupportedError(
            f"layout.cp = {ranks}: {facts.kind} has an encoder and a decoder, whose rows are two, and one of them is"
            f" cut. Set layout.cp = 1."
        )
    if facts.images is not None:
        is_refused = True
        yield UnsupportedError(
            f"layout.cp = {ranks}: {facts.kind} puts the features of a row's images in the places of its image tokens,"
            f" one after the other, before its blocks, and a rank has a part of these places. Set layout.cp = 1;"
            f" layout.tp cuts long rows between the blocks too (techniques.sequence_parallel)."
        )
    if value := facts.capacity_factor:
        is_refused = True
        yield UnsupportedError(
            f"model.moe.capacity_factor = {value} with layout.cp = {ranks}: who is over an expert's capacity depends on"
            f" the whole sequence, of which a rank has a part. Set model.moe.capacity_factor = 0 (no token is dropped),"
            f" or layout.cp = 1."
        )
    if is_refused or facts.applied_plan(ContextPlan) is not None:
        return
    try:
        mixing = facts.measurements.mixing()
    except UnsupportedError as error:
        yield UnsupportedError(f"{error}. Set layout.cp = 1.")
        return
    conditional = set(facts.measurements.premises().conditional)
    names = [p.name for p in facts.parameters if p.trainable] if conditional else []
    # a block that a small copy never calls has no known way in which tokens meet
    paths = [*(caller.path for caller in mixing.callers), *(mixer.path for mixer in mixing.mixers), *facts.blocks]
    inside = {path: {name for name in names if is_within(name, path)} for path in paths}
    if path := next((path for path, held in inside.items() if held and held <= conditional), None):
        yield UnsupportedError(
            f"layout.cp = {ranks}: some batches or draws pass over {path}, in which the tokens of all ranks meet, and"
            f" each rank would decide so for its own tokens. Set layout.cp = 1."
        )
    if case.techniques.compile and (flex := [caller.path for caller in mixing.callers if caller.flex]):
        yield ConfigError(
            f"layout.cp = {ranks} takes the calls of flex_attention in {flex[0]} out of its forward, which a compiled"
            f" block does not allow. Set techniques.compile = false."
        )
    needy = next((m for m in mixing.mixers if any(each.is_read and not each.is_integer for each in m.inputs)), None)
    if needy is not None and case.layout.tp > 1 and case.techniques.sequence_parallel:
        yield UnsupportedError(
            f"layout.cp = {ranks} with layout.tp = {case.layout.tp}: {needy.path} needs whole rows ({needy.why}), and"
            f" tensor-parallel ranks have parts of them. Set techniques.sequence_parallel = false, or layout.tp = 1."
        )
    unknown = (m for m in mixing.mixers if any(each.is_read and not each.features for each in m.inputs))
    if (mixer := next(unknown, None)) is not None:
        yield UnsupportedError(
            f"layout.cp = {ranks}: the sizes of the tensors that {mixer.path} is given are unknown: a forward without"
            f" values does not reach it. Set layout.cp = 1."
        )
