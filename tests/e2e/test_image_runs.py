"""Runs on conversations with images: the same losses on every layout and as plain transformers, and exported whole."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from e2e_runs import Job, Result, losses, metrics, rows_of_step
from safetensors.torch import load_file
from support.vision_models import COLOURS, asks, draw_image, model_folder, write_rows

pytestmark = pytest.mark.all

SEQ = 48


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return model_folder("llava", tmp_path_factory.mktemp("llava"), weights=True, max_position_embeddings=SEQ)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for number in range(8):
        draw_image(folder / "pictures" / f"{number}.png", 16 + 5 * number, 50 - 4 * number, number)
    rows = [
        asks(*(f"pictures/{(n + k) % 8}.png" for k in range(n % 3)), about=f"number {n}?", answer=COLOURS[n % 4])
        for n in range(20)
    ]
    return write_rows(folder / "rows.jsonl", rows).parent


@pytest.fixture(scope="module")
def told(model, data, cache, tmp_path_factory) -> dict[str, Any]:
    return {
        "out": str(tmp_path_factory.mktemp("out")),
        "model.hf": str(model),
        "data.cache": str(cache),
        "data.source": [str(data / "rows.jsonl")],
        "data.seq_len": SEQ,
        "batch.global_batch": 4,
        "steps": 4,
        "optimizer.lr": 0.01,
        "schedule.kind": "constant",
        "checkpoint.every": 2,
        "techniques.precision.master": "float64",
        "data.validation_fraction": 0.2,
        "validation.every": 2,
        "logging.tensorboard": "off",
        "sample.tokens": 0,
    }


@pytest.fixture(scope="module")
def one(pool, told):
    """The run in one process."""
    return pool.run(Job(told), world=1, timeout=90.0)[0]


@pytest.fixture
def train(spmd):
    def run(world: int, changes: dict[str, Any], folder: Path | None = None) -> list[Result]:
        return spmd(world, Job(changes, str(folder) if folder else None), timeout=120.0)

    return run


LAYOUTS = {
    "fsdp 2, microbatches": (2, {"batch.microbatch": 1}),
    "ddp 2": (2, {"layout.dp_replicate": 2, "layout.dp_shard": 1}),
    "fsdp 2 x tp 2": (4, {"layout.dp_shard": 2, "layout.tp": 2}),
    "pp 2": (2, {"layout.dp_shard": 1, "layout.pp": 2, "batch.microbatch": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_prints_the_losses_of_one_process(train, told, one, layout):
    world, changes = LAYOUTS[layout]
    many = train(world, told | changes)
    assert one.status == many[0].status == 0, (one.error, many[0].error)
    assert losses(many[0].folder) == pytest.approx(losses(one.folder), rel=1e-6)
    valid = [[row["validation_loss"] for row in metrics(r.folder) if "validation_loss" in row] for r in (one, many[0])]
    assert valid[0] == pytest.approx(valid[1], rel=1e-6) and len(valid[0]) == 2
    data_ranks = world if "tp" not in layout and "pp" not in layout else 2 if "tp" in layout else 1
    for step in range(4):
        seen = [many[rank] for rank in range(0, world, world // data_ranks)]
        assert rows_of_step(seen, step) == rows_of_step([one], step)


def test_the_first_loss_is_that_of_transformers_on_the_processors_own_batches(one, model, data):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    plain = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float64)
    processor = AutoProcessor.from_pretrained(model)
    known = {}
    for line in (data / "rows.jsonl").read_text().splitlines():
        messages, answer = json.loads(line)["messages"], ""
        for part in copy.deepcopy(messages)[0]["content"]:
            answer = part.get("text", answer)
        for part in messages[0]["content"]:
            if part["type"] == "image":
                part["image"] = str(data / part["image"])
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        whole = processor.apply_chat_template(messages, **options)
        asked = processor.apply_chat_template(messages[:1], add_generation_prompt=True, **options)
        known[tuple(whole["input_ids"][0].tolist())] = (whole, asked["input_ids"].shape[1])
    losses_of_rows, end = [], processor.tokenizer.eos_token_id
    for row in one.samples[0]:
        ((whole, asked),) = [
            found for ids, found in known.items() if tuple(row[: len(ids)]) == ids and set(row[len(ids) :]) <= {end}
        ]
        with torch.no_grad():
            logits = plain(**whole).logits[0]
        begin = asked - 1  # the token that joins the space before the answer
        losses_of_rows.append(F.cross_entropy(logits[begin - 1 : -1], whole["input_ids"][0, begin:], reduction="none"))
    assert losses(one.folder)[0] == pytest.approx(float(torch.cat(losses_of_rows).mean()), rel=1e-5)


def test_a_run_goes_on_bit_by_bit_with_the_tower_frozen_and_the_models_folder_gone(train, told, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    told = told | {"model.hf": str(folder), "techniques.freeze": ["vision_tower"]}
    straight = train(2, told)
    first = train(2, told | {"steps": 2})
    folder.rename(tmp_path / "moved")
    second = train(2, {"steps": 4}, folder=first[0].folder)
    assert second[0].status == 0, second[0].error
    assert [result.samples for result in second] == [result.samples[2:] for result in straight]
    saved = [sorted((r[0].folder / "checkpoints" / "step-00000004").glob("*.safetensors")) for r in (straight, second)]
    assert len(saved[0]) == len(saved[1]) == 2
    for one, other in zip(*([load_file(file) for file in files] for files in saved), strict=True):
        assert one.keys() == other.keys() and any(key.startswith("optimizer.exp_avg") for key in one)
        assert [key for key in one if not torch.equal(one[key], other[key])] == []


def test_another_image_is_another_run(train, told, data, tmp_path):
    own = shutil.copytree(data, tmp_path / "own")
    told = told | {"data.source": [str(own / "rows.jsonl")]}
    first = train(1, told | {"steps": 2})[0]
    draw_image(own / "pictures" / "3.png", 31, 38, seed=99)
    second = train(1, {"steps": 4}, folder=first.folder)[0]
    said = str(second.error)
    assert second.status == 2 and "holds another run: data was" in said
    assert f"{own}/pictures/3.png is not as at the start of the run. Put that back, or leave out the rows" in said


@pytest.mark.parametrize("kind", ["damaged", "gone", "another"])
@pytest.mark.parametrize("began_with", ["refuse", "skip"])
def test_a_picture_lost_between_two_sittings_is_left_out_as_the_message_says(
    train, told, data, tmp_path, kind, began_with
):
    own = shutil.copytree(data, tmp_path / "own")
    lost, told = own / "pictures" / "3.png", told | {"data.source": [str(own / "rows.jsonl")], "out": str(tmp_path)}
    straight = train(2, told)
    first = train(2, told | {"steps": 2, "data.on_bad_row": began_with})[0]
    if kind == "another":
        draw_image(lost, 31, 38, seed=99)  # of the same size
    elif kind == "gone":
        lost.unlink()
    else:
        lost.write_bytes(lost.read_bytes()[:60])
    if began_with == "refuse":
        refused = train(2, {"steps": 4}, folder=first.folder)[0]
        assert refused.status == 2 and "on_bad_row = 'skip'" in str(refused.error) and str(lost) in str(refused.error)
    ranks = train(2, {"steps": 4, "data.on_bad_row": "skip"}, folder=first.folder)
    again = ranks[0]
    assert again.status == 0, again.error
    assert f"{lost} is not as at the start of the run: rows that have it are left out" in again.out
    assert "could not be read and were left out (data.on_bad_row = 'skip')" in again.out
    empty = 0
    for mine, whole in zip(ranks, straight, strict=True):
        for rows, wanted in zip(mine.samples, whole.samples[2:], strict=True):
            left_out = [not any(row) for row in rows]
            empty += sum(left_out)
            assert [row for row, no in zip(rows, left_out, strict=True) if not no] == [
                row[: len(rows[0])] for row, no in zip(wanted, left_out, strict=True) if not no
            ]
    assert 0 < empty < 8


def test_a_run_is_exported_with_its_processor_and_generates(train, told, ask, tmp_path, data):
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    ran = train(2, told | {"sample.tokens": 3})[0]
    assert ran.status == 0 and 'sample.prompt = "Hello" in the chat template' in ran.out, ran.error
    status, said, err = ask("generate", ran.folder, "--prompt", "what?", "--tokens", "3")
    assert status == 0 and "--chat=false" in err and "what?" not in said, "the answer alone"
    status, said, err = ask("generate", ran.folder, "--chat=false", "--prompt", "what?", "--tokens", "3")
    assert (status, err) == (0, "") and "what?" in said
    status, said, err = ask("convert", ran.folder, "--to", "hf", tmp_path / "out", "--dtype", "float32")
    assert (status, err) == (0, "") and "AutoModelForImageTextToText.from_pretrained" in said
    read, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    image = Image.open(data / "pictures" / "1.png")
    with torch.no_grad():
        read(**processor(text=["user: <image>what?"], images=[[image]], return_tensors="pt"))


@pytest.mark.first
def test_a_run_is_evaluated_on_the_images_that_it_held_out(ask, one, tmp_path, data):
    run = shutil.copytree(one.folder, tmp_path / "run")
    (validated,) = (row["validation_loss"] for row in metrics(run) if row.get("step") == 4 and "validation_loss" in row)
    for flags in ([], ["--layout.tp=2", "--batch=1"]):
        status, said, err = ask("evaluate", run, "--json", *flags)
        assert (status, err) == (0, "") and json.loads(said)["loss"] == pytest.approx(validated, rel=1e-6)
    status, said, err = ask("evaluate", run, "--json", "--data", data / "rows.jsonl")
    assert (status, err) == (0, "") and json.loads(said)["rows"] == 20


def test_data_is_shown_with_its_images(ask, model, data):
    status, said, err = ask("inspect", data / "rows.jsonl", "--model.hf", model)
    assert (status, err) == (0, "") and "document 3: " in said and "learnt, 2 images" in said
    assert "<pictures/3.png 31 x 38: 4 tokens>" in said


@pytest.mark.first
def test_a_row_with_a_lost_image_stops_the_run_before_it_starts(train, told, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [asks(about="none"), asks("lost.png")])
    ran = train(1, told | {"data.source": [str(rows)]})[0]
    assert ran.status == 2 and f"{rows}, row 2: the image 'lost.png' is missing" in str(ran.error)
    assert "step 1" not in ran.out
