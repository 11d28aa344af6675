"""The stack of a running thread: read without frame objects, in every Python's words, and no danger to the thread."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

import meshwright
from meshwright.training.health import heartbeat
from meshwright.training.health.heartbeat import Heartbeat, ThreadStack, parse

RACE = """
# every collection that the looking thread starts lets the watched one go on
import gc, os, sys, threading, time
sys.path.insert(0, {source!r})
from meshwright.training.health.heartbeat import Heartbeat
from meshwright.training.health.heartbeat import ThreadStack

sys.setswitchinterval(1e-5)
beat, looks = Heartbeat(), 0
beat._watched = ThreadStack(threading.get_ident())

def let_the_other_go_on(phase, info):
    if threading.get_ident() != beat._watched.thread:
        time.sleep(1e-4)

def look():
    global looks
    while True:
        beat.look()
        beat._watched.first_word(beat._module_of)
        looks += 1

calls = []  # their frames differ in size, so that one that was left is no frame any more
for k in range(9):
    names = "; ".join(f"v{{i}} = None" for i in range(3 * k + 1))
    for line, step in ((names, 7), ("if n < 0: " + names, 5)):
        exec(f"def f(n):\\n if n == 0: return 0\\n {{line}}\\n return 1 + calls[({{step}} * n + {{k}}) % 18](n - 1)")
        calls.append(f)

threading.Thread(target=look, daemon=True).start()
gc.callbacks.append(let_the_other_go_on)
gc.set_threshold(1)
end, n = time.monotonic() + {seconds}, 0
while time.monotonic() < end:
    calls[n % 18](10 + n % 37)
    n += 1
looker = [t for t in threading.enumerate() if t is not threading.main_thread()]
print(looks > 10 and looker and looker[0].is_alive())
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.all
def test_collections_in_the_looking_thread_let_the_other_go_on_without_harm():
    """Frame objects made one by one end this in a SIGSEGV, or a SystemError, under Python 3.11."""
    code = RACE.format(source=str(Path(meshwright.__file__).parents[1]), seconds=1.5)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


DUMPS = {
    "3.11": "Current thread 0x00000000000000bb (most recent call first):\n"
    '  File "/a/me.py", line 9 in look\n\n'
    "Thread 0x00000000000000aa (most recent call first):\n"
    '  File "/a/b c.py", line 12 in <module>\n'
    '  File "caf\\xe9.py", line 2 in f\n'
    "  ...\n",
    "3.14": "Current thread 0x00000000000000bb [meshwright-heart] (most recent call first):\n"
    '  File "/a/me.py", line 9 in look\n\n'
    "Thread 0x00000000000000aa [python] (most recent call first):\n"
    '  File "/a/b c.py", line 12 in <module>\n'
    '  File "caf\\xe9.py", line 2 in f\n'
    '  File "/a/b.py", line ??? in g\n',
}


@pytest.mark.parametrize("dump", DUMPS.values(), ids=DUMPS)
def test_one_threads_frames_are_found_in_the_dump_of_all(dump):
    assert parse(dump, 0xAA) == [("/a/b c.py", 12, "<module>"), ("caf\\xe9.py", 2, "f")]
    assert parse(dump, 0xBB) == [("/a/me.py", 9, "look")] and parse(dump, 0xCC) == []


class Waiting(threading.Thread):
    """A thread that waits inside two calls, until it is let go on to the next place."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.gates = [threading.Event(), threading.Event()]
        self.start()

    def run(self) -> None:
        self._wrapped_call_impl(0)
        self._wrapped_call_impl(1)

    def _wrapped_call_impl(self, gate: int) -> None:
        self.gates[gate].wait(30)


def until_still(watched: ThreadStack) -> list:
    deadline = time.monotonic() + 10
    while not (read := watched.read())[1]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return read[0]


def test_the_module_is_read_while_the_thread_stands_still_and_not_before():
    waiting, beat = Waiting(), Heartbeat()
    assert waiting.ident is not None
    beat._watched = watched = ThreadStack(waiting.ident)
    beat._names = {id(waiting): "layers.1"}
    try:
        functions = [name for _, _, name in until_still(watched)]
        assert "_wrapped_call_impl" in functions and functions[-1] == "_bootstrap"
        beat.look()
        assert beat.module == "layers.1"
        waiting.gates[0].set()
        deadline = time.monotonic() + 10
        while watched._before == watched.read()[0]:
            assert time.monotonic() < deadline
        watched._before = []
        beat.look()
        assert beat.module == "", "it has moved since the last look"
        until_still(watched)
        beat.look()
        assert beat.module == "layers.1"
    finally:
        for gate in waiting.gates:
            gate.set()
        waiting.join(10)
    assert watched.read() == ([], False) and watched.first_word(lambda frame: "word") == ""
    watched.close()


@pytest.mark.skipif(not heartbeat.DUMP_IS_SAFE, reason="from Python 3.13 on one call of C makes all frame objects")
def test_a_moving_thread_has_no_frame_objects_made(monkeypatch):
    def refuse(*_: object) -> types.FrameType:
        raise AssertionError("a frame object of a running thread")

    stop = threading.Event()

    def count(n: int) -> None:
        while not stop.is_set():
            n += 1
            n += 2

    thread = threading.Thread(target=count, args=(0,), daemon=True)
    thread.start()
    assert thread.ident is not None
    beat = Heartbeat()
    beat._watched = ThreadStack(thread.ident)
    beat._watched._before = [("elsewhere.py", 1, "f")]
    monkeypatch.setattr(heartbeat.sys, "_current_frames", refuse)
    monkeypatch.setattr(heartbeat.sys, "_getframe", refuse)
    try:
        beat.look()
        assert beat._watched._before[0][2] in ("count", "is_set")
    finally:
        stop.set()
        thread.join(10)
        beat._watched.close()
