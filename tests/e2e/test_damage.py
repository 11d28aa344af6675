"""A newest checkpoint that is damaged: the newest whole one is used in its place, and the file is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from e2e_runs import Job, losses, tree

from meshwright.checkpoint.copying import copy, verify
from meshwright.checkpoint.folder import CheckpointFolder
from meshwright.checkpoint.manifest import Manifest
from meshwright.core.errors import IntegrityError

pytestmark = pytest.mark.all


@pytest.fixture(scope="module")
def ran(pool, tiny, tmp_path_factory):
    """A run of three steps on two ranks, each with its checkpoint; and the losses of one that goes on to the fifth."""
    config = tiny | {"model.size": "debug", "out": str(tmp_path_factory.mktemp("runs")), "schedule.kind": "constant"}
    config |= {"checkpoint.every": 1, "checkpoint.keep_last": 0, "steps": 3}
    straight = pool.run(Job(config | {"steps": 5}), world=2, timeout=60)[0].folder
    return pool.run(Job(config), world=2, timeout=60)[0].folder, losses(straight)


@pytest.fixture
def run(ran, tmp_path):
    return shutil.copytree(ran[0], tmp_path / "run")


def pack(checkpoint: Path, rank: int = 0) -> Path:
    return next(iter(sorted(checkpoint.glob(f"pieces-*-{rank:05d}.safetensors"))))


def flipped(path: Path, place: int = -1) -> Path:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    return path


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-100])
    return path


def copied_in_part(path: Path) -> Path:
    """As rsync --inplace leaves a file that it made as long as the whole."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2].ljust(len(content), b"\0"))
    return path


def gone(path: Path) -> Path:
    path.unlink()
    return path


def before_rsync_named_it(path: Path) -> Path:
    path.rename(path.with_name(f".{path.name}.a8XkQ1"))
    return path


def as_version_1(checkpoint: Path) -> Path:
    copy(checkpoint, checkpoint.with_name("old"), version=1)
    shutil.rmtree(checkpoint)
    checkpoint.with_name("old").rename(checkpoint)
    return flipped(next(checkpoint.glob("*.safetensors")))


def linked(path: Path) -> Path:
    path.rename(path.parents[2] / path.name)
    path.symlink_to(path.parents[2] / path.name)
    return path


def in_a_weight(checkpoint: Path) -> Path:
    piece = next(piece for piece in Manifest.read(checkpoint).pieces if piece.key.startswith("model."))
    return flipped(checkpoint / piece.pack, piece.begin)


DAMAGE = {
    "a bit of a weight": in_a_weight,
    "a bit of the first rank's": lambda c: flipped(pack(c)),
    "a bit of the second rank's": lambda c: flipped(pack(c, 1)),
    "a pack cut": lambda c: cut(pack(c)),
    "a pack copied in part": lambda c: copied_in_part(pack(c, 1)),
    "a pack gone": lambda c: gone(pack(c, 1)),
    "a pack not yet named": lambda c: before_rsync_named_it(pack(c)),
    "a pack behind a link": lambda c: linked(pack(c)),
    "the manifest cut": lambda c: cut(c / "manifest.json"),
    "the manifest changed": lambda c: flipped(c / "manifest.json", 40),
    "the manifest gone": lambda c: gone(c / "manifest.json").parent,
    "version 1": as_version_1,
}
"""How the newest is damaged, and what a message must name."""
OF_WEIGHTS = ["a bit of a weight", "a pack gone", "version 1"]


@pytest.mark.first
@pytest.mark.parametrize("damage", DAMAGE)
def test_training_goes_on_from_the_newest_whole_one(train, ran, run, damage):
    file = DAMAGE[damage](run / "checkpoints/step-00000003")
    # with keep_last = 1 nothing would be left if the damaged one counted
    results = train(2, {"steps": 5, "checkpoint.every": 0, "checkpoint.keep_last": 1}, folder=run)
    assert all(result.status == 0 for result in results) and str(file) in results[0].out, results[0].out
    assert "continuing from" in results[0].out and "step-00000002 (step 2," in results[0].out
    assert losses(run) == ran[1]
    newest, problems = CheckpointFolder(run / "checkpoints").newest()
    assert newest == run / "checkpoints/step-00000005" and problems == [] and verify(newest) == []


def test_a_damaged_one_is_neither_counted_on_nor_referred_to(train, run):
    """Saves before the damaged step: an interruption then would leave it the newest by its name."""
    flipped(pack(run / "checkpoints/step-00000002", 1))
    flipped(pack(run / "checkpoints/step-00000003"))
    more = {"steps": 2, "checkpoint.every": 1, "checkpoint.keep_last": 1}
    assert train(2, more, folder=run)[0].status == 0
    newest, problems = CheckpointFolder(run / "checkpoints").newest()
    assert newest == run / "checkpoints/step-00000002" and problems == [] and verify(newest) == []
    again = train(2, more | {"steps": 4}, folder=run)[0]
    assert again.status == 0 and f"{run}/checkpoints/step-00000003 was never finished" in again.out
    newest = CheckpointFolder(run / "checkpoints").latest()
    assert newest == run / "checkpoints/step-00000004" and verify(newest) == []


def test_where_none_is_whole_every_file_is_named_and_none_changed(train, run):
    files = [flipped(pack(run / f"checkpoints/step-{step:08d}", 1)) for step in (1, 2, 3)]
    before = tree(run)
    for result in train(2, {"steps": 5}, folder=run):
        assert isinstance(result.error, IntegrityError) and "no checkpoint in" in str(result.error)
        assert all(str(file) in str(result.error) for file in files)
    assert tree(run) == before


@pytest.mark.parametrize("damage", OF_WEIGHTS)
def test_evaluate_reads_the_newest_whole_one_and_says_which(ask, meshwright, caplog, run, damage):
    wanted = [json.loads(ask("evaluate", run, "--rows=4", "--json", f"--step={step}")[1]) for step in (2, 3)]
    file = DAMAGE[damage](run / "checkpoints/step-00000003")
    before = tree(run)
    for words in ((), ("--layout.dp_shard=2",)):
        status, out, _ = ask("evaluate", run, "--rows=4", "--json", *words)
        found = json.loads(out)
        assert status == 0 and found["step"] == 2 and found["loss"] == pytest.approx(wanted[0]["loss"], rel=1e-6)
        assert wanted[0]["loss"] != wanted[1]["loss"]
        assert words or str(file) in caplog.text
    if damage == "a bit of a weight":  # a worker's words
        assert str(file) in meshwright("evaluate", run, "--rows=4", "--layout.dp_shard=2").err
    status, _, err = ask("evaluate", run, "--rows=4", "--step=3")
    assert status == 1 and str(file) in err
    assert tree(run) == before


@pytest.mark.parametrize("damage", OF_WEIGHTS)
def test_generate_and_convert_read_the_newest_whole_one(ask, caplog, run, tmp_path, damage):
    words = ("generate", run, "--prompt=the ", "--tokens=8", "--temperature=0")
    written = ("convert", run, "--to", "hf", "--like", "qwen3")
    wanted = ask(*words, "--step=2")[1]
    assert ask(*written, tmp_path / "two", "--step=2")[0] == 0
    file = DAMAGE[damage](run / "checkpoints/step-00000003")
    status, out, _ = ask(*words)
    assert (status, out) == (0, wanted) and str(file) in caplog.text
    caplog.clear()
    assert ask(*words, "--step=3")[0] == 1
    status, out, _ = ask(*written, tmp_path / "found")
    assert status == 0 and "step-00000002" in out and str(file) in caplog.text
    assert tree(tmp_path / "found") == tree(tmp_path / "two")
    status, _, err = ask(*written, tmp_path / "refused", "--step=3")
    assert status == 1 and str(file) in err and not (tmp_path / "refused").exists()
