"""Lists of records in JSON: the records of the document, at the cost of one, whatever its cuts; faults have a line."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.errors import ConfigError
from meshwright.data import formats
from meshwright.data.cache import open_corpus, prepare
from meshwright.data.formats import RECORD_FORMATS
from meshwright.data.options import SourceOptions
from meshwright.data.scan import scan_sources
from meshwright.data.tokenizers import ByteTokenizer

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def read(path: Path) -> list:
    return list(RECORD_FORMATS["json"].records(path))


@pytest.mark.all
@settings(max_examples=40)
@given(
    records=st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), max_size=6),
    indent=st.sampled_from([None, 2]),
    ascii_only=st.booleans(),
    piece=st.sampled_from([1, 2, 7, 64]),
)
def test_a_list_in_pieces_gives_its_records(tmp_path_factory, records, indent, ascii_only, piece):
    path = tmp_path_factory.getbasetemp() / "list.json"
    path.write_text(json.dumps(records, indent=indent, ensure_ascii=ascii_only) + "\n", encoding="utf-8")
    whole, formats._PIECE = formats._PIECE, piece
    try:
        assert read(path) == list(enumerate(records, 1)) and RECORD_FORMATS["json"].count(path) == len(records)
    finally:
        formats._PIECE = whole


@pytest.mark.parametrize("piece", [1, 3, 1 << 20])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"a": 1},\n {"a": 2]', r"line 2, at record 2 of the list, is no JSON \(Expecting ',' delimiter\)"),
        ('[{"a": 1},\n {"a": 2}', r"line 2, at record 2 of the list, is no JSON \(the file ends\)"),
        ('[{"a": 1},\n {"a": "x', r"line 2, at record 2 of the list, is no JSON \(Unterminated string"),
        (
            '[{"a": 1}\n {"a": 2}]',
            r"line 2, at record 1 of the list, .*\(expected ',' or '\]' after it, and found '\{'",
        ),
        ('[{"a": 1}]\n[1]', r"line 2, at record 1 of the list, is no JSON \(the list ends, and '\[' follows\)"),
        ('[{"a": 1},]', r"line 1, at record 2 of the list, is no JSON \(Expecting value\)"),
        (
            '[{"a": {"b": 1, "b": 1}}]',
            r"line 1, at record 1 of the list, .*\(an object has the key 'b' more than once\)",
        ),
        ('[{"a": tru}]', r"line 1, at record 1 of the list, is no JSON \(Expecting value\)"),
        ('[{"a":\n"\\x"}]', r"line 2, at record 1 of the list, is no JSON \(Invalid \\escape"),
        ("[" + "[" * 200_000, r"line 1, at record 1 of the list, is no JSON \((maximum recursion|Expecting value)"),
        ('{"data":\n [{"a": 1}]}', r"one JSON document that is no list of records .*jq .KEY .*a.json > records.json"),
        ("5", "one JSON document that is no list of records"),
    ],
)
def test_a_broken_list_is_named_with_its_line_and_record(tmp_path, monkeypatch, piece, text, words):
    monkeypatch.setattr(formats, "_PIECE", piece if len(text) < 1000 else 1 << 20)
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=r"data.source: .*a.json.*" + words):
        read(tmp_path / "a.json")


def test_half_a_character_is_named_with_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "_PIECE", 4)
    (tmp_path / "a.json").write_bytes(b'[{"a": "x"},\n\n{"a": "\xff"}]')
    with pytest.raises(ConfigError, match=r"a.json, line 3 is not UTF-8 \(invalid start byte\)"):
        read(tmp_path / "a.json")


def test_what_is_no_object_is_a_bad_row_and_the_others_are_read(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "one"},\n 5, {"txet": "x"},\n {"text": "two"}]')
    options = SourceOptions((str(tmp_path / "a.json"),))
    with pytest.raises(
        ConfigError, match=r"(?s)a.json .*row 2 \(line 2\) is a JSON int, not an object.*row 3.*on_bad_row"
    ):
        prepare(options, ByteTokenizer(), 0, tmp_path / "cache")
    said: list[str] = []
    options = SourceOptions((str(tmp_path / "a.json"),), on_bad_row="skip")
    prepared = prepare(options, ByteTokenizer(), 0, tmp_path / "cache", said.append)
    split = open_corpus(prepared.folder).training
    assert ByteTokenizer().decode(split.tokens) == "onetwo" and prepared.meta.skipped == {"a.json": 2}
    assert any("row 3: the column 'text' is missing. Did you mean 'txet'" in line for line in said)


def test_lines_that_are_called_json_gzip_and_a_mark_of_byte_order_are_read(tmp_path):
    (tmp_path / "lines.json").write_text('{"text": "a"}\n\n{"text": "b"}\n{"text": "c", "text": "d"}')
    (_, first), (_, second), (number, twice) = read(tmp_path / "lines.json")
    assert (first["text"], second["text"], number) == ("a", "b", 4)
    assert "row 4 is no JSON (an object has the key 'text' more than once)" in str(twice)
    (tmp_path / "plain.txt").write_text("one", encoding="utf-8-sig")
    prepared = prepare(str(tmp_path / "plain.txt"), ByteTokenizer(), 0, tmp_path / "cache")
    assert ByteTokenizer().decode(open_corpus(prepared.folder).training.tokens) == "one"
    (tmp_path / "list.json.gz").write_bytes(gzip.compress('\ufeff [{"text": "é"}]'.encode()))
    assert read(tmp_path / "list.json.gz") == [(1, {"text": "é"})]
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(b'[{"text": "e"}]', mtime=0)[:20])
    with pytest.raises(ConfigError, match=r"cut.json.gz is no whole gzip file"):
        read(tmp_path / "cut.json.gz")
    (tmp_path / "none.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"none.json holds no records"):
        prepare(str(tmp_path / "none.json"), ByteTokenizer(), 0, tmp_path / "cache")


@pytest.mark.parametrize("indent", [None, 1])
def test_memory_holds_a_few_records_and_not_the_file(tmp_path, monkeypatch, indent):
    monkeypatch.setattr(formats, "_PIECE", 1 << 13)
    rows = [{"text": f"{i} " + "x" * 300, "more": [i] * 5} for i in range(2000)]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=indent))
    size = (tmp_path / "a.json").stat().st_size
    del rows
    tracemalloc.start()
    try:
        assert RECORD_FORMATS["json"].count(tmp_path / "a.json") == 2000
        assert tracemalloc.get_traced_memory()[1] < 1.5e5 < size / 4
    finally:
        tracemalloc.stop()


def test_a_fault_at_the_beginning_is_found_without_reading_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "_PIECE", 1 << 13)
    (tmp_path / "a.json").write_text('[{"a": 1 "b": 2},' + '{"a": 1},' * 100_000)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="record 1 of the list"):
            read(tmp_path / "a.json")
        assert tracemalloc.get_traced_memory()[1] < 1.5e5
    finally:
        tracemalloc.stop()


def test_a_folder_of_lists_is_records_and_settings_beside_other_files_are_not(tmp_path):
    (tmp_path / "train.json").write_text('[{"text": "a"}]')
    (tmp_path / "dataset_infos.json").write_text("{}")
    scan = scan_sources(str(tmp_path))
    assert (scan.format, [file.name for file in scan.files], scan.n_other) == ("json", ["train.json"], 1)
    (tmp_path / "a.py").write_text("x = 1")
    assert scan_sources(str(tmp_path)).format == "text"
