"""Packing: rows are what a plain loop over the tokens says they are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.errors import ConfigError
from meshwright.data.packing import IGNORE_INDEX, Stream


def make_split(lengths: list[int], name: str = "training") -> Stream:
    """Documents of these lengths (their end included), whose tokens are all different."""
    return Stream(name, np.arange(sum(lengths), dtype=np.uint16), np.cumsum([0, *lengths]))


def by_hand(lengths: list[int], index: int, seq_len: int) -> list[list[int]]:
    document = [d for d, length in enumerate(lengths) for _ in range(length)]
    tokens, labels, positions, ids = [], [], [], []
    for place in range(index * seq_len, (index + 1) * seq_len):
        continues = bool(tokens) and document[place] == document[place - 1]
        last = place + 1 == len(document) or document[place + 1] != document[place]
        positions.append(positions[-1] + 1 if continues else 0)
        ids.append(ids[-1] + (not continues) if ids else 0)
        tokens.append(place)
        labels.append(IGNORE_INDEX if last else place + 1)
    return [tokens, labels, positions, ids]


@pytest.mark.all
@settings(max_examples=200)
@given(lengths=st.lists(st.integers(2, 12), min_size=1, max_size=12), seq_len=st.integers(1, 30), data=st.data())
def test_rows_are_those_of_a_plain_loop(lengths, seq_len, data):
    split = make_split(lengths)
    if seq_len > sum(lengths):
        with pytest.raises(ConfigError):
            split.n_samples(seq_len)
        return
    n = split.n_samples(seq_len)
    assert n == sum(lengths) // seq_len
    indexes = data.draw(st.lists(st.integers(0, n - 1), max_size=6))
    rows = split.rows(np.array(indexes, dtype=np.int64), seq_len)
    assert list(rows) == ["tokens", "labels", "positions", "document_ids"]
    assert all(array.dtype == np.int64 and array.shape == (len(indexes), seq_len) for array in rows.values())
    for row, index in enumerate(indexes):
        assert [array[row].tolist() for array in rows.values()] == by_hand(lengths, index, seq_len)


def test_a_small_case_in_full():
    tokens, labels, positions, document_ids = (
        array[0] for array in make_split([3, 2, 4]).rows(np.array([0]), 7).values()
    )
    assert tokens.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert labels.tolist() == [1, 2, -100, 4, -100, 6, 7]
    assert positions.tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert document_ids.tolist() == [0, 0, 0, 1, 1, 2, 2]


def test_too_long_a_sequence_is_refused_with_numbers():
    with pytest.raises(
        ConfigError, match=r"training split has 9 tokens in 3 documents.*seq_len = 10. Legal here: seq_len from 1 to 9"
    ):
        make_split([3, 2, 4]).n_samples(10)
    with pytest.raises(
        ConfigError, match=r"validation split has 0 tokens.*It is empty.*raise data.validation_fraction"
    ):
        make_split([], "validation").n_samples(4)
    with pytest.raises(ConfigError, match="seq_len = 0: a sample has at least 1 token"):
        make_split([3]).n_samples(0)


@pytest.mark.parametrize("index", [-1, 4])
def test_a_sample_that_is_not_there_is_no_sample(index):
    with pytest.raises(IndexError, match="which has samples 0 to 3"):
        make_split([3, 2, 4]).rows(np.array([index]), 2)
