"""Describe context parallelism: how each attention of a model reaches the tokens of other ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from meshwright.core.dtypes import dtype_bytes
from meshwright.core.names import clean
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.mixing.values import Mixing
from meshwright.introspection.small.sample import Sample
from meshwright.planning.layout import Layout
from meshwright.planning.techniques import Techniques
from meshwright.planning.values import PrecisionPlan

from .cut import Cut
from .methods import Auto, Bytes, Kind, Method, methods, summed_dtype
from .mixers import MixerPlan, plan_mixers


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
    cut: Cut = "head_tail"
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

    def method_of(self, path: str) -> Method:
        """Return the method of one module's attention."""
        return self._methods_by_path[path]

    @cached_property
    def _methods_by_path(self) -> dict[str, Method]:
        return {caller.path: method for caller, method in zip(self.mixing.callers, self.methods, strict=True)}


def plan_methods(mixing: Mixing, ranks: int, tensor_ranks: int, kind: Kind | Auto, size: Bytes) -> ContextPlan:
    """Plan the attentions of a model, by what was measured of them.

    Args:
        kind: the method asked for, or "auto".
        size: bytes of a key's or value's number, and of its gradient in sums.

    Raises:
        UnsupportedError: the method asked for cannot be; see ``methods.given``.
    """
    chosen = tuple(methods(kind, mixing.callers, ranks, tensor_ranks, size))
    near = all(m.kind == "halo" and c.rule and c.rule.reach for c, m in zip(mixing.callers, chosen, strict=True))
    return ContextPlan(ranks, mixing, chosen, "contiguous" if near else "head_tail")


def context_plan(
    facts: ModelFacts, layout: Layout, requested: Techniques, precision: PrecisionPlan
) -> ContextPlan | None:
    """Measure a model's attentions, and plan them; None where rows are not cut.

    Raises:
        UnsupportedError: see ``measure_mixing`` and ``methods.given``.
    """
    if layout.cp == 1:
        return None
    size = Bytes(dtype_bytes(precision.compute), dtype_bytes(summed_dtype(precision.compute)))
    mixing = facts.measurements.mixing()
    mixers = plan_mixers(facts, mixing.mixers, layout.cp, layout.tp)
    made = plan_methods(mixing, layout.cp, layout.tp, requested.context_parallel_method, size)
    return replace(made, mixers=mixers)
