"""Find the nearest change of a config that fits, for a run that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from meshwright.core.config import to_dict
from meshwright.core.dtypes import bytes_text
from meshwright.core.errors import ConfigError, MeshwrightError
from meshwright.distributed.optimizer import low_bit
from meshwright.introspection.cluster import Cluster
from meshwright.introspection.facts import ModelFacts
from meshwright.planning.build import plan as make_plan
from meshwright.planning.memory import MemoryEstimate, bytes_of_states
from meshwright.planning.plan import Plan
from meshwright.planning.values import Batch

from .capacity import Capacity, Fit, Judgement, MemoryNeed, judge, need
from .config import Config

Estimate = Callable[[Config, Plan, Batch], MemoryEstimate]
MOST_DRY_RUNS = 24
"""Neighbours whose memory is estimated before the search gives up."""
LARGER = (2, 4, 8, 16, 32, 64)
"""Factors by which more ranks are tried."""
MOST_STAGES = 8
"""Size of the pipeline axis up to which it grows with the ranks."""
CUTS = (2, 4, 8, 16)
"""Sizes of the tensor axis and of the pipeline that are tried."""


@dataclass(frozen=True)
class Neighbour:
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
    trial = _Trial(facts, batch, cluster, replace(capacity, rank=0), estimate, options)
    for family, ranks in _families(config, plan, batch, cluster, states_fit=not trial.states(plan, batch).is_short):
        # what saves most first: where that does not fit, its relatives do not
        for smallest in reversed(family):
            judgement = trial.judgement(smallest, ranks)
            if judgement is not None:
                break
        else:
            continue
        if trial.runs > MOST_DRY_RUNS:
            return None
        if judgement.verdict is not Fit.FITS:
            continue
        for changed in family:
            judgement = trial.judgement(changed, ranks)
            if judgement is not None and judgement.verdict is Fit.FITS:
                return Neighbour(tuple(flags(config, changed)), ranks, capacity.ranks, judgement)
    return None


@dataclass
class _Trial:
    """Judges neighbours of a run.

    Attributes:
        runs: number of dry runs so far.
    """

    facts: ModelFacts
    batch: Batch
    cluster: Cluster
    capacity: Capacity
    estimate: Estimate
    options: dict[str, Any]
    runs: int = 0

    def states(self, plan: Plan, batch: Batch) -> MemoryNeed:
        """Return the memory that a plan's model states need, if it had no activations."""
        least = bytes_of_states(plan, batch, state_tensors=self.options.get("state_tensors"))
        return need(plan, self.capacity, least, with_libraries=True)

    def judgement(self, config: Config, ranks: int) -> Judgement | None:
        """Judge a config on ``ranks`` ranks (0: as many as there are); None where a rule refuses it."""
        there = replace(self.cluster, world=ranks or self.cluster.world)
        rows = replace(self.batch, microbatch_rows=config.batch.microbatch)
        try:
            made = make_plan(self.facts, config.layout, batch=rows, cluster=there, techniques=config.requested)
        except MeshwrightError:
            return None
        if not _is_installed(made):
            return None
        states = self.states(made, rows)
        if states.is_short:
            return Judgement(states, None)
        self.runs += 1
        estimate = partial(self.estimate, config, made, rows)
        return judge(self.facts, made, rows, self.capacity, estimate, fully=True, **self.options)


def _is_installed(plan: Plan) -> bool:
    """Return whether the packages that a plan's optimizer needs are here."""
    try:
        low_bit.refuse_absent(plan.optimizer)
        return True
    except MeshwrightError:
        return False


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
    sharded = _sharded(config)
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


def _sharded(config: Config) -> Config:
    """Return a config whose model states are sharded over all data ranks."""
    stage = config.techniques.zero_stage
    config = _changed(config, data_parallel="auto", zero_stage="auto" if stage == "auto" else 3)
    return replace(config, layout=replace(config.layout, dp_replicate=1, dp_shard=-1))


def _changed(config: Config, **techniques: Any) -> Config:
    return replace(config, techniques=replace(config.techniques, **techniques))


def flags(config: Config, changed: Config) -> Iterator[str]:
    """Yield the flags of ``meshwright train`` that turn a config into a changed one."""
    before = dict(_leaves(to_dict(config)))
    for key, value in _leaves(to_dict(changed)):
        if before[key] != value:
            yield f"--{key}={str(value).lower() if isinstance(value, bool) else value}"


def _leaves(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def refuse_too_large(
    config: Config, facts: ModelFacts, plan: Plan, batch: Batch, cluster: Cluster, estimate: Estimate
) -> None:
    """Refuse a run that surely does not fit the memory that this rank starts with, before any process group exists.

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
