"""Defaults beside weights from files are a fine-tuner's, and what anybody set wins."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import tomllib
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from meshwright import Layout
from meshwright.cli.arguments import open_model, read_config
from meshwright.cli.plan import as_trained
from meshwright.core.config import all_set, from_dict, is_unset, to_dict, to_toml
from meshwright.core.dtypes import epochs_text
from meshwright.core.errors import ConfigError
from meshwright.data import load_tokenizer
from meshwright.training.config import Config
from meshwright.training.feed import build_feed, refuse_contradictions
from meshwright.training.fine_tuning import (
    Counted,
    after_data,
    before_data,
    chosen,
    few_steps,
    length_follows,
    more_or_fewer,
    of_forecast,
    why_chosen,
)
from meshwright.training.run.occupancy import Begun
from meshwright.training.views.progress import Progress

LORA = {"adapters": {"rank": 4}}


@pytest.fixture
def model(tmp_path) -> Path:
    """A folder that holds weights, as far as its names tell."""
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def counted(config: Config, rows: int = 640, tasks: tuple[str, ...] = ("chat",)) -> Config:
    return after_data(config, Counted(lambda _: rows) if rows else None, tasks, talks="chat" in tasks)


def tuned(model: Path, changes: dict | None = None, rows: int = 640, tasks: tuple[str, ...] = ("chat",)) -> Config:
    """The config with all that was chosen for it."""
    config = before_data(Config.from_dict({"model": {"hf": str(model)}} | (changes or {})))
    return counted(config, rows, tasks)


def values(config: Config) -> tuple:
    o = config.optimizer
    return o.lr, o.weight_decay, config.data.seq_len, config.steps, config.sample.prompt


@pytest.mark.parametrize(
    ("changes", "tasks", "expected"),
    [
        ({}, ("chat",), (1e-5, 0.0, 2048, 60, "Hello")),
        (LORA, ("chat",), (2e-4, 0.0, 2048, 60, "Hello")),
        (LORA, ("alpaca",), (2e-4, 0.0, 2048, 60, "The")),
        (LORA, ("preference",), (5e-5, 0.0, 2048, 60, "The")),
        ({}, ("preference",), (1e-6, 0.0, 2048, 60, "The")),
        ({}, ("text",), (1e-5, 0.0, 2048, 60, "The")),
        (LORA | {"epochs": 0.5}, ("chat",), (2e-4, 0.0, 2048, 10, "Hello")),
        (LORA | {"batch": {"global_batch": 64}}, ("chat",), (2e-4, 0.0, 2048, 60, "Hello")),
        ({"optimizer": {"kind": "lion"}}, ("chat",), (2e-6, 0.0, 2048, 60, "Hello")),
        ({"optimizer": {"kind": "sgd"}}, ("chat",), (3e-3, 0.0, 2048, 60, "Hello")),
    ],
)
def test_what_nobody_set_is_chosen_by_what_is_trained(model, changes, tasks, expected):
    assert values(tuned(model, changes, tasks=tasks)) == pytest.approx(expected)


SET = {
    "optimizer": {"lr": 3e-3, "weight_decay": 0.1},
    "data": {"seq_len": 128},
    "steps": 200,
    "batch": {"global_batch": 32},
    "sample": {"prompt": "The "},
}
"""What everybody has who sets nothing: set by hand, it is no default."""


def test_a_value_that_was_set_wins_even_if_it_is_the_usual_one(model):
    assert values(tuned(model, LORA | SET)) == values(Config()) and chosen(tuned(model, LORA | SET)) == ""
    flags = [
        f"--model.hf={model}",
        "--optimizer.lr=0.003",
        "--data.seq-len",
        "128",
        "--steps=200",
        "--batch.global_batch=32",
        "--sample.prompt=The ",
        "--optimizer.weight_decay=0.1",
    ]
    config = read_config(flags, prog="meshwright train")
    assert values(config) == values(Config()) and chosen(config) == ""
    file = model / "run.toml"
    file.write_text(to_toml(all_set(Config.from_dict({"model": {"hf": str(model)}} | SET))))
    assert values(read_config([str(file)], prog="meshwright train")) == values(Config())
    one = read_config([str(file), "--optimizer.lr=0.5"], prog="meshwright train")
    assert one.optimizer.lr == 0.5 and one.data.seq_len == 128


def test_the_command_line_leaves_open_what_no_flag_says(model):
    config = read_config([f"--model.hf={model}", "--adapters.rank=4"], prog="meshwright train")
    assert (config.optimizer.lr, config.data.seq_len) == (2e-4, 2048)
    assert is_unset(config.optimizer.lr) and length_follows(config)
    text = chosen(counted(config, 640, ("chat",)))
    assert text.startswith("optimizer.lr = 0.0002, optimizer.weight_decay = 0, data.seq_len = 2048, batch.global_batch")
    assert "steps = 60 (3 epochs)" in text


def test_without_weights_nothing_changes(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    for changes in ({}, {"model": {"hf": str(tmp_path)}}, {"model": {"size": "125M"}}):
        config = Config.from_dict(changes)
        made = counted(before_data(config), 640, ("text",))
        assert values(made) == (3e-3, 0.1, 128, 200, "The ") and made == config and chosen(made) == ""
        assert not length_follows(config)
    assert counted(Config.from_dict({"epochs": 2.0}), 640, ("text",)).steps == 40  # as many as were asked for


@pytest.mark.parametrize("adapters", [{}, LORA], ids=["whole", "adapters"])
@pytest.mark.parametrize("has_weights", [True, False])
@pytest.mark.parametrize("verb", ["train", "plan", "rehearse"])
def test_every_verb_takes_the_same_values_and_a_forecast_says_them(
    tmp_path, capsys, monkeypatch, verb, has_weights, adapters
):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    if has_weights:
        (tmp_path / "model.safetensors").write_bytes(b"")
    wanted = before_data(Config.from_dict({"model": {"hf": str(tmp_path)}} | adapters))
    tunes = has_weights or bool(adapters)
    assert wanted.data.seq_len == (512 if tunes else 128)
    module, taken = import_module(f"meshwright.cli.{verb}"), []

    def read(*args, **options):
        taken.append(read_config(*args, **options))
        raise KeyboardInterrupt if verb == "train" else ConfigError("read")

    if verb != "train":
        line = of_forecast(wanted)
        place = "taken as in training beside the model's weights" if tunes else "from random weights, since none lie in"
        assert place in line and f"data.seq_len = {wanted.data.seq_len}" in line
        assert tunes or "beside weights training takes optimizer.lr = 1e-05, optimizer.weight_decay = 0, data" in line
    monkeypatch.setattr(module, "read_config", read)
    flags = {"train": [], "plan": ["--world", "2"], "rehearse": ["--gpus", "2", "--rank", "0"]}[verb]
    with pytest.raises((KeyboardInterrupt, ConfigError)):
        module.run([f"--model.hf={tmp_path}", *(["--adapters.rank=4"] if adapters else []), *flags])
    assert taken == [wanted] and of_forecast(Config()) == ""


def test_rows_that_nobody_set_are_no_longer_than_a_model_from_random_weights_knows(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    for model in ({"hf": str(tmp_path)}, {"max_seq_len": 64}):
        assert before_data(Config.from_dict({"model": model})).data.seq_len == 64
        assert before_data(Config.from_dict({"model": model, "data": {"seq_len": 128}})).data.seq_len == 128


@pytest.mark.parametrize(
    ("epochs", "said"),
    [
        (1.0, "1 epoch"),
        (0.8, "0.8 epochs"),
        (0.9996, "0.9996 epochs"),
        (2.0004, "2.0004 epochs"),
        (3.0476, "3.05 epochs"),
        (0.00321, "0.00321 epochs"),
        (1234.5, "1234.5 epochs"),
        (4000.0, "4,000 epochs"),
        (0.0, "0 epochs"),
    ],
)
def test_no_fraction_of_an_epoch_reads_as_a_whole_number(epochs, said):
    assert epochs_text(epochs) == said


@pytest.mark.parametrize(("rows", "said"), [(20, "steps = 3 (1.2 epochs)"), (16, "steps = 2 (1 epoch)")])
def test_the_epochs_that_are_said_are_those_of_whole_steps(model, rows, said):
    config = tuned(model, {"epochs": 1.0, "batch": {"global_batch": 8}}, rows)
    assert said in chosen(config) and counted(config, rows, ("chat",)).steps == config.steps


@pytest.mark.parametrize(
    ("batch", "epochs", "steps"), [(2, 2.5, 17), (8, 4.0, 16), (4, 2.5, 14), (2, 1.0, 1), (8, 1.0, 8)]
)
def test_a_run_that_goes_on_with_other_rows_per_step_counts_those_it_has_read(model, batch, epochs, steps):
    begun, rows = Begun(10, 40), 21
    config = before_data(Config.from_dict({"epochs": epochs, "batch": {"global_batch": batch}}))
    config = after_data(config, Counted(lambda _: rows, begun=begun), ("chat",), talks=True)
    read = begun.rows_at(steps, batch)
    assert config.steps == steps and config.epochs == read / rows
    assert steps <= begun.steps or epochs * rows <= read < epochs * rows + batch


SHORT = 12_000
"""Tokens of some 200 short chats."""


def packed(tokens: int = SHORT, ranks: int = 2, accepts=lambda config: True, shortest: int = 200) -> Counted:
    """Documents that fill rows of any length."""
    return Counted(lambda seq_len: -(-tokens // seq_len), shortest, ranks, accepts)


def made(model: Path, data: Counted, changes: dict | None = None, tasks: tuple[str, ...] = ("chat",)) -> Config:
    config = before_data(Config.from_dict({"model": {"hf": str(model)}} | LORA | (changes or {})))
    return after_data(config, data, tasks, talks=False)


@pytest.mark.parametrize(
    ("data", "changes", "expected"),
    [
        (packed(), {}, (2, 256, 71)),  # 6 rows of 2048 tokens
        (packed(shortest=1500), {}, (2, 2048, 30)),  # no shorter rows hold all: 10 epochs have 30 steps
        (packed(SHORT * 1000), {}, (32, 2048, 550)),
        (packed(SHORT * 10), {}, (2, 2048, 89)),
        (packed(SHORT * 100), {}, (16, 2048, 110)),
        (packed(), {"batch": {"global_batch": 32}}, (32, 2048, 2)),
        (packed(), {"data": {"seq_len": 1024}}, (2, 1024, 60)),
        (packed(), {"steps": 30}, (2, 512, 30)),  # as many as the data makes in its usual epochs
        (packed(), {"steps": 3}, (8, 2048, 3)),
        (packed(SHORT * 1000), {"steps": 200}, (32, 2048, 200)),
        (packed(), {"epochs": 1.0}, (2, 256, 24)),
        (packed(), {"epochs": 20.0}, (2, 256, 470)),  # more epochs are more of the same steps
        (packed(), {"steps": 200}, (2, 256, 200)),
        (packed(accepts=lambda config: config.batch.global_batch >= 8), {}, (8, 2048, 8)),
    ],
)
def test_a_small_file_makes_enough_steps_of_fewer_or_shorter_rows(model, data, changes, expected):
    config = made(model, data, changes)
    batch, seq_len, steps = expected
    assert (config.batch.global_batch, config.data.seq_len) == (batch, seq_len)
    assert config.steps == steps
    before = before_data(Config.from_dict({"model": {"hf": str(model)}} | LORA | changes))
    said = why_chosen(before, config, data)
    assert bool(said) == ((batch, seq_len) != (before.batch.global_batch, before.data.seq_len))
    assert not said or f"so a step has {batch}" in said


@pytest.mark.parametrize("task", ["chat", "text", "preference", "completion"])
def test_little_data_is_read_more_often_but_no_oftener_than_is_usual_for_its_task(model, task):
    few = made(model, packed(600), tasks=(task,))
    assert few.epochs == pytest.approx(10 if task in ("chat", "completion") else 3, rel=0.5)
    assert made(model, packed(SHORT * 1000), tasks=(task,)).epochs == pytest.approx(
        3 if few.epochs > 5 else 1, rel=0.01
    )
    assert made(model, packed(600), {"data": {"max_epochs": 4}}, (task,)).epochs <= 4


def test_few_steps_are_said_whenever_they_are_few_and_the_advice_makes_more(model):
    data = packed(20_000, shortest=2048)
    said: list[tuple[int, str]] = []
    for changes in ({"batch": {"global_batch": 32}}, {"batch": {"global_batch": 2}, "epochs": 1.0}, {"steps": 3}):
        config = made(model, data, changes)
        said.append((config.steps, few_steps(config, data)))
        assert said[-1][1].startswith(f"{config.steps} steps of {config.batch.global_batch} rows change a model little")
    (_, batch), (_, epochs), (_, steps) = said
    assert "batch.global_batch = 2 or epochs = " in batch and "epochs = 12 makes" in epochs and "steps = 60" in steps
    for changes in ({"batch": {"global_batch": 2}}, {"batch": {"global_batch": 2}, "epochs": 12.0}, {"steps": 60}):
        config = made(model, data, changes)
        assert config.steps >= 49 and few_steps(config, data) == ""


def test_a_step_of_pairs_keeps_both_answers_on_a_rank(model, tmp_path):
    rows = [{"prompt": f"{n} + {n} =", "chosen": str(2 * n), "rejected": "no"} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"source": [str(tmp_path / "pairs.jsonl")], "tokenizer": "bytes", "cache": str(tmp_path / "cache")}
    config = before_data(Config.from_dict({"model": {"hf": str(model)}, "data": data} | LORA))
    feed = build_feed(config, load_tokenizer("bytes"), 0, 2, Progress(), accepts=lambda config: True)
    assert feed.config.batch.global_batch == 4 and feed.config.steps >= 57
    assert len(feed.next_batch()["tokens"]) == 2


@pytest.mark.parametrize(("width", "rate"), [(64, 3e-3), (1024, 8e-4), (4096, 2e-4), (8192, 1e-4), (None, 2e-4)])
def test_rates_fall_with_the_width_of_a_model(model, width, rate):
    (model / "config.json").write_text(json.dumps({"hidden_size": width}))
    assert before_data(Config.from_dict({"model": {"hf": str(model)}} | LORA)).optimizer.lr == pytest.approx(rate)


@pytest.mark.parametrize(
    ("stated", "rows"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"text_config": {"max_position_embeddings": 256}}, 256),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 131072}, 2048),
        ({}, 2048),
        ({"max_position_embeddings": None}, 2048),
        ([], 2048),
    ],
)
def test_rows_are_no_longer_than_the_model_knows(model, stated, rows):
    (model / "config.json").write_text(json.dumps(stated))
    assert before_data(Config.from_dict({"model": {"hf": str(model)}})).data.seq_len == rows


def test_choosing_twice_is_choosing_once(model):
    once = tuned(model, LORA)
    assert tuned(model, LORA) == counted(before_data(once), 640, ("chat",))
    assert before_data(once).optimizer.lr == once.optimizer.lr


def test_a_config_that_is_resolved_leaves_nothing_open(model):
    resolved = dataclasses.replace(all_set(tuned(model, LORA)), epochs=None)
    again = from_dict(Config, tomllib.loads(to_toml(resolved)))
    assert values(again) == values(tuned(model, LORA))
    assert values(tuned(model, to_dict(again) | {"epochs": None}, rows=6400)) == values(again)


def test_marks_survive_files_for_jobs_and_processes(model):
    config = Config.from_dict({"model": {"hf": str(model)}} | LORA)
    for other in (from_dict(Config, tomllib.loads(to_toml(config))), pickle.loads(pickle.dumps(config))):
        assert is_unset(other.steps) and is_unset(other.data.seq_len) and values(before_data(other))[0] == 2e-4


def test_steps_and_epochs_are_one_or_the_other(model, tmp_path):
    with pytest.raises(ConfigError, match=r"steps = 5 and epochs = 2 are both given.*leave one out"):
        Config.from_dict({"steps": 5, "epochs": 2.0})
    file = tmp_path / "run.toml"
    file.write_text("steps = 5\n")
    assert read_config([str(file), "--epochs=2"], prog="meshwright train").epochs == 2.0
    file.write_text("epochs = 2.0\n")
    assert read_config([str(file), "--steps=7"], prog="meshwright train").steps == 7


def test_a_stream_has_no_end_to_count(model):
    with pytest.raises(ConfigError, match=r"epochs = 2 and data.streaming are both given.* Give steps instead"):
        refuse_contradictions(Config.from_dict({"epochs": 2.0, "data": {"streaming": True, "source": ["a.jsonl"]}}))
    assert counted(before_data(Config.from_dict({"model": {"hf": str(model)}})), 0, ("chat",)).steps == 200


def test_a_tuned_model_is_evaluated_in_rows_as_long_as_it_would_be_tuned_in(model):
    (model / "tokenizer.json").write_text("{}")
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    assert open_model(str(model)).config.data.seq_len == 512


LEVEL, FALLING = [2.0] * 40, [5.0 - 0.1 * step for step in range(40)]


@pytest.mark.parametrize(
    ("losses", "validations", "changes", "words"),
    [
        (LEVEL, {}, {}, ""),
        (FALLING[:9], {}, {}, ""),  # too few steps to tell
        (FALLING, {}, {}, "mean of the last 8 steps 1.4500, of the 8 before 2.2500.* steps = 80 may"),
        (FALLING, {0: 5.0, 40: 1.5}, {"epochs": 1.5}, "still falling.* epochs = 3 may"),
        (FALLING, {0: 5.0, 20: 3.0, 40: 3.5}, {}, "lowest at step 20, 3.0000, and is 3.5000 now.* .steps = 20."),
        (FALLING, {0: 5.0, 20: 3.0, 40: 3.05}, {}, ""),  # neither
        (
            LEVEL,
            {0: 2.0, 40: 2.5},
            {},
            r"got worse: .* 2.0000 before .* 2.5000 now.*optimizer.lr = \S+\) changes less",
        ),
        (LEVEL, {0: 2.0, 20: 1.0, 40: 2.5}, {}, "lowest at step 20"),  # it had learnt before it got worse
        ([0.2] * 20 + [0.02] * 10 + [0.01] * 10, {0: 2.0, 40: 0.01}, {}, ""),  # there is nothing left to learn
    ],
)
def test_the_end_says_whether_more_or_fewer_steps_would_do(losses, validations, changes, words):
    config = Config.from_dict(changes or {"steps": 40})
    found = more_or_fewer(config, losses, validations)
    of_pairs = more_or_fewer(config, losses, validations, is_of_pairs=True)
    is_worse = validations and validations[max(validations)] > 1.02 * validations[0]
    assert ("got worse" in of_pairs) == bool(is_worse) and bool(of_pairs) == bool(is_worse)
    assert re.search(words, found) if words else found == ""


def test_a_plan_takes_the_rows_and_steps_that_training_would(model, tmp_path):
    (tmp_path / "qa.jsonl").write_text("".join(f'{{"question": "{n}?", "answer": "it is {n}"}}\n' for n in range(200)))
    given = {"source": [str(tmp_path / "qa.jsonl")], "tokenizer": "bytes", "cache": str(tmp_path / "cache")}
    config = before_data(Config.from_dict({"model": {"hf": str(model)}, "data": given}))
    alone, _ = as_trained(config, 1)
    assert (alone.batch.global_batch, alone.steps) != (config.batch.global_batch, config.steps)
    feed = build_feed(config, load_tokenizer("bytes"), 0, 1, Progress(), accepts=lambda _: True)
    assert (feed.config.batch, feed.config.steps) == (alone.batch, alone.steps)
    assert as_trained(config, 8)[0].batch.global_batch % 8 == 0
    one_row = dataclasses.replace(config, layout=Layout(dp_shard=1, tp=8))
    assert as_trained(one_row, 8)[0].batch == alone.batch  # tensor ranks share rows
    (tmp_path / "qa.jsonl").write_text('{"question": "a", "answer": ""}\n')
    same, why = as_trained(config, 1)
    assert same == config and "the data was not counted" in why and "the answer is empty" in why


@pytest.mark.follows("data.validation_fraction = …", "data.seq_len = …")
@pytest.mark.parametrize(
    ("form", "files"),
    [
        ("txt", [2000]),
        *((form, files) for form in ("txt", "jsonl") for files in ([900, 40, 60, 100, 100], [30, 2000], [120] * 30)),
    ],
)
def test_a_text_that_holds_out_no_row_names_a_value_that_does(tmp_path, files, form):
    """Documents of these lengths in bytes, in a file each, or as records of one file."""
    texts = ["ab" * (n // 2) for n in files]
    if form == "jsonl":
        (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        for i, text in enumerate(texts):
            (tmp_path / f"{i}.txt").write_text(text)

    def fed(**changes):
        data = {"source": [str(tmp_path)], "seq_len": 256, "validation_fraction": 0.01, "cache": str(tmp_path / "c")}
        return build_feed(Config.from_dict({"data": data | changes}), load_tokenizer("bytes"), 0, 1, Progress())

    feed = fed()
    (said,) = (note for note in feed.notes if note.startswith("no validation: no source holds out a row"))
    found = re.search(r": set data\.(\w+) = ([\d.]+)( to hold one out|, as long as what is held out)$", said)
    assert not feed.held_out and found, said
    assert fed(**{found[1]: json.loads(found[2])}).held_out


def test_tokens_of_files_that_no_row_reads_are_counted(tmp_path):
    parts = [np.arange(n, dtype=np.uint16) % 256 for n in (60, 60, 1000)]
    for folder, files in (("apart", parts), ("whole", [np.concatenate(parts)])):
        (tmp_path / folder).mkdir()
        for number, ids in enumerate(files):
            np.save(tmp_path / folder / f"{number}.npy", ids)

    def left(folder, seq_len):
        data = {"source": [str(tmp_path / folder)], "seq_len": seq_len, "cache": str(tmp_path / "c")}
        data |= {"validation_fraction": 0.0}
        feed = build_feed(Config.from_dict({"data": data}), load_tokenizer("bytes"), 0, 1, Progress())
        return [note for note in feed.notes if "are in no row" in note]

    (said,) = left("apart", 128)
    assert said.startswith("224 of the 1,120 tokens") and "128 tokens" in said and "(2 of 3 files are shorter" in said
    assert not left("whole", 128) and not left("apart", 20)


@pytest.mark.parametrize(
    ("from_step", "shares", "held"), [(6, "a 75.0%, .*; b 25.0%", ["a", "b"]), (5, "a 0.0%, .*; b 100.0%", ["b"])]
)
def test_only_a_stage_that_is_reached_decides_what_is_validated(tmp_path, from_step, shares, held):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name * 99}"}}\n' * 20)
    data = {"mixture": [{"source": [str(tmp_path / f"{name}.jsonl")], "weight": w} for name, w in (("a", 3), ("b", 1))]}
    data |= {"curriculum": [{"from_step": from_step, "weights": [0.0, 1.0]}], "cache": str(tmp_path / "c")}

    def fed(seq_len):
        config = {"data": data | {"seq_len": seq_len}, "steps": 6, "batch": {"global_batch": 4}}
        return build_feed(Config.from_dict(config), load_tokenizer("bytes"), 0, 1, Progress())

    feed = fed(64)
    assert re.search(f"2 sources: {shares}", feed.description) and [part.name for part in feed.held_out] == held
    (said,) = (note for note in fed(128).notes if note.startswith("no validation"))
    assert said.startswith(f"no validation: no source{' that the run ends with' * (held == ['b'])} holds out a row")
