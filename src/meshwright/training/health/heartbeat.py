"""Write each rank's current work to a file that outlives it, and explain from it why a rank ended or stalls.

The loop writes the file's first line, step and phase, so that this line is always current. A thread writes the second
line about once per second: collective and stack of the training thread and, if the stack is the same as a second ago,
the module. A file that cannot be written is ignored: a heartbeat never stops a run. Torch-free: the launcher uses it.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import linecache
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat, takewhile
from operator import attrgetter, call, itemgetter
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

# --- write each rank's current work to a small file that outlives the rank

FOLDER = "heartbeats"
INTERVAL_SEC = 1.0
FIRST_LINE = 512
"""Bytes of the first line, which is overwritten in place, in one call."""
LAST_WORDS = 240


@dataclass(frozen=True)
class Record:
    """The last known state of a rank."""

    rank: int
    host: str = ""
    pid: int = 0
    started: float = 0.0
    """Unix time at which the heartbeat began."""
    step: int = 0
    """The current step or, between two steps, the last one."""
    phase: str = "start"
    last_words: str = ""
    """The error that ended the rank; "" while the rank runs."""
    time: float = 0.0
    """Unix time of the last look at the stack."""
    part: str = ""
    """The rank's part of the model, if it does not have the whole: ``"stage 1 of 2: layers.2 to layers.3"``."""
    looked_at_step: int = 0
    module: str = ""
    collective: dict[str, Any] | None = None
    """A ``distributed.process.flight.PendingCollective`` that the rank has waited in for a second or longer."""
    stack: list[tuple[str, int, str]] = field(default_factory=list)
    """The frames of the stack: (file, line, function), the innermost last."""


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank:05d}.json"


def read_record(path: Path) -> Record | None:
    """Read a heartbeat's file; None without a file.

    If the second line is incomplete, only the first is used.
    """
    known: dict[str, Any] | None = None
    for _ in range(3):
        with suppress(OSError, ValueError):
            first, _, rest = path.read_bytes().partition(b"\n")
            known = json.loads(first)
            return Record(**(json.loads(rest) | known))
    return Record(**known) if known else None


def read_records(folder: Path) -> dict[int, Record]:
    """Return all ranks' records in a folder."""
    found = (read_record(path) for path in sorted(folder.glob("rank*.json")))
    return {record.rank: record for record in found if record is not None}


class Heartbeat:
    """This rank's record, a context around all of the rank's work; a clean end removes the file.

    Attributes:
        watch: a function that the thread calls while a collective does not end; see ``peers``.
        folder: folder of the record's file; None if no file is written.
    """

    def __init__(self) -> None:
        self.rank, self.host, self.pid = 0, socket.gethostname(), os.getpid()
        self.step, self.phase, self.last_words, self.module, self.part = 0, "start", "", "", ""
        self.watch: Callable[[], None] | None = None
        self.collective: dict[str, Any] | None = None
        self.folder: Path | None = None
        self._file: int | None = None
        self._started = 0.0
        self._names: dict[int, str] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._watched: ThreadStack | None = None
        self._lock = threading.Lock()

    def enter(self, phase: str, step: int | None = None) -> None:
        """Record the phase that begins; takes a few microseconds."""
        self.phase = phase
        if step is not None:
            self.step = step
        self._write_first_line()

    def know(self, modules: Iterable[tuple[str, object]], part: str = "") -> None:
        """Set the names by which modules are reported, and this rank's part of the model."""
        self._names = {id(module): name for name, module in modules if name}
        self.part = part
        self.look()

    def settle(self, folder: Path | None) -> None:
        """Write later records to ``folder`` (None: nowhere)."""
        with self._lock:
            self._leave()
            if folder is None:
                return
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._file = os.open(file_of(folder, self.rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            except OSError:
                return
            self.folder = folder
            self._write_first_line()
        self.look()

    def fail(self, error: BaseException) -> None:
        """Record the error that ends this rank as its last words; the file stays."""
        words = " ".join(f"{type(error).__name__}: {error}".split())
        self.last_words = words[:LAST_WORDS]
        self._write_first_line()

    def look(self) -> None:
        """Record the stack, module and collective of the training thread, in this thread or another.

        From another thread the module is read only while the stack stays the same from look to look.
        """
        stack, self.module, watched = [], "", self._watched
        if watched is not None and threading.get_ident() == watched.thread:
            frames = list(_outwards([sys._getframe()]))
            stack, self.module = list(map(PLACE, frames)), first_word(frames, self._module_of)
        elif watched is not None:
            stack, is_still = watched.read()
            self.module = watched.first_word(self._module_of) if is_still else ""
        record = {"time": time.time(), "part": self.part, "looked_at_step": self.step, "module": self.module}
        text = json.dumps({**record, "collective": self.collective, "stack": stack[::-1]}).encode() + b"\n"
        with self._lock:  # otherwise the main thread could close the file, and another file reuse its number
            if self._file is not None:
                with suppress(OSError):
                    os.pwrite(self._file, text, FIRST_LINE)
                with suppress(OSError):
                    os.ftruncate(self._file, FIRST_LINE + len(text))

    def __enter__(self) -> Heartbeat:
        self.rank, self.pid, self._started = int(os.environ.get("RANK", "0")), os.getpid(), time.time()
        with suppress(OSError):
            self._watched = ThreadStack(threading.get_ident())
        self._thread = threading.Thread(target=self._beat, name="meshwright-heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)
        with self._lock:
            self._leave(keep=bool(self.last_words))
        if self._watched is not None and not (self._thread and self._thread.is_alive()):
            self._watched.close()

    def _beat(self) -> None:
        from meshwright.distributed.process.flight import Flight

        flight = Flight()
        while not self._stop.wait(INTERVAL_SEC):
            found = flight.look()
            self.collective = vars(found) if found is not None else None
            self.look()
            if self.watch is not None and found is not None:
                self.watch()

    def _module_of(self, frame: FrameType) -> str:
        """Return the name of the module that a frame calls.

        Reads only locals of torch's own calling frames: before Python 3.13 reading locals keeps them alive until the
        frame ends, and these frames hold no more than the call itself does.
        """
        name = frame.f_code.co_name
        if name == CALLING:
            return self._names.get(id(frame.f_locals.get("self")), "")
        if frame.f_code.co_filename.endswith(FSDP_FILE) and "self" in frame.f_code.co_varnames[:1]:
            return getattr(frame.f_locals["self"], MODULE_NAME, None) or ""
        return ""

    def _write_first_line(self) -> None:
        if (file := self._file) is None:
            return
        words = json.dumps(self.last_words) if self.last_words else '""'
        head = (
            f'{{"rank": {self.rank}, "host": "{self.host[:40]}", "pid": {self.pid}, "started": {self._started:.3f},'
            f' "step": {self.step}, "phase": "{self.phase}", "last_words": '
        )
        room = FIRST_LINE - len(head) - 2
        if len(words) > room:
            words = json.dumps(self.last_words[: max(0, room // 6)])
        line = f"{head}{words}}}".encode().ljust(FIRST_LINE - 1)[: FIRST_LINE - 1] + b"\n"
        with suppress(OSError):
            os.pwrite(file, line, 0)

    def _leave(self, keep: bool = False) -> None:
        if self._file is None or self.folder is None:
            return
        file, self._file = self._file, None
        with suppress(OSError):
            os.close(file)
            if not keep:
                file_of(self.folder, self.rank).unlink()
                self.folder.rmdir()  # fails while other files are in it


# --- explain from heartbeats why a rank ended or stalls

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
    held_up = {
        rank
        for rank, record in records.items()
        if process_state(record) in ("gone", "stopped") or latest - record.time > SILENT_SEC
    }
    waiting = [record for rank, record in sorted(records.items()) if record.collective and rank not in held_up]
    if not waiting:
        return None
    first = min(waiting, key=lambda record: record.collective["since"] if record.collective else now)
    members = (first.collective or {})["ranks"] or sorted(records)
    idle = [rank for rank in members if rank in records and not records[rank].collective and rank not in held_up]
    ranks = [rank for rank in members if rank in held_up] or idle or sorted(held_up)
    culprits, what = [records[rank] for rank in ranks], first.collective or {}
    ranks, is_one = _span([record.rank for record in waiting]), len(waiting) == 1
    who = f"rank {ranks} has waited" if is_one else f"ranks {ranks} have waited"
    where = f"{what['name']} number {what['number']} of group {what['group']} (ranks {_span(what['ranks'])})"
    place = f"{who} for {now - what['since']:.0f} s in {where}, {whereabouts(first)}"
    if culprits:
        blamed = (f"{name_of(one)}, {condition(one, now)}, last seen {whereabouts(one)}" for one in culprits)
        return Stall(culprits, waiting, f"{place}, for {', '.join(blamed)}")
    others = (f"rank {r.rank} in {r.collective['name']} of {r.collective['group']}" for r in waiting if r.collective)
    return Stall([], waiting, f"{place}, and nobody comes: the ranks wait for each other ({'; '.join(others)})")


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


def write_stacks(folder: Path, stall: Stall) -> Path | None:
    """Write the last known stacks to a file in ``folder``, those of the stalled ranks first, with source lines where
    this host has them; return its path, None if the file cannot be written.
    """
    ranks = "-".join(str(record.rank) for record in stall.culprits[:4]) or "all"
    path = folder / f"stalled-rank{ranks}-step{stall.waiting[0].step}.txt"
    lines, now = [stall.sentence], time.time()
    for record in [*stall.culprits, *stall.waiting]:
        seen = f"looked at {time.ctime(record.time)}, in step {record.looked_at_step}"
        lines += ["", f"{name_of(record)}, {condition(record, now)}, {whereabouts(record)}; {seen}:"]
        for file, line, function in record.stack:
            lines.append(f'  File "{file}", line {line}, in {function}')
            if source := linecache.getline(file, line).strip():
                lines.append(f"    {source}")
    with suppress(OSError):
        path.write_text("\n".join(lines) + "\n")
        return path
    return None


def first_lost(records: Mapping[int, Record], me: int) -> Record | None:
    """Return the rank whose end broke the others' collectives: one with last words, else one whose process is gone."""
    others = [record for rank, record in sorted(records.items()) if rank != me]
    failed = [record for record in others if record.last_words and not record.last_words.startswith("RankLost")]
    return next(iter(failed or [r for r in others if not r.last_words and process_state(r) == "gone"]), None)


def _span(ranks: Sequence[int]) -> str:
    """Format ranks as ``"0, 1 and 3"``, or as ``"0 to 7"`` if they are consecutive."""
    ranks = sorted(ranks)
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks[:-1])) + (" and " if ranks[:-1] else "") + str(ranks[-1]) if ranks else "unknown"


# --- name torch's stack frames that tell which module runs

CALLING = "_wrapped_call_impl"
"""The function through which torch calls a module; its ``self`` is the module."""
FSDP_FILE = "_fsdp_param_group.py"
"""The file of the functions in which FSDP2 gathers and reduces."""
MODULE_NAME = "_module_fqn"
"""The attribute that holds the module's path, on the ``self`` of the functions in ``FSDP_FILE``."""


# --- read the stack of a running thread from another one

Read = TypeVar("Read")
Place = tuple[str, int, str]
"""File, line and function of a frame."""

_HEADER = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)\b.*:$")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)$')


DUMP_IS_SAFE = sys.version_info < (3, 13)
"""Whether faulthandler may dump a running thread; Python 3.13.0 then reads frames that are no longer there."""
DEEPEST = 100
"""Number of frames that are read, the innermost ones: as many as faulthandler dumps."""


class ThreadStack:
    """Reads one thread's stack from another thread, by faulthandler's dump, which makes no frame objects.

    To make a frame object of a running thread is unsafe in Python 3.11: its allocation may start a garbage collection,
    whose finalizers let the watched thread go on and leave the frame, which is then written to and read regardless. So
    where frame objects are made, one call of C makes all of them, without collections.

    Args:
        thread: the watched thread's ``threading.get_ident()``. It is not found behind 99 younger threads.
    """

    def __init__(self, thread: int) -> None:
        self.thread = thread
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("meshwright-stack")
        else:
            with tempfile.TemporaryFile() as file:  # without a name
                self._file = os.dup(file.fileno())
        self._before: list[Place] = []

    def read(self) -> tuple[list[Place], bool]:
        """Return the innermost hundred frames, the innermost first, and whether they are the same as at the last read
        (the thread waits, most likely).
        """
        if DUMP_IS_SAFE:
            os.lseek(self._file, 0, os.SEEK_SET)
            os.ftruncate(self._file, 0)
            faulthandler.dump_traceback(self._file)
            stack = parse(os.pread(self._file, 1 << 22, 0).decode(errors="replace"), self.thread)
        else:
            stack = self._of_frames(lambda frames: list(map(PLACE, frames[:DEEPEST])), [])
        is_still = bool(stack) and stack == self._before
        self._before = stack
        return stack, is_still

    def first_word(self, word_of: Callable[[FrameType], str]) -> str:
        """Return the first word that a function has for a frame of a thread that waits, from the innermost on.

        "" if no frame has a word, or if the collector is off: whoever stopped it may start it again in between.
        """
        return self._of_frames(lambda frames: first_word(frames, word_of), "")

    def _of_frames(self, read: Callable[[list[FrameType]], Read], otherwise: Read) -> Read:
        """Return what a function reads off the frames, innermost first; no other thread runs while they are made."""
        if not gc.isenabled():
            return otherwise
        top = map(itemgetter(self.thread), map(call, [sys._current_frames]))
        gc.disable()
        try:
            return read(list(_outwards(top)))
        except KeyError:  # the thread has ended
            return otherwise
        finally:
            gc.enable()

    def close(self) -> None:
        os.close(self._file)


PLACE: Callable[[FrameType], Place] = attrgetter("f_code.co_filename", "f_lineno", "f_code.co_name")


def first_word(frames: Iterable[FrameType], word_of: Callable[[FrameType], str]) -> str:
    return next(filter(None, map(word_of, frames)), "")


def _outwards(top: Iterable[FrameType]) -> Iterator[FrameType]:
    """Iterate over a frame and those around it, without a step of Python."""
    steps: Iterator[Any] = chain(top, repeat("f_back"))
    return takewhile(bool, accumulate(steps, getattr))


def parse(dump: str, thread: int) -> list[Place]:
    """Return the frames of one thread from the text of ``faulthandler.dump_traceback``, the innermost first."""
    found: list[Place] = []
    is_it = False
    for line in dump.splitlines():
        if header := _HEADER.match(line):
            is_it = int(header[1], 16) == thread
        elif is_it and (frame := _FRAME.match(line)):
            found.append((frame[1], int(frame[2]), frame[3]))
    return found
