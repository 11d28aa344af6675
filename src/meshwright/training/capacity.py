"""Judge whether a run's memory fits the devices and the host that it starts on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from meshwright.core.devices import CPU, device_memory, is_accelerator
from meshwright.core.dtypes import bytes_text, dtype_bytes
from meshwright.distributed.process.world import get_world_info, ranks_per_node
from meshwright.introspection.facts import ModelFacts
from meshwright.planning.memory import MemoryEstimate, RankBytes, bytes_at_least, bytes_at_most, bytes_of_states
from meshwright.planning.plan import Plan
from meshwright.planning.values import Batch
from meshwright.simulation.cards import machines
from meshwright.simulation.from_model import job_of_plan
from meshwright.simulation.step_memory import step_memory
from meshwright.training.metrics.memory import host_memory

WORTH_A_DRY_RUN = 1 / 3
"""Fraction of the memory that states, with a rough count of activations, must reach before a dry run is made."""
LIBRARIES = {CPU: 0.4e9}
"""Bytes that a rank's interpreter and torch take on a CPU: a rank of the smallest model was found to have a resident
peak of 0.32 GB on Linux."""
LIBRARIES_OF_DEVICES = 1.0e9
"""Bytes that driver, libraries and messages take on an accelerator: assumed."""
HOST = "this host"


class Fit(StrEnum):
    """Whether a run fits."""

    FITS = "fits"
    UNSURE = "may not fit"
    TOO_LARGE = "does not fit"


@dataclass(frozen=True)
class Capacity:
    """The memory that ranks of one host have.

    Attributes:
        device: type of the devices that compute.
        device_bytes: memory of this rank's accelerator; None on a CPU, or where it is unknown.
        host_bytes: memory of the host, for all of its ranks.
        ranks: ranks on this host.
        rank: this rank's number in the world.
    """

    device: str
    device_bytes: int | None
    host_bytes: int
    ranks: int
    rank: int = 0

    @classmethod
    def here(cls, device: str) -> Capacity:
        """Read the capacity of this rank's host, as a launcher's variables and the system describe it."""
        rank, local, world = get_world_info()
        ranks = ranks_per_node() or (1 if world > 1 else world)
        return cls(device, device_memory(device, local), host_memory(), ranks, rank)

    @property
    def room(self) -> int:
        """Bytes that one rank has if the host's ranks share evenly."""
        return self.host_bytes // self.ranks if self.device_bytes is None else self.device_bytes


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a run needs of one memory.

    Attributes:
        bytes: what it needs: of this rank's device, or of the host for all of its ranks.
        have: what there is.
        where: the memory, in words.
        parts: the ranks that share it, and the summands of the fullest, in words.
    """

    bytes: int
    have: int
    where: str
    parts: str = ""

    @property
    def is_short(self) -> bool:
        return self.bytes > self.have


@dataclass(frozen=True)
class Judgement:
    """Bounds of the memory that a run needs, beside the memory that is there.

    Attributes:
        least: lower bound of what it needs, of the memory that is shortest.
        most: upper bound; None where activations are unknown.
    """

    least: MemoryNeed
    most: MemoryNeed | None

    @property
    def verdict(self) -> Fit:
        if self.least.is_short:
            return Fit.TOO_LARGE
        return Fit.UNSURE if self.most is None or self.most.is_short else Fit.FITS


def judge(
    facts: ModelFacts,
    plan: Plan,
    batch: Batch,
    capacity: Capacity,
    estimate: Callable[[], MemoryEstimate],
    *,
    steps: int = 2,
    state_tensors: int | None = None,
    fully: bool = False,
) -> Judgement:
    """Judge whether a plan's step fits. Its memory is estimated by a dry run only where the answer needs that.

    Args:
        estimate: makes the dry run.
        steps: optimizer steps of the run; there is no optimizer state in the first one's forward.
        state_tensors: tensors of optimizer state for each parameter; None: the plan's.
        fully: give an upper bound, whatever it costs.
    """
    states = need(plan, capacity, bytes_of_states(plan, batch, state_tensors=state_tensors))
    if not fully:
        rough = _rough_activations(facts, plan, batch) * (1 if capacity.device_bytes else capacity.ranks)
        if states.is_short or states.bytes + rough <= WORTH_A_DRY_RUN * states.have:
            return Judgement(states, None)
    found = estimate()
    if not found.ranks:
        return Judgement(states, None)
    bound = partial(bytes_at_least, plan, found, optimizer=steps > 1)
    least = need(plan, capacity, bound())
    if least.is_short and is_accelerator(plan.device):
        # a kernel of the device may save less than the CPU's, such as attention without its probabilities
        least = need(plan, capacity, bound(activations=_arithmetic(facts, plan, batch)))
    least = max(states, least, key=lambda one: one.bytes / one.have)
    return Judgement(least, need(plan, capacity, bytes_at_most(plan, found), with_libraries=True))


def whether_it_fits(facts: ModelFacts, plan: Plan, batch: Batch, capacity: Capacity, estimate: MemoryEstimate) -> str:
    """Return a line that says whether a plan's step fits a machine, for the plan's table."""
    judgement = judge(facts, plan, batch, capacity, lambda: estimate, fully=True)
    least, most, verdict = judgement.least, judgement.most, judgement.verdict
    count, world = min(capacity.ranks, plan.world), plan.world
    ranks = "" if least.where != HOST or world == 1 else f" for {count} ranks"
    ranks = ranks if count == world or not ranks else f" for {count} of {world} ranks"
    lower, there = bytes_text(least.bytes), f"{bytes_text(least.have)} there"
    if verdict is Fit.TOO_LARGE:
        return f"  does not fit {least.where}: at least {lower}{ranks}, {there}"
    if most is None:
        return f"  {least.where}: at least {lower}{ranks}, {there}; with activations, which are unknown, it may not fit"
    upper = bytes_text(most.bytes)
    if verdict is Fit.FITS:
        return f"  fits {least.where}: at most {upper}{ranks}, libraries included, {there}"
    return f"  may not fit {least.where}: between {lower} and {upper}{ranks}, {there}"


def need(plan: Plan, capacity: Capacity, ranks: Sequence[RankBytes], *, with_libraries: bool = False) -> MemoryNeed:
    """Return the memory that is shortest: of this rank's device, or of the host for all of its ranks.

    Args:
        ranks: bytes of each rank of the pipeline, or of one that is like all.
        with_libraries: for an upper bound: count libraries, and the fullest rank where a lower bound counts this one.
    """
    each = plan.world // len(ranks)
    own = ranks[min(capacity.rank // each, len(ranks) - 1)]
    own = max(ranks, key=lambda one: one.device) if with_libraries else own
    count = min(capacity.ranks, plan.world)
    together = each * sum(one.host for one in ranks)
    if count < plan.world:  # which stages are on this host is not known: the least, or with libraries the most
        together = count * (max if with_libraries else min)(one.host for one in ranks)
    libraries = LIBRARIES.get(plan.device, LIBRARIES[CPU]) * count if with_libraries else 0
    largest = max(ranks, key=lambda one: one.host)
    each_of = f"{count} ranks, each with " * (count > 1)
    needs = [MemoryNeed(int(together + libraries), capacity.host_bytes, HOST, each_of + _text(largest))]
    if capacity.device_bytes is not None:
        beside = LIBRARIES_OF_DEVICES if with_libraries else 0
        needs.append(
            MemoryNeed(int(own.device + beside), capacity.device_bytes, f"this {plan.device} device", _text(own))
        )
    return max(needs, key=lambda need: need.bytes / need.have)


def _text(rank: RankBytes) -> str:
    return ", ".join(f"{name} {bytes_text(size)}" for name, size in rank.parts.items())


def _rough_activations(facts: ModelFacts, plan: Plan, batch: Batch) -> float:
    """Count the inputs of all matrices and the logits of a microbatch on one rank, to decide about a dry run."""
    rows = max(1, batch.global_rows // plan.data_ranks)
    tokens = min(rows, batch.microbatch_rows or rows) * batch.seq_len / plan.size("cp")
    widths = sum(p.shape[-1] for p in facts.parameters if len(p.shape) == 2)
    cut = plan.size("tp") * plan.size("pp")
    return tokens / cut * (widths * dtype_bytes(plan.precision.compute) + 4 * (facts.vocab_size or 0))


def _arithmetic(facts: ModelFacts, plan: Plan, batch: Batch) -> float:
    """Return the bytes of activations and logits by arithmetic, which any card has alike."""
    job = job_of_plan(facts, plan, batch, machines("h100", plan.world, per_node=plan.world))
    memory = step_memory(job)
    return memory.activations + memory.logits
