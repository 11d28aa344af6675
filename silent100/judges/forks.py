"""Run scripts in forks of one process, which imports torch once for all.

A script needs two seconds to import torch and half a second to train. The process may not start a thread, and train
nothing. Its forks have one seed of hashes in common, unlike ranks of their own. A command of another form than those
of the scorer runs as it is.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"  # as observe has it, before torch is imported
import torch.distributed as dist

START = subprocess.run
LONGEST = 120.0
"""Seconds for a script, many times what a case needs: torch may hang at its end, in the destructor of a group."""
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def forked(action: Callable[[], object], printed: Path | None = None) -> int:
    """Let a copy of this process do something and end as a Python process does; return its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    if child := os.fork():
        return child
    status = 1
    try:
        if printed is not None:
            os.setpgid(0, 0)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
        try:
            action()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            if status and status is not end.code:
                print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  (as Python says it)
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()
    gc.collect()  # closes files
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


def train(script: str, words: list[str], environment: dict[str, str]) -> None:
    """Run a script as Python would; recorded, if ``meshwright observe`` has set that up."""
    os.environ.clear()
    os.environ.update(environment)
    random.seed()  # as of a process of its own
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "MESHWRIGHT_OBSERVE" in environment:
        path = os.path.join(environment["PYTHONPATH"].partition(os.pathsep)[0], "sitecustomize.py")
        recording = runpy.run_path(path)  # what Python does at its start, and then waits for torch to be imported
        recording["run_twice"]()
        recording["record"]()
    subprocess.run = START
    sys.argv, sys.path[0] = [script, *words], os.path.dirname(script)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__dict__.update(__file__=script, __builtins__=__builtins__)
    exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), module.__dict__)


def run(command: list[str], env: dict[str, str] | None = None, **rest: Any) -> subprocess.CompletedProcess[bytes]:
    """Run ``python SCRIPT …`` or ``torchrun --standalone … SCRIPT …`` in forks of this process."""
    if rest or env is None:
        return START(command, env=env, **rest)
    if command[0] == sys.executable and command[1:] and command[1].endswith(".py"):
        child = forked(lambda: train(command[1], command[2:], env))
        return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if command[: len(LAUNCH)] != LAUNCH or not command[len(LAUNCH) + 1].endswith(".py"):
        return START(command, env=env)
    count, script, *words = command[len(LAUNCH) :]
    door = socket.create_server(("localhost", 0))
    port = door.getsockname()[1]
    common = env | {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": str(uuid.uuid4()),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "ROLE_WORLD_SIZE": count,
        "ROLE_NAME": "default",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }

    def rank(number: str) -> None:
        door.close()
        train(script, words, common | dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), number))

    children = {forked(lambda number=number: rank(str(number))) for number in range(int(count))}
    store = dist.TCPStore("localhost", port, None, True, timedelta(seconds=300), False, master_listen_fd=door.detach())
    failed, deadline = 0, float("inf")
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            children.discard(child)
            if status and not failed:
                failed, deadline = 1, time.monotonic() + 30
                for other in children:
                    os.kill(other, signal.SIGTERM)
        elif time.monotonic() > deadline:
            for other in children:
                os.kill(other, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.01)
    del store
    return subprocess.CompletedProcess(command, failed)


def ended(children: Sequence[int], seconds: float = float("inf")) -> None:
    """Wait for forks that print elsewhere; end them and theirs after some time, or where this process is to end."""
    left, end = set(children), time.monotonic() + seconds
    try:
        while left and time.monotonic() < end:
            left -= {child for child in left if os.waitpid(child, os.WNOHANG)[0]}
            time.sleep(0.01)
    finally:
        for child in left:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)


def finish(command: str, folder: str, printed: str) -> None:
    """Run a command in a folder to its end, or for ``LONGEST``; what it prints goes to a file."""
    words = shlex.split(command)
    ended([forked(lambda: (os.chdir(folder), run(words, dict(os.environ))), Path(printed))], LONGEST)


def serve(asked: Callable[..., dict[str, Any]]) -> NoReturn:
    """Answer a question of the scorer a line, until there are no more."""
    importlib.import_module("torch._dynamo")  # as every optimizer does
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1
    for line in sys.stdin:
        print(json.dumps(asked(**json.loads(line))), flush=True)
    sys.exit(0)
