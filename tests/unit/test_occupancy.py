"""A run's folder has one job at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from meshwright.core.errors import ConfigError
from meshwright.training.run import occupancy
from meshwright.training.run.occupancy import NAME, occupied

HOLDER = """
import sys, time
from pathlib import Path
from meshwright.training.run.occupancy import occupied
with occupied(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_job_is_refused_with_the_first_ones_process(holder, tmp_path, monkeypatch):
    monkeypatch.setattr(occupancy, "_PATIENCE_SEC", 0.1)
    with (
        pytest.raises(
            ConfigError, match=rf"is being trained by another job \(process {holder.pid} on .*leave run empty"
        ),
        occupied(tmp_path),
    ):
        raise AssertionError("held twice")


def test_a_job_that_was_killed_holds_nobody_up(holder, tmp_path):
    os.kill(holder.pid, signal.SIGKILL)
    with occupied(tmp_path):
        assert (tmp_path / NAME).is_file()


def test_it_is_let_go_and_leaves_nothing_also_after_an_error(tmp_path):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), occupied(tmp_path):
            raise ZeroDivisionError
        assert not list(tmp_path.iterdir())


def test_where_files_cannot_be_locked_the_run_goes_on(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(occupancy.fcntl, "flock", refuse)
    begun = time.monotonic()
    with occupied(tmp_path), occupied(tmp_path):
        assert time.monotonic() - begun < occupancy._PATIENCE_SEC, "nothing is held, so nobody waits"
