"""Checkpoints outside a run's folder are those of one run: it finds them again, and no other takes them for its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal

import pytest
from e2e_runs import Job, finish, losses, metrics, only_run, start, tree
from support.buckets import bucket
from test_signals import ENDLESS, wait_until

from meshwright.checkpoint.folder import CheckpointFolder
from meshwright.checkpoint.store import store_of
from meshwright.training.metrics import MetricsWriter
from meshwright.training.run.request import completed

pytestmark = pytest.mark.all


@pytest.fixture
def shared(train, tmp_path):
    """A run of two steps, and the folder of its checkpoints."""
    changes = {"steps": 2, "checkpoint.every": 1, "checkpoint.folder": str(tmp_path / "shared")}
    run = train(1, changes | {"run": str(tmp_path / "runs/first")})[0]
    assert run.status == 0, run.error
    return run.folder, changes


@pytest.mark.follows("--run")
def test_another_run_is_refused_before_it_has_a_folder_and_each_way_out_is_one(train, shared, tmp_path):
    first, changes = shared
    before = tree(first) | tree(tmp_path / "shared")
    for other in ({"run": str(tmp_path / "runs/second")}, {"name": "third", "optimizer.lr": 0.5, "steps": 4}):
        refused = train(1, changes | other)[0]
        words = f"checkpoint.folder = {tmp_path}/shared has the checkpoints of the run {first}, and two runs would"
        assert refused.status == 2 and words in str(refused.error)
        assert f"give this one a folder of its own, or continue that one with --run={first}" in str(refused.error)
    assert tree(first) | tree(tmp_path / "shared") == before and [*(tmp_path / "runs").iterdir()] == [first]
    own = train(1, changes | {"run": str(tmp_path / "runs/second"), "checkpoint.folder": str(tmp_path / "own")})[0]
    further = train(1, changes | {"run": str(first), "steps": 3})[0]
    assert own.status == further.status == 0 and len(losses(own.folder)) == 2 and len(losses(first)) == 3


def test_a_run_that_has_its_own_does_not_take_over_those_of_another(train, shared, tmp_path):
    first, changes = shared
    second = train(1, changes | {"run": str(tmp_path / "runs/second"), "checkpoint.folder": ""})[0].folder
    for place in (tmp_path / "shared", first / "checkpoints"):
        if place.parent == first:
            train(1, {"steps": 3, "checkpoint.folder": ""}, folder=first)
        moved = {"checkpoint.folder": str(place), "steps": 2}
        refused = train(1, moved, folder=second)[0]
        assert refused.status == 2 and f"has the checkpoints of the run {first}" in str(refused.error)
        assert completed(Job(moved, str(second)).config()) == "", "it is looked at, and refused"


@pytest.mark.parametrize("way", ["lost", "renamed", "other flags"])
def test_the_run_itself_goes_on(train, shared, tmp_path, way):
    """Its machine is lost, and it begins with a fresh folder of its name; or its folder was moved."""
    first, changes = shared
    if way == "lost":
        shutil.rmtree(first)
        again = train(1, changes | {"steps": 3, "run": str(tmp_path / "elsewhere/first")})[0]
    else:
        folder = first.rename(tmp_path / "runs/renamed") if way == "renamed" else first
        again = train(1, {"steps": 3, "optimizer.lr": 0.5}, folder=folder)[0]
    assert again.status == 0 and f"continuing from {tmp_path}/shared/step-00000002" in again.out, again.error
    assert json.loads((tmp_path / "shared/run.json").read_text()) == {"run": str(again.folder)}


def test_of_a_run_that_is_copied_the_first_keeps_the_checkpoints(train, shared, tmp_path):
    first, _ = shared
    shutil.copytree(first, tmp_path / "runs/copy")
    refused = train(1, {"steps": 3}, folder=tmp_path / "runs/copy")[0]
    assert refused.status == 2 and f"has the checkpoints of the run {first}" in str(refused.error)


def test_of_two_runs_at_once_the_second_is_refused(environment, flags, ask, tmp_path):
    """Before the first has a checkpoint too."""
    place = {"checkpoint.folder": str(tmp_path / "shared"), "process.count": 1}
    words = flags(ENDLESS | place | {"out": str(tmp_path / "runs")})
    process = start(["python", "-m", "meshwright", "train", *words], environment, tmp_path)
    wait_until(lambda: len(metrics(only_run(tmp_path / "runs"))) > 0, process)
    run = only_run(tmp_path / "runs")
    status, _, err = ask("train", *flags(place | {"out": str(tmp_path / "others")}))
    os.killpg(process.pid, signal.SIGINT)
    assert finish(process).status == 130
    assert status == 2 and f"checkpoint.folder = {tmp_path}/shared is in use by another job (process" in err
    assert f"for the run {run}: two jobs would" in err and not (tmp_path / "others").exists()
    assert not (tmp_path / "shared/running.lock").exists()


@pytest.fixture
def trained(small, monkeypatch):
    """``trained(changes, {step: happens})``: a run in this process, in which something happens at some steps."""
    write = MetricsWriter._write

    def run(changes, happens):
        def written(writer, line, *values):
            happens.get(line.get("step"), bool)()
            write(writer, line, *values)

        monkeypatch.setattr(MetricsWriter, "_write", written)
        return Job(small(changes))()

    return run


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_whose_folder_is_moved_says_so_and_saves_when_it_is_back(train, trained, tmp_path, asynchronous):
    run, moved = tmp_path / "runs/run", tmp_path / "moved"
    changes = {"run": str(run), "checkpoint.every": 1, "checkpoint.asynchronous": asynchronous, "steps": 8}

    def back():
        assert not run.exists(), "no save has made it again"
        moved.rename(run)

    result = trained(changes, {3: lambda: run.rename(moved), 6: back if asynchronous else bool})
    ends = f"{run} was moved or removed while its run goes on: move it back, or put a link to it there"
    if not asynchronous:
        assert result.status == 1 and ends in str(result.error) and not run.exists()
        assert CheckpointFolder(moved / "checkpoints").newest() == (moved / "checkpoints/step-00000002", [])
        moved.rename(run)
        result = train(1, {}, folder=run)[0]
    else:
        assert f"{ends}. The next save tries again" in result.out
    assert result.status == 0 and CheckpointFolder(run / "checkpoints").latest() == run / "checkpoints/step-00000008"


def test_figures_that_find_their_folder_moved_say_so(train, trained, tmp_path):
    """TensorBoard opens its file by name."""
    run, moved = tmp_path / "runs/run", tmp_path / "moved"
    changes = {"run": str(run), "checkpoint.every": 1, "steps": 8, "logging.tensorboard": "on"}
    result = trained(changes, {3: lambda: run.rename(moved)})
    assert result.status == 1 and f"{run} was moved or removed" in str(result.error)
    assert "move it back, or put a link to it there" in str(result.error) and "Make room" not in str(result.error)
    moved.rename(run)
    assert train(1, {}, folder=run)[0].status == 0


@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_a_job_whose_bucket_another_one_took_over_ends(trained, tmp_path, kind):
    """Both of one name, each on a machine of its own; what the first has saved is there for the second."""
    with bucket() if kind == "s3" else contextlib.nullcontext():
        take_over(trained, tmp_path, "memory://taken" if kind == "memory" else "s3://bucket/taken")


def take_over(trained, tmp_path, place):
    changes = {"run": str(tmp_path / "runs/run"), "checkpoint.every": 1, "checkpoint.folder": place}

    def other():
        job = {"pid": 7, "host": "far", "since": "noon"}
        store_of(place).put("run.json", json.dumps({"run": "/far/runs/run", "job": job}).encode())

    one, left = trained(changes, {4: other}), CheckpointFolder(place).latest()
    again = trained(changes, {})
    assert one.status == 2 and f"{place} was taken over by another job (process 7 on far, since noon)" in str(one.error)
    assert f"{place} was last used by another job (process 7 on far, since noon)" in again.out
    assert again.status == 0 and left and f"continuing from {left} (step" in again.out


def test_of_checkpoints_in_memory_nothing_is_advised_that_another_process_would_do(train, tmp_path):
    out = train(1, {"steps": 2, "checkpoint.folder": f"memory://{tmp_path.name}"})[0].out
    assert "its checkpoints are in the memory of this process, and end with it" in out
    assert "generate" not in out and "Continue with" not in out


def test_too_little_host_memory_for_a_row_is_refused_before_the_first_step(train):
    """As bytes it rounds to none, which meant no bound."""
    result = train(1, {"steps": 2, "checkpoint.host_memory": 1e-10})[0]
    assert result.status == 2 and "one row of" in str(result.error) and "a save may hold 1 B" in str(result.error)
    assert "start-up:" not in result.out
