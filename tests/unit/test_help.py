"""Help is written from the verbs and the config themselves: every verb begins with its usage, every key is there once,
a section alone has its own keys, and a name that is none is answered with the nearest.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from importlib import import_module

import pytest

from meshwright.cli import main as cli
from meshwright.core.config import field_doc, keys_text, public_keys
from meshwright.core.config.flags import key_kind, legal_words
from meshwright.core.errors import ConfigError
from meshwright.training.config import Config
from meshwright.training.slurm import LaunchConfig


def helped(capsys, *words: str) -> str:
    assert cli.main(list(words)) == 0
    return capsys.readouterr().out


def keys_in(text: str) -> list[str]:
    found = re.findall(r"^  (?:--([\w.]+) |([\w.]+\[\]\S+) = )\S", text, re.MULTILINE)
    return [flag or of_table for flag, of_table in found]


@pytest.mark.first
@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_begins_with_its_usage_and_says_what_it_does(verb, capsys):
    for flag in ("--help", "-h"):
        first, empty, does, *_ = helped(capsys, verb, flag).splitlines()
        assert first.startswith(f"usage: meshwright {verb} ") and empty == ""
        assert does[0].isupper() and "``" not in does


@pytest.mark.parametrize("verb", [verb for verb in cli.VERBS if verb not in ("train", "launch")])
def test_help_names_every_flag_that_a_verb_reads(verb, capsys):
    module = import_module(cli.VERBS[verb][0].partition(":")[0])
    read = re.findall(r"""take_(?:option|flag)\(\w+, "(--[\w-]+)\"""", inspect.getsource(module))
    told = helped(capsys, verb, "--help")
    assert [flag for flag in read if flag not in told] == []


def test_train_names_what_it_takes(capsys):
    assert helped(capsys, "train", "--help").startswith(
        "usage: meshwright train [CONFIG.toml | RUN] [--key=value …]\n\nTrain a model from a config"
    )
    assert helped(capsys, "--help").startswith("usage: meshwright VERB [CONFIG.toml | RUN] [--key=value …]\n")


@pytest.mark.parametrize(("verb", "cls"), [("train", Config), ("launch", LaunchConfig)])
def test_the_keys_of_help_are_those_of_the_config(verb, cls, capsys):
    found = keys_in(helped(capsys, verb, "--help").partition("keys of the run\n")[2])
    wanted = public_keys(cls)
    flags = [key for key in wanted if "[]" not in key]
    arrays = {key.partition("[]")[0] for key in wanted if "[]" in key}
    assert sorted(found) == sorted([*flags, *arrays, *(key for key in wanted if "[]" in key)])


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["--help", "layout"], {f"layout.{axis}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}),
        (["--help=layout."], {f"layout.{axis}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}),
        (["--help", "--layout.tp"], {"layout.tp"}),
        (["--help", "schedule.warm"], {"schedule.warmup_steps", "schedule.warmup_tokens"}),
        (["--help", "lr"], {"optimizer.lr"}),
        (["--help", "dp-shard"], {"layout.dp_shard"}),
        (
            ["--help", "optimizer.overrides"],
            {
                "optimizer.overrides",
                *(f"optimizer.overrides[].{name}" for name in ("pattern", "lr_scale", "weight_decay")),
            },
        ),
    ],
)
def test_a_section_or_a_key_is_printed_alone(words, keys, capsys):
    text = helped(capsys, "train", *words)
    assert set(keys_in(text)) == keys and text.startswith("usage: meshwright train ")
    assert len(text.splitlines()) < 40


@pytest.mark.parametrize(
    ("name", "near"), [("layuot", "layout"), ("batch_size", "batch"), ("schedule.knd", "schedule.kind")]
)
def test_a_section_that_is_none_is_answered_with_the_nearest(name, near, capsys):
    assert cli.main(["train", "--help", name]) == 2
    error = capsys.readouterr().err
    assert f"Did you mean '{near}'?" in error and "Sections: model, adapters" in error and error.count("\n") == 1


def test_a_file_in_front_shows_its_values_beside_the_defaults(tmp_path, capsys):
    (tmp_path / "c.toml").write_text("[layout]\ntp = 4\n")
    text = " ".join(helped(capsys, "train", str(tmp_path / "c.toml"), "--help", "layout").split())
    assert "(here: 4; default: 1)" in text and text.count("here:") == 1
    assert cli.main(["train", str(tmp_path / "none.toml"), "--help", "layout"]) == 2
    assert "no such file" in capsys.readouterr().err


def test_no_word_is_broken_and_no_line_too_long_at_any_width():
    for width in (40, 80, 100):
        text = keys_text(Config, width=width)
        words = {word for key in public_keys(Config) for word in field_doc(Config, key).replace("``", "").split()}
        assert words <= set(text.split())
        docs = [line for line in text.splitlines() if line.startswith("      ")]
        assert all(len(line) <= width or " " not in line.strip() for line in docs)


def test_a_type_is_told_by_what_may_be_written():
    kinds = {
        "steps": "N",
        "epochs": "NUMBER|none",
        "out": "TEXT",
        "data.source": "TEXT …",
        "process.audit": "true|false",
    }
    text = keys_text(Config)
    assert all(f"--{key} {kind}\n" in text for key, kind in kinds.items())
    assert key_kind(int | None) == "N|none" and legal_words(bool | None) == ("true", "false", "none")


def test_a_tree_of_ones_own_is_helped_too():
    @dataclasses.dataclass(frozen=True)
    class Own:
        size: int = 3

    assert keys_text(Own) == "keys of the run\n  --size N\n      (default: 3)"
    with pytest.raises(ConfigError, match="no section and no key"):
        keys_text(Own, wanted="nothing")
