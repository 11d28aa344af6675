"""A run's folder has one job at a time, and tells from its files alone that its run is complete."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from meshwright.checkpoint.folder import CheckpointFolder, TakenOver
from meshwright.checkpoint.manifest import Manifest
from meshwright.core.config import to_toml, unset
from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.training.config import Config
from meshwright.training.run import occupancy
from meshwright.training.run.occupancy import NAME, OWNER, claimed, nobody_saves, occupied
from meshwright.training.run.request import completed, keep_request

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

    with occupied(tmp_path) as earlier, occupied(tmp_path) as later, pytest.raises(TakenOver):
        later.check()
        earlier.check()


def test_of_two_jobs_in_a_bucket_the_later_one_saves(tmp_path):
    """The earlier is told who does; one that died without a word holds nobody up."""
    place = CheckpointFolder(f"memory://{tmp_path.name}")
    with claimed(place, tmp_path / "one/run") as earlier:
        earlier.check()
        with claimed(place, tmp_path / "two/run") as later:
            later.check()
            assert f"(process {os.getpid()} on" in later.before and not nobody_saves(place)
            with pytest.raises(TakenOver, match=rf"{place.path} was taken over by another job \(process"):
                earlier.check()
        assert nobody_saves(place)
    assert place.store.read(OWNER).decode() == json.dumps({"run": f"{tmp_path}/two/run"}), "the earlier leaves it"


def test_a_folder_that_is_not_there_any_more_is_saved_to_when_it_is_back(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with occupied(folder) as claim:
        folder.rename(tmp_path / "moved")
        for made in (False, True):
            (folder / "checkpoints").mkdir(parents=True) if made else None
            with pytest.raises(IntegrityError, match=f"{folder} was moved or removed .*: move it back, or put a link"):
                claim.check()
        shutil.rmtree(folder)
        folder.symlink_to(tmp_path / "moved")
        claim.check()
        folder.unlink()
        folder.mkdir()
        with occupied(folder), pytest.raises(TakenOver):
            claim.check()


ENDED = """
import sys
from meshwright.cli.main import main
from meshwright.distributed.process.workers import WorkerPool
WorkerPool.start = lambda pool: sys.exit("processes were started")
status = main(["train", *sys.argv[1:]])
sys.exit(status or ("torch was imported" if "torch" in sys.modules else 0))
"""


@pytest.fixture
def ended(tmp_path):
    """The folder of a run of four processes that has taken its 4 steps."""
    config = Config(steps=4, name="over")
    (tmp_path / "config.toml").write_text(to_toml(replace(config, process=replace(config.process, count=4))))
    keep_request(tmp_path, config)
    whole = tmp_path / "checkpoints" / "step-00000004"
    whole.mkdir(parents=True)
    Manifest({}, {}, extra={"state": {"step": 4, "consumed": 32}}).write(whole)
    (tmp_path / "identity.json").write_text('{"seed": 0}')
    return tmp_path


@pytest.mark.first
@pytest.mark.parametrize("flags", [[], ["--process.count=2"], ["--steps=3"], ["--optimizer.lr=0.5"]])
def test_a_complete_run_says_so_before_torch_is_imported_or_a_process_started(ended, flags):
    words = [sys.executable, "-c", ENDED, str(ended), *flags]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    told = (
        "this run has taken 4 steps, and 3 are asked for"
        if "--steps=3" in flags
        else "this run is complete: step 4 of 4"
    )
    assert last.startswith(told)
    assert last.endswith(f"train {ended} --steps=8")


def test_only_what_the_files_decide_is_decided_by_them(ended):
    config = Config(run=str(ended), steps=4)
    assert completed(config) and not completed(replace(config, steps=5)) and not completed(replace(config, run=""))
    data, length = replace(config.data, seq_len=64), {"epochs": 1.0, "steps": unset(4)}
    for other in (replace(config, seed=1), replace(config, data=data), replace(config, **length)):
        assert not completed(other)
    with occupied(ended):
        assert not completed(config)
    manifest = ended / "checkpoints" / "step-00000004" / "manifest.json"
    for other in ({"state": {"step": "four"}}, {}, {"state": {"step": 3, "consumed": 24}}):
        Manifest({}, {}, extra=other).write(manifest.parent)
        assert not completed(config)
    manifest.unlink()
    assert not completed(config)
