"""Units, dtypes and errors: what people read, and what names mean."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.core.dtypes import canonical_dtype, dtype_bytes, torch_dtype
from meshwright.core.errors import (
    ConfigError,
    IntegrityError,
    MeshwrightError,
    MissingExtraError,
    NonFiniteError,
    UnsupportedError,
)
from meshwright.core.units import bytes_text, count_text, duration_text


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


def test_a_missing_extra_says_how_to_install_it():
    assert "pip install 'meshwright[track]'" in str(MissingExtraError("TensorBoard", "tensorboard", "track"))


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
