"""The demo, as a newcomer meets it: the text before and after shows what was learnt, and the advice runs."""

from __future__ import annotations

import re
import subprocess
import tomllib

import pytest

from meshwright.data.formats import FARMYARD_FILE

pytestmark = pytest.mark.all

ANIMALS = tomllib.loads(FARMYARD_FILE.read_text(encoding="utf-8"))["animals"]
"""Animal -> its food, its sound."""


def is_true(sentence: str) -> bool:
    """Whether a sentence is of the grammar, and right about its animal."""
    found = re.fullmatch(r"(?:(?:The|My) \w+|Every) (\w+)(?: eats (\w+))?(?: and)?(?: says (\w+))?\.", sentence)
    return bool(found) and all(
        said in (None, known) for said, known in zip(found.groups()[1:], ANIMALS.get(found[1], ["", ""]), strict=True)
    )


def test_after_the_demo_its_model_says_true_sentences_and_what_it_advises_runs(meshwright, environment, tmp_path):
    here = tmp_path / "a folder"
    here.mkdir()
    words = ("--process.count=1", f"--data.cache={tmp_path / 'cache'}", "--logging.tensorboard=off")
    done = meshwright("train", *words, cwd=here)
    assert (done.status, done.err) == (0, "")
    before, after = re.findall(r"\nsample (?:before|after) training\n((?:  .*\n)+)", done.out)
    sentences = [line.strip() for line in after.splitlines()]
    assert len(sentences) == 3 and all(map(is_true, sentences)), sentences
    assert before.startswith("  The ") and not any(is_true(line.strip()) for line in before.splitlines())

    again, other = re.findall(r"meshwright generate .*", done.out)
    for line, expected in ((again, after.strip()), (other, "My sleepy owl says hoot.")):
        said = subprocess.run(["sh", "-c", line], cwd=here, env=environment, capture_output=True, text=True, check=True)
        assert [one.strip() for one in said.stdout.strip().splitlines()][: 1 + expected.count("\n")] == [
            one.strip() for one in expected.splitlines()
        ]
