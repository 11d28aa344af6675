"""Runs fed from what people have: conversations, mixtures, token ids, a tokenizer trained on the spot."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
from e2e_runs import Job, losses, metrics, nested, rows_of_step

from meshwright.cli.main import main
from meshwright.core.errors import ConfigError, UnsupportedError, command
from meshwright.distributed.process.world import get_world_info
from meshwright.training import build
from meshwright.training.run.occupancy import latest_checkpoint
from meshwright.training.trainer import Trainer

QUESTIONS = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}."} for a in range(10) for b in range(10)]


@pytest.fixture
def questions(tmp_path) -> str:
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return str(path)


@pytest.fixture
def ids(tmp_path) -> str:
    np.save(tmp_path / "ids.npy", np.tile(np.array([*b"0123456789", 256], dtype=np.uint16), 300))
    return str(tmp_path / "ids.npy")


@pytest.mark.all
@pytest.mark.parametrize("streaming", [False, True])
def test_fine_tuning_learns_answers_and_goes_on_with_exactly_the_next_samples(train, questions, streaming):
    told = {
        "data.source": [questions],
        "steps": 6,
        "validation.every": 3,
        "schedule.kind": "constant",
        "data.streaming": streaming,
    }
    straight = train(2, told)
    learnt = [row["tokens"] for row in metrics(straight[0].folder)]
    assert learnt[0] < 8 * 32 / 2, "only answers count"
    first = train(2, told | {"steps": 3})
    second = train(1, {"steps": 6, "layout.dp_shard": 1}, folder=first[0].folder)
    assert [rows_of_step(second, step) for step in range(3)] == [rows_of_step(straight, step) for step in range(3, 6)]
    assert losses(first[0].folder) == pytest.approx(losses(straight[0].folder), rel=1e-5)


@pytest.mark.all
def test_a_mixture_is_the_same_on_every_layout_and_says_its_epochs(train, questions, ids, corpus):
    parts = [
        {"name": "prose", "source": [str(corpus)], "weight": 2.0},
        {"name": "sums", "source": [questions]},
        {"name": "digits", "source": [ids], "weight": 0.0},
    ]
    told = {
        "data.mixture": parts,
        "data.source": ["farmyard"],
        "validation.every": 4,
        "steps": 4,
        "schedule.kind": "constant",
    }
    told |= {
        "data.curriculum": [{"from_step": 2, "weights": [0.0, 1.0, 1.0]}],
        "techniques.precision.master": "float64",
    }
    two = train(2, told)
    one = train(1, told | {"layout.dp_shard": 1})
    for step in range(4):
        assert rows_of_step(two, step) == rows_of_step(one, step)
    is_digits = [
        [row[:2] in ([d, d + 1] for d in range(48, 57)) or row[:1] == [256] for row in rows_of_step(one, step)]
        for step in range(4)
    ]
    assert not any(is_digits[0]) and sum(is_digits[2]) >= 3
    assert losses(two[0].folder) == pytest.approx(losses(one[0].folder), rel=1e-10)
    last = metrics(two[0].folder)[-1]
    assert {"validation_loss", "validation_loss/sums", "validation_loss/digits"} <= set(
        last
    ) and "validation_loss/prose" not in last
    assert "3 sources: prose 0.0%" in two[0].out and "epochs" in two[0].out
    changed = train(1, {"steps": 6, "batch.global_batch": 4}, folder=two[0].folder)[0]
    for words in ("mixture[1].first was 16 and is now 8", "batch.global_batch was 8 and is now 4, and stages of"):
        assert changed.status == 2 and words in str(changed.error)


@pytest.mark.all
def test_a_tokenizer_trained_on_the_spot_stays_with_the_run(train, corpus, tmp_path, monkeypatch, capsys):
    told = {"data.tokenizer": "bpe:300", "data.cache": str(tmp_path / "cache"), "steps": 2, "sample.tokens": 5}
    first = train(2, told)[0]
    assert "vocabulary 300" in first.out
    assert ("training a tokenizer of 300 tokens" in first.out) != ("makes the same tokenizer" in first.out), (
        "one rank trains it"
    )
    shutil.rmtree(tmp_path / "cache")
    assert main(["generate", str(first.folder), "--tokens", "3"]) == 0 and capsys.readouterr().out
    second = train(1, {"steps": 4, "layout.dp_shard": 1}, folder=first.folder)[0]
    assert second.status == 0 and len(losses(first.folder)) == 4, "its own copy is read, and trained no second time"
    assert "training a tokenizer" not in second.out


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"data.mixture": [{"source": ["x.jsonl"], "streaming": True}]},
            UnsupportedError,
            "only a source alone can be streamed",
        ),
        ({"data.curriculum": [{"from_step": 1, "weights": [1.0]}]}, ConfigError, "there is no mixture"),
    ],
)
def test_what_the_config_alone_shows_is_refused_before_the_ranks_meet(small, changes, error, words, monkeypatch):
    monkeypatch.setattr(build, "init_distributed", lambda *_: pytest.fail("a process group came first"))
    monkeypatch.setattr(build, "run_tokenizer", lambda *_: pytest.fail("something was read first"))
    with pytest.raises(error, match=words):
        Trainer(nested({"data.source": ["farmyard"], **changes})).run()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"data.max_epochs": 0.5, "steps": 400},
            r"steps = 400 of batch.global_batch = 8 samples would read data.source .* times, more than",
        ),
        (
            {"data.mixture": [{"source": ["{questions}"]}], "data.column": "x"},
            "data.column and data.mixture are both given",
        ),
        (
            {"data.mixture": [{"source": ["{questions}"]}, {"source": ["{questions}"]}]},
            "two parts named 'sums': give each a name",
        ),
        ({"data.curriculum": [{"from_step": 1, "weights": [1.0]}]}, "there is no mixture"),
        (
            {
                "data.mixture": [{"source": ["{questions}"]}],
                "data.curriculum": [{"from_step": 1, "weights": [1.0, 2.0]}],
            },
            r"data.curriculum\[0\].weights has 2 values, and the mixture 1 parts: sums",
        ),
        ({"data.streaming": True, "data.max_epochs": 2.0}, "data.max_epochs and data.streaming are both given"),
        (
            {"data.mixture": [{"source": ["{questions}"], "weight": 0.0}]},
            r"weights \[0.0\]: there must be one for each of the 1 parts",
        ),
        ({"data.tokenizer": "bpe:100"}, "must be bpe:SIZE, with a vocabulary of 258 or more"),
        ({"data.tokenizer": "ids:5"}, "must be ids:VOCABULARY:END"),
        (
            {"data.tokenizer": "ids:100:0", "data.source": ["{ids}"]},
            "holds the id 256 at position 10 of 3300, outside the vocabulary",
        ),
        ({"data.seq_len": 8}, "conversations of the training split are longer than data.seq_len = 8"),
        ({"data.format": "parquet"}, "sums.jsonl is no Parquet file"),
    ],
)
def test_refusals_teach(train, questions, ids, changes, words, tmp_path):
    def filled(value):
        if isinstance(value, list):
            return [filled(item) for item in value]
        if isinstance(value, dict):
            return {key: filled(item) for key, item in value.items()}
        return (
            value.format(questions=questions, ids=ids)
            if isinstance(value, str) and value in ("{questions}", "{ids}")
            else value
        )

    told = {"data.source": ["farmyard"] if "data.mixture" in changes else [questions]} | {
        key: filled(value) for key, value in changes.items()
    }
    for result in train(2, told):
        assert result.status == 2
        assert re.search(words, str(result.error)), result.error
    assert not (tmp_path / "runs").exists(), "nothing was written"


class Unreadable(Job):
    """A run in which rank 1 cannot read the fourth step's first sample."""

    def __call__(self):
        from meshwright.data.packing import Stream

        rows, reads = Stream.rows, []

        def torn(self, indexes, seq_len):
            if get_world_info()[0] == 1 and self.name == "training":
                reads.append(int(indexes[0]))
                if reads[min(3, len(reads) - 1)] == int(indexes[0]) and len(reads) > 3:
                    raise OSError(5, "Input/output error", "disk")
            return rows(self, indexes, seq_len)

        Stream.rows = torn
        try:
            return super().__call__()
        finally:
            Stream.rows = rows


@pytest.mark.all
def test_what_one_rank_cannot_read_ends_all_in_its_words_or_is_left_out_by_all(train, small):
    told = small({"data.workers": 0, "validation.every": 0, "checkpoint.every": 3})
    results = train(2, job=Unreadable(told))
    for result in results:
        assert result.status == 1
        assert "rank 1 cannot read its part of the step's samples, 24 to 31 of the run: OSError" in str(result.error)
        assert str(result.error).endswith(f"Continue with: {command('train', results[0].folder)}")
    assert latest_checkpoint(results[0].folder) == "step-00000003"
    results = train(2, job=Unreadable(told | {"data.on_bad_row": "skip", "out": told["out"] + "2"}))
    assert [result.status for result in results] == [0, 0]
    assert "samples could not be read and were left out" in results[0].out and "(rank 1): OSError" in results[0].out
    tokens = np.diff([0, *(row["tokens"] for row in metrics(results[0].folder))])
    assert len(tokens) == 6 and tokens[3] < 8 * 31 and losses(results[0].folder)[3] > 0


class FewAtOnce(Job):
    """A run that tokenises a few documents at once, as one of long documents does."""

    def __call__(self):
        from meshwright.data import building

        before, building._BATCH_CHARACTERS = building._BATCH_CHARACTERS, 2000
        try:
            return super().__call__()
        finally:
            building._BATCH_CHARACTERS = before


def test_a_run_that_stops_over_a_bad_line_has_saved_and_goes_on_as_its_message_says(train, small, tmp_path):
    lines = [json.dumps({"text": f"{i} " + "words " * 40}) for i in range(200)]
    broken = [*lines[:150], "{half a line", *lines[150:]]
    told = {"data.streaming": True, "steps": 5, "batch.global_batch": 64, "data.seq_len": 128, "checkpoint.every": 100}
    for name, content in (("whole", lines), ("broken", broken)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(content) + "\n")
    (whole,) = train(1, job=FewAtOnce(small(told) | {"data.source": [str(tmp_path / "whole.jsonl")]}))
    (first,) = train(1, job=FewAtOnce(small(told) | {"data.source": [str(tmp_path / "broken.jsonl")]}))
    assert first.status == 1 and "set data.on_bad_row = 'skip'" in str(first.error)
    assert str(first.error).endswith(f"Continue with: {command('train', first.folder)}")
    saved = int(latest_checkpoint(first.folder).removeprefix("step-"))
    assert 0 < saved < 5 and saved == len(losses(first.folder)), "every step that was taken is saved"
    (second,) = train(1, job=FewAtOnce({"data.on_bad_row": "skip"}, str(first.folder)))
    assert second.status == 0, second.error
    assert losses(first.folder) == pytest.approx(losses(whole.folder), rel=1e-6)


@pytest.mark.all
def test_a_record_damaged_between_two_sittings_stays_as_it_was_and_other_changes_are_said(train, small, tmp_path):
    file, rows = tmp_path / "a.jsonl", [json.dumps({"prompt": f"{i}?", "completion": "yes" * 4}) for i in range(60)]
    told = small({"data.source": [str(file)], "schedule.kind": "constant"})
    file.write_text("\n".join(rows) + "\n")
    straight = train(1, job=Job(told))[0].folder
    first = train(1, job=Job(told | {"steps": 3}))[0].folder
    file.write_text("\n".join([*rows[:7], rows[7][:-3], *rows[8:]]) + "\n")
    (refused,) = train(1, {"steps": 6}, folder=first)
    assert refused.status == 2 and re.search(r"row 8 .*set data.on_bad_row = 'skip'", str(refused.error))
    (again,) = train(1, {"steps": 6, "data.on_bad_row": "skip"}, folder=first)
    assert again.status == 0 and losses(first) == losses(straight), again.error
    assert "unusable rows of a.jsonl, 1 in all, stay as they were when the run began" in again.out
    file.write_text("\n".join([*rows[:7], rows[7][:-3], *rows[9:]]) + "\n")  # and a row is gone
    (other,) = train(1, {"steps": 8}, folder=first)
    assert other.status == 2 and re.search(r"another run: data was .*a.jsonl has .* bytes, and had", str(other.error))
    assert "Put that back to continue" in str(other.error)
    file.write_text("\n".join(rows) + "\n")
    assert train(1, {"steps": 8}, folder=first)[0].status == 0


@pytest.mark.all
def test_rows_of_a_stream_that_end_early_have_the_losses_of_whole_rows(questions, tmp_path, monkeypatch):
    changes = {"data.source": [questions], "data.streaming": True, "data.seq_len": 20, "steps": 3}
    changes |= {"batch.global_batch": 8, "batch.microbatch": 2, "sample.tokens": 0, "logging.tensorboard": "off"}
    early = Job(changes | {"run": str(tmp_path / "early")})()
    monkeypatch.setattr(build.RowEnds, "of", lambda *args, **options: None)
    whole = Job(changes | {"run": str(tmp_path / "whole")})()
    assert early.status == whole.status == 0
    tokens = [sum(len(row) for step in one.samples for row in step) for one in (early, whole)]
    assert tokens[1] == 3 * 8 * 20 > tokens[0] == 3 * 8 * 16
    assert losses(tmp_path / "early") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


@pytest.mark.all
def test_a_stream_that_meets_a_long_conversation_goes_on_as_its_message_says(train, small, tmp_path):
    rows = [{"prompt": "?" * 20, "completion": "yes" * (40 if i == 300 else 6)} for i in range(500)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = {"data.source": [str(tmp_path / "a.jsonl")], "data.streaming": True, "data.seq_len": 64, "steps": 50}
    (first,) = train(1, job=FewAtOnce(small(told) | {"checkpoint.every": 100}))
    assert first.status == 1 and "set data.too_long = 'truncate' or 'skip'" in str(first.error), first.error
    (second,) = train(1, job=FewAtOnce({"data.too_long": "skip"}, str(first.folder)))
    assert second.status == 0 and len(losses(first.folder)) == 50, second.error
    (third,) = train(1, job=FewAtOnce({"data.too_long": "truncate", "steps": 60}, str(first.folder)))
    assert third.status == 2 and "too_long was skip and is now truncate" in str(third.error)


@pytest.mark.all
def test_a_held_out_conversation_that_is_too_long_does_not_switch_validation_off(train, tmp_path):
    rows = [{"prompt": "?" * (40 if i == 3 else 2), "completion": "yes"} for i in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = {
        "data.source": [str(tmp_path / "a.jsonl")],
        "data.validation_fraction": 0.5,
        "data.seq_len": 16,
        "steps": 1,
        "validation.every": 1,
    }
    for result in train(2, told):
        assert result.status == 2 and "longer than data.seq_len = 16" in str(result.error)
    kept = train(2, told | {"data.too_long": "skip"})[0]
    assert kept.status == 0 and "validation_loss" in metrics(kept.folder)[0]


@pytest.mark.all
def test_inspect_tells_each_source_of_a_mixture(train, questions, corpus, capsys):
    parts = [{"name": "prose", "source": [str(corpus)]}, {"name": "sums", "source": [questions], "weight": 2.0}]
    run = train(1, {"data.mixture": parts, "data.source": ["farmyard"], "steps": 1, "layout.dp_shard": 1})[0].folder
    assert main(["inspect", str(run)]) == 0
    out = capsys.readouterr().out
    assert f"data        prose: {corpus}, weight 1 (" in out and f"data        sums: {questions}, weight 2 (" in out
