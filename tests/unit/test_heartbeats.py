"""What heartbeats are read as: who holds whom up, who was lost first, and what is worth a new start."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.distributed.process.workers import WorkerDied, WorkerFailed
from meshwright.training import launch
from meshwright.training.health.heartbeat import (
    FIRST_LINE,
    Heartbeat,
    Record,
    condition,
    file_of,
    find_stall,
    first_lost,
    read_record,
    whereabouts,
)
from meshwright.training.health.peers import RankLost, RankStalled

NOW = time.time()
HERE = socket.gethostname()


def rank(
    number: int, name: str = "", group: str = "dp_shard", ranks=(0, 1, 2, 3), since: float = 9.0, **known
) -> Record:
    """A rank elsewhere that was heard of just now, and waits where a name is given."""
    waits = {"name": name, "group": group, "number": 40, "ranks": list(ranks), "since": NOW - since} if name else None
    at = Record(number, "n2", 100 + number, step=12, phase="forward", looked_at_step=12, time=NOW, collective=waits)
    return replace(at, **known)


def stall(*records: Record):
    return find_stall({record.rank: record for record in records}, NOW)


def test_nobody_waits_nobody_is_blamed():
    assert stall(rank(0), rank(1)) is None


def test_the_one_that_does_not_come_is_named_with_collective_group_and_module():
    found = stall(*(rank(n, "all_gather", module="layers.1") for n in (0, 1, 3)), rank(2))
    assert found is not None and [record.rank for record in found.culprits] == [2]
    assert found.sentence == (
        "ranks 0, 1 and 3 have waited for 9 s in all_gather number 40 of group dp_shard (ranks 0 to 3), at step 12,"
        " in forward of layers.1,"
        " for rank 2 (host n2, pid 102), which runs but does not come, last seen at step 12, in forward"
    )


def test_behind_a_chain_of_waiting_ranks_stands_the_silent_one():
    pairs = [
        rank(0, "all_reduce", "tp", (0, 1)),
        rank(1, "all_gather", ranks=(1, 3), since=12),
        rank(2, "all_reduce", "tp", (2, 3)),
    ]
    found = stall(*pairs, rank(3, "all_reduce", "tp", (2, 3), time=NOW - 30))
    assert found is not None and [record.rank for record in found.culprits] == [3]
    assert "rank 3 (host n2, pid 103), not heard of for 30 s" in found.sentence and found.sentence.startswith(
        "ranks 0 to 2 have waited"
    )


def test_ranks_in_different_collectives_wait_for_each_other():
    found = stall(rank(0, "all_gather", ranks=(0, 1)), rank(1, "all_reduce", ranks=(0, 1)))
    assert found is not None and not found.culprits
    assert (
        "the ranks wait for each other (rank 0 in all_gather of dp_shard; rank 1 in all_reduce of dp_shard)"
        in found.sentence
    )


def test_the_state_of_a_process_on_this_host_is_looked_up():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        mine = rank(1, host=HERE, pid=process.pid, started=time.time())
        assert condition(mine, NOW) == "which runs but does not come"
        process.send_signal(19)
        deadline = time.monotonic() + 10
        while "stopped" not in condition(mine, NOW) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert condition(mine, NOW) == "whose process is stopped (state T: a SIGSTOP, or a debugger)"
        assert condition(replace(mine, started=NOW - 3600), NOW) == "whose process is gone", (
            "another process has its number"
        )
        process.kill()
        process.wait()
        assert condition(mine, NOW) == "whose process is gone"
        found = stall(rank(0, "all_gather", ranks=(0, 1)), mine)
        assert found is not None and [record.rank for record in found.culprits] == [1]


def test_who_was_lost_first():
    alive, echo, gone = rank(0), rank(1, last_words="RankLost: rank 3 ended"), rank(2, host=HERE, pid=2**30)
    told = rank(3, last_words="ValueError: the cause")
    ranks = {record.rank: record for record in (alive, echo, gone, told)}
    assert first_lost(ranks, 0) == told and first_lost({0: alive, 1: echo, 2: gone}, 0) == gone
    assert first_lost({0: alive, 1: echo}, 0) is None and first_lost({3: told}, 3) is None


def test_places_are_told_by_what_was_seen_in_the_same_step():
    seen = rank(0, module="layers.1", stack=[("a.py", 1, "backward")])
    assert whereabouts(seen) == "at step 12, in backward of layers.1"
    assert whereabouts(replace(seen, looked_at_step=11)) == "at step 12, in forward"
    assert whereabouts(replace(seen, step=0, phase="data")) == "in data, before the first step"


def test_a_file_is_read_however_it_was_left(tmp_path):
    with Heartbeat() as beat:
        beat.settle(tmp_path / "beats")
        path = file_of(tmp_path / "beats", beat.rank)
        beat.enter("save", 7)
        whole = path.read_bytes()
        for cut in (len(whole) - 20, FIRST_LINE + 1, FIRST_LINE):
            path.write_bytes(whole[:cut])
            record = read_record(path)
            assert record is not None and (record.step, record.phase) == (7, "save") and record.stack == []
        path.write_bytes(whole[:100])
        assert read_record(path) is None
        beat.fail(ValueError('a "quoted" cause ' + "\u00fc" * 900))
        record = read_record(path)
        assert record is not None and record.last_words.startswith('ValueError: a "quoted" cause')
        assert (
            len(path.read_bytes().partition(b"\n")[0]) == FIRST_LINE - 1
            and json.loads(path.read_bytes()[:FIRST_LINE])["pid"] == os.getpid()
        )
    assert path.exists(), "last words stay"


@pytest.mark.parametrize(
    ("trouble", "is_worth_it"),
    [
        (WorkerDied(1, -9), True),
        (WorkerDied(1, 1), True),
        (WorkerFailed(1, "text", RuntimeError("CUDA error")), True),
        (WorkerFailed(1, "text", None), True),
        (WorkerFailed(1, "text", RankLost("rank 1")), True),
        (WorkerFailed(1, "text", RankStalled("rank 1")), True),
        (WorkerFailed(1, "text", ConfigError("steps")), False),
        (WorkerFailed(1, "text", IntegrityError("damaged")), False),
        (WorkerFailed(1, "text", KeyboardInterrupt()), False),
    ],
)
def test_what_would_happen_again_is_not_started_again(trouble, is_worth_it):
    assert launch.is_worth_a_restart(trouble) == is_worth_it


def test_the_short_flag_is_the_key_of_process(monkeypatch):
    from meshwright.cli.main import main

    seen = []
    monkeypatch.setattr(launch, "launch", lambda config: seen.append(config.process.max_restarts) or 0)
    for words in (["--max-restarts", "3"], ["--max-restarts=3"], ["--process.max-restarts", "3"]):
        assert main(["train", *words]) == 0
    assert seen == [3, 3, 3]
    assert main(["train", "--max-restarts", "-1"]) == 2
