"""A run whose checkpoints lie at an address is, from begin to end, the run whose checkpoints lie in its folder."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from pathlib import Path

import pytest
from e2e_runs import Job, finish, losses, metrics, only_run, start
from support.buckets import bucket
from test_signals import wait_until

from meshwright.checkpoint.folder import CheckpointFolder
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.store import store_of
from meshwright.cli.main import main
from meshwright.training.run.request import completed

pytestmark = pytest.mark.all


@pytest.fixture(scope="module")
def s3():
    """The environment for a server which has a bucket."""
    with bucket() as environment:
        yield environment


def said(*words) -> str:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(word) for word in words])
    return out.getvalue() + err.getvalue() + f"status {status}\n"


class There:
    """A job with the environment that its checkpoints need; it stays in the process."""

    def __init__(self, job, environment: dict[str, str]):
        self.job, self.environment = job, environment

    def __call__(self):
        os.environ.update(self.environment)
        return self.job()


class Verbs:
    """What every verb says of a run."""

    def __init__(self, folder: Path, address: str):
        self.folder, self.address = folder, address

    def __call__(self) -> dict[str, str]:
        folder = self.folder
        place = self.address or str(folder / "checkpoints")
        store_of(place).put("step-00000009/pieces-deadbeef-00000.safetensors", b"left")
        new = folder.parent / "new"
        found = {
            "completed": completed(Job({}, str(folder)).config()),
            "evaluate": said("evaluate", folder, "--rows=4", "--json"),
            "step": said("evaluate", folder, "--rows=4", "--json", "--step=5"),
            "generate": said("generate", folder, "--prompt=the ", "--tokens=6", "--temperature=0"),
            "gc": said("checkpoint", "gc", folder),
            "ls": said("checkpoint", "ls", folder),
            "verify": said("checkpoint", "verify", place),
            "copy": said("checkpoint", "copy", folder, new / "copy"),
            "inspect": said("inspect", folder),
        }
        return {
            verb: text.replace(place.removeprefix("file://"), "PLACE")
            .replace(str(folder), "RUN")
            .replace(str(new), "NEW")
            for verb, text in found.items()
        }


@pytest.mark.parametrize(("kind", "world"), [("memory", 1), ("file", 2), ("s3", 2)])
def test_a_run_at_an_address_is_the_run_in_its_folder(request, pool, small, tmp_path, kind, world):
    environment = request.getfixturevalue("s3") if kind == "s3" else {}
    address = {"memory": f"memory://{tmp_path.name}", "file": f"file://{tmp_path}/far", "s3": f"s3://bucket/{kind}"}[
        kind
    ]
    found = []
    for number, place in enumerate(("", address)):
        config = {"out": str(tmp_path / f"runs{number}"), "schedule.kind": "constant", "steps": 3}
        config |= {"checkpoint.every": 1, "checkpoint.keep_last": 2, "checkpoint.folder": place}
        run = pool.run(There(Job(small(config)), environment), world=world, timeout=150)[0].folder
        again = pool.run(There(Job({"steps": 6}, str(run)), environment), world=world, timeout=150)[0]
        assert again.status == 0, again.error
        verbs = pool.run(There(Verbs(run, place), environment), world=1, timeout=150)[0]
        found.append((run, verbs, again.out))
    (here, wanted, _), (there, verbs, out) = found
    assert losses(there) == losses(here) and len(losses(there)) == 6
    for verb, text in verbs.items():
        assert (
            text.rpartition("plan")[0] == wanted[verb].rpartition("plan")[0]
            if verb == "inspect"
            else (text == wanted[verb])
        ), verb
    assert "complete: step 6 of 6" in verbs["completed"] and "removed 1 files" in verbs["gc"]
    assert verbs["ls"].count("step-") == 2 and verbs["verify"].count("whole, every byte") == 2
    assert not (there / "checkpoints").exists() and "step-00000003 (step 3," in out


def test_ctrl_c_saves_to_a_bucket_and_the_run_goes_on(s3, environment, flags, meshwright, tmp_path):
    words = flags({"out": "runs", "steps": 10**6, "process.count": 2, "schedule.kind": "constant"})
    command = [*words, "--schedule.warmup_steps=0", "--checkpoint.folder=s3://bucket/stopped"]
    process = start(["python", "-m", "meshwright", "train", *command], environment, tmp_path)
    wait_until(lambda: len(metrics(only_run(tmp_path / "runs"))) > 1, process)
    os.killpg(process.pid, signal.SIGINT)
    done = finish(process)
    run = only_run(tmp_path / "runs")
    latest = CheckpointFolder("s3://bucket/stopped").latest()
    step = Manifest.read(latest).extra["state"]["step"]
    assert done.status == 130 and f"saved {latest}" in done.out and len(metrics(run)) == step
    again = meshwright("train", run, f"--steps={step + 1}")
    assert again.status == 0 and f"continuing from {latest} (step {step}" in again.out and len(metrics(run)) == step + 1


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("nothing://bucket/run", "nothing://bucket/run is no address that can be reached"),
        ("memory://run", "memory://run is in the memory of one process, and 2 would save there"),
        ("/proc/run", "/proc/run cannot be written"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_before_the_run_has_a_folder(ask, flags, tmp_path, address, words):
    status, _, err = ask("train", *flags({"process.count": 2, "checkpoint.folder": address}))
    assert status == 2 and words in err and err.count("\n") == 1
    assert not (tmp_path / "runs").exists()
