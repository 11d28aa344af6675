"""The command line: verbs, exit statuses, and what stands before the flags."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys

import pytest

from meshwright import Layout, __version__
from meshwright.cli import main as cli
from meshwright.cli.arguments import read_config
from meshwright.core.config import to_toml
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.training.config import Config


def read(*argv: str) -> Config:
    return read_config(list(argv), prog="meshwright train")


@pytest.fixture
def verb(monkeypatch):
    """Makes ``meshwright try`` call a function."""

    def install(function):
        monkeypatch.setitem(cli.VERBS, "try", (f"{__name__}:_verb", "for this test"))
        monkeypatch.setitem(globals(), "_verb", function)

    return install


def test_no_words_and_help_list_the_verbs(capsys):
    for argv in ([], ["--help"], ["-h"]):
        assert cli.main(argv) == 0
        assert all(f"  {name}" in capsys.readouterr().out for name in ["train"])


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"meshwright {__version__}\n"


def test_unknown_verb_is_refused_with_the_nearest(capsys):
    assert cli.main(["trian"]) == 2
    error = capsys.readouterr().err
    assert "unknown verb 'trian'. Did you mean 'train'?" in error and "inspect" in error


@pytest.mark.parametrize("name", cli.VERBS)
def test_every_verb_has_its_module(name):
    module, _, function = cli.VERBS[name][0].partition(":")
    assert importlib.util.find_spec(module) is not None
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize(
    ("error", "status"), [(ConfigError("no"), 2), (UnsupportedError("no"), 3), (KeyboardInterrupt(), 130)]
)
def test_errors_become_a_sentence_and_a_status(verb, capsys, monkeypatch, error, status):
    def fail(argv):
        raise error

    verb(fail)
    monkeypatch.delenv("MESHWRIGHT_DEBUG", raising=False)
    assert cli.main(["try"]) == status
    text = capsys.readouterr().err
    assert text.startswith("meshwright: ") and "Traceback" not in text
    if status != 130:
        monkeypatch.setenv("MESHWRIGHT_DEBUG", "1")
        assert cli.main(["try"]) == status
        assert "Traceback" in capsys.readouterr().err


def test_the_verb_gets_its_words_and_gives_its_status(verb):
    seen = []

    def run(argv):
        seen.append(argv)
        return 7

    verb(run)
    assert cli.main(["try", "a", "--b=c"]) == 7 and seen == [["a", "--b=c"]]


def test_an_error_that_is_not_ours_keeps_its_traceback(verb):
    def fail(argv):
        raise ZeroDivisionError

    verb(fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["try"])


def test_flags_stand_over_the_file_and_the_file_over_the_defaults(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("steps = 5\nseed = 3\n")
    config = read(str(path), "--steps=6")
    assert (config.steps, config.seed, config.name, config.run) == (6, 3, Config().name, "")


def test_a_flag_mends_a_value_of_the_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("steps = 0\n")
    assert read(str(path), "--steps=6").steps == 6
    with pytest.raises(ConfigError, match="steps = 0"):
        read(str(path))


def test_a_run_folder_brings_its_own_config_and_is_continued(tmp_path):
    (tmp_path / "config.toml").write_text(to_toml(Config(steps=9, run="elsewhere")))
    config = read(str(tmp_path))
    assert (config.steps, config.run) == (9, str(tmp_path))


@pytest.mark.parametrize("name", ["none.toml", "."])
def test_what_is_neither_a_config_nor_a_run_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=r"no such file|config\.toml"):
        read(str(tmp_path / name))


def test_the_words_behind_torchruns_two_dashes(capsys):
    """torchrun takes ``--run`` for its own ``--run-path``, wherever it stands, but for two dashes before it."""
    from torch.distributed.run import get_args_parser

    with pytest.raises(SystemExit):
        get_args_parser().parse_args(["-m", "meshwright", "train", "--run=R"])
    assert "ambiguous option: --run=R" in capsys.readouterr().err
    read_by_torchrun = get_args_parser().parse_args(["-m", "meshwright", "--", "train", "--run=R"])
    assert read_by_torchrun.training_script == "meshwright" and read_by_torchrun.training_script_args[-2:] == [
        "train",
        "--run=R",
    ]
    assert cli.main(["--", "--version"]) == 0 and capsys.readouterr().out.startswith("meshwright ")


@pytest.mark.parametrize("words", ["--help", "train --help"])
def test_a_reader_that_has_seen_enough_is_no_error(words):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *words.split()], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("words", ["--help", "train --help layout", "train --steps=0"])
def test_a_terminal_with_few_characters_is_served_too(words):
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *words.split()],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == (2 if "=" in words else 0) and "Traceback" not in done.stderr
    assert "meshwright" in done.stdout + done.stderr


def test_a_suggestion_is_close_or_is_not_made():
    for word, told in (("--lora.rank=1", False), ("--optimizer.lrr=1", True), ("--layouts.tp=2", True)):
        with pytest.raises(ConfigError) as error:
            read(word)
        assert ("Did you mean" in str(error.value)) is told


def test_sizes_are_told_once():
    with pytest.raises(ConfigError, match="^layout: tp = 3 does not divide the world size 4"):
        Layout(tp=3).resolve(4)
    with pytest.raises(ConfigError, match=r"^layout: dp_shard=2 \* tp=3 = 6 does not divide the world size 4"):
        Layout(dp_shard=2, tp=3).resolve(4)
