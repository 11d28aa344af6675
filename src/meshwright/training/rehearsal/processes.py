"""Rehearse ranks one after the other, each in a process of its own, so that memory and errors are that rank's."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import torch

from meshwright.core.devices import CPU, check_device_type, is_accelerator, local_device
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.distributed.process.workers import WorkerDied, WorkerFailed, WorkerPool
from meshwright.introspection.cluster import Cluster
from meshwright.planning.plan import Plan
from meshwright.planning.step.kinds import RankKind, kinds_of_ranks
from meshwright.simulation.hardware.links import Machines
from meshwright.training.build import batch_of, facts_of, plan_run
from meshwright.training.config import Config
from meshwright.training.model_source import model_source
from meshwright.training.tokenizer import planned_tokenizer

from .one_rank import rehearse
from .result import Rehearsal, digest


@dataclass(frozen=True)
class Cast:
    """The run that is rehearsed.

    Attributes:
        config: the config, computing on the device.
        plan: its plan on ``world`` ranks.
        kinds: the ranks by their work.
        per_node: ranks on a host; 0: all on one.
        digest: digest of plan and batch, by which a forecast knows them again.
        machines: the cluster whose links messages are taken to use; None: messages take no time.
    """

    config: Config
    plan: Plan
    kinds: tuple[RankKind, ...]
    per_node: int
    digest: str
    machines: Machines | None = None


def cast(config: Config, world: int, per_node: int = 0, device: str = "", machines: Machines | None = None) -> Cast:
    """Plan the run, and refuse what no rank of it could rehearse; without a process group.

    Args:
        device: type of the device to compute on; by default this machine's accelerator, or the CPU.
        machines: the cluster whose links messages are taken to use; None: messages take no time.

    Raises:
        ConfigError, UnsupportedError: the run is refused, or cannot be rehearsed here.
    """
    device = device or local_device()
    config = _computing_on(config, device)
    tokenizer = planned_tokenizer(config)
    batch, facts = batch_of(config, tokenizer), facts_of(model_source(config, tokenizer))
    plan = plan_run(config, facts, Cluster(world, per_node or world, device), batch)
    if plan.tensor is not None and plan.tensor.async_tensor_parallel:
        raise UnsupportedError(
            "techniques.async_tensor_parallel reads other ranks' memory, and in a rehearsal they are absent: rehearse"
            " with techniques.async_tensor_parallel = false, which computes the same products."
        )
    return Cast(config, plan, kinds_of_ranks(plan, facts, batch), per_node, digest(plan, batch), machines)


def _computing_on(config: Config, device: str) -> Config:
    check_device_type(device, "--device")
    if is_accelerator(device) and device != local_device():
        raise ConfigError(
            f"--device = {device}: there is none here, and a rehearsal computes. Run it on a machine that has one, or"
            f" with --device cpu and a small model."
        )
    if device == CPU and is_accelerator(local_device()):
        return replace(config, process=replace(config.process, backend="gloo"))
    return config


def one_rank(parts: Cast, rank: int) -> list[RankKind]:
    """Return a rank's kind as the only one, with that rank first. Raises ConfigError where there is no such rank."""
    kind = next((kind for kind in parts.kinds if rank in kind.ranks), None)
    if kind is None:
        raise ConfigError(f"--rank = {rank}: {parts.plan.world} GPUs have the ranks 0 to {parts.plan.world - 1}")
    return [replace(kind, ranks=(rank, *(other for other in kind.ranks if other != rank)))]


def rehearse_each(
    parts: Cast, kinds: Sequence[RankKind], steps: int, show: Callable[[Rehearsal], None] = lambda found: None
) -> list[Rehearsal]:
    """Rehearse the first rank of each kind, in a process of its own.

    Args:
        steps: steps that are timed.
        show: called with each result as soon as it is there.
    """
    found = []
    for kind in kinds:
        alone = partial(rehearse, per_node=parts.per_node, steps=steps, machines=parts.machines)
        with closing(WorkerPool(1, threads=torch.get_num_threads())) as pool:
            result = _in(pool, alone, parts, kind.ranks[0]).of_kind(len(kind.ranks), kind.work)
        result = replace(result, plan=parts.digest)
        show(result)
        found.append(result)
    return found


def _in(pool: WorkerPool, alone: Callable[..., Rehearsal], parts: Cast, rank: int) -> Rehearsal:
    world = parts.plan.world
    try:
        return pool.run(alone, parts.config, rank, world)[0]
    except WorkerFailed as failure:
        if failure.error is None or isinstance(failure.error, KeyboardInterrupt):
            raise
        raise failure.error from None
    except WorkerDied as death:
        hint = ": its host has too little memory" if death.exit_code == -signal.SIGKILL else ""
        return Rehearsal(rank, world, refused=f"the process {death.how}{hint}", exit_status=1)
