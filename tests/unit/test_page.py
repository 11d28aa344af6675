"""The page of a run: every point is there, nothing in the run's files can act in it, and a browser draws it without
complaint.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from contextlib import ExitStack
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.browser import BROWSER, WHY_NOT

from meshwright.cli.main import main
from meshwright.core.config import to_toml
from meshwright.core.errors import IntegrityError
from meshwright.distributed.loss.preference import MARGINS
from meshwright.planning.layout import Layout
from meshwright.training.config import Config
from meshwright.training.metrics import MetricsWriter, read_metrics
from meshwright.training.run.occupancy import occupied
from meshwright.training.run.request import keep_request
from meshwright.training.views.page import (
    BEGIN,
    MOST_POINTS,
    MOST_SOURCES,
    OF_PAIRS,
    Series,
    page,
    read_history,
    thinned,
)

EVIL = "</script><script>alert(1)</script><img src=http://x.y/z onerror=alert(1)>\"'&\u2028"


class Reader(HTMLParser):
    """What a browser would make of the page: its elements, the texts of tables, and the data of its figures."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.cells, self.data, self._open = [], [], "", ""
        self.feed(text)
        self.close()
        self.charts = json.loads(self.data)

    def handle_starttag(self, tag, attrs):
        attributes = {name: value or "" for name, value in attrs}
        self.tags.append((tag, attributes))
        self._open = self._open if tag in ("wbr", "br") else attributes.get("id") or tag
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data):
        if self._open == "data":
            self.data += data
        elif self._open == "td":
            self.cells[-1] += data

    def handle_endtag(self, tag):
        self._open = self._open if tag in ("wbr", "br") else ""

    def curve(self, title, name):
        chart = next(chart for chart in self.charts if chart["title"] == title)
        curve = next(curve for curve in chart["curves"] if curve["name"] == name)
        return list(zip(curve["at"], curve["values"], strict=True))


def is_harmless(reader: Reader) -> bool:
    """Nothing is fetched, and nothing but the page's own script runs."""
    scripts = [attributes for tag, attributes in reader.tags if tag == "script"]
    links = [
        value
        for _, attributes in reader.tags
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "action")
    ]
    handlers = [name for _, attributes in reader.tags for name in attributes if name.startswith("on")]
    foreign = {tag for tag, _ in reader.tags} & {"img", "iframe", "object", "embed", "form", "base", "a"}
    return (
        scripts == [{"type": "application/json", "id": "data"}, {}]
        and links == ["data:,"]
        and not handlers
        and not foreign
    )


@pytest.fixture
def run(tmp_path):
    """The folder of a run, with a resume, a step that was skipped and one that was not a number."""
    (tmp_path / "config.toml").write_text(to_toml(Config(steps=40, name="tiny", layout=Layout(dp_shard=4))))
    with MetricsWriter(tmp_path) as writer:
        writer.event("startup", {"imports": 1.5})
        for step in range(1, 31):
            writer.log(step, figures(step) | ({"loss": 9.0} if step > 20 else {}))
        writer.resumed(20)
        for step in range(21, 41):
            more = (
                {"validation_loss": 3.0 - step / 100, "validation_loss/web": 2.0, "validation_loss/code": 4.0}
                if step % 10 == 0
                else {}
            )
            writer.log(step, figures(step) | more)
    return tmp_path


def figures(step):
    return {
        "loss": math.nan if step == 25 else 5.0 - step / 20,
        "grad_norm": math.inf if step == 25 else 1.0 + step % 3,
        "learning_rate": 1e-3 / step,
        "tokens_per_second": 1000.0 + step,
        "memory_bytes": 2**30 + step * 2**20,
        "tokens": 256 * step,
        "skipped": int(step >= 25),
    }


def test_every_point_of_every_series_is_there_with_its_unit_and_marks(run):
    config = Config.from_toml(run / "config.toml")
    reader = Reader(page(run, config))
    rows = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    assert [row["step"] for row in rows] == list(range(1, 41))
    for title, name, key in [
        ("Loss", "training", "loss"),
        ("Loss", "validation", "validation_loss"),
        ("Loss", "code", "validation_loss/code"),
        ("Speed", "tokens/s", "tokens_per_second"),
        ("Memory of rank 0", "memory", "memory_bytes"),
        ("Gradient norm", "gradient norm", "grad_norm"),
        ("Learning rate", "learning rate", "learning_rate"),
    ]:
        wanted = [(row["step"], row[key] if math.isfinite(row[key]) else None) for row in rows if key in row]
        assert reader.curve(title, name) == wanted
    assert {chart["title"]: chart["y"]["unit"] for chart in reader.charts} == {
        "Loss": "nats/token",
        "Speed": "tokens/s",
        "Memory of rank 0": "bytes",
        "Gradient norm": "no unit, L2 norm before clipping",
        "Learning rate": "no unit",
    }
    for chart in reader.charts:
        assert chart["marks"] == [["resume", [20]], ["skipped", [25]]] and chart["x"]["unit"] == "optimizer steps"
    assert "dashed, the run was continued there; dotted, a step was skipped" in page(run, config)
    assert {"startup", "imports 1.5 s", "resume", "layout.dp_shard", "4", '"tiny"'} <= set(reader.cells)
    assert is_harmless(reader)


@pytest.mark.parametrize("has_file", [False, True])
def test_a_run_without_a_step_says_so(tmp_path, has_file):
    if has_file:
        MetricsWriter(tmp_path).close()
    text = page(tmp_path, Config())
    assert "No step was taken yet." in text and Reader(text).charts == [] and is_harmless(Reader(text))


def test_what_stands_in_the_files_cannot_act_in_the_page(tmp_path):
    lines = [
        {"event": "resume", "step": -5, "time": 1e999},
        {"event": EVIL, "time": EVIL, "step": 1, EVIL: EVIL},
        {
            "step": 1,
            "time": 1.0,
            "loss": 1.0,
            "grad_norm": EVIL,
            "memory_bytes": -(10**400),
            "mfu": True,
            EVIL: 2.0,
            f"validation_loss/{EVIL}": 2.0,
        },
        {"step": 1, "time": 2.0, "loss": 7.0},
        {"step": 10**30, "loss": 1.0},
        {
            "step": 2,
            "time": None,
            "loss": 1e308,
            "learning_rate": [1],
            "tokens_per_second": -1e299,
            "validation_loss": 5e-324,
        },
        {"step": 3, "loss": -1e308, "tokens_per_second": 1e299, "validation_loss": 1e-320},
        {"event": ["x"], "time": {}},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "plan.json").write_text(json.dumps({EVIL: 1}))
    config = Config.from_dict({"data": {"source": [EVIL], "tokenizer": EVIL}})
    text = page(tmp_path, config)
    reader = Reader(text)
    assert is_harmless(reader) and text.count("<script") == 2 and "alert(1)" in text
    assert reader.curve("Loss", "training") == [(1, 1.0), (2, None), (3, None)] and reader.curve("Loss", EVIL) == [
        (1, 2.0)
    ]
    assert reader.curve("Speed", "tokens/s") == [(2, -1e299), (3, 1e299)]
    assert any(cell == EVIL for cell in reader.cells) and "plan.json cannot be read" in text


def test_a_file_that_is_no_metrics_is_refused_by_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n\xff\xfe\n')
    with pytest.raises(IntegrityError, match="line 2: not JSON"):
        page(tmp_path, Config())


def test_many_sources_and_events_are_counted_and_not_drawn(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.log(1, {"loss": 1.0} | {f"validation_loss/{i}": 1.0 for i in range(40)})
        for _ in range(1200):
            writer.event("late", {"text": "rank 3"})
    history = read_history(tmp_path / "metrics.jsonl")
    assert (len(history.sources), len(history.left_out), len(history.events), history.dropped) == (
        MOST_SOURCES,
        28,
        1000,
        200,
    )
    text = page(tmp_path, Config())
    assert "losses of 28 more sources" in text and "200 earlier ones" in text


@pytest.mark.all
def test_a_long_run_is_thinned_without_losing_its_peaks(tmp_path):
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 50_001):
            loss = 99.0 if step == 31_415 else 3.0 + math.sin(step / 500)
            value = "null" if step == 27_182 else str(loss)
            flag = ', "nonfinite": {"loss": "nan"}' if step == 27_182 else ""
            file.write(f'{{"step": {step}, "time": {step}, "loss": {value}{flag}}}\n')
    text = page(tmp_path, Config())
    points = Reader(text).curve("Loss", "training")
    assert len(points) <= MOST_POINTS and len(text) < 200_000 and "extremes of equal portions" in text
    assert (31_415, 99.0) in points and (27_182, None) in points and points[0][0] == 1 and points[-1][0] == 50_000


@settings(max_examples=60)
@given(st.lists(st.floats(-10, 10) | st.just(math.nan), max_size=300), st.integers(8, 100))
def test_thinning_keeps_ends_and_extremes_in_order(values, most):
    series = Series()
    for step, value in enumerate(values, start=1):
        series.add(step, value)
    kept = thinned(series, most)
    steps = [step for step, _ in kept]
    assert len(kept) <= most and steps == sorted(set(steps))
    assert [repr(value) for _, value in kept] == [repr(values[step - 1]) for step in steps]
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        there = [value for _, value in kept if math.isfinite(value)]
        assert (min(there), max(there)) == (min(finite), max(finite)) and {1, len(values)} <= set(steps)
    assert any(math.isnan(value) for _, value in kept) == any(math.isnan(value) for value in values)


def test_inspect_writes_the_page_where_it_is_told_and_nothing_else(run, tmp_path, capsys):
    for words, target in (
        (["--html"], run / "report.html"),
        ([f"--html={tmp_path / 'a.html'}"], tmp_path / "a.html"),
        (["--html", str(tmp_path / "b.html")], tmp_path / "b.html"),
    ):
        before = set(run.iterdir())
        assert main(["inspect", str(run), *words]) == 0 and str(target) in capsys.readouterr().out
        assert set(run.iterdir()) - before == {target} and is_harmless(Reader(target.read_text(encoding="utf-8")))
    assert main(["inspect", str(run), "--html", str(tmp_path / "no" / "c.html")]) == 2
    assert "cannot write this file (No such file or directory)" in capsys.readouterr().err
    assert main(["inspect", str(run), "--htm"]) == 2 and "Flags: --html, --live" in capsys.readouterr().err


def browse(path: Path, folder: Path, *flags) -> tuple[str, list[str]]:
    """(what the page became, what its console says), in a browser of its own."""
    words = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        f"--user-data-dir={folder}",
        "--enable-logging=stderr",
    ]
    environment = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(
        [str(BROWSER), *words, *flags, "--dump-dom", path.as_uri()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.all
@pytest.mark.skipif(BROWSER is None, reason=WHY_NOT)
def test_a_browser_draws_every_curve_and_tells_values_without_an_error(run, tmp_path):
    text = page(run, Config.from_toml(run / "config.toml"))
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    became, console = browse(tmp_path / "page.html", tmp_path / "browser")
    assert console == []
    curves = [curve for chart in Reader(text).charts for curve in chart["curves"]]
    assert len(curves) == 8 and 'data-drawn="8"' in became
    drawn = dict(re.findall(r'class="curve[^"]*" data-name="([^"]*)" d="([^"]*)"', became))
    for curve in curves:  # each finite value has its place; a value that is none begins the curve anew, and is a cross
        assert len(re.findall("[ML]", drawn[curve["name"]])) == sum(value is not None for value in curve["values"])
    falling = [float(y) for y in re.findall(r"[ML]\S+ ([\d.]+)", drawn["training"])]
    assert falling == sorted(falling) and drawn["training"].count("M") == 2  # SVG counts downwards
    assert became.count('class="broken"') == 2 and became.count('class="mark resume"') == 5

    # a pointer over step 18 of the first figure; the policy forbids scripts that are not the page's own, so it is
    # taken out here
    probe = """<script>
      const box = document.querySelector(".drawing svg").getBoundingClientRect();
      const at = {clientX: box.left + LEFT + (18 - 1) / (40 - 1) * (box.width - LEFT - RIGHT), clientY: box.top + 99};
      document.querySelector(".drawing svg").dispatchEvent(new PointerEvent("pointermove", at));
    </script></body>"""
    (tmp_path / "probe.html").write_text(text.replace("</body>", probe), encoding="utf-8")
    became, console = browse(tmp_path / "probe.html", tmp_path / "browser")
    assert len(console) == 1 and "Content Security Policy" in console[0] and 'id="tip" hidden' in became
    policy = re.compile(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>")
    (tmp_path / "probe.html").write_text(policy.sub("", text).replace("</body>", probe), encoding="utf-8")
    became, console = browse(tmp_path / "probe.html", tmp_path / "browser")
    tip = re.search(r'<div id="tip"[^>]*>([^<]*)</div>', became)
    assert console == [] and tip is not None
    assert tip.group(1).splitlines()[:3] == [
        "step 18",
        "training  4.1 nats/token",
        "validation  2.7 nats/token  (step 30)",
    ]


def test_a_live_page_is_rewritten_until_the_run_ends(run, tmp_path, capsys, monkeypatch):
    """The run goes on for a step at each pause, and ends in the second; a browser is told to read again until then."""
    target, steps, held = tmp_path / "live.html", iter([41, 42]), ExitStack()
    held.enter_context(occupied(run))
    seen = []

    def pause(seconds: float) -> None:
        seen.append((seconds, target.read_text(encoding="utf-8")))
        with MetricsWriter(run) as writer:
            writer.log(next(steps), figures(40))
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 43, "lo')
        if len(seen) == 2:
            held.close()

    monkeypatch.setattr("meshwright.cli.inspect.time.sleep", pause)
    assert main(["inspect", str(run), "--html", str(target), "--live=7"]) == 0
    refresh = '<meta http-equiv="refresh" content="7"/>'
    assert [seconds for seconds, _ in seen] == [7, 7]
    assert all(refresh in text and "live at step" in text for _, text in seen)
    assert [re.findall(r"live at step (\d+)", text)[0] for _, text in seen] == ["40", "41"]
    last = target.read_text(encoding="utf-8")
    assert refresh not in last and "complete, 40 steps" in last and "42 of 40 steps" in last
    printed = capsys.readouterr().out
    assert "it is rewritten every 7 s" in printed and "the run has ended" in printed


def test_a_live_page_of_a_run_that_is_none_is_written_once(run, tmp_path, capsys):
    target = tmp_path / "once.html"
    assert main(["inspect", str(run), "--html", str(target), "--live"]) == 0
    assert "is not being trained: its page is written once" in capsys.readouterr().out
    assert 'http-equiv="refresh"' not in target.read_text(encoding="utf-8")
    for words, says in ((["--live"], "give --html FILE too"), (["--html=x", "--live=0"], "at least 1 second")):
        assert main(["inspect", str(run), *words]) == 2 and says in capsys.readouterr().err


def test_an_interrupted_live_page_is_not_read_again(run, tmp_path, monkeypatch):
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("meshwright.cli.inspect.time.sleep", interrupted)
    with occupied(run):
        assert main(["inspect", str(run), "--html", str(tmp_path / "i.html"), "--live"]) == 130
    assert 'http-equiv="refresh"' not in (tmp_path / "i.html").read_text(encoding="utf-8")


def test_a_page_shows_the_last_sample_and_what_was_asked_for(run):
    """Keys that models and data filled in stand in the config and not in the request."""
    config = Config.from_toml(run / "config.toml")
    assert "<h2>Sample</h2>" not in page(run, config)
    keep_request(run, Config(steps=40, name="asked"))
    with MetricsWriter(run) as writer:
        writer.event("sample", {"prompt": "an <old>", "text": "an <old> one"}, 30)
        writer.event("sample", {"prompt": "a <new>", "text": "a <new> one\x07"}, 40)
    text = page(run, config)
    assert "<mark>a &lt;new&gt;</mark> one\\x07</pre>" in text and "weights of step 40" in text
    assert "an &lt;old" not in text and is_harmless(Reader(text))
    asked = text.partition("<h2>Set for this run</h2>")[2].partition("<h2>Events</h2>")[0]
    assert Reader(f'{asked}<script id="data">[]</script>').cells == ["name", '"asked"', '"demo"', "steps", "40", "200"]
    with MetricsWriter(run) as writer:
        writer.resumed(30)
    assert "<h2>Sample</h2>" not in page(run, config)


def test_what_was_set_when_a_run_was_continued_is_shown_with_its_steps(run):
    keep_request(run, Config(name="asked"))
    with MetricsWriter(run) as writer:
        writer.event(BEGIN, {"layout": "dp_shard=4"}, 0)
        writer.event(BEGIN, {"layout": "tp=4", "steps": "200 → 40", "layout.tp": "1 → 4"}, 30)
        writer.log(41, figures(41))
        writer.resumed(20)  # the steps from 21 on are taken anew; the config keeps what was set
        writer.event(BEGIN, {"layout": "tp=2", "layout.tp": "4 → 2", "process.count": "0 → 2"}, 20)
        writer.log(21, figures(21))
    history = read_history(run / "metrics.jsonl")
    assert history.layout == "dp_shard=4 (to step 20), tp=2 (from step 21)"
    asked = page(run, Config.from_toml(run / "config.toml")).partition("<h2>Set for this run</h2>")[2]
    cells = Reader(f'{asked.partition("<h2>Events</h2>")[0]}<script id="data">[]</script>').cells
    shown = {cells[n]: cells[n + 1 : n + 3] for n in range(0, len(cells), 3)}
    assert shown == {
        "name": ['"asked"', '"demo"'],
        "steps": ["200 (to step 20), 40 (from step 21)", "200"],
        "layout.tp": ["1 (to step 20), 2 (from step 21)", "1"],
        "process.count": ["0 (to step 20), 2 (from step 21)", "0"],
    }


def test_a_run_on_pairs_has_its_loss_per_pair(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.log(1, {"loss": 0.69, MARGINS: 0.1})
    assert OF_PAIRS == MARGINS and Reader(page(tmp_path, Config())).charts[0]["y"]["unit"] == "nats/pair"
