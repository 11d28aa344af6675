"""What the tests remember on disk is known by its content: nothing is read that other sources, or other questions,
had given.
"""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from support import families, remembered
from support.oracle import floors, oracle
from support.problems import FSDP2, TIED, UNTIED, Problem
from support.remembered import Store, digest_of_sources, identity, is_of_one_process, key_of
from torch import nn

from meshwright.introspection.source import as_module


def house(root: Path, text: str) -> Path:
    (root / "src" / "meshwright" / "models").mkdir(parents=True, exist_ok=True)
    (root / "src" / "meshwright" / "models" / "decoder.py").write_text(text)
    return root


def answered(root: Path, cache: Path, text: str) -> str:
    """What a store says that is asked for what the sources say."""
    sources = remembered.digest_of_sources(("models",), house(root, text))
    return Store("oracle", sources, cache).get(b"the same question", lambda: text)


def test_a_value_is_computed_once_and_again_when_a_source_changes(tmp_path):
    said = [answered(tmp_path / "house", tmp_path / "cache", text) for text in ("x = 1", "x = 2")]
    assert said == ["x = 1", "x = 2"]
    store = Store("oracle", digest_of_sources(("models",), house(tmp_path / "house", "x = 2")), tmp_path / "cache")
    assert store.get(b"the same question", lambda: pytest.fail("computed again")) == "x = 2"
    assert store.get(b"another question", lambda: 7) == 7


@pytest.mark.kills("oracle", mutant="read from a stale cache")
def test_an_oracle_of_other_sources_is_caught(tmp_path):
    """The mutant knows values by their question alone."""
    with patch.object(remembered, "digest_of_sources", lambda folders, house: "always the same"):
        said = [answered(tmp_path / "house", tmp_path / "cache", text) for text in ("x = 1", "x = 2")]
    assert said == ["x = 1", "x = 1"], "the first test of this file would fail"


def test_the_digest_is_of_every_file_of_the_folders(tmp_path):
    before = digest_of_sources(("models",), house(tmp_path, "x = 1"))
    for place in ("src/meshwright/models/deep/other.py", "tests/support/oracle.py"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("y = 1")
        after = digest_of_sources(("models",), tmp_path)
        assert after != before
        before = after
    (tmp_path / "src/meshwright/data").mkdir()
    (tmp_path / "src/meshwright/data/other.py").write_text("y = 1")
    assert digest_of_sources(("models",), tmp_path) == before, "data has no part in a model"


def test_what_raises_or_cannot_travel_is_not_kept(tmp_path):
    store, tries = Store("any", "0" * 16, tmp_path), []

    def fails():
        tries.append(1)
        raise ValueError("a reason")

    for _ in range(2):
        with pytest.raises(ValueError, match="a reason"):
            store.get(b"question", fails)
    unpicklable = lambda: tries  # noqa: E731
    assert len(tries) == 2 and store.get(b"other", lambda: unpicklable) is unpicklable
    assert store.get(b"other", lambda: 3) == 3


def test_a_file_that_was_cut_short_is_written_again(tmp_path):
    store = Store("any", "0" * 16, tmp_path)
    store.get(b"question", lambda: list(range(100)))
    (path,) = [path for path in store.folder.iterdir() if path.suffix != ".lock"]
    path.write_bytes(path.read_bytes()[:20])
    assert store.get(b"question", lambda: 5) == 5 and pickle.loads(path.read_bytes()) == 5


def test_only_what_one_process_computes_is_kept():
    assert is_of_one_process(oracle) and is_of_one_process(partial(floors)) and not is_of_one_process(key_of)


def test_other_problems_and_other_code_of_the_tests_have_other_keys():
    keys = {
        key_of((oracle, (problem,)))
        for problem in (Problem(), Problem(TIED), Problem(max_norm=None), Problem(dtype="float32"))
    }
    assert len(keys) == 4 and key_of((oracle, (Problem(),))) in keys
    own = Path(families.__file__).read_bytes()
    assert own in key_of(partial(families.on_cpu, seed=2)) and own not in key_of(FSDP2)


def test_models_are_one_only_where_modules_parameters_and_config_are():
    one = as_module(UNTIED)
    assert identity(one) == identity(as_module(UNTIED)) != identity(as_module(TIED))
    frozen = as_module(UNTIED)
    next(frozen.parameters()).requires_grad_(False)
    changed = as_module(UNTIED)
    changed.forward = lambda *args: None  # type: ignore[method-assign]
    assert identity(frozen) != identity(one)
    assert identity(changed) is None and identity(nn.Linear(2, 2)) is None, "they may hold anything"
    assert identity(as_module(UNTIED).to(torch.float64)) != identity(one)
