"""What a user reads where several ranks refuse, or a run is resumed on another number of processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from meshwright import ConfigError, Layout
from meshwright.cli.arguments import read_config
from meshwright.core.config import to_toml
from meshwright.training.config import Config
from meshwright.training.launch import process_count

SCRIPT = """
from meshwright.core.errors import {kind}
def refuse():
    raise {kind}("layout.tp = 3 does not divide 4 heads. " + "Set layout.tp = 2. " * 9)
refuse()
"""


def printed(tmp_path, kind: str, **ranks: str) -> str:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(kind=kind))
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, script], env=environment | ranks, capture_output=True, text=True)
    assert done.returncode == 1
    return done.stderr


def test_a_refusal_of_several_ranks_is_read_once(tmp_path):
    first = printed(tmp_path, "UnsupportedError", RANK="0", WORLD_SIZE="4")
    assert "Traceback" not in first and first.startswith("UnsupportedError: layout.tp = 3") and "Set" in first[-400:]
    assert "train.py:4, 'raise UnsupportedError(" in first
    second = printed(tmp_path, "UnsupportedError", RANK="1", WORLD_SIZE="4")
    assert second.startswith("rank 1: UnsupportedError: layout.tp = 3") and len(second) < 120


def test_what_one_rank_alone_may_meet_is_read_whole(tmp_path):
    text = printed(tmp_path, "IntegrityError", RANK="1", WORLD_SIZE="4")
    assert text.startswith("rank 1: IntegrityError") and text.count("Set layout.tp = 2.") > 9 and "train.py" in text


def test_a_script_of_one_process_keeps_its_traceback(tmp_path):
    assert "Traceback" in printed(tmp_path, "UnsupportedError")


def test_processes_that_are_set_are_named():
    config = Config()
    asked = replace(config, layout=Layout(dp_shard=4), process=replace(config.process, count=2))
    with pytest.raises(ConfigError, match="process.count = 2 is set: make it --process.count=4"):
        process_count(asked)
    assert process_count(replace(config, layout=Layout(dp_shard=-1, tp=3))) == 3
    assert process_count(replace(asked, process=config.process)) == 4


@pytest.mark.parametrize(
    ("kept", "launcher", "flags", "says"),
    [
        ({"count": 2}, 1, ["--layout.dp_shard=4"], "process.count = 2 is kept in the run"),
        ({"count": 2}, 1, ["--layout.tp=4"], "process.count = 2 is kept in the run"),
        ({"count": 2, "dp_shard": 4}, 1, [], "process.count = 2 is kept in the run"),
        ({"count": 2, "dp_shard": 2}, 1, ["--process.count=4"], "layout.dp_shard = 2 is kept"),
        ({"count": 2, "dp_shard": 2}, 4, [], "layout.dp_shard = 2 is kept"),
        ({"dp_shard": 1, "dp_replicate": 2}, 3, [], "layout.dp_replicate = 2 is kept"),
        ({"tp": 2, "dp_shard": 1}, 1, ["--process.count=1"], "layout.tp = 2 is kept"),
        ({"pp": 2, "cp": 2, "dp_shard": 1}, 6, [], "layout.pp = 2, layout.cp = 2 are kept"),
        ({"count": 4, "dp_shard": 2, "tp": 2}, 1, ["--process.count=6"], "layout.dp_shard = 2, layout.tp = 2 are kept"),
    ],
)
def test_the_key_that_a_run_keeps_is_named_and_the_advice_works(tmp_path, monkeypatch, kept, launcher, flags, says):
    config, sizes = Config(), {axis: size for axis, size in kept.items() if axis != "count"}
    process = replace(config.process, count=kept.get("count", 0))
    (tmp_path / "config.toml").write_text(to_toml(replace(config, layout=Layout(**sizes), process=process)))
    if launcher > 1:
        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": launcher, "LOCAL_WORLD_SIZE": launcher}.items():
            monkeypatch.setenv(name, str(value))

    def resumed(*more: str) -> int:
        return process_count(read_config([str(tmp_path), *flags, *more], prog="meshwright train"))

    with pytest.raises(ConfigError) as refused:
        resumed()
    said = str(refused.value)
    assert says in said and f"kept in the run {tmp_path}" in said and ("count" not in kept or "process.count" in said)
    advice = re.findall(r"--(?:process|layout)\.\w+=-?\d+", said.partition(" add ")[2])
    assert advice and resumed(*advice) in (1, 2, 3, 4, 6, 8)


def test_a_run_is_not_continued_by_a_flag_of_another_trainer():
    with pytest.raises(ConfigError, match="--resume: a run is continued by the name of its folder.* train RUN"):
        read_config(["--resume=runs/a"], prog="meshwright train")
