"""Decide how modules in which tokens meet otherwise than in attention are computed where rows are cut.

heads  each rank computes some heads, or channels, for whole rows: what linear layers give of a rank's own tokens is
       traded for that, as DeepSpeed Ulysses does for attention (arXiv 2309.14509), and back before the last layer
whole  each rank gathers the module's input, computes whole rows, and keeps its own tokens: C times the work
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from torch import nn

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import is_within
from meshwright.core.parts import FusedPart
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.mixing.values import Mixer, MixerInput
from meshwright.introspection.small.sample import Sample
from meshwright.introspection.structure import Measured
from meshwright.introspection.structure.local_form import LocalForm
from meshwright.introspection.structure.region import Cut, Region, resized, shapes_of


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


def plan_mixers(facts: ModelFacts, mixers: tuple[Mixer, ...], ranks: int, tensor_ranks: int) -> tuple[MixerPlan, ...]:
    """Share out the heads of each mixer, where these were measured apart; compute the others whole."""
    if not mixers:
        return ()
    facts.measurements.sample(ranks)  # for rehearsals: a model that is laid out cannot be copied
    measured = None
    if not all(mixer.has_attention for mixer in mixers):
        with suppress(UnsupportedError):
            measured = facts.measurements.structure(ranks)
    blocks = {m.path: next((block for block in facts.blocks if is_within(m.path, block)), "") for m in mixers}
    return tuple(
        replace(_planned(measured, m, blocks[m.path], ranks * tensor_ranks, tensor_ranks), block=blocks[m.path])
        for m in mixers
    )


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
