"""Judge whether a run's memory fits the devices and the host that it starts on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

from meshwright.core.config import to_dict
from meshwright.core.devices import device_memory, is_accelerator
from meshwright.core.dtypes import bytes_text, dtype_bytes
from meshwright.core.errors import ConfigError, MeshwrightError
from meshwright.distributed.optimizer import low_bit
from meshwright.distributed.process.world import get_world_info, ranks_per_node
from meshwright.introspection.cluster import Cluster
from meshwright.introspection.facts import ModelFacts
from meshwright.planning.build import plan as make_plan
from meshwright.planning.memory import MemoryEstimate, RankBytes, bytes_at_least, bytes_at_most, bytes_of_states
from meshwright.planning.plan import Plan
from meshwright.planning.premise_rules import may_be_idle
from meshwright.planning.values import Batch
from meshwright.simulation.cards import machines
from meshwright.simulation.from_model import job_of_plan
from meshwright.simulation.step_memory import step_memory
from meshwright.training.config import Config, leaves
from meshwright.training.memory import host_memory

WORTH_A_DRY_RUN = 1 / 3
"""Fraction of the memory that states, with a rough count of activations, must reach before a dry run is made."""
LIBRARIES = 0.4e9
"""Bytes of host memory that a rank's interpreter and torch take: a rank of the smallest model was found to have a
resident peak of 0.32 GB on Linux."""
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


class MemoryNeed(NamedTuple):
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


class Judgement(NamedTuple):
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
    is_bound = facts.images is None and not may_be_idle(facts)  # else some weights get no gradient
    if not fully:
        # the inputs of all matrices and the logits of a microbatch on one rank
        rows = max(1, batch.global_rows // plan.data_ranks)
        tokens = min(rows, batch.microbatch_rows or rows) * batch.seq_len / plan.size("cp")
        widths = sum(p.shape[-1] for p in facts.parameters if len(p.shape) == 2) * dtype_bytes(plan.precision.compute)
        rough = tokens / (plan.size("tp") * plan.size("pp")) * (widths + 4 * (facts.vocab_size or 0))
        rough *= 1 if capacity.device_bytes else capacity.ranks
        if (states.is_short and is_bound) or states.bytes + rough <= WORTH_A_DRY_RUN * states.have:
            return Judgement(states, None)
    found = estimate()
    if not found.ranks:
        return Judgement(states, None)
    bound = partial(bytes_at_least, plan, found, optimizer=steps > 1)
    least = need(plan, capacity, bound())
    if least.is_short and is_accelerator(plan.device):
        # a kernel of the device may save less than the CPU's, such as attention without its probabilities: so by
        # arithmetic, which any card has alike
        memory = step_memory(job_of_plan(facts, plan, batch, machines("h100", plan.world, per_node=plan.world)))
        least = need(plan, capacity, bound(activations=memory.activations + memory.logits))
    least = max(states, least, key=lambda one: one.bytes / one.have) if is_bound else least
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
    libraries = LIBRARIES * count if with_libraries else 0
    largest = max(ranks, key=lambda one: one.host)
    each_of = f"{count} ranks, each with " * (count > 1)

    def text(rank: RankBytes) -> str:
        return ", ".join(f"{name} {bytes_text(size)}" for name, size in rank.parts.items())

    needs = [MemoryNeed(int(together + libraries), capacity.host_bytes, HOST, each_of + text(largest))]
    if capacity.device_bytes is not None:
        beside = LIBRARIES_OF_DEVICES if with_libraries else 0
        where = f"this {plan.device} device"
        needs.append(MemoryNeed(int(own.device + beside), capacity.device_bytes, where, text(own)))
    return max(needs, key=lambda need: need.bytes / need.have)


# --- find the nearest change of a config that fits, for a run that does not

Estimate = Callable[[Config, Plan, Batch], MemoryEstimate]
MOST_DRY_RUNS = 24
"""Neighbours whose memory is estimated before the search gives up."""
LARGER = (2, 4, 8, 16, 32, 64)
"""Factors by which more ranks are tried."""
MOST_STAGES = 8
"""Size of the pipeline axis up to which it grows with the ranks."""
CUTS = (2, 4, 8, 16)
"""Sizes of the tensor axis and of the pipeline that are tried."""


class Neighbour(NamedTuple):
    """A config that fits, near one that does not.

    Attributes:
        flags: the change, as flags of ``meshwright train``.
        ranks: number of ranks where the change needs others; 0: as many as there are.
        per_host: ranks of a host.
        judgement: what it needs.
    """

    flags: tuple[str, ...]
    ranks: int
    per_host: int
    judgement: Judgement

    def __str__(self) -> str:
        more = f"{self.ranks} ranks, {self.per_host} on a host" * bool(self.ranks)
        return ", with ".join(filter(None, (more, " ".join(self.flags))))


def nearest_that_fits(
    config: Config,
    facts: ModelFacts,
    plan: Plan,
    batch: Batch,
    cluster: Cluster,
    capacity: Capacity,
    estimate: Estimate,
    **options: Any,
) -> Neighbour | None:
    """Return the first neighbour of a config that the rules allow and that fits by its upper bound; None if none does.

    Tried in this order: fewer rows of a forward, recomputed blocks and a loss in chunks; model states sharded over data
    ranks; optimizer state in 8 bits; tensor and pipeline axes; more ranks.

    Args:
        options: further arguments of ``judge``.
    """
    capacity, runs = replace(capacity, rank=0), 0

    def states(made: Plan, rows: Batch) -> MemoryNeed:
        """Return the memory that a plan's model states need, if it had no activations."""
        least = bytes_of_states(made, rows, state_tensors=options.get("state_tensors"))
        return need(made, capacity, least, with_libraries=True)

    def judged(changed: Config, ranks: int) -> Judgement | None:
        """Judge a config on ``ranks`` ranks (0: as many as there are); None where it is refused."""
        nonlocal runs
        there = replace(cluster, world=ranks or cluster.world)
        rows = replace(batch, microbatch_rows=changed.batch.microbatch)
        try:
            made = make_plan(facts, changed.layout, batch=rows, cluster=there, techniques=changed.requested)
            low_bit.refuse_absent(made.optimizer)
        except MeshwrightError:
            return None
        if (least := states(made, rows)).is_short and facts.images is None and not may_be_idle(facts):
            return Judgement(least, None)
        runs += 1
        return judge(facts, made, rows, capacity, partial(estimate, changed, made, rows), fully=True, **options)

    for family, ranks in _families(config, plan, batch, cluster, states_fit=not states(plan, batch).is_short):
        # what saves most first: where that does not fit, its relatives do not
        for smallest in reversed(family):
            judgement = judged(smallest, ranks)
            if judgement is not None:
                break
        else:
            continue
        if runs > MOST_DRY_RUNS:
            return None
        if judgement.verdict is not Fit.FITS:
            continue
        for changed in family:
            judgement = judged(changed, ranks)
            if judgement is not None and judgement.verdict is Fit.FITS:
                return Neighbour(tuple(flags(config, changed)), ranks, capacity.ranks, judgement)
    return None


def _families(
    config: Config, plan: Plan, batch: Batch, cluster: Cluster, *, states_fit: bool
) -> Iterator[tuple[list[Config], int]]:
    """Yield (configs with the same model states, those that keep fewer activations last; number of ranks or 0).

    Args:
        states_fit: whether the config's own model states fit; else changes of activations alone are left out.
    """
    if states_fit:
        rows = max(1, batch.global_rows // plan.data_ranks)
        held = min(rows, batch.microbatch_rows or rows)
        halves = [held >> power for power in range(1, held.bit_length())]
        yield [*(_activations(config, microbatch=held) for held in halves), *_relatives(config)], 0
    stage = config.techniques.zero_stage
    sharded = _changed(config, data_parallel="auto", zero_stage="auto" if stage == "auto" else 3)
    sharded = replace(sharded, layout=replace(config.layout, dp_replicate=1, dp_shard=-1))
    at_once = _changed(sharded, sync_grad_accum=True)
    few_bits = (_changed(one, optimizer_state="8bit") for one in (config, sharded, at_once))
    for one in (sharded, at_once, *few_bits):
        yield _relatives(one), 0
    for size in CUTS:
        for axis in ("tp", "pp"):
            yield _relatives(replace(at_once, layout=replace(at_once.layout, **{axis: size}))), 0
    for factor in LARGER:
        stages = replace(at_once, layout=replace(at_once.layout, pp=min(factor, MOST_STAGES)))
        for one in (sharded, at_once, stages):
            yield _relatives(one), factor * cluster.world


def _relatives(config: Config) -> list[Config]:
    """Return a config, and changes of it that keep fewer and fewer activations."""
    return [
        config,
        _activations(config, recompute=True),
        _activations(config, chunks=True),
        _activations(config, recompute=True, chunks=True),
        _activations(config, microbatch=1, recompute=True),
        _activations(config, microbatch=1, recompute=True, chunks=True),
    ]


def _activations(config: Config, *, microbatch: int = 0, recompute: bool = False, chunks: bool = False) -> Config:
    """Return a config whose step keeps fewer activations or logits."""
    if recompute:
        config = _changed(config, activation_checkpointing="full")
    if chunks:
        config = _changed(config, loss_chunks=max(8, config.techniques.loss_chunks))
    return replace(config, batch=replace(config.batch, microbatch=microbatch)) if microbatch else config


def _changed(config: Config, **techniques: Any) -> Config:
    return replace(config, techniques=replace(config.techniques, **techniques))


def flags(config: Config, changed: Config) -> Iterator[str]:
    """Yield the flags of ``meshwright train`` that turn a config into a changed one."""
    before = dict(leaves(to_dict(config)))
    for key, value in leaves(to_dict(changed)):
        if before[key] != value:
            yield f"--{key}={str(value).lower() if isinstance(value, bool) else value}"


def refuse_too_large(
    config: Config, facts: ModelFacts, plan: Plan, batch: Batch, cluster: Cluster, estimate: Estimate
) -> None:
    """Refuse a run that surely does not fit the memory that this rank starts with.

    Args:
        estimate: makes a dry run of a config's step under a plan.

    Raises:
        ConfigError: it does not; with the nearest change that fits.
    """
    capacity = Capacity.here(cluster.device)
    tensors = 0 if config.optimizer.kind == "sgd" and config.optimizer.beta1 == 0 else None
    options = {"steps": config.steps, "state_tensors": tensors}
    judgement = judge(facts, plan, batch, capacity, partial(estimate, config, plan, batch), **options)
    if judgement.verdict is not Fit.TOO_LARGE:
        return
    least = judgement.least
    found = nearest_that_fits(config, facts, plan, batch, cluster, capacity, estimate, **options)
    if found is None:
        ways = (
            "No change of batch, recomputation, sharding or optimizer state that was tried fits: take a smaller model."
        )
    else:
        assert found.judgement.most is not None
        ways = f"Nearest change that fits, with about {bytes_text(found.judgement.most.bytes)}: {found}."
    raise ConfigError(
        f"this run does not fit: it needs at least {bytes_text(least.bytes)} of the memory of {least.where}"
        f" ({least.parts}), which has {bytes_text(least.have)}. {ways} process.check_memory = false starts it all the"
        f" same."
    )
