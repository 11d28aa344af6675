"""First contact with a GPU resumes, keeps stale results apart, and goes on behind a failing step."""

import json
import sys

import pytest
import torch

from benchmarks.first_contact import child, machine, page, runner
from benchmarks.first_contact.loops import covered
from benchmarks.first_contact.parity import judge
from benchmarks.first_contact.problem import EXACT, Outcome, errors_of
from benchmarks.first_contact.results import FAILED, NOT_HERE, PASSED, SKIPPED, Result, Results, sources_key
from benchmarks.first_contact.runner import OutOfTime, Step, run_steps

STEPS = [Step("a", "x:y"), Step("b/one", "x:y"), Step("b/two", "x:y", limit=7)]


class Started:
    """Notes which steps were started, and gives each the result that it is told to."""

    def __init__(self, **given):
        self.names, self.given = [], given

    def __call__(self, step, folder, seconds):
        self.names.append(step.name)
        found = self.given.get(step.name, Result(PASSED))
        if isinstance(found, BaseException):
            raise found
        return found


def run(folder, start, key="k", steps=STEPS, **options):
    results, said = Results(folder, key), []
    try:
        run_steps(steps, results, start=start, say=said.append, **options)
    except (KeyboardInterrupt, OutOfTime) as stop:
        said.append(type(stop).__name__)
    return results, "\n".join(said)


def test_a_second_call_begins_where_the_first_was_stopped(tmp_path):
    stopped = Started(**{"b/one": KeyboardInterrupt()})
    results, said = run(tmp_path, stopped)
    assert said.endswith("KeyboardInterrupt") and list(results.steps) == ["a"]
    again = Started()
    results, said = run(tmp_path, again)
    assert again.names == ["b/one", "b/two"] and list(results.steps) == ["a", "b/one", "b/two"]
    assert "a      ok, by an earlier call" in said
    last = Started()
    run(tmp_path, last)
    assert last.names == []


def test_results_are_on_disk_before_the_next_step_begins(tmp_path):
    def start(step, folder, seconds):
        held = json.loads((folder / "results.json").read_text())["steps"] if step.name != "a" else {}
        assert list(held) == [s.name for s in STEPS[: STEPS.index(step)]]
        return Result(PASSED, figures={"n": 1})

    results, _ = run(tmp_path, start)
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"] and results.count(PASSED) == 3


def test_a_failing_step_is_kept_with_its_last_lines_and_the_next_goes_on(tmp_path):
    start = Started(
        **{"a": Result(FAILED, why="Traceback\nValueError: no"), "b/one": Result(SKIPPED, why="no torchao")}
    )
    results, said = run(tmp_path, start)
    assert start.names == ["a", "b/one", "b/two"] and results.count(FAILED) == 1
    assert "    ValueError: no" in said and "skipped, 0 s: no torchao" in said
    text = page.section(results.steps, is_dry=False)
    assert "a failed:" in text and "    ValueError: no" in text
    assert page.summary(results.steps) == "1 passed, 1 failed, 1 skipped"


@pytest.mark.parametrize(
    ("patterns", "names"), [(["b/*"], ["b/one", "b/two"]), (["failed"], ["a"]), (["b/two"], ["b/two"])]
)
def test_steps_are_repeated_by_name(tmp_path, patterns, names):
    run(tmp_path, Started(a=Result(FAILED, why="x")))
    start = Started()
    run(tmp_path, start, again=patterns)
    assert start.names == names


def test_results_of_other_sources_are_kept_apart(tmp_path):
    run(tmp_path, Started())
    start = Started()
    results, _ = run(tmp_path, start, key="other")
    assert start.names == ["a", "b/one", "b/two"]
    assert (
        results.set_aside == tmp_path / "results-k.json"
        and len(json.loads(results.set_aside.read_text())["steps"]) == 3
    )
    (tmp_path / "results.json").write_text('{"sources": "other", "steps"')
    assert Results(tmp_path, "other").steps == {} and (tmp_path / "results-unreadable.json").exists()


def test_the_key_follows_sources_and_torch(tmp_path):
    (tmp_path / "deep").mkdir()
    source = tmp_path / "deep" / "a.py"
    source.write_text("x = 1\n")
    first = sources_key(tmp_path, "2.11")
    assert first == sources_key(tmp_path, "2.11") != sources_key(tmp_path, "2.12")
    source.write_text("x = 2\n")
    second = sources_key(tmp_path, "2.11")
    source.rename(tmp_path / "a.py")
    assert len({first, second, sources_key(tmp_path, "2.11")}) == 3


def test_a_step_beyond_its_limit_fails_and_one_cut_short_by_the_minutes_is_left(tmp_path):
    results, said = run(tmp_path, Started(**{"b/two": None}))
    assert results.steps["b/two"].why == "it took longer than its limit of 7 s" and "FAILED" in said
    short = tmp_path / "short"
    results, said = run(short, Started(a=None), minutes=0.1)
    assert said == "OutOfTime" and results.steps == {}


def test_a_process_reports_how_its_step_ended():
    def raising(error):
        def work():
            raise error

        return child.judged(work)

    assert child.judged(lambda: ({"n": 1}, ["one"])) == Result(PASSED, figures={"n": 1}, lines=["one"])
    assert raising(machine.SkippedError("no room")) == Result(SKIPPED, why="no room")
    assert raising(machine.NotHereError("NCCL")) == Result(NOT_HERE, why="NCCL")
    missing = raising(ModuleNotFoundError("No module named 'torchao.optim'", name="torchao.optim"))
    assert missing == Result(SKIPPED, why="the package torchao.optim is not installed")
    own = raising(ModuleNotFoundError("No module named 'meshwright.gone'", name="meshwright.gone"))
    assert own.status == FAILED
    broken = raising(ValueError("no"))
    assert broken.status == FAILED and broken.why.endswith("ValueError: no")


@pytest.mark.parametrize(
    ("code", "limit", "why"),
    [
        ("import os; print('last words', flush=True); os._exit(3)", 30, "last words\nthe process ended with status 3"),
        ("import time; time.sleep(60)", 0.2, None),
    ],
)
def test_a_process_that_dies_or_hangs_is_a_result(tmp_path, monkeypatch, code, limit, why):
    monkeypatch.setattr(runner, "child_command", lambda step, out: [sys.executable, "-S", "-c", code])
    found = runner.run_child(STEPS[0], tmp_path, limit)
    assert found is None if why is None else (found.status, found.why) == (FAILED, why)


def test_hidden_packages_are_absent(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv(machine.WITHOUT, "a_package,colorsys")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert machine.has("colorsys")
    machine.hide_packages()
    assert not machine.has("colorsys") and machine.has("json")
    with pytest.raises(machine.SkippedError, match="a palette needs colorsys, which is not installed"):
        machine.need("colorsys", "a palette")


def test_a_figure_beyond_its_bound_fails_and_is_named():
    one = Outcome([2.0, 1.0], [3.0], {"w": torch.ones(4)}, {"w": torch.ones(4)})
    bounds = dict.fromkeys(errors_of(one, one), EXACT)
    figures, _ = judge(one, one, bounds)
    assert figures["error"] == 0.0 and len(bounds) == 5
    for other, words in (
        (Outcome([2.0, 1.0 + 1e-8], [3.0], one.gradients, one.parameters), "losses of step 1: 1.00e-08 > 1.0e-10"),
        (Outcome([2.0, 1.0], [3.0], {"w": torch.tensor([1, 1, 1, 1.001])}, one.parameters), "gradients of w: 5"),
        (Outcome([2.0, 1.0], [3.0], one.gradients, {"w": torch.full((4,), torch.nan)}), "parameters of w: inf"),
    ):
        with pytest.raises(AssertionError, match=words):
            judge(other, one, bounds)


def test_kernels_that_overlap_count_once():
    assert covered([(0, 2e6), (1e6, 3e6), (5e6, 6e6)]) == {"busy": 4.0, "span": 6.0}
    assert covered([]) == {"busy": 0.0, "span": 0.0}
