"""Explain from heartbeats why a rank ended or stalls.

Torch-free: the launcher uses it too.
"""

from __future__ import annotations

import linecache
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .heartbeat import INTERVAL_SEC, Record

SILENT_SEC = 3.5 * INTERVAL_SEC
"""A rank whose last heartbeat is older than this has stalled."""


def whereabouts(record: Record) -> str:
    """Describe a rank's place: ``"at step 12, in forward of layers.1.attention"``; without the module if the rank's
    stack was not sampled in this step.
    """
    phase, module = record.phase, ""
    if record.looked_at_step == record.step:
        is_backward = phase == "forward" and any(name == "backward" for _, _, name in record.stack)
        phase, module = "backward" if is_backward else phase, record.module
    words = f"in {phase}" + (f" of {module}" if module else "")
    return f"at step {record.step}, {words}" if record.step else f"{words}, before the first step"


def name_of(record: Record) -> str:
    """Name a rank: ``"rank 2 (host n1, pid 4711)"``, with its part of the model if that is not the whole."""
    part = f", {record.part}" if record.part else ""
    return f"rank {record.rank} (host {record.host}, pid {record.pid}{part})"


def process_state(record: Record) -> str:
    """Return the state of a rank on this host: "gone", "stopped" or "runs"; "" for a rank elsewhere."""
    import psutil

    if record.host != socket.gethostname():
        return ""
    try:
        process = psutil.Process(record.pid)
        status = process.status()
        if status == psutil.STATUS_ZOMBIE or process.create_time() > record.started + 10:  # the pid was reused
            return "gone"
    except psutil.Error:
        return "gone"
    return "stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "runs"


@dataclass(frozen=True)
class Stall:
    """Ranks that others wait for."""

    culprits: list[Record]
    waiting: list[Record]
    sentence: str


def find_stall(records: Mapping[int, Record], now: float) -> Stall | None:
    """Find the ranks that wait and those that they wait for; None if none waits.

    A rank holds the others up if its process is gone or stopped, if its heartbeat is some seconds old, or else if it
    does not wait in a collective itself. If all wait, each in another collective, they wait for each other.
    """
    latest = max((record.time for record in records.values()), default=now)
    held_up = {rank for rank, record in records.items() if _holds_up(record, latest)}
    waiting = [record for rank, record in sorted(records.items()) if record.collective and rank not in held_up]
    if not waiting:
        return None
    first = min(waiting, key=lambda record: record.collective["since"] if record.collective else now)
    members = (first.collective or {})["ranks"] or sorted(records)
    idle = [rank for rank in members if rank in records and not records[rank].collective and rank not in held_up]
    ranks = [rank for rank in members if rank in held_up] or idle or sorted(held_up)
    culprits = [records[rank] for rank in ranks]
    return Stall(culprits, waiting, _sentence(culprits, waiting, first, now))


def _holds_up(record: Record, latest: float) -> bool:
    return process_state(record) in ("gone", "stopped") or latest - record.time > SILENT_SEC


def _sentence(culprits: Sequence[Record], waiting: Sequence[Record], first: Record, now: float) -> str:
    what = first.collective or {}
    who = f"{_ranks([record.rank for record in waiting])} {'has' if len(waiting) == 1 else 'have'} waited"
    where = f"{what['name']} number {what['number']} of group {what['group']} (ranks {_span(what['ranks'])})"
    place = f"{who} for {now - what['since']:.0f} s in {where}, {whereabouts(first)}"
    if not culprits:
        others = "; ".join(
            f"rank {r.rank} in {r.collective['name']} of {r.collective['group']}" for r in waiting if r.collective
        )
        return f"{place}, and nobody comes: the ranks wait for each other ({others})"
    blamed = ", ".join(
        f"{name_of(record)}, {condition(record, now)}, last seen {whereabouts(record)}" for record in culprits
    )
    return f"{place}, for {blamed}"


def condition(record: Record, now: float) -> str:
    """Describe the state of a rank's process."""
    state = process_state(record)
    if state == "stopped":
        return "whose process is stopped (state T: a SIGSTOP, or a debugger)"
    if state == "gone":
        return "whose process is gone"
    silent = now - record.time
    if silent > SILENT_SEC:
        return f"not heard of for {silent:.0f} s"
    return "which waits" if record.collective else "which runs but does not come"


def stack_text(record: Record, now: float) -> str:
    """Return the stack of a record, with source lines where this host has them."""
    seen = f"looked at {time.ctime(record.time)}, in step {record.looked_at_step}"
    lines = [f"{name_of(record)}, {condition(record, now)}, {whereabouts(record)}; {seen}:"]
    for file, line, function in record.stack:
        lines.append(f'  File "{file}", line {line}, in {function}')
        if source := linecache.getline(file, line).strip():
            lines.append(f"    {source}")
    return "\n".join(lines)


def write_stacks(folder: Path, stall: Stall) -> Path | None:
    """Write the last known stacks to a file in ``folder``, those of the stalled ranks first, and return its path.

    None if the file cannot be written.
    """
    ranks = "-".join(str(record.rank) for record in stall.culprits[:4]) or "all"
    path = folder / f"stalled-rank{ranks}-step{stall.waiting[0].step}.txt"
    text = "\n\n".join(
        [stall.sentence, *(stack_text(record, time.time()) for record in [*stall.culprits, *stall.waiting])]
    )
    with suppress(OSError):
        path.write_text(text + "\n")
        return path
    return None


def first_lost(records: Mapping[int, Record], me: int) -> Record | None:
    """Return the rank whose end broke the others' collectives: one with last words, else one whose process is gone."""
    others = [record for rank, record in sorted(records.items()) if rank != me]
    failed = [record for record in others if record.last_words and not record.last_words.startswith("RankLost")]
    return next(iter(failed or [r for r in others if not r.last_words and process_state(r) == "gone"]), None)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_span(ranks)}"


def _span(ranks: Sequence[int]) -> str:
    """Format ranks as ``"0, 1 and 3"``, or as ``"0 to 7"`` if they are consecutive."""
    ranks = sorted(ranks)
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks[:-1])) + (" and " if ranks[:-1] else "") + str(ranks[-1]) if ranks else "unknown"
