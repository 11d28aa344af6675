"""Streams: the samples of the documents in order, without end, whoever asks and however often."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from meshwright.core.errors import ConfigError
from meshwright.data import Loader, Stream
from meshwright.data.building import TokenisingRecipe
from meshwright.data.loader import StreamedSamples
from meshwright.data.options import SourceOptions
from meshwright.data.packing import IGNORE_INDEX, RowEnds
from meshwright.data.scan import list_sources
from meshwright.data.tokenizers import ByteTokenizer

SEQ = 8
TEXTS = ["".join(chr(97 + (i + j) % 26) for j in range(3 + 7 * i % 29)) for i in range(150)]


def streamed(path: Path, say=print, **options) -> StreamedSamples:
    options = SourceOptions((str(path),), streaming=True, **options)
    return StreamedSamples(
        TokenisingRecipe(list_sources(options.source, options.format), options, ByteTokenizer(), 0.0), SEQ, say
    )


@pytest.fixture
def lines(tmp_path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture
def talks(tmp_path) -> Path:
    path = tmp_path / "b.jsonl"
    path.write_text(
        "".join(
            json.dumps({"prompt": "?" * (1 + i % 3), "completion": str(i % 7) * (1 + i % 4)}) + "\n" for i in range(100)
        )
    )
    return path


def endless(n_tokens: int) -> Stream:
    """The texts again and again, as one stream."""
    ids = [np.append(ByteTokenizer().encode(text), 256) for text in TEXTS]
    times = n_tokens // sum(map(len, ids)) + 2
    return Stream("training", np.concatenate(ids * times), np.cumsum([0, *[len(i) for i in ids] * times]))


def test_rows_are_those_of_the_documents_end_to_end_over_epochs(lines):
    n = 1200
    expected = endless(n * SEQ).rows(np.arange(n), SEQ)
    assert n * SEQ > 3 * sum(len(text) + 1 for text in TEXTS), "several epochs, and windows that cut documents"
    samples = streamed(lines)
    found = [samples.rows(np.arange(i, i + 25)) for i in range(0, n, 25)]
    for key, values in expected.items():
        assert (np.concatenate([rows[key] for rows in found]) == values).all(), key


def test_a_stream_goes_back_and_far_ahead_and_says_what_it_passes_over(lines):
    said: list[str] = []
    samples = streamed(lines, said.append)
    ahead = samples.rows(np.array([2000]))
    assert (
        said[0] == "the source is streamed and cannot seek: passing over 2000 samples"
        and "passed over 2000 samples in" in said[1]
    )
    first = samples.rows(np.array([3, 0]))
    expected = endless(2001 * SEQ).rows(np.array([2000, 3, 0]), SEQ)
    for key, values in expected.items():
        assert (np.concatenate([ahead[key], first[key]]) == values).all()


def test_many_readers_get_what_one_gets(lines):
    alone, shared = streamed(lines), streamed(lines)
    found: dict[int, np.ndarray] = {}

    def read(indexes):
        for index in indexes:
            found[index] = shared.rows(np.array([index]))["tokens"][0]

    threads = [threading.Thread(target=read, args=(range(k, 400, 4),)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    expected = alone.rows(np.arange(400))["tokens"]
    assert all((found[i] == expected[i]).all() for i in range(400))


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_deal_a_stream_among_them(lines, world):
    loaders = [Loader(streamed(lines), 4, rank, world, workers=1) for rank in range(world)]
    seen = [row for _ in range(30) for loader in loaders for row in next(loader)["tokens"].tolist()]
    for loader in loaders:
        loader.close()
    assert seen == endless(120 * SEQ).rows(np.arange(120), SEQ)["tokens"].tolist()


def test_conversations_stay_whole_and_each_comes_once_per_epoch(talks):
    samples, answers, n = streamed(talks), [], 0
    while len(answers) < 200:
        rows = samples.rows(np.array([n]))
        tokens, labels, documents = (rows[key][0] for key in ("tokens", "labels", "document_ids"))
        for document in np.unique(documents):
            mine = documents == document
            if (labels[mine] != IGNORE_INDEX).any():
                answers.append(ByteTokenizer().decode(tokens[mine]))
        n += 1
    whole = ["?" * (1 + i % 3) + str(i % 7) * (1 + i % 4) for i in range(100)]
    counts = {text: answers.count(text) for text in set(whole)}
    assert set(answers) == set(whole)
    for text, times in counts.items():
        assert whole.count(text) <= times <= 3 * whole.count(text)


def test_bad_rows_meet_the_policy_and_are_said_once(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\nx\n{"text": "de"}\n')
    with pytest.raises(ConfigError, match=r"a.jsonl, row 2 is no JSON"):
        streamed(tmp_path / "a.jsonl").rows(np.array([0]))
    said: list[str] = []
    rows = streamed(tmp_path / "a.jsonl", said.append, on_bad_row="skip").rows(np.arange(3))
    assert ByteTokenizer().decode(rows["tokens"].ravel()) == "abcdeabcdeabcdeabc" and len(said) == 1
    assert rows["labels"][0].tolist()[2:4] == [256, IGNORE_INDEX]


def test_a_source_of_nothing_is_refused_and_not_read_for_ever(tmp_path):
    (tmp_path / "a.jsonl").write_text("x\n{}\n")
    with pytest.raises(ConfigError, match="holds no document"):
        streamed(tmp_path / "a.jsonl", on_bad_row="skip", task="completion").rows(np.array([0]))
    (tmp_path / "b.jsonl").write_text('{"text": 1}\n')
    with pytest.raises(ConfigError, match="holds no document"):
        streamed(tmp_path / "b.jsonl", on_bad_row="skip").rows(np.array([0]))


def test_a_stream_that_broke_off_says_the_same_again(tmp_path):
    (tmp_path / "a.txt").write_text("whole")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    for workers in (0, 1):
        with Loader(streamed(tmp_path), 2, workers=workers) as loader:
            for _ in range(2):
                with pytest.raises(ConfigError, match="b.txt is not UTF-8"):
                    next(loader)


def test_rows_of_one_token_go_on_from_window_to_window(lines):
    expected = endless(300).tokens[:300]
    options = SourceOptions((str(lines),), streaming=True)
    samples = StreamedSamples(TokenisingRecipe(list_sources(options.source), options, ByteTokenizer(), 0.0), 1, print)
    assert samples.rows(np.arange(300))["tokens"].ravel().tolist() == expected.tolist()


def test_conversations_that_are_too_long_are_passed_over_however_many_come(tmp_path):
    rows = [{"prompt": "?" * 30, "completion": "x"}] * 70 + [{"prompt": "?", "completion": "y"}] * 300
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = streamed(tmp_path / "a.jsonl", too_long="skip").rows(np.arange(40))
    assert ord("y") in found["tokens"] and ord("x") not in found["tokens"]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:70]))
    with pytest.raises(ConfigError, match="no conversation of data.source fits data.seq_len = 8"):
        streamed(tmp_path / "b.jsonl", too_long="skip").rows(np.array([0]))


def test_a_stream_of_nothing_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(ConfigError, match="all of 0 bytes"):
        streamed(tmp_path / "a.jsonl")


@pytest.mark.parametrize("microbatch", [0, 3])
def test_rows_of_a_stream_end_where_the_longest_of_their_microbatch_ends(tmp_path, microbatch):
    """Whatever rank asks, with more rows in a step than windows are held for, and read only once."""
    talk = [{"prompt": "?" * (1 + i % 3), "completion": "x" * (11 + i * 7 % 8)} for i in range(70)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in talk))
    batch, ranks, said = 800, 2, list[str]()

    def samples() -> StreamedSamples:
        options = SourceOptions((str(path),), streaming=True)
        recipe = TokenisingRecipe(list_sources(options.source), options, ByteTokenizer(), 0.0)
        return StreamedSamples(recipe, 24, said.append)

    ends = RowEnds(microbatch, 2)
    loaders = [Loader(samples(), batch, rank, ranks, workers=1, ends=ends) for rank in range(ranks)]
    whole = samples()
    for step in range(2):
        found = [next(loader) for loader in loaders]
        pieces = [one if isinstance(one, list) else [one] for one in found]
        lengths = [[piece["tokens"].shape[1] for piece in one] for one in pieces]
        assert lengths[0] == lengths[1] and (not microbatch or min(lengths[0]) < 24)
        for rank, of_rank in enumerate(pieces):
            at = step * batch + rank * batch // ranks
            for piece in of_rank:
                full = whole.rows(at + np.arange(len(piece["tokens"])))
                at += len(piece["tokens"])
                for key, values in piece.items():
                    assert (values.numpy() == full[key][:, : values.shape[1]]).all()
                beyond = piece["tokens"].shape[1]
                assert (full["document_ids"][:, beyond:] == -1).all() and (full["labels"][:, beyond:] == -100).all()
        assert (whole.row_lengths(step * batch + np.arange(9)) <= 24).all()
    for loader in loaders:
        loader.close()
    assert not said, "nothing is read twice"
