"""What a user reads where several ranks refuse, or a run is resumed on another number of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from meshwright import ConfigError, Layout
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


def test_processes_that_a_run_keeps_are_named():
    config = Config()
    asked = replace(config, layout=Layout(dp_shard=4), process=replace(config.process, count=2))
    with pytest.raises(
        ConfigError, match=r"process.count = 2 is set, .* the run that is resumed: give --process.count too"
    ):
        process_count(asked)
    with pytest.raises(ConfigError, match="does not divide|is not") as refused:
        process_count(replace(config, layout=Layout(dp_shard=-1, tp=3)))
    assert "process.count" not in str(refused.value)
    assert process_count(replace(asked, process=config.process)) == 4
