"""How many processes a command may start on this host."""

from __future__ import annotations

import time
from types import SimpleNamespace

import psutil
import pytest

from meshwright import ConfigError
from meshwright.cli import main as cli
from meshwright.core import host as processes
from meshwright.core.host import MIB, refuse_too_many
from meshwright.distributed.process import workers


def host(monkeypatch, cores, free_mib):
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free_mib << 20))


@pytest.mark.parametrize(
    ("cores", "free_mib", "most"), [(2, 100_000, 16), (8, 100_000, 64), (8, 20 * MIB, 20), (1, 10, 4)]
)
def test_the_bound_is_of_cores_and_memory(monkeypatch, cores, free_mib, most):
    host(monkeypatch, cores, free_mib)
    refuse_too_many(most)
    with pytest.raises(ConfigError, match=rf"{most + 1} processes on this host: its {cores} cores serve"):
        refuse_too_many(most + 1)


@pytest.mark.parametrize("argv", [["train"], ["verify"]])
def test_a_layout_for_a_cluster_starts_no_process_here(monkeypatch, capsys, tmp_path, argv):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workers.WorkerPool, "start", lambda self: pytest.fail("started"))
    begin = time.monotonic()
    assert cli.main([*argv, "--layout.dp_shard=1000"])
    said = capsys.readouterr()
    assert "1,000 processes on this host" in said.err and "'meshwright plan'" in said.err
    assert time.monotonic() - begin < 30.0


def test_who_insists_is_served(monkeypatch):
    host(monkeypatch, 1, 10)
    with pytest.raises(ConfigError, match="process.count = 20"):
        workers.WorkerPool(20)
    workers.WorkerPool(20, oversubscribe=True).close()
