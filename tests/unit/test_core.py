"""Units, dtypes and errors: what people read, and what names mean."""

from __future__ import annotations

import math
import pickle
import shlex
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.releases import installed

from meshwright.core.dtypes import bytes_text, canonical_dtype, count_text, dtype_bytes, duration_text, torch_dtype
from meshwright.core.errors import (
    ConfigError,
    IntegrityError,
    MeshwrightError,
    MissingExtraError,
    NonFiniteError,
    UnsupportedError,
    command,
    install_command,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1023.9 * 1024, "1 MiB"),
        (1010 * 2**20, "1010 MiB"),
        (139 * 2**30, "139 GiB"),
        (-1536, "-1.5 KiB"),
        (2**70, "1048576 PiB"),
    ],
)
def test_bytes(n, text):
    assert bytes_text(n) == text


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1500, "1.5K"),
        (999_999, "1M"),
        (135_000_000, "135M"),
        (1_240_000_000, "1.24B"),
        (7e13, "70T"),
    ],
)
def test_counts(n, text):
    assert count_text(n) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (3e-6, "3 us"),
        (0.0032, "3.2 ms"),
        (0.9996, "1 s"),
        (12.49, "12.5 s"),
        (59.99, "1 min"),
        (125, "2 min 5 s"),
        (3599.6, "1 h"),
        (11220, "3 h 7 min"),
        (187_200, "2 d 4 h"),
        (-125, "-2 min 5 s"),
        (math.inf, "inf s"),
    ],
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text


@given(st.integers(1, 10**15))
def test_counts_are_within_half_a_percent(n):
    text = count_text(n)
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1], 1)
    assert abs(float(text.rstrip("KMBT")) * scale - n) <= 0.005 * n


@pytest.mark.parametrize(
    ("canonical", "names", "size"),
    [
        ("float32", ("float32", "fp32"), 4),
        ("float16", ("float16", "fp16", "half"), 2),
        ("bfloat16", ("bfloat16", "bf16"), 2),
        ("float64", ("float64", "double", "fp64"), 8),
    ],
)
def test_dtype_names(canonical, names, size):
    import torch

    for name in names:
        assert canonical_dtype(name) == canonical
        assert dtype_bytes(name) == size == torch_dtype(name).itemsize
        assert torch_dtype(name) is getattr(torch, canonical)


@pytest.mark.parametrize("name", ["float8", "FP32", "int32", "", "auto"])
def test_unknown_dtype_lists_every_legal_name(name):
    with pytest.raises(ConfigError) as caught:
        canonical_dtype(name, where="techniques.precision.compute")
    text = str(caught.value)
    assert text.startswith(f"techniques.precision.compute = {name!r}")
    for legal in ("float32", "fp32", "float16", "fp16", "half", "bfloat16", "bf16", "float64", "double", "fp64"):
        assert legal in text


@pytest.mark.parametrize(
    ("error", "sibling", "status"),
    [
        (ConfigError("x"), ValueError, 2),
        (UnsupportedError("x"), NotImplementedError, 3),
        (IntegrityError("x"), RuntimeError, 1),
        (NonFiniteError("x"), ArithmeticError, 1),
        (MissingExtraError("TensorBoard", "tensorboard", "track"), ImportError, 2),
    ],
)
def test_every_error_is_ours_and_pythons(error, sibling, status):
    assert isinstance(error, MeshwrightError) and isinstance(error, sibling) and error.exit_status == status


@installed
def test_a_missing_extra_names_its_packages_and_no_index_is_asked_for_meshwright(monkeypatch):
    wanted = "pip install 'tensorboard>=2.21' 'wandb>=0.30'"
    assert wanted in str(MissingExtraError("TensorBoard", "tensorboard", "track"))
    listed = set(shlex.split(install_command("lm-eval", "eval").partition(" install ")[2]))
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert listed == {one for one in requirements["eval"] + requirements["hf"] if not one.startswith("meshwright")}
    assert install_command("pyarrow").endswith(" install pyarrow")

    def absent(name: str):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", absent)  # imported from a source tree that nobody installed
    assert install_command("lm-eval", "eval").endswith(" install lm-eval")


def test_advised_commands_run_where_they_are_pasted(tmp_path, monkeypatch):
    scripts, other = tmp_path / "my env" / "bin", tmp_path / "other"
    for folder in (scripts, other):
        folder.mkdir(parents=True)
    for program in ("python", "meshwright"):
        (scripts / program).write_text(f'#!/bin/sh\necho {program} "$@"\n')
        (scripts / program).chmod(0o755)
    (other / "meshwright").symlink_to("/bin/false")
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme="": str(scripts))

    def said(line: str) -> str:
        return subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout

    for path, folder, begins in (
        (f"{scripts}:/usr/bin:/bin", "/", "meshwright generate"),  # the environment is active
        ("/usr/bin:/bin", "/", f"'{scripts}/meshwright' generate".replace("'/", "'", 1)),
        (f"{other}:/usr/bin:/bin", tmp_path, "'my env/bin/meshwright' generate"),  # another's meshwright is found
    ):
        monkeypatch.setenv("PATH", path)
        monkeypatch.chdir(folder)
        line = command("generate", Path("my runs/x"), "--prompt", "a 'b' $c")
        assert line.startswith(begins) and said(line) == "meshwright generate my runs/x --prompt a 'b' $c\n"
        assert said(install_command("torchao")) == "python -m pip install torchao\n"
    (scripts / "meshwright").unlink()
    assert said(command("plan")) == "python -m meshwright plan\n"


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a"),
        UnsupportedError("b"),
        IntegrityError("c"),
        MeshwrightError("d"),
        MissingExtraError("BPE", "tokenizers", "hf"),
    ],
)
def test_every_error_travels_between_processes_as_what_it_is(error):
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error) and str(found) == str(error) and found.exit_status == error.exit_status
