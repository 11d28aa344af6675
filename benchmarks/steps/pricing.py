"""Price recorded operators by the curves of a profile."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from meshwright.simulation.measured import MachineProfile, SecondsCurve

from .operators import OperatorKind, OperatorWork, Phase

K = OperatorKind


DETACH = "detach"
"""The host's work around a tensor that a checkpointed block keeps for its backward: hooks that torch calls on it."""


def is_detached(work: OperatorWork) -> bool:
    """Whether an operator detaches a tensor in a backward, as a block does that computes its forward again."""
    return work.phase is Phase.BACKWARD and work.name == "aten.detach"


class Spent(StrEnum):
    """A use of a rank's seconds."""

    PRODUCTS = "products"
    ATTENTION = "attention"
    TRAFFIC = "memory traffic"
    HOST = "host"


@dataclass(frozen=True)
class OperatorSeconds:
    """Seconds of an operator on a core of its own: the host's, and those of the operator itself."""

    host: float
    computing: float
    spent: Spent

    @property
    def seconds(self) -> float:
        return self.host + self.computing


class OperatorPrices:
    """Prices of operators on the machine of a profile."""

    def __init__(self, profile: MachineProfile):
        self.profile, self._known = profile, dict[OperatorWork, OperatorSeconds]()
        self._traffic = {kind: SecondsCurve(points) for kind, points in profile.traffic.items()}
        self._adamw = SecondsCurve(profile.optimizer["fused"])
        host = profile.host
        self._around = {
            Phase.FORWARD: host.get("forward", host.get("autograd", 0.0)),
            Phase.BACKWARD: host.get("backward", 0.0),
            Phase.STEP: host.get("step", 0.0),
        }

    def price(self, work: OperatorWork) -> OperatorSeconds:
        """Return the seconds of an operator, and of the host around it."""
        found = self._known.get(work)
        if found is None:
            found = self._known[work] = self._price(work)
        return found

    def _price(self, work: OperatorWork) -> OperatorSeconds:
        profile, host = self.profile, self.profile.host
        if work.kind is K.DTENSOR:
            return OperatorSeconds(host.get("dtensor", 0.0), 0.0, Spent.HOST)
        around = self._around[work.phase] * work.tensors
        if work.name.startswith("fsdp."):
            around += host.get("fsdp", 0.0)
        if is_detached(work):
            around += host.get(DETACH, 0.0)
        if work.kind in (K.VIEW, K.EMPTY):
            return OperatorSeconds(around + host["view" if work.kind is K.VIEW else "empty"], 0.0, Spent.HOST)
        if work.kind is K.PRODUCT:
            rows, columns, depth, number = work.dims
            seconds = number * profile.grid(work.dtype, work.layout).product_s(rows, columns, depth)
            return OperatorSeconds(around, seconds, Spent.PRODUCTS)
        if work.kind is K.ATTENTION:
            queries, keys, dim, number = work.dims
            seconds = profile.attention_curve(work.dtype, work.layout, dim).seconds(queries) * number
            # measured causal, with as many keys as queries
            seconds *= keys / queries if work.causal else 2 * keys / queries
            return OperatorSeconds(around, seconds, Spent.ATTENTION)
        each = work.moved / work.tensors
        if work.kind is K.OPTIMIZER:
            moments = 7 * 4  # float32: parameter, gradient, two moments read; all but the gradient written
            return OperatorSeconds(around, work.tensors * self._adamw.seconds(each / moments), Spent.TRAFFIC)
        curve = self._traffic.get(work.kind.value, self._traffic["pointwise"])
        least = curve.least
        return OperatorSeconds(
            around + work.tensors * least, work.tensors * max(0.0, curve.seconds(each) - least), Spent.TRAFFIC
        )
