"""Which tests `make test` has: computed from what they cost (support/suite)."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from support import suite
from support.suite import (
    ALONE_SEC,
    FILE,
    SHARE_SEC,
    Cost,
    digest_of_tests,
    files_with,
    left_to_all,
    lines_of,
    pieces,
    read_costs,
)


def cases(function: str, *seconds: float, **more) -> list[Cost]:
    return [Cost(f"tests/unit/test_a.py::{function}[{number}]", sec, **more) for number, sec in enumerate(seconds)]


def short(left: set[str]) -> set[str]:
    return {test.rpartition("::")[2] for test in left}


def test_of_each_function_the_cheapest_cases_stay_as_far_as_its_share_reaches():
    third = SHARE_SEC / 3
    assert short(left_to_all(cases("f", 3 * third, third, third) + cases("g", third))) == {"f[0]"}


def test_one_case_may_take_more_than_the_share_and_not_any_amount():
    assert short(left_to_all(cases("f", ALONE_SEC, ALONE_SEC + 1) + cases("g", ALONE_SEC + 1))) == {"f[1]", "g[0]"}


def test_a_test_that_alone_kills_a_mutant_never_leaves():
    dear = 10 * ALONE_SEC
    costs = [*cases("f", dear, dear + 1, covers=("verify: one",)), *cases("g", dear, covers=("verify: another",))]
    assert short(left_to_all(costs)) == {"f[1]"}
    assert not left_to_all(cases("f", dear, dear, is_kept=True))


def test_what_is_covered_by_any_test_stays_covered_by_the_cheapest_for_what_they_add():
    one, two, both = (
        cases(name, 10 * ALONE_SEC, covers=covers)[0] for name, covers in (("a", "x"), ("b", "y"), ("c", "xy"))
    )
    assert short(left_to_all([one, two, both])) == {"a[0]", "b[0]"}
    assert short(left_to_all([one, two])) == set()


def test_a_file_of_costs_is_read_back_and_new_tests_are_not_in_it(tmp_path):
    (tmp_path / "costs.txt").write_text(
        "# a head\n" + "\n".join(lines_of(cases("f, g [1 / 2]", 0.01, SHARE_SEC / 2, 7.0))), encoding="utf-8"
    )
    name = "tests/unit/test_a.py::f, g [1 / 2]"
    assert read_costs(tmp_path / "costs.txt") == {f"{name}[1]": (SHARE_SEC / 2, "test"), f"{name}[2]": (7.0, "all")}


def test_pieces_have_every_test_once_and_cost_about_the_same():
    costs = {f"tests/a.py::f[{number:02}]": (1.0 + number % 3, "all") for number in range(60)}
    found = pieces(costs, 3, costs)
    assert sorted(test for piece in found for test in piece) == sorted(costs)
    spent = [sum(costs[test][0] for test in piece) for piece in found]
    assert max(spent) - min(spent) <= 3


@pytest.mark.skipif(not FILE.exists(), reason="make test-all has recorded no costs yet")
def test_what_is_left_to_make_test_all_is_listed_with_its_cost():
    left = [seconds for seconds, tier in read_costs().values() if tier == "all"]
    assert left and min(left) > 0


def test_files_are_chosen_by_names_only_while_no_test_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "NAMES", tmp_path / "names.json")
    assert files_with("pipeline") == [], "nothing was collected yet"
    files = {"tests/a.py": ["test_x[1F1B]"], "tests/b.py": ["test_pipelines_end"], "tests/pipeline.py": ["test_z"]}

    def collected(tests):
        suite.NAMES.write_text(json.dumps({"tests": tests, "files": files}), encoding="utf-8")

    collected(digest_of_tests())
    assert files_with("pipeline") == ["tests/b.py", "tests/pipeline.py"]
    assert files_with("1f1b or test_z") == ["tests/a.py", "tests/pipeline.py"]
    assert files_with("not pipeline") == []
    collected("other tests")
    assert files_with("pipeline") == []


@pytest.fixture(scope="module")
def touching():
    path = Path(__file__).resolve().parents[2] / "scripts" / "touched.py"
    spec = importlib.util.spec_from_file_location("touched", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_change_touches_the_tests_that_import_it_at_any_remove(touching):
    near = touching.distances_of(["src/meshwright/checkpoint/save.py"])
    assert near["tests/distributed/test_checkpoint.py"] <= near["tests/e2e/test_resume.py"]
    assert "tests/unit/test_loss.py" not in near
    assert touching.distances_of(["tests/unit/test_loss.py"]) == {"tests/unit/test_loss.py": 0}
    assert touching.distances_of(["README.md"]) == {}


def test_the_nearest_tests_come_first_and_only_what_fits(touching, monkeypatch):
    monkeypatch.setattr(touching, "changed_files", lambda: ["tests/unit/test_loss.py"])
    monkeypatch.setattr(
        touching, "read_costs", lambda: {f"tests/unit/test_loss.py::f[{n}]": (2.0, "all") for n in range(4)}
    )
    tests = [f"tests/unit/test_loss.py::f[{n}]" for n in range(4)]
    assert touching.touched([*tests, "tests/unit/test_moe.py::g"], 5.0) == (tests[:2], 2)
