"""The questions that every way is asked, in the process that runs the tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshwright.distributed.process.workers import WorkerPool

from .oracle import Outcome, differences, faults, worst
from .ways import Record, Way, record

EXACT, UPCASTS = 1e-10, 1e-6
"""Bounds in float64, and where a model casts to float32 inside, or has weights in it."""
UNEVEN = 1.02
"""Where a dim does not divide, one rank holds more than another; the plan counts the even share."""
LIMIT_SEC = 180.0


@dataclass
class Answers:
    """What came of a way's questions.

    Attributes:
        faults: by question, what is wrong; a question without a fault is left out.
        worst: of all that was compared with one process, the largest error by kind.
    """

    way: Way
    faults: dict[str, list[str]]
    worst: dict[str, float]

    def text(self) -> str:
        """Layout, model, tensors, errors, bounds, and the command that runs the way alone."""
        lines = [f"{question}: {line}" for question, found in self.faults.items() for line in found[:6]]
        alone = f"pytest 'tests/distributed/test_ways.py::test_a_way_keeps_every_promise[{self.way}]'"
        return "\n".join(
            [
                f"layout {self.way.layout}, model {self.way.model}, techniques {self.way.techniques}",
                *lines,
                f"alone: {alone}",
            ]
        )


def answers(
    way: Way,
    pool: WorkerPool,
    reference: Outcome,
    folder: Path,
    mutant: str = "",
    job: Callable[..., Record] = record,
    more: Callable[[Way, list[Record]], dict[str, list[str]]] | None = None,
) -> Answers:
    """Lay a way out once, and ask everything.

    Args:
        reference: one process's outcome of the way's problem.
        mutant: a name in support.mutants, for the whole of the job.
        job: what each rank runs.
        more: further questions: the ranks' records -> faults by question.
    """
    ranks = pool.run(job, way, str(folder / "checkpoint"), mutant, world=way.layout.world, timeout=LIMIT_SEC)
    for name in ("checkpoint", "checkpoint-at-once"):
        shutil.rmtree(folder / name, ignore_errors=True)
    outcomes = [rank.outcome for rank in ranks]
    found = {
        "equal": faults(outcomes, reference, EXACT if way.is_exact else UPCASTS),
        "bytes": [line for number, rank in enumerate(ranks) for line in _bytes(way, number, rank)],
        "memory": _memory(way, ranks),
        "resume": [
            f"rank {n}: {name} is another after a resumed step" for n, rank in enumerate(ranks) for name in rank.went_on
        ],
        "snapshot": [f"{name} has other bytes where training went on" for name in ranks[0].unlike],
        "doors": [f"{name} is another in torch's state dict" for name in ranks[0].elsewhere],
        **(more(way, ranks) if more is not None else {}),
    }
    return Answers(
        way, {question: lines for question, lines in found.items() if lines}, worst(differences(outcomes[0], reference))
    )


def _bytes(way: Way, rank: int, found: Record) -> list[str]:
    """The plan speaks for the first rank of the tensor axis, and of shards where a stage sends a tied weight: others
    have fewer rows of the vocabulary, and send no more. How many rows travel to experts is the routers' affair.
    """
    lines, layout = [], way.layout
    for key in found.planned.keys() | found.sent.keys():
        (calls, moved), (sent_calls, sent) = found.planned.get(key, (0, 0.0)), found.sent.get(key, (0, 0.0))
        is_first = rank % layout.tp == 0 and (key[0] != "send" or rank // layout.tp % layout.dp_shard == 0)
        fits = abs(sent - moved) <= 1e-12 * moved if is_first else sent <= moved
        if (calls is not None and sent_calls != calls) or not (fits or key[0] == "all_to_all"):
            what = f"{key[0]} over {key[1]} ranks"
            lines.append(
                f"rank {rank}: {what}: {sent_calls} calls and {sent:g} bytes were sent, {calls} and {moved:g} planned"
            )
    return lines


def _memory(way: Way, ranks: list[Record]) -> list[str]:
    """Of the rank that holds most.

    In a pipeline of that which needs most at its peak, whichever it is: the plan speaks for that one.
    """
    held = (
        [rank.held for rank in ranks]
        if way.pp == "2"
        else [{name: max(rank.held[name] for rank in ranks) for name in ranks[0].held}]
    )
    if any(all(_is_even(*pair) for pair in rank.values()) for rank in held):
        return []
    return [
        f"{name}: {found} bytes are held, {planned} planned" for rank in held for name, (found, planned) in rank.items()
    ]


def _is_even(found: int, planned: int) -> bool:
    return planned / UNEVEN <= found <= planned * UNEVEN
