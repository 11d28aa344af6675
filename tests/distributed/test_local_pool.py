"""The pool of one host: whatever a worker does, the caller hears of it soon, and the pool goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager

import psutil
import pytest

from meshwright import ConfigError, Layout
from meshwright.distributed.process.workers import WorkerDied, WorkerFailed, WorkerPool, WorkerTimeout


@pytest.fixture(scope="module")
def two():
    with WorkerPool(2, threads=1) as pool:
        yield pool


@contextmanager
def within(seconds: float):
    """Far below every time limit of these jobs, and far above what a busy machine needs."""
    begun = time.monotonic()
    yield
    took = time.monotonic() - begun
    assert took < seconds, f"took {took:.1f} s"


def meet() -> int:
    """Sum of the ranks plus one, over the process group."""
    import torch
    import torch.distributed as dist

    from meshwright.distributed import init_distributed

    init_distributed(Layout(dp_shard=-1))
    total = torch.tensor(int(os.environ["RANK"]) + 1)
    if dist.is_initialized():
        dist.all_reduce(total)
    return int(total)


def meet_then(rank: int, what: str) -> None:
    """All ranks meet; then one does something, and the others wait for it in a collective."""
    import torch.distributed as dist

    meet()
    if dist.get_rank() == rank:
        act(what)
    dist.barrier()


def act(what: str) -> None:
    if what == "return":
        return
    if what == "raise":
        raise ValueError("the cause")
    if what == "raise config":
        raise ConfigError("backend 'gloo' is the cause")
    if what == "leave":
        sys.exit("leaving")
    if what == "exit":
        os._exit(7)
    if what == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    os.kill(os.getpid(), signal.Signals[what])
    time.sleep(600)


def staged(*acts: tuple[float, str]) -> None:
    """Each rank waits its seconds, then acts; without a process group."""
    delay, what = acts[int(os.environ["RANK"])]
    time.sleep(delay)
    if what == "echo":
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")
    act(what)


@pytest.fixture(autouse=True)
def goes_on(two):
    """After every test the pool still works, on all ranks and on one."""
    yield
    assert two.run(meet, timeout=30) == [3, 3]
    assert two.run(meet, world=1, timeout=30) == [1]


@pytest.mark.first("exit-rank 1 exited with status 7")
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("SIGKILL", "rank 1 was killed by SIGKILL"),
        ("SIGSEGV", "rank 1 was killed by SIGSEGV"),
        ("exit", "rank 1 exited with status 7"),
    ],
)
def test_a_death_names_rank_and_manner(two, what, words):
    two.run(meet)
    with within(8), pytest.raises(WorkerDied, match=words + " in the middle of the job") as caught:
        two.run(meet_then, 1, what, timeout=30)
    assert caught.value.rank == 1
    stands = re.search(r"test_local_pool.py\", line \d+ in act", str(caught.value))
    assert bool(stands) == (what == "SIGSEGV")


def test_a_worker_that_died_between_jobs_is_replaced(two):
    two.run(meet)
    two.signal_all(signal.SIGKILL)
    for process in two._processes:
        process.join(30)
    assert two.run(meet, timeout=30) == [3, 3]


@pytest.mark.all
def test_a_rank_that_hangs_ends_at_the_limit(two):
    two.run(meet)
    with within(8), pytest.raises(WorkerTimeout, match=r"did not end within 1.0 s on ranks \[0, 1\]") as caught:
        two.run(meet_then, 1, "hang", timeout=1.0)
    alone, hanging = str(caught.value).split("rank 1:")
    assert re.search(r"test_local_pool.py\", line \d+ in act", hanging) and "rank 0:" in alone
    with pytest.raises(WorkerTimeout, match=r"on ranks \[1\]"):
        two.run(staged, (0.0, "return"), (0.0, "hang"), timeout=3.0)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("raise", "ValueError: the cause"),
        ("raise config", "ConfigError: backend 'gloo' is the cause"),
        ("leave", "SystemExit: leaving"),
    ],
)
def test_an_error_is_told_at_once_while_the_others_wait(two, what, words):
    two.run(meet)
    with within(8), pytest.raises(WorkerFailed, match="rank 1 failed:") as caught:
        two.run(meet_then, 1, what, timeout=30)
    assert caught.value.rank == 1 and words in str(caught.value) and "in act" in str(caught.value), "with its traceback"
    assert str(caught.value.error) in words


@pytest.mark.parametrize(
    ("acts", "rank", "kind"),
    [
        (((0.0, "echo"), (0.4, "raise")), 1, WorkerFailed),
        (((0.0, "SIGABRT"), (0.4, "raise")), 1, WorkerFailed),
        (((0.0, "echo"), (0.4, "SIGKILL")), 1, WorkerDied),
        (((0.0, "raise"), (0.1, "SIGKILL")), 1, WorkerDied),
        (((0.1, "raise"), (0.0, "raise config")), 0, WorkerFailed),
        (((0.0, "SIGABRT"), (0.1, "echo")), 0, WorkerDied),
    ],
)
def test_of_several_troubles_the_cause_is_told(two, acts, rank, kind):
    two.run(meet)
    with within(8), pytest.raises(kind) as caught:
        two.run(staged, *acts, timeout=30)
    assert caught.value.rank == rank


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError("no")


def give(what: str, size: int = 0, data: bytes = b""):
    if what == "large":
        assert len(data) == size
        return os.environ["RANK"].encode() * size
    if what == "unpicklable error":
        raise Unpicklable("its words travel")
    return {
        "lambda": lambda: None,
        "environment": {
            name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        },
    }[what]


def test_large_arguments_and_results_travel(two):
    size = 24_000_000
    results = two.run(give, "large", size, bytes(size), timeout=30)
    assert [(len(result), result[:1]) for result in results] == [(size, b"0"), (size, b"1")]


@pytest.mark.all
def test_what_cannot_travel_is_an_error_and_no_silence(two):
    with pytest.raises(WorkerFailed, match="pickle"):
        two.run(give, "lambda", timeout=30)
    with pytest.raises(WorkerFailed, match="its words travel") as caught:
        two.run(give, "unpicklable error", timeout=30)
    assert caught.value.error is None


def test_each_rank_sees_who_it_is(two):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    expected = [dict(zip(names, (str(rank), str(rank), "2", "2"), strict=True)) for rank in range(2)]
    assert two.run(give, "environment") == expected
    assert two.run(give, "environment", world=1) == [dict(zip(names, "0011", strict=True))]


@pytest.mark.parametrize("world", [0, 3, -1])
def test_a_world_that_does_not_fit_is_refused(two, world):
    with pytest.raises(ConfigError, match=f"a job for {world} ranks does not fit a pool of 2 workers: give it 1 to 2"):
        two.run(meet, world=world)


SCRIPT = """
    import os, psutil, sys, time
    from meshwright.distributed.process.workers import WorkerPool

    def who():
        return os.getpid()

    def sleep():
        os.write(1, f"{os.getpid()}\\n".encode())  # in one piece: the other worker writes to the same pipe
        time.sleep(600)

    if __name__ == "__main__":
        me = psutil.Process()
        with WorkerPool(2, threads=1) as pool:
            pids = pool.run(who)
            folder = pool.folder
            assert set(pids) <= {child.pid for child in me.children(recursive=True)}
        left = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
        print("left", left, os.path.exists(folder), "torch" in sys.modules, flush=True)
        WorkerPool(2, threads=1).run(sleep)
"""


def gone(pids: list[int], seconds: float) -> list[int]:
    """The processes that still run after at most ``seconds``."""
    found = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return [
        process.pid
        for process in psutil.wait_procs(found, timeout=seconds)[1]
        if process.status() != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.all
def test_nothing_is_left_and_the_parent_stays_free_of_torch(tmp_path):
    """Neither after close, nor when the parent is killed in the middle of a job."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed parent leaves its folder
    with subprocess.Popen(
        [sys.executable, str(path)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        try:
            assert parent.stdout is not None and parent.stderr is not None
            assert parent.stdout.readline() == "left [] False False\n", parent.stderr.read()
            sleepers = [int(parent.stdout.readline()) for _ in range(2)]
            family = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
            assert set(sleepers) <= set(family)
        finally:
            parent.kill()
    assert gone(family, seconds=15) == []
