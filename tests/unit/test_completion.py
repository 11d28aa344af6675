"""Shells complete the words that the command takes: asked of the function, and of bash, zsh and fish themselves."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import meshwright
from meshwright.cli import main as cli
from meshwright.cli.completion import SCRIPTS, candidates, place_of, split
from meshwright.core.config import public_keys
from meshwright.training.config import Config

HOW = "on this machine (scripts/test_programs.py install gets it)"
AXES = ["--layout.cp=", "--layout.dp_replicate=", "--layout.dp_shard=", "--layout.ep=", "--layout.pp=", "--layout.tp="]


def offered(line: str) -> list[str]:
    return candidates(split(line)[1:], cli.VERBS)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("meshwright ", sorted([*cli.VERBS, "--help", "--version"])),
        ("meshwright tr", ["train"]),
        ("meshwright train --layout.", AXES),
        ("meshwright train --la", AXES),
        ("meshwright train --layout.t", ["--layout.tp="]),
        ("meshwright train c.toml --layout.dp-r", ["--layout.dp_replicate="]),
        ("meshwright train --schedule.kind=c", ["--schedule.kind=constant", "--schedule.kind=cosine"]),
        ("meshwright train --process.audit=", ["--process.audit=false", "--process.audit=true"]),
        ("meshwright train --model.size=d", ["--model.size=debug", "--model.size=demo"]),
        ("meshwright train --help lay", ["layout"]),
        ("meshwright launch --slurm.part", ["--slurm.partition="]),
        ("meshwright convert r --to ", ["adapter", "hf", "merged"]),
        ("meshwright compare a b --by ", ["seconds", "steps", "tokens"]),
        ("meshwright compare a b --ht", ["--html"]),
        ("meshwright completion ", ["--install", "bash", "fish", "zsh"]),
        ("meshwright nothing ", []),
        ('meshwright train "--la', AXES),
    ],
)
def test_what_may_stand_there_is_offered(line, words):
    assert offered(line) == words


def test_every_key_can_be_reached_by_its_beginnings():
    """From ``--`` on, each word that goes on leads further, until all keys were offered, and nothing else."""
    found, open_words = set(), ["--"]
    while open_words:
        for word in offered(f"meshwright verify {open_words.pop()}"):
            (open_words if word.endswith(".") else found.add(word) or []).append(word)
    keys = {f"--{key.partition('[]')[0]}=" for key in public_keys(Config)}
    assert {word for word in found if word.endswith("=")} == keys


def test_runs_and_files_are_offered_where_a_verb_takes_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/demo-1", "runs/demo-2", "runs/notes", "other/deep-1", "texts"):
        Path(name).mkdir(parents=True)
    for name in ("runs/demo-1", "runs/demo-2", "other/deep-1"):
        (Path(name) / "config.toml").touch()
    Path("a.toml").touch()
    Path("a.txt").touch()
    os.utime("runs/demo-1", (1, 1))
    assert offered("meshwright compare ") == ["runs/demo-2", "runs/demo-1", "other/", "runs/", "texts/"]
    assert offered("meshwright compare runs/d") == ["runs/demo-2", "runs/demo-1"]
    assert offered("meshwright generate other/") == ["other/deep-1"]
    assert offered("meshwright train a") == ["a.toml"]
    assert offered("meshwright inspect a") == ["a.toml", "a.txt"]
    assert offered("meshwright train --data.source=a") == ["--data.source=a.toml", "--data.source=a.txt"]
    assert offered("meshwright train nowhere/") == []


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """A home of its own, and a ``meshwright`` in the path that is this checkout."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "meshwright"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m meshwright "$@"\n')
    command.chmod(0o755)
    source = str(Path(meshwright.__file__).parents[1])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return kept | {"HOME": str(tmp_path), "PATH": path, "PYTHONPATH": source, "TERM": "dumb", "LC_ALL": "C.UTF-8"}


def asked(shell: str, program: str, environment: dict[str, str], *flags: str) -> str:
    done = subprocess.run(
        [shell, *flags, "-c", program],
        env=environment,
        cwd=environment["HOME"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


BASH = """
source <(meshwright completion bash)
try() {
    COMP_LINE="$1" COMP_POINT=${#1} COMP_TYPE=9
    shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
    _meshwright; printf '%s ' "${COMPREPLY[@]}"; echo
}
try 'meshwright tra' meshwright tra
try 'meshwright train --layout.t' meshwright train --layout.t
try 'meshwright train --schedule.kind=w' meshwright train --schedule.kind = w
try 'meshwright train --schedule.kind=' meshwright train --schedule.kind =
complete -p meshwright
"""


@pytest.mark.all
def test_bash_completes(environment):
    """With = among the word breaks, as bash has it, a reply holds only what stands behind the =."""
    lines = asked("bash", BASH, environment).splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["train"],
        ["--layout.tp="],
        ["wsd"],
        ["constant", "cosine", "inverse_sqrt", "linear", "wsd"],
    ]
    assert "-F _meshwright meshwright" in lines[4]


FISH = """
meshwright completion fish | source
complete -C 'meshwright tra'
complete -C 'meshwright train --layout.t'
complete -C 'meshwright train --schedule.kind=w'
"""


@pytest.mark.all
@pytest.mark.skipif(shutil.which("fish") is None, reason=f"no fish {HOW}")
def test_fish_completes(environment):
    lines = asked("fish", FISH, environment).split()
    assert lines == ["train", "--layout.tp=", "--schedule.kind=wsd"]


@pytest.mark.all
@pytest.mark.skipif(shutil.which("zsh") is None, reason=f"no zsh {HOW}")
def test_zsh_completes(environment):
    """compadd is replaced by one that prints: a real line editor needs a terminal."""
    program = """
    compdef() { print -r -- "compdef $*" }
    source =(meshwright completion zsh)
    compadd() { while [[ "$1" != -- ]]; do shift; done; shift; print -r -- "$@" }
    words=(meshwright tra) CURRENT=2 _meshwright
    words=(meshwright train --layout.t) CURRENT=3 _meshwright
    words=(meshwright train --schedule.kind=w) CURRENT=3 _meshwright
    words=(meshwright completion '') CURRENT=3 _meshwright
    """
    lines = asked("zsh", program, environment, "-f").splitlines()
    assert lines[0] == "compdef _meshwright meshwright"
    assert [line.split() for line in lines[1:]] == [
        ["train"],
        ["--layout.tp="],
        ["--schedule.kind=wsd"],
        ["--install", "bash", "fish", "zsh"],
    ]


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_script_is_installed_where_the_shell_looks_and_said_how_to_undo_it(shell, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    for words in (["--install"], [shell, "--install"]):
        assert cli.main(["completion", *words]) == 0
        told = capsys.readouterr().out
        path = place_of(shell)
        assert path.is_relative_to(tmp_path) and path.read_text() == SCRIPTS[shell]
        assert f"wrote {path}" in told and f"to undo: rm {path}" in told
    path.write_text("mine")
    assert cli.main(["completion", shell, "--install"]) == 2 and path.read_text() == "mine"
    assert "was not written by meshwright" in capsys.readouterr().err
    assert cli.main(["completion", shell]) == 0 and capsys.readouterr().out == SCRIPTS[shell]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "needs a shell, one of bash, zsh, fish"),
        (["--instal"], "does not know '--instal'. Did you mean '--install'?"),
        (["bsh"], "Did you mean 'bash'?"),
        (["--install"], "'tcsh' (from $SHELL) is no shell that can be completed"),
        (["bash", "zsh"], "takes one shell, not bash zsh"),
    ],
)
def test_other_shells_are_refused_in_a_sentence(words, says, monkeypatch, capsys):
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert cli.main(["completion", *words]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


class Terminal:
    """A shell in a terminal of its own, to which keys are sent and whose answers are waited for."""

    def __init__(self, words: list[str], environment: dict[str, str]):
        pid, self._file = pty.fork()
        if pid == 0:
            os.chdir(environment["HOME"])
            os.execvpe(words[0], words, environment)
        self.pid = pid

    def type(self, keys: str, answer: str) -> None:
        """Send keys, and wait until the terminal shows the answer."""
        os.write(self._file, keys.encode())
        shown, end = "", time.monotonic() + 60
        while answer not in shown:
            assert select.select([self._file], [], [], max(0.0, end - time.monotonic()))[0], shown
            shown += os.read(self._file, 1 << 16).decode(errors="replace")

    def close(self) -> None:
        os.close(self._file)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@pytest.mark.first
@pytest.mark.parametrize(
    ("words", "setup"),
    [
        (["bash", "--norc", "--noprofile"], "source <(meshwright completion bash)"),
        (["zsh", "-f"], "autoload -Uz compinit; compinit -u -D; source =(meshwright completion zsh)"),
    ],
    ids=["bash", "zsh"],
)
def test_a_terminal_goes_on_where_the_user_presses_tab(environment, words, setup):
    if shutil.which(words[0]) is None:
        pytest.skip(f"no {words[0]} {HOW}")
    terminal = Terminal(words, environment | {"PS1": ""})
    try:
        terminal.type(f"{setup}; echo rea''dy\n", "ready")
        for typed, answer in (("tra", "in "), ("--layout.t", "p="), ("4 --schedule.kind=w", "sd ")):
            terminal.type(f"{'meshwright ' * (typed == 'tra')}{typed}\t", f"{typed}{answer}")
    finally:
        terminal.close()
