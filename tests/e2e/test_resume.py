"""A run that is stopped and continued is the run that was not; and what cannot be continued is left as it was."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
from e2e_runs import Job, assert_equal_checkpoints, losses, metrics, nested, rows_of_step, tree

from meshwright.checkpoint.manifest import Manifest
from meshwright.cli.main import main
from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.training.run import checkpointing
from meshwright.training.trainer import Trainer

pytestmark = pytest.mark.all

STEADY = {"schedule.kind": "constant", "validation.every": 3, "validation.samples": 5}
DDP2 = {"layout.dp_replicate": 2, "layout.dp_shard": 1}


@pytest.mark.first
@pytest.mark.parametrize("layout", [{}, DDP2], ids=["fsdp2", "ddp2"])
def test_stopped_and_continued_is_bit_by_bit_the_run_that_was_not(train, spmd, layout):
    straight = train(2, STEADY | layout)[0].folder
    first = train(2, STEADY | layout | {"steps": 3})[0]
    second = train(2, {"steps": 6}, folder=first.folder)[0]  # raising steps is how a complete run goes on
    assert f"continuing from {first.folder}/checkpoints/step-00000003 (step 3, sample 24)" in second.out
    assert second.folder == first.folder and losses(first.folder) == losses(straight)
    assert [row["tokens"] for row in metrics(first.folder)] == [row["tokens"] for row in metrics(straight)]
    assert [row.get("validation_loss") for row in metrics(first.folder)] == [
        row.get("validation_loss") for row in metrics(straight)
    ]
    spmd(
        1, assert_equal_checkpoints, straight / "checkpoints/step-00000006", first.folder / "checkpoints/step-00000006"
    )


@pytest.mark.parametrize(
    ("world", "changes"),
    [
        pytest.param(1, {"layout.dp_shard": 1, "data.workers": 0}, id="one-process"),
        pytest.param(4, {"layout.dp_replicate": 2, "layout.dp_shard": 2, "data.workers": 2}, id="hsdp2x2"),
        pytest.param(2, {"batch.microbatch": 1}, id="microbatches-of-1"),
    ],
)
def test_on_another_layout_it_goes_on_with_exactly_the_next_samples(train, world, changes):
    exact = STEADY | {"techniques.precision.master": "float64"}
    straight = train(2, exact)
    first = train(2, exact | {"steps": 3})
    second = train(world, changes | {"steps": 6}, folder=first[0].folder)
    assert [rows_of_step(second, step) for step in range(3)] == [rows_of_step(straight, step) for step in range(3, 6)]
    assert rows_of_step(second, 0) != rows_of_step(straight, 0)
    assert losses(first[0].folder) == pytest.approx(losses(straight[0].folder), rel=1e-10)


def test_epochs_count_the_rows_of_steps_with_another_batch(train, tmp_path):
    np.save(tmp_path / "ids.npy", np.tile(np.array([*b"0123456", 256], dtype=np.uint16), 400))
    told = {"data.source": [str(tmp_path / "ids.npy")], "data.validation_fraction": 0.0, "steps": 3}
    first = train(1, told)[0]  # 24 of 100 rows
    often = train(1, {"batch.global_batch": 2, "data.max_epochs": 0.5, "steps": 17}, folder=first.folder)[0]
    assert often.status == 2 and "17 of batch.global_batch = 2 samples, the first 3 of 24 in all, w" in str(often.error)
    second = train(1, {"batch.global_batch": 2, "data.max_epochs": 0.5, "epochs": 0.5}, folder=first.folder)[0]
    assert second.status == 0 and "· 0.5 epochs" in second.out
    assert Manifest.read(first.folder / "checkpoints/step-00000016").extra["state"]["consumed"] == 50


@pytest.fixture
def complete(train):
    """A run of two steps that is done."""
    return train(1, {"steps": 2, "checkpoint.every": 1})[0].folder


def test_a_complete_run_says_so_and_is_left_as_it_is(train, complete):
    before = tree(complete)
    for flags in ({}, {"steps": 1, "optimizer.lr": 0.5}):
        again = train(2, flags, folder=complete)[0]
        words = "has taken 2 steps, and 1 are asked for" if flags else "this run is complete: step 2 of 2. Raise"
        assert again.status == 0 and words in again.out
        assert not re.search("continuing|done:|note|layout", again.out), again.out
        assert tree(complete) == before


def test_a_run_is_continued_from_another_folder(train, small, tmp_path, monkeypatch, corpus):
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(corpus, tmp_path / "here" / "texts")
    there = {"data.source": ["texts"], "data.cache": "cache", "out": "runs", "steps": 1}
    first = train(1, job=InFolder(str(tmp_path / "here"), Job(small(there))))[0]
    run = tmp_path / "here" / first.folder
    second = train(1, job=InFolder(str(tmp_path / "elsewhere"), Job({"steps": 2}, str(run))))[0]
    assert second.status == 0 and len(losses(run)) == 2
    assert not any((tmp_path / "elsewhere").iterdir())


def test_a_run_continued_on_another_layout_shows_each_with_its_steps(train, complete, capsys, tmp_path):
    page_of = ["inspect", str(complete), "--html", str(tmp_path / "page.html")]
    assert train(2, {"steps": 3, "layout.dp_shard": 1, "layout.tp": 2}, folder=complete)[0].status == 0
    assert train(2, {"steps": 4}, folder=complete)[0].status == 0
    text = (main(page_of), (tmp_path / "page.html").read_text(encoding="utf-8"))[1]
    asked = re.sub("<[^>]*>", "|", text.partition("<h2>Set for this run</h2>")[2].partition("<h2>Events</h2>")[0])
    steps = r"steps\|+2 \(to step 2\), 3 \(step 3\), 4 \(from step 4\)\|+200\|"
    assert re.search(steps, asked) and re.search(r"tp\|+1 \(to step 2\), 2 \(from step 3\)\|+1\|", asked), asked
    other = train(1, {"steps": 2})[0].folder
    capsys.readouterr()
    assert main(["compare", str(complete), str(other), "--html", str(tmp_path / "both.html")]) == 0
    said, words = capsys.readouterr().out, "one process (to step 2), tp=2 (from step 3)"
    assert words in said and words in re.sub("<[^>]*>", "", (tmp_path / "both.html").read_text(encoding="utf-8"))
    assert "2 (to step 2), 3 (step 3), 4 (from step 4)" in " ".join(said.split())


class InFolder:
    def __init__(self, folder: str, job: Job):
        self.folder, self.job = folder, job

    def __call__(self):
        import contextlib

        with contextlib.chdir(self.folder):
            return self.job()


def attempts(cases: dict[str, dict]) -> dict[str, str]:
    """What each config is refused with, in one process."""
    said = {}
    for name, changes in cases.items():
        try:
            Trainer(nested(changes)).run()
            said[name] = ""
        except ConfigError as error:
            said[name] = str(error)
    return said


def write_tokenizer(path):
    tokenizers = pytest.importorskip("tokenizers")
    end = "<|endoftext|>"
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, end: 1, **{f"w{i}": i for i in range(2, 257)}}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens([end])
    made.save(str(path))
    path.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": end}))


@pytest.mark.first
def test_another_run_is_not_continued_by_name_and_nothing_is_touched(spmd, small, complete, corpus, tmp_path):
    write_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "no-run").mkdir()
    (tmp_path / "no-run" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("")
    different = {
        "seed was 0 and is now 1": {"seed": 1},
        "model.n_layers was 2 and is now 3": {"model.n_layers": 3},
        "data was": {"data.source": [str(corpus / "a.txt")]},
        "seq_len was 32 and is now 16": {"data.seq_len": 16},
        "tokenizer was bytes": {"data.tokenizer": str(tmp_path / "tokenizer.json"), "model.vocab_size": 257},
        "the folder is not empty and holds no run": {"run": str(tmp_path / "no-run")},
        "cannot make this folder": {"run": str(tmp_path / "file")},
    }
    before = tree(tmp_path)
    said = spmd(
        1,
        attempts,
        {words: small({"run": str(complete), "steps": 4} | changes) for words, changes in different.items()},
    )[0]
    for words, error in said.items():
        assert words in error and str(different[words].get("run", complete)) in error, error
    # the other four are the same
    assert ", " not in said["seed was 0 and is now 1"].split("another run: ")[1].split(". ")[0]
    assert tree(tmp_path) == before


class Crowded(Job):
    """A run on a host that has no memory left for a copy, and what it says of its saves."""

    def __call__(self):
        left, checkpointing.memory_left = checkpointing.memory_left, lambda ranks: 8
        try:
            return super().__call__()
        finally:
            checkpointing.memory_left = left


def test_where_the_host_has_no_room_for_a_copy_saves_are_waited_for(train, small):
    result = train(2, job=Crowded(small({"steps": 3, "checkpoint.every": 1, "checkpoint.keep_last": 0})))[0]
    saved = [line for line in result.out.splitlines() if line.startswith("saved ")]
    assert result.status == 0 and len(saved) == 3 and result.out.count("Saves are synchronous from here on") == 1


def test_what_was_never_finished_is_said_and_not_read(train, complete):
    checkpoints = complete / "checkpoints"
    whole = tree(checkpoints / "step-00000002")
    shutil.copytree(checkpoints / "step-00000002", checkpoints / "step-00000009.partial")
    shutil.copytree(checkpoints / "step-00000002", checkpoints / "step-00000008")
    (checkpoints / "step-00000008" / "manifest.json").unlink()
    second = train(1, {"steps": 3, "checkpoint.keep_last": 0}, folder=complete)[0]
    assert second.status == 0 and "continuing from" in second.out and "step-00000002 (step 2," in second.out
    assert f"{checkpoints}/step-00000009.partial was never finished" in second.out
    assert f"{checkpoints}/step-00000008 was never finished" in second.out
    assert tree(checkpoints / "step-00000002") == whole and len(losses(complete)) == 3


def test_a_truncated_checkpoint_is_named_and_the_newest_whole_one_is_continued(train, complete):
    (shard,) = (complete / "checkpoints/step-00000002").glob("*.safetensors")
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    damage = f"{shard} has {len(content) - 100:,} bytes, but {len(content):,} were written"
    older = train(2, {"steps": 3, "checkpoint.keep_last": 0}, folder=complete)[0]
    assert older.status == 0 and f"{damage}: this checkpoint is not used" in older.out
    assert "step-00000001 (step 1," in older.out and len(losses(complete)) == 3


def test_where_no_checkpoint_is_whole_every_rank_says_so_and_nothing_is_lost(train, complete):
    shards = list((complete / "checkpoints").rglob("*.safetensors"))
    for shard in shards:
        shard.write_bytes(shard.read_bytes()[:-100])
    before = tree(complete)
    for rank in train(2, {"steps": 3}, folder=complete):
        assert isinstance(rank.error, IntegrityError) and "no checkpoint in" in str(rank.error)
        assert all(str(shard) in str(rank.error) for shard in shards)
    assert tree(complete) == before


def test_a_run_that_died_before_its_first_checkpoint_begins_again(train, complete):
    taken = losses(complete)
    shutil.rmtree(complete / "checkpoints")
    again = train(1, {}, folder=complete)[0]
    assert again.status == 0 and "has no checkpoint to continue from: it begins again at step 0" in again.out
    assert [row["step"] for row in metrics(complete)] == [1, 2] and losses(complete) == taken
