"""Folders as the hub lays them out: cards are no data, splits and subsets are never mixed without a word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.releases import installed

from meshwright.core.errors import ConfigError, MissingExtraError
from meshwright.data.cache import open_corpus, prepare
from meshwright.data.scan import list_sources, resolved, scan_sources, split_of
from meshwright.data.tokenizers import ByteTokenizer

CARD = (
    "---\nlicense: mit\nconfigs:\n- config_name: de\n  data_files: de/*\n- config_name: en\n  data_files: en/*\n---\nx"
)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("data/train-00000-of-00003.parquet", "train"),
        ("Test.jsonl", "test"),
        ("train/my-test.json", "test"),
        ("valid_1.jsonl", "validation"),
        ("dev/a.jsonl", "validation"),
        ("latest.jsonl", ""),
        ("trains.jsonl", ""),
        ("a.jsonl", ""),
    ],
)
def test_the_split_is_the_last_word_that_stands_for_one(name, split):
    assert split_of(name) == split


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name.replace('__', '-')}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    return folder


def text_of(source: Path, tmp_path: Path) -> str:
    prepared = prepare(str(source), ByteTokenizer(), 0, tmp_path / "cache")
    return ByteTokenizer().decode(open_corpus(prepared.folder).training.tokens)


def test_one_split_is_read_and_never_the_one_that_is_tested_on(tmp_path):
    folder = write(tmp_path / "d", train__0="a", train__1="b", test="t", validation="v")
    (folder / "README.md").write_text("---\nlicense: mit\n---\nabout")
    with pytest.raises(
        ConfigError,
        match=r"holds the splits test \(1 files\), train \(2 files\), validation \(1 files\): name the one to train on,"
        r" like .*/d/train",
    ):
        scan_sources(str(folder))
    assert (text_of(folder / "train", tmp_path), text_of(folder / "dev", tmp_path)) == ("ab", "v")
    assert list_sources(str(folder / "train")).n_other == 3
    with pytest.raises(ConfigError, match=r"'.*/d/trian' does not exist"):
        scan_sources(str(folder / "trian"))


def test_a_folder_of_one_split_needs_no_word_and_a_folder_that_exists_is_itself(tmp_path):
    folder = write(tmp_path / "d", train__0="a", train__1="b")
    assert text_of(folder, tmp_path) == "ab"
    with pytest.raises(
        ConfigError, match=r"/d/test does not exist, .* no split of this name.*it has: train \(2 files\)"
    ):
        scan_sources(str(folder / "test"))
    write(folder / "test", a="t")
    assert text_of(folder / "test", tmp_path) == "t"
    (tmp_path / "prose").mkdir()
    (tmp_path / "prose/test.txt").write_text("x"), (tmp_path / "prose/train.txt").write_text("y")
    assert len(scan_sources(str(tmp_path / "prose")).files) == 2, "text has no splits"


def test_subsets_of_a_card_are_named_one_by_one(tmp_path):
    folder = write(tmp_path / "d")
    write(folder / "de", train="eins"), write(folder / "en", train="one")
    (folder / "README.md").write_text(CARD)
    with pytest.raises(ConfigError, match=r"README.md lists the subsets de, en, .*name the folder or the files of one"):
        scan_sources(str(folder))
    assert text_of(folder / "en", tmp_path) == "one"


def cached(cache: Path, name: str, commit: str, files: dict[str, str]) -> Path:
    """A snapshot as the hub's client leaves it: links to blobs."""
    place = cache / f"datasets--{name.replace('/', '--')}"
    snapshot = place / "snapshots" / commit
    (place / "blobs").mkdir(parents=True, exist_ok=True)
    for number, (file, text) in enumerate(files.items()):
        blob = place / "blobs" / f"{commit * 16}{number:048x}"
        blob.write_text(json.dumps({"text": text}) + "\n")
        (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / file).symlink_to(blob)
    return snapshot


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home/hub"


def test_a_name_on_the_hub_is_read_from_its_cache(cache, tmp_path, monkeypatch):
    first = cached(cache, "some/name", "a", {"train.jsonl": "old"})
    cached(cache, "some/name", "b", {"train.jsonl": "new", "en/test-0.jsonl": "t", "en/train-0.jsonl": "e"})
    main = cache / "datasets--some--name/refs/main"
    main.parent.mkdir()
    main.write_text("a")
    assert text_of(Path("some/name"), tmp_path) == "old"
    main.write_text("b")
    assert text_of(Path("some/name/en/train"), tmp_path) == "e"
    with pytest.raises(ConfigError, match="holds the splits test"):
        scan_sources("some/name")
    assert text_of(first, tmp_path) == "old"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    cached(tmp_path / "elsewhere", "some/name", "c", {"train.jsonl": "there"})
    assert text_of(Path("some/name"), tmp_path) == "there"  # the one snapshot, without refs/main


def test_a_folder_here_is_itself_and_what_a_run_keeps_names_the_snapshot(cache, tmp_path):
    snapshot = cached(cache, "some/name", "a", {"train.jsonl": "cached"})
    assert resolved("some/name/train") == str(snapshot / "train") and resolved("stdlib") == "stdlib"
    assert text_of(Path(resolved("some/name/train")), tmp_path) == "cached"
    assert resolved("chats.jsonl") == str(tmp_path / "chats.jsonl")
    (tmp_path / "some").mkdir()
    write(tmp_path / "some/name", train="here")
    assert text_of(Path("some/name"), tmp_path) == "here" and resolved("some/name") == str(tmp_path / "some/name")


def test_a_name_that_is_nowhere_is_answered_with_the_places_and_the_command(cache, tmp_path):
    cached(cache, "some/name", "a", {"train.jsonl": "cached"})
    with pytest.raises(ConfigError) as refused:
        scan_sources("some/nmae")
    said = str(refused.value)
    assert f"looked at {tmp_path / 'some/nmae'}" in said and f"looked for in {cache / 'datasets--some--nmae'}" in said
    assert "Did you mean 'some/name'?" in said and "hf download --repo-type dataset some/nmae'" in said
    for source in ("data/chats.jsonl", "chats", "/some/name"):
        with pytest.raises(ConfigError) as refused:
            scan_sources(source)
        assert "hub" not in str(refused.value)


def test_a_name_leads_to_no_place_outside_its_snapshot(cache):
    cached(cache, "some/name", "a", {"train.jsonl": "cached"})
    with pytest.raises(ConfigError, match=r"no file in .*snapshots/a and is not read"):
        scan_sources("some/name/../../../secret")


@installed
def test_a_missing_package_is_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "train-00000-of-00001.parquet").write_text("x")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pyarrow.*pip install .*datasets"):
        scan_sources(str(tmp_path))
