"""Defaults beside weights from files are a fine-tuner's, and what anybody set wins."""

from __future__ import annotations

import dataclasses
import json
import pickle
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from meshwright.cli.arguments import open_model, read_config
from meshwright.core.config import all_set, from_dict, is_unset, to_dict, to_toml
from meshwright.core.dtypes import epochs_text
from meshwright.core.errors import ConfigError
from meshwright.training.config import Config
from meshwright.training.feed import refuse_contradictions
from meshwright.training.fine_tuning import (
    after_data,
    before_data,
    chosen,
    few_steps,
    length_follows,
    of_forecast,
)

LORA = {"adapters": {"rank": 4}}


@pytest.fixture
def model(tmp_path) -> Path:
    """A folder that holds weights, as far as its names tell."""
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def counted(config: Config, rows: int = 640, tasks: tuple[str, ...] = ("chat",)) -> Config:
    return after_data(config, rows, tasks, lambda message: f"<{message}>")


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
        ({}, ("chat",), (1e-5, 0.0, 2048, 60, "<Hello>")),
        (LORA, ("chat",), (2e-4, 0.0, 2048, 60, "<Hello>")),
        (LORA, ("alpaca",), (2e-4, 0.0, 2048, 60, "The")),
        (LORA, ("preference",), (5e-5, 0.0, 2048, 20, "<Hello>")),
        ({}, ("preference",), (1e-6, 0.0, 2048, 20, "<Hello>")),
        ({}, ("text",), (1e-5, 0.0, 2048, 20, "The")),
        (LORA | {"epochs": 0.5}, ("chat",), (2e-4, 0.0, 2048, 10, "<Hello>")),
        (LORA | {"batch": {"global_batch": 64}}, ("chat",), (2e-4, 0.0, 2048, 30, "<Hello>")),
        ({"optimizer": {"kind": "lion"}}, ("chat",), (2e-6, 0.0, 2048, 60, "<Hello>")),
        ({"optimizer": {"kind": "sgd"}}, ("chat",), (3e-3, 0.0, 2048, 60, "<Hello>")),
    ],
)
def test_what_nobody_set_is_chosen_by_what_is_trained(model, changes, tasks, expected):
    assert values(tuned(model, changes, tasks=tasks)) == pytest.approx(expected)


SET = {
    "optimizer": {"lr": 3e-3, "weight_decay": 0.1},
    "data": {"seq_len": 128},
    "steps": 200,
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
    assert text.startswith("optimizer.lr = 0.0002, optimizer.weight_decay = 0, data.seq_len = 2048, steps = 60 (3 e")


def test_without_weights_nothing_changes(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    for changes in ({}, {"model": {"hf": str(tmp_path)}}, {"model": {"size": "125M"}}):
        config = Config.from_dict(changes)
        made = after_data(before_data(config), 640, ("text",), str)
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
        place = (
            "taken as in training beside the model's weights: " if tunes else "from random weights, since none lie in"
        )
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


def test_few_steps_are_said_with_the_batch_that_makes_more(model):
    config = tuned(model, {"batch": {"global_batch": 32}}, 15)
    assert config.steps == 2
    words = few_steps(config, 2)
    assert words.startswith("2 steps of 32 rows change a model little") and words.endswith("batch.global_batch = 4")
    followed = tuned(model, {"batch": {"global_batch": 4}}, 15)
    assert followed.steps == 12 and few_steps(followed, 2) == ""
    assert few_steps(tuned(model, {"steps": 2}, 15), 2) == few_steps(tuned(model, {}, 6400), 2) == ""


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
