"""Rehearse one rank in this process: the run's own build and steps, with peers that are absent."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from meshwright.core.errors import MeshwrightError
from meshwright.distributed.process.absent_peers import Duration, absent_peers
from meshwright.distributed.process.operators import Message
from meshwright.distributed.process.world import STORE
from meshwright.planning.plan import Plan
from meshwright.planning.step.kinds import axes_among, coordinates
from meshwright.simulation.hardware.links import Machines
from meshwright.simulation.hardware.messages import message_s
from meshwright.training.build import Run, build_run, device_name
from meshwright.training.config import Config
from meshwright.training.metrics.timeline import StartupTimeline
from meshwright.training.stopping import StopRequest
from meshwright.training.views.progress import SilentProgress

from .observe import StepsOfRank, observe
from .result import MessageRow, Rehearsal


def rehearse(
    config: Config, rank: int, world: int, *, per_node: int = 0, steps: int = 3, machines: Machines | None = None
) -> Rehearsal:
    """Build the run of a config as one of ``world`` ranks, take steps, and return the figures.

    Nothing is written, and an error of the run is part of the result.

    Args:
        per_node: ranks on a host; 0: all on one.
        steps: steps that are timed, behind two that are watched.
        machines: the cluster whose links messages are taken to use; None: messages take no time.

    Raises:
        ConfigError: there is no such rank.
    """
    with alone_as(rank, world, per_node, None if machines is None else partial(message_s, machines=machines)):
        began = time.perf_counter()
        try:
            run = built(config)
            seconds = time.perf_counter() - began
            observed = observe(run, steps)
        except Exception as error:  # noqa: BLE001  (whatever a rank meets is what a rehearsal is for)
            return _refused(error, rank, world)
        run.feed.loader.close()
        return _figures(run, observed, rank, seconds, machines)


CLIPPED = 1e-6
"""Norm of the gradients above which they are clipped in a rehearsal, where clipping is on: always."""


def built(config: Config) -> Run:
    """Build the run of a config, with nothing shown and no signal awaited.

    Gradients that are clipped at all are clipped in every step: their norm is not that of a run.
    Rows of whole answers or conversations are as long in each step as the longest of them all.
    """
    optimizer = replace(config.optimizer, max_norm=min(config.optimizer.max_norm, CLIPPED))
    silent = StartupTimeline(), SilentProgress(), StopRequest()
    return build_run(replace(config, run="", optimizer=optimizer), *silent, longest_rows=True)


@contextmanager
def alone_as(rank: int, world: int, per_node: int = 0, duration: Duration | None = None) -> Iterator[None]:
    """Make this process one of ``world`` ranks that a launcher started, with nobody else there.

    Raises:
        ConfigError: there is no such rank.
    """
    with _as_rank(rank, world, per_node), absent_peers(rank, world, duration):
        yield


def _figures(run: Run, observed: StepsOfRank, rank: int, seconds: float, machines: Machines | None) -> Rehearsal:
    return Rehearsal(
        rank,
        run.plan.world,
        places(run.plan, rank),
        device=device_name(run.model),
        build_seconds=seconds,
        first_step_seconds=observed.first_seconds,
        step_seconds=observed.seconds,
        is_compiled=bool(run.plan.compiled),
        memory={str(kind): size for kind, size in observed.memory.items()},
        peak_bytes=observed.peak.peak,
        peak_label=observed.peak.label,
        operators=dict(Counter(name for name, _ in observed.operators)),
        messages=tuple(_rows(run.plan, observed.messages, machines)),
        links="" if machines is None else machines.words,
    )


def _refused(error: Exception, rank: int, world: int) -> Rehearsal:
    if os.environ.get("MESHWRIGHT_DEBUG"):
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, MeshwrightError):
        return Rehearsal(rank, world, refused=str(error), exit_status=error.exit_status)
    lines = str(error).strip().splitlines() or [""]
    return Rehearsal(rank, world, refused=f"{type(error).__name__}: {lines[0]}", exit_status=1)


def places(plan: Plan, rank: int) -> dict[str, int]:
    """Return a rank's place on the axes larger than 1."""
    sizes = dict(plan.mesh) | dict(plan.experts.mesh if plan.experts is not None else ())
    return {str(axis): place for axis, place in coordinates(plan, rank).items() if sizes.get(axis, 1) > 1}


def _rows(plan: Plan, messages: tuple[Message, ...], machines: Machines | None) -> Iterator[MessageRow]:
    """Add messages up by kind and axis; a message to oneself is none."""
    found: dict[tuple[str, str, int], tuple[int, float, float]] = {}
    for op, ranks, larger, sent in messages:
        if len(ranks) > 1:
            key = op, axes_among(plan, ranks), len(ranks)
            calls, moved, seconds = found.get(key, (0, 0.0, 0.0))
            taken = 0.0 if machines is None else message_s(op, ranks, larger, machines)
            found[key] = calls + 1, moved + sent, seconds + taken
    yield from (MessageRow(*key, *figures) for key, figures in found.items())


@contextmanager
def _as_rank(rank: int, world: int, per_node: int) -> Iterator[None]:
    """Set the variables of a launcher; this process is the first of its host, since no other is there."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", STORE)
    before = {name: os.environ.pop(name, None) for name in names}
    values = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": per_node or world}
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
