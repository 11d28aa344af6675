"""Enumerate the layouts and switches that a search tries."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from meshwright.planning.layout import Layout
from meshwright.planning.pipeline.schedules.orders import schedule_kind
from meshwright.simulation.workload.execution import Execution, Job

from .pins import Pin, hold

STAGES_PER_RANK = (1, 2, 4)
ZERO_BUBBLE, MOST_RANKS = "zbv_zero_bubble", 16
"""The schedule that is tried beside 1F1B and its loops, and the pipeline ranks up to which it is."""
LARGEST_CONTEXT = 16
MICROBATCH_TOKENS = 1 << 16
"""Tokens of a microbatch on one rank beyond which products get no faster."""


@cache
def divisors(number: int) -> tuple[int, ...]:
    """List the divisors of a number, smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


@dataclass(frozen=True)
class Mesh:
    """Sizes of a layout before the data ranks are split into replicas and shards."""

    pp: int
    data: int
    cp: int
    tp: int
    ep: int

    def shards(self) -> list[int]:
        """List the legal sizes of dp_shard."""
        return [n for n in divisors(self.data) if (n * self.cp * self.tp) % self.ep == 0]

    def layout(self, shard: int) -> Layout:
        return Layout(self.pp, self.data // shard, shard, self.cp, self.tp, self.ep)


def meshes(base: Job, pins: tuple[Pin, ...]) -> Iterator[Mesh]:
    """Yield the meshes whose sizes divide the model, the batch and the GPUs of a job's machines."""
    gpus, model, length = base.machines.gpus, base.architecture, base.seq_len
    heads = max((b.attention.heads for b in model.blocks if b.attention), default=1)
    keys = max((b.attention.kv_heads for b in model.blocks if b.attention), default=1)
    experts = max((b.experts.number for b in model.blocks if b.experts), default=1)
    for pp in divisors(gpus):
        if pp > len(model.blocks) or not hold(pins, pp=pp):
            continue
        for tp in divisors(gpus // pp):
            if tp > base.machines.per_node or heads % tp or max(keys, tp) % min(keys, tp) or not hold(pins, tp=tp):
                continue
            for cp in divisors(gpus // pp // tp):
                if cp > LARGEST_CONTEXT or length % (2 * cp) or (length / cp) % tp or not hold(pins, cp=cp):
                    continue
                data = gpus // pp // tp // cp
                if base.rows % data:
                    continue
                for ep in divisors(experts):
                    if (data * cp * tp) % ep == 0 and hold(pins, ep=ep):
                        yield Mesh(pp, data, cp, tp, ep)


def microbatches(base: Job, mesh: Mesh, pins: tuple[Pin, ...]) -> list[int]:
    """List the legal sequences of a forward on one rank, fewest first."""
    own = base.rows // mesh.data
    tokens = base.seq_len / mesh.cp
    return [n for n in divisors(own) if (n == 1 or n * tokens <= MICROBATCH_TOKENS) and hold(pins, microbatch=n)]


def recomputations(base: Job, pins: tuple[Pin, ...]) -> list[Execution]:
    """List the ways to recompute that the pins allow, each as the base job's execution with that mode."""
    return [
        replace(base.execution, recompute=mode, recomputed=1.0)  # type: ignore[arg-type]
        for mode in ("none", "selective", "full")
        if hold(pins, recompute=mode)
    ]


def stages_per_rank(base: Job, mesh: Mesh, microbatch: int, pins: tuple[Pin, ...]) -> list[int]:
    """List how many stages each pipeline rank may have (1F1B, or interleaved)."""
    if mesh.pp == 1:
        return [1] if hold(pins, stages_per_rank=1) else []
    blocks, found = len(base.architecture.blocks), []
    number = base.rows // mesh.data // microbatch
    for per_rank in STAGES_PER_RANK:
        stages = mesh.pp * per_rank
        if stages > blocks or not hold(pins, stages_per_rank=per_rank):
            continue
        kind = schedule_kind("1f1b" if per_rank == 1 else "interleaved_1f1b")
        size = -(-blocks // stages)
        if kind.legal(number, mesh.pp) == number and (per_rank == 1 or -(-blocks // size) == stages):
            found.append(per_rank)
    return found


def schedules(base: Job, mesh: Mesh, microbatch: int, pins: tuple[Pin, ...]) -> list[tuple[int, str]]:
    """List (stages per rank, schedule) that a pipeline may have; "": 1F1B or its loops.

    Rules refuse a backward in two parts where blocks are compiled or gradients reduced with every microbatch.
    """
    found = [
        (per_rank, "")
        for per_rank in stages_per_rank(base, mesh, microbatch, pins)
        if mesh.pp == 1 or hold(pins, schedule="1f1b" if per_rank == 1 else "interleaved_1f1b")
    ]
    splits = not (base.execution.fused or base.execution.reduces_each)
    fits = 1 < mesh.pp <= MOST_RANKS and 2 * mesh.pp <= len(base.architecture.blocks)
    if splits and fits and hold(pins, stages_per_rank=2, schedule=ZERO_BUBBLE):
        found.append((2, ZERO_BUBBLE))
    return found


def reductions(job: Job, schedule: str, pins: tuple[Pin, ...]) -> list[bool]:
    """List whether gradients may be reduced with every microbatch: shards of them accumulate then, not whole ones.

    Rules refuse that with a backward in two parts. A config that asks for it keeps it.
    """
    if job.execution.reduces_each or job.microbatches == 1 or job.execution.zero != 3:
        found = [job.execution.reduces_each]
    else:
        found = [False] if schedule == ZERO_BUBBLE else [False, True]
    return [each for each in found if hold(pins, sync_grad_accum=str(each).lower())]
