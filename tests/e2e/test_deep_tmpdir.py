"""A deep TMPDIR: the path of a Unix socket is short, and a run must not depend on it."""

import os

import pytest

pytestmark = pytest.mark.all


def test_a_run_starts_under_a_deep_temporary_folder(meshwright, flags, tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(deep))
    done = meshwright("train", *flags({"process.count": 2, "steps": 1, "sample.tokens": 0}))
    assert done.status == 0, done.err
    assert os.listdir(deep) == []
