"""Write each rank's current work to a small file that outlives the rank.

The loop writes the file's first line, step and phase, so that this line is always current. A thread writes the second
line about once per second: collective and stack of the training thread and, if the stack is the same as a second ago,
the module. A file that cannot be written is ignored: a heartbeat never stops a run. Torch-free.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from .stacks import PLACE, Place, ThreadStack, first_word, own_frames
from .torch_frames import CALLING, FSDP_FILE, MODULE_NAME

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
        if self._file is not None:
            self._write(self._file, self._first_line(), 0)

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
            self._write(self._file, self._first_line(), 0)
        self.look()

    def fail(self, error: BaseException) -> None:
        """Record the error that ends this rank as its last words; the file stays."""
        words = " ".join(f"{type(error).__name__}: {error}".split())
        self.last_words = words[:LAST_WORDS]
        if self._file is not None:
            self._write(self._file, self._first_line(), 0)

    def look(self) -> None:
        """Record the stack, module and collective of the training thread, in this thread or another."""
        stack, self.module = self._stack_and_module()
        record: dict[str, Any] = {
            "time": time.time(),
            "part": self.part,
            "looked_at_step": self.step,
            "module": self.module,
        }
        record |= {"collective": self.collective, "stack": stack[::-1]}
        text = json.dumps(record).encode() + b"\n"
        with self._lock:  # otherwise the main thread could close the file, and another file reuse its number
            if self._file is not None:
                self._write(self._file, text, FIRST_LINE)
                with suppress(OSError):
                    os.ftruncate(self._file, FIRST_LINE + len(text))

    def _stack_and_module(self) -> tuple[list[Place], str]:
        """Return the watched thread's stack, the innermost first, and the module that it calls.

        From another thread the module is read only while the stack stays the same from look to look.
        """
        if self._watched is None:
            return [], ""
        if threading.get_ident() == self._watched.thread:
            frames = own_frames(sys._getframe(1))
            return list(map(PLACE, frames)), first_word(frames, self._module_of)
        stack, is_still = self._watched.read()
        return stack, self._watched.first_word(self._module_of) if is_still else ""

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

    def _first_line(self) -> bytes:
        words = json.dumps(self.last_words) if self.last_words else '""'
        head = (
            f'{{"rank": {self.rank}, "host": "{self.host[:40]}", "pid": {self.pid}, "started": {self._started:.3f},'
            f' "step": {self.step}, "phase": "{self.phase}", "last_words": '
        )
        room = FIRST_LINE - len(head) - 2
        if len(words) > room:
            words = json.dumps(self.last_words[: max(0, room // 6)])
        return f"{head}{words}}}".encode().ljust(FIRST_LINE - 1)[: FIRST_LINE - 1] + b"\n"

    def _write(self, file: int, text: bytes, place: int) -> None:
        with suppress(OSError):
            os.pwrite(file, text, place)

    def _leave(self, keep: bool = False) -> None:
        if self._file is None or self.folder is None:
            return
        file, self._file = self._file, None
        with suppress(OSError):
            os.close(file)
            if not keep:
                file_of(self.folder, self.rank).unlink()
                self.folder.rmdir()  # fails while other files are in it
