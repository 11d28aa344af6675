"""Formats: what people have, read record by record; what is wrong in them is named with its place."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import re
from pathlib import Path

import numpy as np
import pytest

from meshwright.cli.main import main
from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.data import formats
from meshwright.data import scan as sources
from meshwright.data.cache import open_corpus, prepare, trained_bpe
from meshwright.data.options import SourceOptions
from meshwright.data.scan import scan_sources
from meshwright.data.tokenizers import ByteTokenizer

ROWS = [{"text": f"row {i} é"} for i in range(40)]


def jsonl(path: Path, rows=ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def gzipped(path: Path, rows=ROWS) -> Path:
    packing = {".gz": gzip, ".bz2": bz2, ".xz": lzma}[path.suffix]
    path.write_bytes(packing.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


def table(path: Path, rows=ROWS) -> Path:
    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        made = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        made.writeheader()
        made.writerows(rows)
    return path


def parquet(path: Path, rows=ROWS) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
    return path


def saved(path: Path, rows=ROWS) -> Path:
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(str(path), num_shards=3)
    return path


def listed(path: Path, rows=ROWS) -> Path:
    path.write_text(json.dumps(rows, indent=1))
    return path


WRITERS = {
    "a.jsonl": jsonl,
    "a.jsonl.gz": gzipped,
    "a.jsonl.bz2": gzipped,
    "a.ndjson.xz": gzipped,
    "a.json": listed,
    "a.csv": table,
    "a.tsv": table,
    "a.parquet": parquet,
    "a": saved,
}


def texts(split) -> list[str]:
    bounds = zip(split.offsets[:-1], split.offsets[1:], strict=True)
    return [ByteTokenizer().decode(split.tokens[begin : end - 1]) for begin, end in bounds]


@pytest.mark.first
@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_documents(tmp_path, name):
    path = WRITERS[name](tmp_path / name)
    corpus = open_corpus(prepare(str(path), ByteTokenizer(), 0.2, tmp_path / "cache").folder)
    assert sorted(texts(corpus.training) + texts(corpus.validation)) == sorted(row["text"] for row in ROWS)
    assert corpus.validation.n_documents == 8
    assert texts(corpus.training) == [row["text"] for row in ROWS if row["text"] in texts(corpus.training)], (
        "the order of the file"
    )


def test_which_rows_are_held_out_depends_on_the_file_alone(tmp_path):
    path = jsonl(tmp_path / "a.jsonl")
    held = [
        texts(open_corpus(prepare(str(path), ByteTokenizer(), 0.1, tmp_path / cache).folder).validation)
        for cache in "ab"
    ]
    assert held[0] == held[1] and len(held[0]) == 4


def test_a_folder_of_one_format_is_read_and_one_of_several_must_be_told(tmp_path):
    jsonl(tmp_path / "a.jsonl"), jsonl(tmp_path / "b.jsonl")
    (tmp_path / "notes.dat").write_text("x")
    scan = scan_sources(str(tmp_path))
    assert (scan.format, str(scan)) == (
        "jsonl",
        f"80 rows in 2 jsonl files, {scan.n_bytes} bytes (passed over: 1 not jsonl)",
    )
    (tmp_path / "notes.md").write_text("about")
    with pytest.raises(ConfigError, match=r"several formats \(2 jsonl, 1 text\): say which with data.format"):
        scan_sources(str(tmp_path))
    assert [file.name for file in scan_sources(str(tmp_path), "jsonl").files] == ["a.jsonl", "b.jsonl"]
    assert [file.name for file in scan_sources(str(tmp_path), "text").files] == ["notes.md"]


BAD = {
    '{"text": "cut': r"a.jsonl, row 3 is no JSON \(Unterminated string.*: '\{\"text\": \"cut'. In JSON lines each"
    r" line is one object",
    '["a"]': r"a.jsonl, row 3 is a JSON list, not an object",
    '{"txet": "x", "label": 1}': r"row 3: the column 'text' is missing. Did you mean 'txet'\? Columns with a value:"
    r" 'txet', 'label'",
    '{"text": null, "body": "x"}': r"row 3: the column 'text' is empty. .*Columns with a value: 'body'",
    '{"text": 5}': r"row 3: the column 'text' must hold text, and holds int 5",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_row_is_named_with_file_and_row_and_skipped_when_that_is_wanted(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n' + line + '\n{"text": "two"}')
    with pytest.raises(ConfigError, match=BAD[line] + r".*data.on_bad_row = 'skip'"):
        prepare(str(tmp_path / "a.jsonl"), ByteTokenizer(), 0, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.tmp-*"))
    said: list[str] = []
    options = SourceOptions((str(tmp_path / "a.jsonl"),), on_bad_row="skip")
    prepared = prepare(options, ByteTokenizer(), 0, tmp_path / "cache", said.append)
    assert texts(open_corpus(prepared.folder).training) == ["one", "two"] and prepared.meta.skipped == {"a.jsonl": 1}
    assert any("skipped: " in text and "row 3" in text for text in said)


MIXED = {
    r"row 2, turn 2: the role 'asistant' .*Did you mean 'assistant'\? \(also rows 5, 11, 12 and 2 more, 6 in all\)": 2,
    r"row 3, turn 2: the assistant's answer is empty, so an immediate stop would be learnt \(also row 10\)": 3,
    r"row 4: 'messages' must be a list of messages with a role and a content each .* and is 'no list'$": 4,
    r"row 7: the column 'context' holds 'another long text', .*data.ignore = \['context'\]$": 7,
    r"row 8 is no JSON \(Expecting value.*each line is one object": 8,
}
"""What a refusal says of a file, by the row that it names first."""


def turns(role="assistant", content="b", **more):
    return json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": role, "content": content}], **more})


def test_a_refusal_names_every_kind_of_bad_row_of_a_file_at_once(tmp_path):
    """Each kind once, in the order of the rows, with the other rows that have it."""
    rows = [turns(), turns("asistant"), turns(content=""), '{"messages": "no list"}', turns("robot"), turns()]
    rows += [turns(context="another long text"), "not json", turns(), turns(content=""), *[turns("bot")] * 4]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    (tmp_path / "t.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}")
    options = SourceOptions((str(tmp_path / "a.jsonl"),), template=str(tmp_path / "t.jinja"))
    with pytest.raises(ConfigError) as caught:
        prepare(options, ByteTokenizer(), 0, tmp_path / "cache")
    head, *listed, way = str(caught.value).split("\n")
    assert head == f"11 rows of {tmp_path}/a.jsonl cannot be used, for 5 reasons:"
    assert len(listed) == len(MIXED) and "data.on_bad_row = 'skip'" in way
    assert all(re.match(f"- {pattern}", line) for pattern, line in zip(MIXED, listed, strict=True)), listed


def test_a_refusal_names_ten_kinds_of_bad_rows_and_inspect_all(tmp_path, capsys):
    rows = ['{"text": "one"}', *(f'{{"text": {value}}}' for value in ("null", "5", "[1]", "{}", "true", "0.5"))]
    rows += ["x", "[1]", "1", '"a"', "null", "true", '{"body": "x"}', '{"txt": "x"}']
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    with pytest.raises(
        ConfigError, match=r"14 rows of .* for \d+ reasons:(\n- .*){10}\n- and \d+ more kinds\nTo leave"
    ):
        prepare(SourceOptions((str(tmp_path / "a.jsonl"),)), ByteTokenizer(), 0, tmp_path / "cache")
    assert main(["inspect", str(tmp_path / "a.jsonl")]) == 0
    said = capsys.readouterr().out
    assert "more kinds" not in said and all(f", row {n}" in said for n in (3, 5, 8, 9, 14, 15)), said
    (tmp_path / "a.jsonl").write_text("\n".join(rows[1:]))
    assert main(["inspect", str(tmp_path / "a.jsonl"), "--data.column=text"]) == 2
    said = capsys.readouterr().err
    assert "none of 14 records can be used:\n- " in said and said.count("\n- ") > 10, said


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_inspect_names_the_numbers_of_all_rows_of_a_kind(tmp_path, capsys, name):
    rows, ends = ["3", "4", *['{"text": "one"}'] * 10, "5", "6"], name == "a.json"
    (tmp_path / name).write_text("[" * ends + (",\n" if ends else "\n").join(rows) + "]" * ends)
    assert main(["inspect", str(tmp_path / name), "--data.column=text"]) == 0
    assert " (also rows 2, 13, 14)\n" in capsys.readouterr().out


def test_many_bad_rows_are_counted_and_a_file_of_nothing_else_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("x\n" * 20 + '{"text": "one"}\n')
    said: list[str] = []
    options = SourceOptions((str(tmp_path / "a.jsonl"),), on_bad_row="skip", column="text")
    assert prepare(options, ByteTokenizer(), 0, tmp_path / "cache", said.append).meta.skipped == {"a.jsonl": 20}
    assert sum("is no JSON" in line for line in said) == 3 and any("20 of the 21 rows" in line for line in said)
    (tmp_path / "b.jsonl").write_text("x\n" * 3)
    with pytest.raises(ConfigError, match="b.jsonl, row 1 is no JSON"):
        prepare(SourceOptions((str(tmp_path / "b.jsonl"),), on_bad_row="skip"), ByteTokenizer(), 0, tmp_path / "cache")


def several_splits(root: Path) -> str:
    import datasets

    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(root / "d"))
    return str(root / "d")


def not_parquet(root: Path) -> str:
    (root / "a.parquet").write_text("x")
    return str(root / "a.parquet")


@pytest.mark.first
@pytest.mark.parametrize(
    ("write", "words"),
    [
        (
            several_splits,
            r"holds a dataset for each of train, test: name the one to train on, like .*/d/train",
        ),
        (not_parquet, r"a.parquet is no Parquet file that pyarrow"),
    ],
)
def test_refusals_teach(tmp_path, write, words):
    with pytest.raises(ConfigError, match=words):
        prepare(write(tmp_path), ByteTokenizer(), 0, tmp_path / "cache")


def test_sources_of_two_formats_are_no_one_source(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"a.txt is text, .*b.jsonl is jsonl. .* make each a part of data.mixture"):
        scan_sources([str(tmp_path / "a.txt"), str(jsonl(tmp_path / "b.jsonl"))])


def test_a_file_that_changed_while_it_was_read_is_not_taken_for_what_it_was(tmp_path, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl")
    scan = scan_sources(str(path))
    jsonl(path, ROWS[:20] + ROWS[21:])
    monkeypatch.setattr("meshwright.data.cache.scan_sources", lambda *args, **kwargs: scan)
    with pytest.raises(IntegrityError, match=r"a.jsonl changed while the corpus was being made"):
        prepare(str(path), ByteTokenizer(), 0, tmp_path / "cache")


def test_files_that_did_not_change_are_read_once(tmp_path, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl")
    monkeypatch.setattr(sources, "_SETTLED_SEC", -1.0)
    first = scan_sources(str(path), memory=tmp_path / "memory")
    read = []
    monkeypatch.setattr(sources, "digest_of", lambda path: read.append(path) or formats.digest_of(path))
    assert scan_sources(str(path), memory=tmp_path / "memory") == first and not read
    jsonl(path, ROWS[:-1])
    assert scan_sources(str(path), memory=tmp_path / "memory").files[0].n_records == 39 and read == [path]


def test_what_is_remembered_holds_in_every_working_folder(tmp_path, monkeypatch):
    jsonl(tmp_path / "a.jsonl")
    monkeypatch.setattr(sources, "_SETTLED_SEC", -1.0)
    monkeypatch.chdir(tmp_path)
    first = scan_sources("a.jsonl", memory=tmp_path / "memory")
    monkeypatch.chdir("/")
    again = scan_sources(str(tmp_path / "a.jsonl"), memory=tmp_path / "memory")
    assert again == first and again.files[0].path.is_file()


def test_what_changed_a_moment_ago_is_not_remembered(tmp_path):
    path = jsonl(tmp_path / "a.jsonl")
    scan_sources(str(path), memory=tmp_path / "memory")
    assert not (tmp_path / "memory").exists()


def test_progress_is_told_to_the_end(tmp_path):
    told: list[tuple[int, int]] = []
    prepare(
        str(jsonl(tmp_path / "a.jsonl")),
        ByteTokenizer(),
        0,
        tmp_path / "cache",
        progress=lambda done, total: told.append((done, total)),
    )
    assert told[-1] == (40, 40)


def test_a_row_that_is_held_out_is_never_trained_on(tmp_path):
    rows = [{"text": chr(97 + i)} for i in range(20)]
    corpus = open_corpus(
        prepare(str(jsonl(tmp_path / "a.jsonl", rows)), ByteTokenizer(), 0.3, tmp_path / "cache").folder
    )
    training, validation = set(texts(corpus.training)), set(texts(corpus.validation))
    assert len(training) == 14 and len(validation) == 6 and not training & validation
    assert isinstance(corpus.training.tokens, np.ndarray)


def test_an_empty_first_shard_and_blank_lines_are_no_rows(tmp_path):
    (tmp_path / "d").mkdir()
    gzipped(tmp_path / "d" / "0.jsonl.gz", [])
    gzipped(tmp_path / "d" / "1.jsonl.gz", ROWS[:1])
    (tmp_path / "d" / "2.jsonl").write_text("\n\n" + json.dumps(ROWS[1]) + "\n\n")
    corpus = open_corpus(prepare(str(tmp_path / "d"), ByteTokenizer(), 0.01, tmp_path / "cache").folder)
    assert sorted(texts(corpus.training) + texts(corpus.validation)) == ["row 0 é", "row 1 é"]
    assert (corpus.training.n_documents, corpus.validation.n_documents) == (1, 1)


@pytest.mark.parametrize("content", [gzip.compress(b'{"text": "abc"}\n' * 50, mtime=0)[:30], b'{"text": "abc"}\n'])
def test_a_file_that_is_not_packed_as_its_name_says_is_named(tmp_path, content):
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a.jsonl.gz is no whole gzip file"):
        prepare(str(tmp_path / "a.jsonl.gz"), ByteTokenizer(), 0, tmp_path / "cache")


def test_a_tokenizer_belongs_to_the_text_as_it_was_read(tmp_path):
    path = jsonl(tmp_path / "a.jsonl")
    made = [
        trained_bpe("bpe:270", [SourceOptions((str(path),), format=format)], tmp_path / "c", print)
        for format in ("jsonl", "text")
    ]
    assert made[0].path != made[1].path


def test_a_table_has_quotes_line_ends_and_json_text_in_its_values(tmp_path):
    from meshwright.data.formats import RECORD_FORMATS

    rows = [{"instruction": 'Say "a, b"\nand c', "input": "", "output": "é\t"}, {"instruction": "x", "input": "y"}]
    rows[1]["output"] = json.dumps([{"role": "user", "content": "a"}])
    for name in ("a.csv", "a.tsv"):
        found = list(RECORD_FORMATS["csv"].records(table(tmp_path / name, rows)))
        assert found == [(1, rows[0]), (2, rows[1])]


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"
FOREIGN = [
    (
        "a.jsonl.zst",
        b"\x28\xb5\x2f\xfd\x00",
        r"a.jsonl.zst is a zstd file, and is read unpacked: zstd -d .*a.jsonl.zst",
    ),
    ("a.txt.gz", gzip.compress(b"once"), r"a.txt.gz is a gzip file, and is read unpacked: gunzip -k .*a.txt.gz"),
    ("a.xlsx", b"PK\x03\x04\x14", r"a.xlsx is a zip archive \(as .xlsx"),
    *(
        (name, text.encode("utf-16"), rf"{name} is UTF-16 text.*iconv -f utf-16 -t utf-8 .*{name} > .*utf8-{name}\)")
        for name, text in {"a.jsonl": '{"text": "x"}', "a.json": "[]", "a.txt": "once", "a.csv": "text\nx\n"}.items()
    ),
    *((name, POINTER, rf"{name} is a pointer of Git LFS.*git lfs pull") for name in ("a.txt", "a.jsonl", "a.parquet")),
    ("a.npy", POINTER, "a.npy is a pointer of Git LFS"),
    ("a.csv", b"text,text\n1,2\n", "the first row of .*a.csv must name the columns"),
    ("a.csv", b"text,id\n1\n", r"a.csv, row 1 \(up to line 2\) has 1 values, and the first row names 2 columns"),
    ("a.csv", b'text\n"once', r"a.csv is no table of UTF-8 text behind line 2 .*as JSON lines"),
    ("a.csv", b"text\n\xe9\n", r"a.csv is no table of UTF-8 text behind line"),
]


@pytest.mark.parametrize(("name", "content", "words"), FOREIGN, ids=range(len(FOREIGN)))
def test_a_file_that_is_something_else_is_called_by_its_name(tmp_path, name, content, words):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / name).write_bytes(content)
    places = [tmp_path / "d" / name] + ([tmp_path / "d"] if name not in ("a.txt.gz", "a.xlsx") else [])
    for place in places:
        with pytest.raises(ConfigError, match=words):
            prepare(str(place), ByteTokenizer(), 0, tmp_path / "cache")


def test_pointers_of_git_lfs_stand_for_no_model_tokenizer_or_dataset(tmp_path):
    from meshwright.checkpoint.tensor_files import TensorFiles
    from meshwright.data.tokenizers import FileTokenizer

    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(POINTER)
    for opened in (TensorFiles, FileTokenizer):
        with pytest.raises(ConfigError, match="is a pointer of Git LFS, and not the file itself"):
            opened(tmp_path)
    arrow = next(saved(tmp_path / "a").glob("*.arrow"))
    arrow.write_bytes(POINTER)
    with pytest.raises(ConfigError, match=rf"{arrow.name} is a pointer of Git LFS"):
        prepare(str(tmp_path / "a"), ByteTokenizer(), 0, tmp_path / "cache")


@pytest.mark.parametrize("write", [parquet, saved])
def test_nulls_in_arguments_that_arrow_filled_in_are_counted(tmp_path, write):
    def row(arguments, wrap=lambda value: value):
        calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": calls}]
        return {"messages": wrap(turns)}

    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{{ m.tool_calls[0].function.arguments | tojson if m.tool_calls }}"
        "{% endfor %}"
    )
    given = [{"a": 1, "why": None}, {"a": 1, "why": "so"}, {"a": 2, "why": "no"}]
    options = {"template": str(tmp_path / "t.jinja")}
    for name, wrap, count in (("a", lambda value: value, 1), ("b", json.dumps, 0)):
        source = SourceOptions((str(write(tmp_path / name, [row(each, wrap) for each in given])),), **options)
        if write is parquet:
            source = SourceOptions((str((tmp_path / name).rename(tmp_path / f"{name}.parquet")),), **options)
        prepared = prepare(source, ByteTokenizer(), 0, tmp_path / "cache")
        assert ("null" in texts(open_corpus(prepared.folder).training)[0]) == (not count)
        found = [note for note in prepared.meta.notes if "nulls" in note]
        assert [note.split()[0] for note in found] == ["1"] * count and all("as JSON text" in note for note in found)
