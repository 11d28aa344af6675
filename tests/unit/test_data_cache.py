"""The cache: right contents, made once, never taken for whole when it is not."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.data import cache
from meshwright.data.cache import default_cache_dir, open_corpus, prepare
from meshwright.data.corpus import find_damage
from meshwright.data.tokenizers import ByteTokenizer

TEXTS = {f"{letter}.txt": letter * (20 + i) for i, letter in enumerate("abcdefghij")}


@pytest.fixture
def texts(tmp_path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    return folder


def documents_of(split) -> list[str]:
    ends = split.offsets[1:]
    assert (split.tokens[ends - 1] == 256).all()
    return [
        ByteTokenizer().decode(split.tokens[begin:end]) for begin, end in zip(split.offsets[:-1], ends, strict=True)
    ]


class Words:
    """A tokenizer with a vocabulary of our choice."""

    def __init__(self, vocab_size: int, largest: int):
        self.vocab_size, self.largest = vocab_size, largest
        self.end_of_document = vocab_size - 1
        self.fingerprint = f"words-{vocab_size}-{largest}"

    def encode(self, text: str) -> np.ndarray:
        return np.full(len(text), self.largest)

    def decode(self, ids) -> str:
        return ""


def test_every_document_is_there_once_in_one_split_or_the_other(texts, tmp_path):
    said: list[str] = []
    prepared = prepare(str(texts), ByteTokenizer(), 0.25, tmp_path / "cache", said.append)
    corpus = open_corpus(prepared.folder)
    training, validation = documents_of(corpus.training), documents_of(corpus.validation)
    assert sorted(training + validation) == sorted(TEXTS.values()) and training == sorted(training)
    assert len(validation) == 2 and corpus.training.tokens.dtype == np.uint16
    assert (
        corpus.meta.training.n_tokens + corpus.meta.validation.n_tokens
        == corpus.training.n_tokens + corpus.validation.n_tokens
        == sum(map(len, TEXTS.values())) + 10
    )
    assert said[0] == "sources: 10 documents, 245 bytes" and "tokenising 10 documents with ByteTokenizer()" in said[1]


def test_a_corpus_gets_its_name_in_one_move_when_it_is_whole(texts, tmp_path, monkeypatch):
    moves = []
    rename = os.rename

    def watched(source, target):
        moves.append((find_damage(source, contents=True), target.exists()))
        rename(source, target)

    monkeypatch.setattr(cache.os, "rename", watched)
    prepare(str(texts), ByteTokenizer(), 0.25, tmp_path / "cache")
    assert moves == [("", False)]


def test_a_single_document_is_cut_at_its_end(tmp_path):
    (tmp_path / "one.txt").write_text("0123456789")
    corpus = open_corpus(prepare(str(tmp_path / "one.txt"), ByteTokenizer(), 0.2, tmp_path / "cache").folder)
    assert documents_of(corpus.training) == ["01234567"] and documents_of(corpus.validation) == ["89"]


def test_nothing_held_out_is_an_empty_split(texts, tmp_path):
    corpus = open_corpus(prepare(str(texts), ByteTokenizer(), 0, tmp_path / "cache").folder)
    assert corpus.training.n_documents == 10
    assert corpus.validation.n_documents == corpus.validation.n_tokens == 0


def test_a_second_call_finds_it_and_a_change_of_anything_it_is_made_of_does_not(texts, tmp_path):
    def call(fraction=0.1, tokenizer=None):
        return prepare(str(texts), tokenizer or ByteTokenizer(), fraction, tmp_path / "cache")

    first = call()
    assert first.was_built
    again = call()
    assert not again.was_built and (again.folder, again.meta) == (first.folder, first.meta)
    keys = {first.key, call(fraction=0.2).key, call(tokenizer=Words(300, 1)).key}
    (texts / "a.txt").write_text("A" * 20)  # same name, same size
    keys.add(call().key)
    (texts / "a.txt").rename(texts / "z.txt")
    keys.add(call().key)
    assert len(keys) == 5


def test_a_moved_corpus_has_the_same_key(texts, tmp_path):
    first = prepare(str(texts), ByteTokenizer(), 0.1, tmp_path / "cache")
    texts.rename(tmp_path / "moved")
    assert not prepare(str(tmp_path / "moved"), ByteTokenizer(), 0.1, tmp_path / "cache").was_built
    assert first.folder.name == f"corpus-{first.key}"


def test_ids_above_uint16_are_kept_and_ids_above_the_vocabulary_refused(texts, tmp_path):
    corpus = open_corpus(prepare(str(texts), Words(1 << 17, 100_000), 0, tmp_path / "cache").folder)
    assert corpus.training.tokens.dtype == np.uint32 and corpus.training.tokens[0] == 100_000
    with pytest.raises(ConfigError, match="gave ids from 299 to 70000, and its vocab_size is 300"):
        prepare(str(texts), Words(300, 70_000), 0, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.tmp-*")), "a build that failed leaves nothing behind"


def truncate_tokens(folder: Path) -> None:
    os.truncate(folder / "training.tokens", 100)


def flip_a_byte(folder: Path) -> None:
    data = bytearray((folder / "training.tokens").read_bytes())
    data[50] ^= 1
    (folder / "training.tokens").write_bytes(data)


def lose_offsets(folder: Path) -> None:
    (folder / "training.offsets").unlink()


def empty_meta(folder: Path) -> None:
    (folder / "meta.json").write_text("")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate_tokens, "training.tokens has 100 bytes and meta.json says 406"),
        (flip_a_byte, "the bytes of training.tokens are not those that were written"),
        (lose_offsets, "training.offsets is missing"),
        (empty_meta, "meta.json cannot be read"),
    ],
)
def test_a_damaged_corpus_is_made_anew_and_said(texts, tmp_path, damage, words):
    whole = prepare(str(texts), ByteTokenizer(), 0.25, tmp_path / "cache")
    damage(whole.folder)
    if damage is not flip_a_byte:  # opening looks at sizes; contents are read when preparing
        with pytest.raises(IntegrityError, match=f"no whole corpus: {words}.*Call prepare"):
            open_corpus(whole.folder)
    said: list[str] = []
    again = prepare(str(texts), ByteTokenizer(), 0.25, tmp_path / "cache", said.append)
    assert again.was_built and again.meta == whole.meta
    assert any(f"damaged ({words}" in line and "made anew" in line for line in said)
    assert len(documents_of(open_corpus(again.folder).training)) == 8
    assert not list((tmp_path / "cache").glob("*.tmp-*"))


def test_a_corpus_of_another_tokenizer_in_its_place_is_not_taken_for_it(texts, tmp_path):
    mine = prepare(str(texts), ByteTokenizer(), 0.25, tmp_path / "cache")
    other = prepare(str(texts), Words(300, 1), 0.25, tmp_path / "cache")
    shutil.rmtree(mine.folder)
    other.folder.rename(mine.folder)
    said: list[str] = []
    again = prepare(str(texts), ByteTokenizer(), 0.25, tmp_path / "cache", said.append)
    assert again.was_built and again.meta == mine.meta
    assert any("damaged (it was made of something else, with the tokenizer words-300-1)" in line for line in said)


def test_a_folder_that_cannot_be_written_is_refused_with_the_way_out(texts, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match=r"data\.cache: cannot keep the corpus under .*set data.cache to a folder"):
        prepare(str(texts), ByteTokenizer(), 0, tmp_path / "file" / "cache")


def test_a_whole_corpus_is_used_without_writing(texts, tmp_path, monkeypatch):
    prepare(str(texts), ByteTokenizer(), 0, tmp_path / "cache")
    monkeypatch.setattr(cache, "only_one", None)
    assert not prepare(str(texts), ByteTokenizer(), 0, tmp_path / "cache").was_built


def test_the_default_folder_is_the_users_cache(texts, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for unset in (None, ""):
        assert prepare(str(texts), ByteTokenizer(), 0, unset).folder.parent == tmp_path / "meshwright"
    assert default_cache_dir() == tmp_path / "meshwright"
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert default_cache_dir() == Path.home() / ".cache" / "meshwright"


PROCESS = """
import errno, fcntl, os, signal, sys, time
from pathlib import Path
from meshwright.data.cache import prepare
from meshwright.data.tokenizers import ByteTokenizer

texts, folder, mode, go = sys.argv[1:]

class Slow(ByteTokenizer):
    n = 0
    def encode(self, text):
        Slow.n += 1
        if mode == "kill" and Slow.n == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.03)
        return super().encode(text)

if mode == "kill late":
    os.rename = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
if mode == "no locks":
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")
    fcntl.flock = refuse
print("ready", flush=True)
while not Path(go).exists():
    time.sleep(0.002)
said = []
prepared = prepare(texts, Slow(), 0.25, folder, said.append)
print(prepared.was_built, prepared.folder)
print(" | ".join(said))
"""


def start(texts: Path, folder: Path, mode: str = "") -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(PROCESS), str(texts), str(folder), mode, str(folder) + ".go"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def let_go(folder: Path, *processes: subprocess.Popen) -> list[list[str]]:
    """Lines that each process printed after the moment at which all were ready."""
    for process in processes:
        assert process.stdout and process.stdout.readline() == "ready\n"
    Path(str(folder) + ".go").touch()
    return [process.communicate(timeout=30)[0].splitlines() for process in processes]


@pytest.mark.first("no locks")
@pytest.mark.parametrize("mode", ["", "no locks"])
def test_three_processes_at_once_get_one_whole_corpus(texts, tmp_path, mode):
    folder = tmp_path / "cache"
    outputs = let_go(folder, *(start(texts, folder, mode) for _ in range(3)))
    built = [line.split()[0] for line, _ in outputs]
    assert sorted(built) == ["False", "False", "True"] and len({line.split()[1] for line, _ in outputs}) == 1
    said = [line for _, line in outputs]
    if mode:
        assert all("cannot lock files (No locks available)" in line for line in said)
    else:
        assert sum("tokenising" in line for line in said) == 1
    assert len(documents_of(open_corpus(outputs[0][0].split()[1]).training)) == 8
    assert not list(folder.glob("*.tmp-*"))


def test_who_waits_for_another_says_so_and_for_which_file(texts, tmp_path):
    prepared = prepare(str(texts), ByteTokenizer(), 0.25, tmp_path / "cache")
    truncate_tokens(prepared.folder)
    lock = prepared.folder.with_name(prepared.folder.name + ".lock")
    said: list[str] = []
    with open(lock, "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        other = threading.Thread(
            target=prepare, args=(str(texts), ByteTokenizer(), 0.25, tmp_path / "cache", said.append)
        )
        other.start()
        end = time.monotonic() + 10
        while len(said) < 2 and time.monotonic() < end:
            time.sleep(0.002)
        assert said[1:] == [f"waiting for another process that makes the same corpus ({lock})"]
    other.join(timeout=10)
    assert not other.is_alive() and any("made anew" in line for line in said)


@pytest.mark.first
@pytest.mark.parametrize("mode", ["kill", "kill late"])
def test_a_build_that_was_killed_is_not_taken_for_a_corpus_and_holds_nobody_up(texts, tmp_path, mode):
    folder = tmp_path / "cache"
    process = start(texts, folder, mode)
    assert let_go(folder, process) == [[]] and process.returncode == -9
    left = list(folder.glob("corpus-*.tmp-*"))
    assert len(left) == 1 and (left[0] / "meta.json").exists() == (mode == "kill late")
    elsewhere = folder / left[0].name.replace(left[0].name.rpartition(".tmp-")[2], "1-another-host")
    elsewhere.mkdir()
    begin = time.perf_counter()
    prepared = prepare(str(texts), ByteTokenizer(), 0.25, folder)
    assert prepared.was_built and time.perf_counter() - begin < 5
    assert len(documents_of(open_corpus(prepared.folder).training)) == 8
    assert list(folder.glob("*.tmp-*")) == [elsewhere], "what this host left is removed; another host may be at work"
