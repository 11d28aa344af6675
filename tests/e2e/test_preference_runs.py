"""Runs on pairs of answers: the same on every layout and across a restart, held to the first weights alone."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
from e2e_runs import OfPeak, losses, metrics, rows_of_step

from meshwright.core.errors import IntegrityError
from meshwright.training.preference import FOLDER

ROWS = [
    {"prompt": f"{a} + {b} =", "chosen": f" {a + b}.", "rejected": f" {a * b + 1}?"} for a in range(6) for b in range(6)
]


@pytest.fixture
def told(tmp_path) -> dict:
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return {
        "data.source": [str(tmp_path / "pairs.jsonl")],
        "data.validation_fraction": 0.2,
        "dpo.beta": 0.5,
        "dpo.label_smoothing": 0.1,
        "steps": 4,
        "validation.every": 2,
        "schedule.kind": "constant",
        "techniques.precision.master": "float64",
    }


@pytest.mark.all
def test_a_run_on_pairs_is_the_same_on_other_ranks_and_goes_on_from_the_same_reference(train, told):
    straight = train(2, told)
    folder = straight[0].folder
    assert losses(folder)[0] == pytest.approx(math.log(2), rel=1e-10) and losses(folder)[3] < math.log(2)
    validated = [row["validation_loss"] for row in metrics(folder) if "validation_loss" in row]
    assert len(validated) == 2 and all(0 < loss < 1 for loss in validated)
    told_pairs = [row for row in metrics(folder) if "rewards/margins" in row]
    assert len(told_pairs) == 4 and told_pairs[0]["rewards/margins"] == pytest.approx(0, abs=1e-10)
    last = told_pairs[-1]
    assert (
        last["rewards/chosen"] - last["rewards/rejected"] == pytest.approx(last["rewards/margins"])
        and 0 < last["rewards/margins"]
    )
    assert 0 <= last["validation_rewards/accuracies"] <= 1 and "accuracy" in straight[0].out
    margin, accuracy = last["validation_rewards/margins"], last["validation_rewards/accuracies"]
    assert f"validation margin {margin:.4f}, accuracy {accuracy:.0%}" in straight[0].out
    assert "kept in reference/ (the model has no adapters)" in straight[0].out
    tensor = train(2, told | {"layout.dp_shard": 1, "layout.tp": 2, "batch.microbatch": 2})
    assert losses(tensor[0].folder) == pytest.approx(losses(folder), rel=1e-10)
    for split in ("training", "validation"):
        values, others = (np.load(each[0].folder / FOLDER / f"{split}.npy") for each in (straight, tensor))
        assert len(values) in (58, 14) and values == pytest.approx(others, rel=1e-10) and (values < 0).all()
    first = train(2, told | {"steps": 2})
    second = train(1, {"steps": 4, "layout.dp_shard": 1}, folder=first[0].folder)
    assert [rows_of_step(second, step) for step in range(2)] == [rows_of_step(straight, step) for step in (2, 3)]
    assert losses(first[0].folder) == pytest.approx(losses(folder), rel=1e-10)


def test_a_run_that_has_lost_its_reference_does_not_go_on(train, told):
    first = train(1, told | {"steps": 1, "layout.dp_shard": 1})[0].folder
    (first / FOLDER / "training.npy").unlink()
    (left,) = train(1, {"steps": 2, "layout.dp_shard": 1}, folder=first)
    assert isinstance(left.error, IntegrityError) and metrics(first)[-1]["step"] == 1
    assert f"{FOLDER}/training.npy is missing: it holds what the first weights gave the pairs" in str(left.error)
    np.save(first / FOLDER / "training.npy", np.zeros(3))
    (left,) = train(1, {"steps": 2, "layout.dp_shard": 1}, folder=first)
    assert "training.npy holds (3,) log-probabilities, and there are 58 rows" in str(left.error)


LAYOUTS = {
    "data ranks": {"layout.dp_shard": 2, "batch.microbatch": 2},
    "tensor ranks": {"layout.dp_shard": 1, "layout.tp": 2},
    "context ranks": {"layout.dp_shard": 1, "layout.cp": 2},
    "a pipeline": {"layout.dp_shard": 1, "layout.pp": 2, "batch.microbatch": 2},
}


@pytest.mark.all
@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_rows_cost_what_short_answers_cost_and_give_the_same_losses(train, told, layout):
    told |= {"model.max_seq_len": 512, "validation.every": 4}
    whole = train(2, told | LAYOUTS[layout] | {"data.seq_len": 16})
    longer = train(2, told | LAYOUTS[layout] | {"data.seq_len": 512})
    assert {len(row) for result in longer for step in result.samples for row in step} == {16}, "no row is padded to 512"
    assert losses(longer[0].folder) == pytest.approx(losses(whole[0].folder), rel=1e-10)
    validated = [
        [row["validation_loss"] for row in metrics(r[0].folder) if "validation_loss" in row] for r in (whole, longer)
    ]
    assert validated[0] == pytest.approx(validated[1], rel=1e-10)


def test_speed_and_mfu_count_the_tokens_of_answers_whatever_rows_they_stand_in(train, small, told):
    told |= {"model.max_seq_len": 512, "validation.every": 0}
    per_token = []
    for seq_len in (16, 512):
        (result, counted, real), (_, _, of_other) = train(2, job=OfPeak(small(told | {"data.seq_len": seq_len})))
        assert "FLOPs per token that is no padding over 1 TFLOP/s" in result.out
        longest = re.search(
            r"plan: at most, with rows of data.seq_len = (\d+); the longest of this step has (\d+)", result.out
        )
        assert longest and int(longest[1]) == seq_len and int(longest[2]) < 16
        assert counted == [sum(ranks) for ranks in zip(real, of_other, strict=True)] and max(counted) < 8 * 16
        per_token.append([row["mfu"] * 2 * 1e12 / row["tokens_per_second"] for row in metrics(result.folder)])
    assert per_token[0] == pytest.approx(per_token[1], rel=1e-12)
