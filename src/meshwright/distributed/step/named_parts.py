"""Name the parameters and buffers of this rank's parts by their global names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from meshwright.core.names import clean
from meshwright.distributed.optimizer.parameter_groups import make_parameter_groups
from meshwright.introspection.facts import ModelFacts
from meshwright.planning.plan import Plan

from .part import ModelPart


class NamedParts:
    """The local modules of a model, and their parameters and buffers by global name."""

    plan: Plan
    facts: ModelFacts
    _parts: tuple[ModelPart, ...]

    @property
    def parts(self) -> list[nn.Module]:
        """The local modules: one for each of this rank's pipeline stages."""
        return [part.model for part in self._parts]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (global name, parameter) of this rank, tied ones once; sharded parameters are DTensors.

        A parameter that a pipeline's first and last stage share has one name; a rank with both stages holds two
        bitwise equal copies.
        """
        first = {last: one for one, last in self.plan.pipeline.tied} if self.plan.pipeline else {}
        for model in self.parts:
            for name, parameter in model.named_parameters():
                yield first.get(clean(name), clean(name)), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (global name, buffer) of the buffers that belong to a checkpoint."""
        persistent = {fact.name for fact in self.facts.buffers if fact.persistent}
        for model in self.parts:
            for name, buffer in model.named_buffers():
                if clean(name) in persistent:
                    yield clean(name), buffer

    def make_parameter_groups(
        self, *, weight_decay: float = 0.1, overrides: Sequence[tuple[str, dict[str, Any]]] = ()
    ) -> list[dict[str, Any]]:
        """Group parameters for an optimizer: matrices decay, vectors do not, overrides win (``parameter_groups``)."""
        return make_parameter_groups(self.named_parameters(), weight_decay=weight_decay, overrides=overrides)

    def _counted_once(self) -> list[nn.Parameter]:
        """List the parameters without the last stage's copies of the first stage's in a pipeline."""
        copies = {last for _, last in self.plan.pipeline.tied} if self.plan.pipeline else set()
        return [p for model in self.parts for name, p in model.named_parameters() if clean(name) not in copies]
