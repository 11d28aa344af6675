"""Sources: which files are documents, in which order, and what is refused with which words."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.data import scan as sources
from meshwright.data.formats import FARMYARD_FILE, farmyard
from meshwright.data.scan import scan_sources


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def names(scan) -> list[str]:
    return [document.name for document in scan.files]


def test_a_folder_is_read_in_sorted_order_and_says_what_it_passed_over(tmp_path):
    write(
        tmp_path,
        b_dot_txt="b",
        a__z_dot_py="z",
        a__B_dot_MD="B",
        a__empty_dot_txt="",
        a__picture_dot_png="p",
        _dot_git__x_dot_txt="x",
    )
    scan = scan_sources(str(tmp_path))
    assert names(scan) == ["a/B.MD", "a/z.py", "b.txt"]
    assert str(scan) == "3 documents, 3 bytes (passed over: 1 empty, 1 not text)"


def test_sources_keep_the_order_given_and_a_file_named_itself_is_taken_whatever_it_is_called(tmp_path):
    write(tmp_path, one__a_dot_txt="1", notes_dot_log="2")
    scan = scan_sources([str(tmp_path / "notes.log"), str(tmp_path / "one")])
    assert names(scan) == ["notes.log", "a.txt"]


def test_a_file_reached_twice_counts_once_and_circular_links_end(tmp_path):
    write(tmp_path, one__a_dot_txt="1", one__b_dot_txt="2")
    (tmp_path / "one" / "circle").symlink_to(tmp_path / "one")
    (tmp_path / "one" / "link.txt").symlink_to(tmp_path / "one" / "a.txt")
    scan = scan_sources([str(tmp_path / "one"), str(tmp_path / "one" / "b.txt")])
    assert names(scan) == ["a.txt", "b.txt"] and scan.n_repeated == 2


def test_stdlib_is_the_library_without_tests_and_packages():
    scan = scan_sources("stdlib")
    found = names(scan)
    assert found == sorted(found) and {"argparse.py", "asyncio/base_events.py"} <= set(found)
    parts = {part for name in found for part in name.split("/")}
    assert not parts & {"test", "tests", "site-packages", "dist-packages", "idle_test", "__pycache__"}
    assert scan.n_undecodable == 0 and scan.n_bytes > 5_000_000


def test_stdlib_counts_what_is_not_utf8(tmp_path, monkeypatch):
    write(tmp_path, good_dot_py="x = 1", tests__t_dot_py="x", site_packages_dot_txt="x")
    (tmp_path / "bad.py").write_bytes(b"caf\xe9")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    scan = scan_sources("stdlib")
    assert names(scan) == ["good.py"] and str(scan).endswith("(passed over: 1 not UTF-8)")


def test_the_demos_text_is_the_same_everywhere_and_true_of_its_animals(tmp_path, monkeypatch):
    (tmp_path / "farmyard").mkdir()
    write(tmp_path / "farmyard", a_dot_txt="mine")
    monkeypatch.chdir(tmp_path)
    assert str(scan_sources("farmyard")) == "12000 documents about animals" and names(scan_sources("./farmyard")) == [
        "a.txt"
    ]
    texts = [record["text"] for _, record in farmyard(FARMYARD_FILE)]
    assert hashlib.sha256("".join(texts).encode()).hexdigest()[:16] == "3c3d27b3ba3d800d"
    animals = tomllib.loads(FARMYARD_FILE.read_text(encoding="utf-8"))["animals"]
    for sentence in "\n".join(texts[:300]).splitlines():
        words = sentence.removesuffix(".").split()
        food, sound = animals[next(word for word in words if word in animals)]
        assert words[-1] in (food, sound) and ("says" not in words or words[-1] == sound)
        assert "eats" not in words or words[words.index("eats") + 1] == food
    # with another digest other documents are held out, and README's losses are others
    assert scan_sources("farmyard").files[0].digest == "d4814e8c0ea41a40ad697bf762a19a19"
    with pytest.raises(ConfigError, match=r"data.format = 'jsonl': 'farmyard' is text"):
        scan_sources("farmyard", "jsonl")


def test_bytes_that_are_not_utf8_name_the_file_the_offset_and_the_way_out(tmp_path):
    (tmp_path / "a latin.txt").write_bytes(text := b"a caf\xe9 there")
    with pytest.raises(ConfigError, match=r"latin\.txt is not UTF-8: byte 0xe9 at offset 5 ") as refused:
        scan_sources(str(tmp_path))
    assert "Text has no rows, so data.on_bad_row says nothing of it" in str(refused.value)
    command = re.search(r"\((iconv -f latin1 .*)\) and name that one", str(refused.value)).group(1)
    assert subprocess.run(command, shell=True, cwd="/", check=True, capture_output=True).stdout == b""
    (written,) = scan_sources(str(tmp_path / "utf8-a latin.txt")).files
    assert written.read() == "a café there" and (tmp_path / "a latin.txt").read_bytes() == text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "data.source is empty: name at least one file or folder, or 'farmyard' or 'stdlib'"),
        ([""], "'' does not exist"),
        (["stdlb"], "'stdlb' does not exist .*Did you mean 'stdlib'"),
        (["{root}/*.txt"], "does not exist .*patterns such as \\*.txt are not expanded"),
        (["{root}/pictures"], r"holds no text file \(1 files of other kinds\).*\.md .*\.py .*\.txt"),
        (["{root}/empty"], "1 files, all of 0 bytes"),
    ],
)
def test_refusals_teach(tmp_path, given, words):
    write(tmp_path, pictures__a_dot_png="x", empty__a_dot_txt="")
    with pytest.raises(ConfigError, match=words):
        scan_sources([source.replace("{root}", str(tmp_path)) for source in given])


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    write(tmp_path, a_dot_txt="x")

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(sources.Path, "read_bytes", refuse)
    with pytest.raises(
        ConfigError, match=r"cannot read .*a\.txt: Permission denied. Make it readable, or leave it out"
    ):
        scan_sources(str(tmp_path))


def test_a_document_that_changed_since_the_scan_is_not_read_as_if_it_had_not(tmp_path):
    write(tmp_path, a_dot_txt="12345", b_dot_txt="x")
    scan = scan_sources(str(tmp_path))
    (tmp_path / "a.txt").write_text("12346")
    (tmp_path / "b.txt").unlink()
    with pytest.raises(IntegrityError, match=r"a\.txt changed"):
        scan.files[0].read()
    with pytest.raises(IntegrityError, match=r"b\.txt could be read a moment ago"):
        scan.files[1].read()


def test_line_ends_are_left_as_they_are(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\r\nb\rc\n")
    assert scan_sources(str(tmp_path)).files[0].read() == "a\r\nb\rc\n"


def test_a_path_that_does_not_exist_is_said_before_the_flags_behind_it(tmp_path, capsys):
    (tmp_path / "chats.jsonl").write_text("{}")
    for name, near in (("chat.jsonl", " Did you mean 'chats.jsonl'?"), ("none/chats.jsonl", "")):
        assert main(["inspect", str(tmp_path / name), "--model.hf=model"]) == 2
        said = capsys.readouterr().err
        assert f"does not exist (looked at {tmp_path / name}).{near} Give the folder of a run" in said
