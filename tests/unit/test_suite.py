"""Which tests `make test` has, chosen by markers (support/suite), and which a change touches (scripts/run_tests)."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.suite import FAST, KILLS, TIERS, Suite, in_make_test, is_chosen

HOUSE = Path(__file__).resolve().parents[2]


def case(name: str, *marks: str | pytest.MarkDecorator, of_case: str = "", kills: str = "", folder: str = "e2e"):
    """A collected test, as far as the suite asks it; ``marks`` from the nearest to the file's."""
    made = [mark.mark if isinstance(mark, pytest.MarkDecorator) else getattr(pytest.mark, mark).mark for mark in marks]
    killing = pytest.mark.kills("gallery", "mutant").mark if kills else None
    return SimpleNamespace(
        nodeid=f"tests/{folder}/test_a.py::{name}",
        callspec=SimpleNamespace(
            id=name.partition("[")[2].rstrip("]"),
            marks=[getattr(pytest.mark, of_case).mark] if of_case else [],
            params={"mutant": kills},
        ),
        iter_markers=lambda: iter(made),
        get_closest_marker=lambda wanted: killing if wanted == KILLS else None,
    )


def short(names: set[str]) -> set[str]:
    return {name.rpartition("::")[2] for name in names}


@pytest.mark.parametrize(
    ("marks", "folder", "kept"),
    [
        ((), "e2e", {"f[0]"}),
        ((), "unit", {"f[0]", "f[1]", "f[2]"}),
        (("fast",), "e2e", {"f[0]", "f[1]", "f[2]"}),
        (("first",), "unit", {"f[0]"}),
        ((pytest.mark.first("1"),), "unit", {"f[1]"}),
        (("all",), "unit", set()),
        (("fast", "all"), "e2e", {"f[0]", "f[1]", "f[2]"}),
    ],
)
def test_the_nearest_marker_tells_which_cases_make_test_has(marks, folder, kept):
    assert short(in_make_test(case(f"f[{n}]", *marks, folder=folder) for n in range(3))) == kept


def test_a_cases_own_marker_wins():
    assert short(in_make_test([case("f[0]", "all"), case("f[1]", "all", of_case="fast")])) == {"f[1]"}
    assert short(in_make_test([case("f[0]", of_case="all"), case("f[1]"), case("f[2]")])) == {"f[1]"}


def test_each_mutant_keeps_a_first_case_whatever_the_markers():
    assert short(in_make_test([case("f", "all", kills="one")])) == {"f"}
    cases = [case("f[0]", kills="one"), case("f[1]", kills="one"), case("f[2]", kills="another")]
    assert short(in_make_test(cases)) == {"f[0]", "f[2]"}


def test_tiers_and_pieces_have_every_test_once():
    cases = [case(f"{name}[{n}]") for name in "fgh" for n in range(5)]
    assert sum(is_chosen(cases, "test", "")) == 3
    assert [a != b for a, b in zip(is_chosen(cases, "test", ""), is_chosen(cases, "rest", ""), strict=True)] == [
        True
    ] * 15
    pieces = [is_chosen(cases, "all", f"{number}/4") for number in range(1, 5)]
    assert [sum(chosen) for chosen in zip(*pieces, strict=True)] == [1] * 15


def test_what_begins_after_the_time_is_skipped():
    Suite(None).pytest_runtest_setup(None)
    with pytest.raises(pytest.skip.Exception, match="minutes of this run are over"):
        Suite(-1.0).pytest_runtest_setup(None)


@pytest.fixture(scope="module")
def run_tests():
    spec = importlib.util.spec_from_file_location("run_tests", HOUSE / "scripts" / "run_tests.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_change_touches_itself_and_the_tests_that_import_from_its_folder(run_tests, monkeypatch):
    def touched(*changed):
        monkeypatch.setattr(
            subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0, stdout="\n".join(changed))
        )
        return run_tests.touched("HEAD~1")

    near = touched("src/meshwright/checkpoint/saving.py")
    assert "tests/distributed/test_checkpoint.py" in near and "tests/unit/test_loss.py" not in near
    assert touched("tests/unit/test_loss.py", "README.md", "tests/unit/test_gone.py") == ["tests/unit/test_loss.py"]
    assert "tests/distributed/test_ways.py" in touched("tests/support/ways.py")


def test_files_are_found_by_the_names_in_them(run_tests):
    assert "tests/distributed/test_pipeline.py" in (found := run_tests.files_with("pipeline"))
    assert "tests/unit/test_loss.py" not in found
    assert run_tests.files_with("not pipeline") == [] == run_tests.files_with("zzzz")
    assert "tests/unit/test_suite.py" in run_tests.files_with("zzzz or a_cases_own_marker_wins")


def test_the_markers_are_declared(pytestconfig):
    assert {*TIERS, KILLS} <= {line.partition("(")[0].partition(":")[0] for line in pytestconfig.getini("markers")}
    assert FAST == "fast"


def replaced_names(code: str) -> dict[str, str]:
    """What a file's tests replace in modules of meshwright that it imports: "module:name" -> the call."""
    found: dict[str, str] = {}
    if "patch.object" not in code and "monkeypatch.setattr" not in code:
        return found
    tree = ast.parse(code)
    homes = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meshwright")
        for alias in node.names
    }
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) > 1):
        makes_it = {keyword.arg for keyword in call.keywords} & {"create", "raising"}
        if ast.unparse(call.func) not in ("patch.object", "monkeypatch.setattr") or makes_it:
            continue
        target, name = map(ast.unparse, call.args[:2])
        first, _, rest = target.partition(".")
        if first in homes and isinstance(call.args[1], ast.Constant):
            found[".".join(filter(None, [homes[first], rest, ast.literal_eval(name)]))] = ast.unparse(call)
    return found


def is_there(place: str) -> bool:
    module, _, name = place.partition(":")
    first, *way = name.split(".")
    home = importlib.import_module(module)
    home = getattr(home, first, None) or importlib.import_module(f"{module}.{first}")
    for step in way[:-1]:
        home = getattr(home, step)
    return hasattr(home, way[-1])


def test_what_tests_replace_is_there():
    """A mutant of a name that has gone raises, and a test that only expects an error of it would pass."""
    replaced = {}
    for path in sorted((HOUSE / "tests").rglob("*.py")):
        replaced |= replaced_names(path.read_text(encoding="utf-8"))
    assert len(replaced) > 100
    assert {place: call for place, call in replaced.items() if not is_there(place)} == {}


def test_a_name_that_has_gone_is_seen():
    code = "from meshwright.distributed import nf4\npatch.object(nf4, '_gone', None)\n"
    (place,) = replaced_names(code)
    assert not is_there(place) and is_there("meshwright.distributed:nf4.unpack")
