"""Take steps of a run and observe them: memory, operators, messages, seconds.

Beside peers or without them: a test holds both against each other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from meshwright.core.devices import finish_stream
from meshwright.distributed.process.operators import Message, Operator, OperatorRecorder
from meshwright.planning.memory.step import MemoryUse
from meshwright.training.build import Run
from meshwright.training.metrics.memory import MemoryReading, read_memory, reset_peak
from meshwright.training.preference import pretend_references
from meshwright.training.views.memory_watch import MemoryWatch

Context = AbstractContextManager[object]
UNWATCHED: Context = nullcontext()


@dataclass(frozen=True)
class StepsOfRank:
    """The observations of a rank's steps.

    Attributes:
        memory: the most bytes at one time in the first step, by kind, as a run accounts for them.
        peak: the process's memory after all steps; on an accelerator the most in them.
        operators: the operators of the second step, in order: forward, backward, optimizer step.
        messages: the messages among them.
        first_seconds: seconds of the first step, which compiles.
        seconds: seconds of the steps behind the second.
    """

    memory: Mapping[MemoryUse, int]
    peak: MemoryReading
    operators: tuple[Operator, ...]
    messages: tuple[Message, ...]
    first_seconds: float
    seconds: tuple[float, ...]


def observe(run: Run, steps: int) -> StepsOfRank:
    """Take two steps that are watched, and ``steps`` that are timed. Collective where peers are there."""
    run.model.learn_documents()
    pretend_references(run.config, run.feed)
    reset_peak(run.model.device)
    watch, recorder = MemoryWatch(run), OperatorRecorder()
    first = _step(run, 0, watch.computing(), watch.stepping())
    watch.end_first_step()
    _step(run, 1, recorder, recorder)
    seconds = tuple(_step(run, number) for number in range(2, 2 + steps))
    peak = read_memory(run.model.device)
    return StepsOfRank(watch.found, peak, tuple(recorder.recorded), tuple(recorder.messages), first, seconds)


def _step(run: Run, number: int, computing: Context = UNWATCHED, stepping: Context = UNWATCHED) -> float:
    """Take an optimizer step, as the trainer does, and return its seconds."""
    finish_stream(run.model.device)
    began = time.perf_counter()
    run.schedule.apply(run.optimizer.optimizer, number)
    batch = run.feed.next_batch()
    with computing:
        run.model.forward_backward(batch)
    with stepping:
        run.model.optimizer_step(run.optimizer.optimizer, run.config.optimizer.max_norm)
    finish_stream(run.model.device)
    return time.perf_counter() - began
