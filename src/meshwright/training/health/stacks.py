"""Read the stack of a running thread from another one; torch-free."""

from __future__ import annotations

import faulthandler
import gc
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, chain, repeat, takewhile
from operator import attrgetter, call, itemgetter
from types import FrameType
from typing import Any, TypeVar

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
        self._file = _open_file()
        self._before: list[Place] = []

    def read(self) -> tuple[list[Place], bool]:
        """Return the innermost hundred frames, the innermost first, and whether they are the same as at the last read
        (the thread waits, most likely).
        """
        stack = self._dump() if DUMP_IS_SAFE else self._of_frames(lambda frames: list(map(PLACE, frames[:DEEPEST])), [])
        is_still = bool(stack) and stack == self._before
        self._before = stack
        return stack, is_still

    def first_word(self, word_of: Callable[[FrameType], str]) -> str:
        """Return the first word that a function has for a frame of a thread that waits, from the innermost on.

        "" if no frame has a word, or if the collector is off: whoever stopped it may start it again in between.
        """
        return self._of_frames(lambda frames: first_word(frames, word_of), "")

    def _dump(self) -> list[Place]:
        os.lseek(self._file, 0, os.SEEK_SET)
        os.ftruncate(self._file, 0)
        faulthandler.dump_traceback(self._file)
        return parse(os.pread(self._file, 1 << 22, 0).decode(errors="replace"), self.thread)

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


def own_frames(frame: FrameType) -> list[FrameType]:
    """Return a frame of the calling thread and those around it, the innermost first."""
    return list(_outwards([frame]))


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


def _open_file() -> int:
    """Open a file without a name, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("meshwright-stack")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
