"""Rehearse a rank beside the real run of all ranks, and say where the two differ."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from meshwright.data.tokenizers import BYTES, load_tokenizer
from meshwright.distributed.memory.account import MemoryAccount
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.pipeline.run import Mail
from meshwright.distributed.process.absent_peers import Message, Operator, OperatorRecorder
from meshwright.distributed.process.world import get_world_info
from meshwright.distributed.setup import destroy_distributed
from meshwright.models.layers import Router
from meshwright.planning.rank_kinds import kinds_of_ranks
from meshwright.training.build import Run, batch_of
from meshwright.training.config import Config
from meshwright.training.rehearsal import StepsOfRank, alone_as, built, observe
from meshwright.training.trainer import Trainer
from meshwright.training.views import watching
from meshwright.training.views.watching import MemoryWatch

from . import rehearsal_mutants

REDUCE_SCATTERS = ("c10d._reduce_scatter_base_.default",)


@dataclass(frozen=True)
class Compared:
    """How a rank's rehearsal differs from its run, and how a mutant of it does; its work, as a number; the kinds of
    ranks, by the plan.
    """

    differences: list[str]
    mutated: list[str]
    work: int
    kinds: tuple[tuple[int, ...], ...]


def in_turn(self: Router, scores: torch.Tensor) -> torch.Tensor:
    """Choose experts by the token's place: each rank then sends to all alike."""
    rows, length, experts = scores.shape
    chosen = torch.arange(rows * length * self.config.top_k, device=scores.device)
    return (chosen % experts).view(rows, length, -1)


@contextmanager
def comparable() -> Iterator[None]:
    """Decide in the same way what chance decides: where tokens go, and when a pipeline's messages have been taken.

    gloo's messages end when they like, and absent ones at once: both are held to the end of the step.
    """
    send = Mail.send

    def hold(self: Mail, *message: Any) -> None:
        held, self._sent = self._sent, []
        send(self, *message)
        self._sent = held + self._sent

    with (
        patch.object(Router, "_choose", in_turn),
        patch.object(Mail, "send", hold),
    ):
        yield


@contextmanager
def settled() -> Iterator[None]:
    """Take a new maximum of memory a moment later: gloo's threads free a message's tensors when they like."""

    def later(name: str) -> Any:
        whole = getattr(MemoryAccount, name)

        def call(self: MemoryAccount, **options: bool) -> None:
            held = self._storages.bytes
            while held.total() > self._highest or any(size > self.most[kind] for kind, size in held.items()):
                before = Counter(held)
                time.sleep(0.003)
                if held == before:
                    break
            whole(self, **options)

        return patch.object(MemoryAccount, name, call)

    with later("_take_peak"), later("look"):
        yield


def steps_of(run: Run) -> StepsOfRank:
    with comparable():
        return observe(run, 0)


def beside(config: dict[str, Any], mutant: str = "") -> Compared:
    """Run for two steps with all ranks, rehearse this rank, and compare."""
    rank, _, world = get_world_info()
    settings = Config.from_dict(config)
    run = built(settings)
    kinds = kinds_of_ranks(run.plan, run.model.facts, batch_of(settings, load_tokenizer(BYTES)))
    with settled():
        real = steps_of(run)
    del run
    destroy_distributed()
    with alone_as(rank, world):
        found, mutated = differences(real, steps_of(built(settings))), []
    if mutant:
        with getattr(rehearsal_mutants, mutant)(), alone_as(rank, world):
            mutated = differences(real, steps_of(built(settings)))
    return Compared(found, mutated, work_of(real), tuple(kind.ranks for kind in kinds))


def beside_training(config: dict[str, Any]) -> list[str]:
    """Train to the end with all ranks, rehearse this rank, and compare the trainer's first two steps."""
    rank, _, world = get_world_info()
    with comparable(), settled():
        real = training(config)
    with alone_as(rank, world):
        return differences(real, steps_of(built(Config.from_dict(config))))


def training(config: dict[str, Any]) -> StepsOfRank:
    """Train, and observe as a rehearsal does: memory in the first step, operators in the second."""
    recorder, calls, memory = OperatorRecorder(), {"forward_backward": 0, "optimizer_step": 0}, {}

    def seen(name: str) -> Any:
        whole = getattr(ParallelModel, name)

        def call(self: ParallelModel, *args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            with recorder if calls[name] == 2 else nullcontext():
                return whole(self, *args, **kwargs)

        return patch.object(ParallelModel, name, call)

    end = MemoryWatch.end_first_step

    def ended(self: MemoryWatch) -> bool:
        was_open = end(self)
        memory.update(self.found)
        return was_open

    # the first rank's estimate empties torch's caches, and what is in them is computed anew in the next step
    no_estimate = patch.object(watching, "is_rank_zero", lambda: False)
    with (
        seen("forward_backward"),
        seen("optimizer_step"),
        patch.object(MemoryWatch, "end_first_step", ended),
        no_estimate,
    ):
        assert Trainer(Config.from_dict(config)).run() == 0
    return StepsOfRank(memory, None, tuple(recorder.recorded), tuple(recorder.messages), 0.0, ())  # type: ignore[arg-type]


def differences(real: StepsOfRank, rehearsed: StepsOfRank) -> list[str]:
    """List where a rank's steps differ from its rehearsal; of operators and messages the first place alone."""
    found = [
        f"{kind}: {real.memory.get(kind)} bytes, and {rehearsed.memory.get(kind)} in the rehearsal"
        for kind in {**real.memory, **rehearsed.memory}
        if real.memory.get(kind) != rehearsed.memory.get(kind)
    ]
    assert real.operators and real.messages and real.memory
    found += _first("operator", without_gloos(real.operators), rehearsed.operators)
    return found + _first("message", real.messages, rehearsed.messages)


def _first(what: str, real: tuple, rehearsed: tuple) -> list[str]:
    if real == rehearsed:
        return []
    pairs = enumerate(zip(real, rehearsed, strict=False))
    place = next((place for place, (one, other) in pairs if one != other), min(len(real), len(rehearsed)))
    return [
        f"{what} {place} of {len(real)}: {real[place : place + 1]}, and {rehearsed[place : place + 1]} in the rehearsal"
    ]


def without_gloos(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """Leave out what gloo does for want of a reduce-scatter, when it is waited for: it cuts a sum, and copies a part.

    One such pair of operators for each message, of its sizes.
    """
    kept: list[Operator] = []
    waited_for: list[tuple] = []
    part: tuple | None = None
    for name, tensors in operators:
        if name in REDUCE_SCATTERS:
            waited_for.append((tensors[1], tensors[0]))
        if name == "aten.split.Tensor" and tensors[:2] in waited_for:
            waited_for.remove(tensors[:2])
            part = tensors[1]
        elif part is not None:
            assert (name, tensors) == ("aten.copy_.default", (part,) * 3)
            part = None
        else:
            kept.append((name, tensors))
    assert not waited_for
    return tuple(kept)


def work_of(steps: StepsOfRank) -> int:
    """Return a number of a rank's work: what it computes, holds and sends, wherever its peers are."""
    sent = tuple(_of_peers(message) for message in steps.messages)
    return hash((steps.operators, tuple(sorted(steps.memory.items())), sent))


def _of_peers(message: Message) -> tuple:
    op, ranks, size, sent = message
    return op, len(ranks), size, sent
