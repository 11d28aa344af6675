"""Runs beside each other: each figure and curve is that of its own run, only differing keys are shown, and a run is
read as it stands, also with half a line at its end.
"""

from __future__ import annotations

import json
import math
import re
import shutil

import pytest

from meshwright.cli.main import main
from meshwright.core.config import to_toml
from meshwright.planning.layout import Layout
from meshwright.training.config import Config, OptimizerConfig
from meshwright.training.metrics import MetricsWriter
from meshwright.training.run.occupancy import occupied
from meshwright.training.views.page import read_history


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs whose every figure differs: ``a`` complete, and ``b`` stopped half way, twice as fast."""
    clock = [1000.0]
    monkeypatch.setattr("meshwright.training.metrics._now", lambda: clock[0])
    for name, steps, lr, layout, seconds in (
        ("a", 8, 3e-3, Layout(dp_shard=4), 2.0),
        ("b", 4, 1e-2, Layout(dp_shard=2, tp=2), 1.0),
    ):
        folder = tmp_path / name
        folder.mkdir()
        config = Config(steps=8, name="same", layout=layout, optimizer=OptimizerConfig(lr=lr))
        (folder / "config.toml").write_text(to_toml(config))
        with MetricsWriter(folder) as writer:
            writer.event("startup", {"imports": 1.0})
            for step in range(1, steps + 1):
                clock[0] += seconds
                writer.log(step, values(name, step))
        clock[0] += 100.0
    return tmp_path / "a", tmp_path / "b"


def values(name, step):
    of = 1.0 if name == "a" else 2.0
    found = {
        "loss": 6 * of - step / 2 + (0.75 if step == 8 else 0.0),
        "grad_norm": of + step / 10,
        "learning_rate": of / step,
        "tokens_per_second": 1000 * of + step,
        "memory_bytes": int(of * 2**30),
        "tokens": int(100 * of * step),
        "skipped": 0,
    }
    return found | ({"validation_loss": 7 * of - step} if step % 2 == 0 else {})


def as_json(runs, capsys, *flags):
    assert main(["compare", *map(str, runs), "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


class Figures:
    """The data that the page's script has: title -> run -> points, and the colours of each run."""

    def __init__(self, text):
        found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
        assert found is not None
        self.curves, self.colours = {}, {}
        for chart in json.loads(found.group(1)):
            for curve in chart["curves"]:
                points = list(zip(curve["at"], curve["values"], strict=True))
                self.curves.setdefault(chart["title"], {})[curve["name"]] = points
                self.colours.setdefault(curve["name"], set()).add(curve["colour"])


@pytest.mark.parametrize("by", ["steps", "tokens", "seconds"])
def test_every_curve_is_that_of_its_own_run(runs, tmp_path, by, capsys):
    assert main(["compare", *map(str, runs), "--by", by, "--html", str(tmp_path / "c.html")]) == 0
    page = Figures((tmp_path / "c.html").read_text(encoding="utf-8"))
    titles = {
        "Loss": "loss",
        "Validation loss": "validation_loss",
        "Gradient norm": "grad_norm",
        "Learning rate": "learning_rate",
        "Speed": "tokens_per_second",
    }
    assert set(page.curves) == set(titles)
    for name, steps, seconds in (("a", 8, 2.0), ("b", 4, 1.0)):
        places = {step: {"steps": step, "tokens": values(name, step)["tokens"], "seconds": step * seconds}[by]
                  for step in range(1, steps + 1)}  # fmt: skip
        for title, key in titles.items():
            wanted = [(at, values(name, step)[key]) for step, at in places.items() if key in values(name, step)]
            found = page.curves[title][f"{name.upper()} {name}"]
            assert found == wanted, (title, name)
    assert [len(colours) for colours in page.colours.values()] == [1, 1]
    assert page.colours["A a"] != page.colours["B b"]
    assert f"wrote {tmp_path / 'c.html'}" in capsys.readouterr().out


def test_the_figures_are_those_of_the_runs(runs, capsys):
    answer = as_json(runs, capsys)
    a, b = answer["runs"]
    wanted = {
        "state": "complete", "step": 8, "steps": 8, "layout": "dp_shard=4,pp=1", "loss": 2.75, "best_loss": 2.5,
        "best_loss_step": 7, "validation_loss": -1.0, "best_validation_loss": -1.0, "best_validation_loss_step": 8,
        "tokens": 800, "seconds": 16.0, "tokens_per_second": 1004.5, "memory_bytes": 2**30, "skipped": 0,
        "loss_at_common": 4.0, "mfu": None,
    }  # fmt: skip
    assert {name: a[name] for name in wanted if name != "layout"} == {
        name: value for name, value in wanted.items() if name != "layout"
    }
    assert (b["state"], b["step"], b["loss"], b["loss_at_common"], b["tokens"]) == ("stopped", 4, 10.0, 10.0, 800)
    assert (answer["by"], answer["common"]) == ("steps", 4.0)
    assert as_json(runs, capsys, "--by=tokens")["common"] == 800.0
    seconds = as_json(runs, capsys, "--by=seconds")
    assert seconds["common"] == 4.0 and seconds["runs"][0]["loss_at_common"] == values("a", 2)["loss"]


def test_only_keys_that_differ_are_shown(runs, capsys):
    assert as_json(runs, capsys)["differences"] == {
        "layout.dp_shard": {"a": "4", "b": "2"},
        "layout.tp": {"a": "1", "b": "2"},
        "optimizer.lr": {"a": "0.003", "b": "0.01"},
    }


def test_the_table_has_units_and_a_column_for_each_run(runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["compare", *map(str, runs)]) == 0
    text = capsys.readouterr().out
    assert f"A  {runs[0]}: complete, 8 steps, dp_shard=4" in text
    assert f"B  {runs[1]}: stopped at step 4 of 8, dp_shard=2, tp=2" in text
    rows = {line.split("  ")[0]: re.split(r" {2,}", line.strip())[1:] for line in text.splitlines()[3:]}
    assert rows["final loss, nats/token"] == ["2.75", "10"] and rows["best loss, nats/token"] == ["2.5", "10"]
    assert rows["loss at step 4, nats/token"] == ["4", "10"]
    assert rows["trained on, tokens"] == ["800", "800"] and rows["time of training, s"] == ["16", "4"]
    assert rows["median speed, tokens/s"] == ["1K", "2K"] and rows["optimizer.lr"] == ["0.003", "0.01"]
    assert not any(name.startswith(("skipped steps", "MFU")) for name in rows)


def test_eight_runs_fit_a_terminal_of_80_columns_without_a_broken_word(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    more = [shutil.copytree(runs[number % 2], tmp_path / f"copy{number}") for number in range(6)]
    assert main(["compare", *map(str, [*runs, *more])]) == 0
    table = capsys.readouterr().out.splitlines()[8:]
    assert all(len(line) <= 80 for line in table)
    words = {word for line in table for word in line.split()}
    assert {"validation", "nats/token", "tokens/s", "training,"} <= words


def test_a_run_is_read_as_it_stands(runs, tmp_path, capsys):
    with (runs[1] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "time": 12')
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.toml").write_text(to_toml(Config(steps=3)))
    with occupied(runs[1]):
        answer = as_json([*runs, empty], capsys)
    states = [(one["state"], one["step"], one["loss"]) for one in answer["runs"]]
    assert states == [("complete", 8, 2.75), ("live", 4, 10.0), ("stopped", 0, None)]
    assert main(["compare", *map(str, [*runs, empty]), "--html", str(tmp_path / "c.html")]) == 0
    assert "no step was taken yet" in capsys.readouterr().out
    page = Figures((tmp_path / "c.html").read_text(encoding="utf-8"))
    assert set(page.curves["Loss"]) == {"A a", "B b"}


def test_numbers_that_are_none_stay_out_of_the_figures(runs, capsys):
    with MetricsWriter(runs[1]) as writer:
        writer.log(5, values("b", 5) | {"loss": math.nan})
    b = as_json(runs, capsys)["runs"][1]
    assert b["loss"] is None and b["best_loss"] == 10.0 and b["step"] == 5


def test_pauses_and_abandoned_steps_are_no_time_of_training(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("meshwright.training.metrics._now", lambda: clock[0])
    with MetricsWriter(tmp_path) as writer:
        writer.event("startup", {"imports": 1.0})
        for step in (1, 2, 3, 4):
            clock[0] += 10.0
            writer.log(step, {"loss": 1.0})
        clock[0] += 3600.0
        writer.resumed(2)
        for step in (3, 4):
            clock[0] += 1.0
            writer.log(step, {"loss": 1.0})
    history = read_history(tmp_path / "metrics.jsonl")
    assert list(zip(history.clock.steps, history.clock.values, strict=True)) == [(1, 10), (2, 20), (3, 21), (4, 22)]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("{a}", "takes 2 to 8 folders of runs, not 1"),
        ("", "takes 2 to 8 folders of runs, not 0"),
        ("{a} {b} {a} {b} {a} {b} {a} {b} {a}", "takes 2 to 8 folders of runs, not 9"),
        ("{a} {a}/../a", "is named twice"),
        ("{a} {none}", "does not exist or is no folder; give the folder of a run"),
        ("{a} {folder}", "is a folder without a config.toml, so it is no run"),
        ("{a} {b} --by=step", 'by = "step" is text; expected one of "steps", "tokens", "seconds". Did you mean'),
        ("{a} {b} --html={none}/c.html", "cannot write this file (there is no folder"),
        ("{a} {b} --htm=c", "does not know '--htm=c'. Did you mean '--html'? Flags: --by, --html, --json"),
        ("{new} {new2}", "none of these runs has figures yet"),
        ("{a} {foreign}", "metrics.jsonl, line 1: not JSON"),
    ],
)
def test_each_refusal_is_a_sentence(runs, tmp_path, words, says, capsys):
    places = {"a": runs[0], "b": runs[1], "none": tmp_path / "none"}
    for name in ("folder", "new", "new2", "foreign"):
        places[name] = tmp_path / name
        places[name].mkdir()
        if name != "folder":
            (places[name] / "config.toml").write_text(to_toml(Config()))
    (places["foreign"] / "metrics.jsonl").write_text("loss 3.0\n")
    assert main(["compare", *words.format(**places).split()]) in (1, 2)
    error = capsys.readouterr().err
    assert says in error and error.startswith("meshwright: ") and error.count("\n") == 1
