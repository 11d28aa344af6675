"""Corpora of token ids, used where they lie: what the files say is what the samples hold."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.data import Samples
from meshwright.data.cache import open_corpus, prepare
from meshwright.data.options import SourceOptions
from meshwright.data.tokenizers import ByteTokenizer, IdTokenizer

TOKENIZER = IdTokenizer(100, 0)
LENGTHS = [5, 3, 7, 4, 6, 2, 9, 4]
IDS = np.concatenate([[*range(10 * i + 1, 10 * i + n), 0] for i, n in enumerate(LENGTHS)])


def npy(folder: Path, ids=IDS, name="a") -> SourceOptions:
    np.save(folder / f"{name}.npy", np.asarray(ids, dtype=np.uint16))
    return SourceOptions((str(folder / f"{name}.npy"),))


def flat(folder: Path, ids=IDS, dtype="uint32") -> SourceOptions:
    np.asarray(ids, dtype=dtype).tofile(folder / "a.bin")
    return SourceOptions((str(folder / "a.bin"),), dtype=dtype)


def megatron(folder: Path, ids=IDS, lengths=LENGTHS, code=8, version=1, magic=b"MMIDIDX\x00\x00") -> SourceOptions:
    np.asarray(ids, dtype=np.uint16).tofile(folder / "a.bin")
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * 2
    with open(folder / "a.idx", "wb") as file:
        file.write(magic + struct.pack("<QBQQ", version, code, len(lengths), len(lengths) + 1))
        for array, dtype in ((lengths, "<i4"), (pointers, "<i8"), (range(len(lengths) + 1), "<i8")):
            file.write(np.array(array, dtype=dtype).tobytes())
    return SourceOptions((str(folder / "a.bin"),))


def documents_in(index) -> int:
    return sum(file.n_documents for file in index.files)


@pytest.mark.parametrize("write", [npy, flat, megatron])
@pytest.mark.parametrize("fraction", [0.0, 0.3])
def test_samples_are_the_ids_of_the_file_and_know_their_documents(tmp_path, write, fraction):
    said: list[str] = []
    prepared = prepare(write(tmp_path), TOKENIZER, fraction, tmp_path / "cache", said.append)
    corpus = open_corpus(prepared.folder)
    cut = corpus.meta.n_training_tokens
    assert cut == (36 if fraction else 40), "the end of a document at or behind (1 - fraction) of the ids"
    assert (corpus.meta.n_tokens, documents_in(corpus.meta)) == (40, 8)
    rows = corpus.training.rows(np.arange(cut // 6), 6)
    assert rows["tokens"].ravel().tolist() == IDS[: cut // 6 * 6].tolist()
    document = np.repeat(np.arange(8), LENGTHS)
    for row, (labels, ids) in enumerate(zip(rows["labels"], rows["document_ids"], strict=True)):
        at = np.arange(row * 6, row * 6 + 6)
        assert ids.tolist() == (document[at] - document[at[0]]).tolist()
        expected = [IDS[i + 1] if i + 1 < 40 and document[i + 1] == document[i] else -100 for i in at]
        assert labels.tolist() == expected
    if fraction:
        assert corpus.validation.rows(np.array([0]), 4)["tokens"][0].tolist() == IDS[cut : cut + 4].tolist()
    assert "indexing 40 token ids of 1 files" in said[1]


def test_equal_ids_and_documents_have_one_identity_and_another_end_another(tmp_path):
    keys = set()
    for write in (npy, megatron):
        keys.add(prepare(write(tmp_path), TOKENIZER, 0.3, tmp_path / "cache").key)
    assert len(keys) == 1
    options = npy(tmp_path)
    first = prepare(options, TOKENIZER, 0, tmp_path / "cache")
    assert prepare(options, IdTokenizer(100, 99), 0, tmp_path / "cache").key != first.key


def test_it_is_indexed_once_and_again_when_the_file_changes(tmp_path):
    options = npy(tmp_path)
    first = prepare(options, TOKENIZER, 0, tmp_path / "cache")
    assert first.was_built and not prepare(options, TOKENIZER, 0, tmp_path / "cache").was_built
    changed = IDS.copy()
    changed[3] = 77
    npy(tmp_path, changed)
    os.utime(tmp_path / "a.npy", ns=(1, 1))
    with pytest.raises(IntegrityError, match="a.npy changed"):
        open_corpus(first.folder)
    again = prepare(options, TOKENIZER, 0, tmp_path / "cache")
    assert again.was_built and again.key != first.key
    assert open_corpus(again.folder).training.rows(np.array([0]), 5)["tokens"][0, 3] == 77


def test_several_files_are_one_source_whose_samples_do_not_reach_across(tmp_path):
    (tmp_path / "ids").mkdir()
    for name, begin in (("a", 0), ("b", 20), ("c", 39)):
        npy(tmp_path / "ids", IDS[begin : begin + 20], name)
    corpus = open_corpus(prepare(str(tmp_path / "ids"), TOKENIZER, 0, tmp_path / "cache").folder)
    assert corpus.training.n_samples(6) == 3 + 3, "the third file has one id only"
    rows = corpus.training.rows(np.array([5, 0, 2, 3]), 6)["tokens"]
    assert rows.tolist() == [IDS[32:38].tolist(), IDS[:6].tolist(), IDS[12:18].tolist(), IDS[20:26].tolist()]
    samples = Samples.of([corpus.training], 6, 0)
    assert sorted(samples.rows(np.arange(6))["tokens"][:, 0].tolist()) == sorted(IDS[[0, 6, 12, 20, 26, 32]].tolist())


def test_a_validation_cut_inside_several_files_loses_nothing(tmp_path):
    (tmp_path / "ids").mkdir()
    npy(tmp_path / "ids", IDS, "a")
    npy(tmp_path / "ids", IDS, "b")
    corpus = open_corpus(prepare(str(tmp_path / "ids"), TOKENIZER, 0.7, tmp_path / "cache").folder)
    assert corpus.training.n_tokens + corpus.validation.n_tokens == 80 and corpus.training.n_tokens == 25
    assert [part.n_tokens for part in corpus.validation.parts] == [15, 40]


def outside(folder):
    return npy(folder, [1, 2, 100, 3])


def negative(folder):
    return flat(folder, [1, -1], "int32")


def two_dimensional(folder):
    np.save(folder / "a.npy", np.zeros((2, 3), dtype=np.uint16))
    return SourceOptions((str(folder / "a.npy"),))


def floats(folder):
    np.save(folder / "a.npy", np.zeros(3))
    return SourceOptions((str(folder / "a.npy"),))


def pickled(folder):
    np.save(folder / "a.npy", np.array([{}], dtype=object), allow_pickle=True)
    return SourceOptions((str(folder / "a.npy"),))


def no_dtype(folder):
    flat(folder)
    return SourceOptions((str(folder / "a.bin"),))


def wrong_dtype(folder):
    flat(folder)
    return SourceOptions((str(folder / "a.bin"),), dtype="uint61")


def odd_size(folder):
    (folder / "a.bin").write_bytes(b"123")
    return SourceOptions((str(folder / "a.bin"),), dtype="uint16")


def cut_short(folder):
    options = megatron(folder)
    os.truncate(folder / "a.bin", 70)
    return options


def other_index(folder):
    return megatron(folder, magic=b"NOTMEGATR")


def float_index(folder):
    return megatron(folder, code=7)


def short_index(folder):
    options = megatron(folder)
    os.truncate(folder / "a.idx", 60)
    return options


def lone_index(folder):
    megatron(folder)
    (folder / "a.bin").unlink()
    return SourceOptions((str(folder / "a.idx"),))


def a_task(folder):
    return SourceOptions(npy(folder).source, task="chat")


REFUSALS = {
    outside: r"a.npy holds the id 100 at position 2 of 4, outside the vocabulary of IdTokenizer\(100, 0\) \(0 to 99\)",
    negative: r"a.bin holds the id -1 at position 1 of 2.*whether data.dtype is right",
    two_dimensional: r"shape \(2, 3\) and dtype uint16; it must be 1-D, of whole numbers",
    floats: "dtype float64; it must be 1-D, of whole numbers",
    pickled: "a.npy is no .npy file that numpy reads",
    no_dtype: "does not say of which dtype its ids are, and data.dtype is empty. Legal: uint8, uint16, uint32, int32,"
    " int64",
    wrong_dtype: "data.dtype = 'uint61' is none of them. Did you mean 'uint16'",
    odd_size: "has 3 bytes, which are no whole number of ids of data.dtype = 'uint16'",
    cut_short: "a.bin has 70 bytes, and a.idx tells of 40 ids of 2 bytes: one of the two was cut short",
    other_index: "does not begin with MMIDIDX",
    float_index: r"version 1, dtype code 7 .*the codes \[1, 2, 3, 4, 5, 8\]",
    short_index: "and 60 bytes; what is read is version 1, .* 202 bytes for its 8 sequences",
    lone_index: "a.idx has no a.bin beside it",
    a_task: "data.task = 'chat' needs records, and npy files hold token ids",
}


@pytest.mark.parametrize("write", REFUSALS, ids=lambda write: write.__name__)
def test_refusals_teach(tmp_path, write):
    with pytest.raises(ConfigError, match=REFUSALS[write]):
        prepare(write(tmp_path), TOKENIZER, 0, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.tmp-*"))


def test_text_tokenizers_see_their_ends(tmp_path):
    ids = np.concatenate([[*b"one", 256], [*b"two!", 256]])
    corpus = open_corpus(prepare(npy(tmp_path, ids), ByteTokenizer(), 0, tmp_path / "cache").folder)
    assert corpus.training.parts[0].offsets.tolist() == [0, 4, 9]


def test_the_index_belongs_to_the_format_and_to_the_documents_that_were_told(tmp_path):
    options = megatron(tmp_path)
    first = prepare(options, TOKENIZER, 0, tmp_path / "cache")
    flat_view = prepare(
        SourceOptions(options.source, format="bin", dtype="uint16"), IdTokenizer(100, 99), 0, tmp_path / "cache"
    )
    assert (documents_in(first.meta), documents_in(flat_view.meta)) == (8, 1) and first.key != flat_view.key
    status = (tmp_path / "a.bin").stat()
    megatron(tmp_path, lengths=[20, 20])  # the same ids, told otherwise
    os.utime(tmp_path / "a.bin", ns=(status.st_atime_ns, status.st_mtime_ns))
    again = prepare(options, TOKENIZER, 0, tmp_path / "cache")
    assert again.was_built and documents_in(again.meta) == 2 and again.key != first.key


def test_an_empty_file_among_others_is_no_trouble(tmp_path):
    (tmp_path / "ids").mkdir()
    npy(tmp_path / "ids", [], "a")
    npy(tmp_path / "ids", IDS, "b")
    assert (
        open_corpus(prepare(str(tmp_path / "ids"), TOKENIZER, 0, tmp_path / "cache").folder).training.n_samples(6) == 6
    )
