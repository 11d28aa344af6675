"""The page of a forecast: its pictures have the figures that the command prints, and it fetches and runs nothing."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from support.forecasts import CONFIG

from benchmarks.published.shapes import decoder_block
from meshwright import Layout
from meshwright.cli.main import main
from meshwright.simulation.cards import machines
from meshwright.simulation.job import Architecture, Execution, Job
from meshwright.simulation.search import Candidate
from meshwright.simulation.step_memory import step_memory
from meshwright.simulation.step_time import step_time
from meshwright.simulation.timeline import LaneUse, memory_over_step, step_timeline
from meshwright.training.views.forecast import forecast_page


def candidate(name: str = "small", microbatches: int = 8, pp: int = 4, **run) -> Candidate:
    model = Architecture(name, (decoder_block(2048, 16, 8, 5632),) * 16, 32_000)
    layout = Layout(pp=pp, dp_shard=4, tp=2)
    job = Job(model, layout, 2048, 4 * microbatches, 1, Execution(**run), machines("h100", layout.world))
    return Candidate(job, step_time(job), step_memory(job))


def page_of(one: Candidate) -> str:
    return forecast_page([one], [one])


def figures_of(text: str) -> dict[str, dict]:
    """Return the data of the figures by their titles."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return {figure["title"]: figure for figure in json.loads(found.group(1))}


def bars_of(figure: dict) -> list[tuple[float, float, float]]:
    """Return (lane, begin, end) of the bars in a figure."""
    return [bar for one in figure["curves"] for bar in zip(one["lanes"], one["at"], one["values"], strict=True)]


class Elements(HTMLParser):
    """Every element of a page, with its attributes."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, {name: value or "" for name, value in attrs}))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("schedule", "per_rank"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("looped_bfs", 2),
        ("interleaved_zero_bubble", 2),
        ("zbv_zero_bubble", 2),
        ("dualpipe_v", 2),
        ("", 1),
    ],
)
def test_the_areas_peak_at_the_memory_and_the_lanes_end_with_the_step(schedule, per_rank, recompute):
    one = candidate(pp=4 if schedule else 1, schedule=schedule, stages_per_rank=per_rank, recompute=recompute)
    timeline = step_timeline(one.job)
    held = memory_over_step(one.job, one.memory, timeline)
    assert max(held.totals) == pytest.approx(one.memory.total, rel=1e-12)
    assert held.parts.keys() == one.memory.parts().keys()
    assert list(held.times) == sorted(held.times) and held.times[0] == 0
    assert held.times[-1] == pytest.approx(one.time.seconds) == timeline.seconds
    assert held.parts["activations"][-1] == 0 and held.parts["gradients"][0] == 0
    for lane in timeline.work:
        assert lane[-1].use is LaneUse.OPTIMIZER and lane[-1].end == timeline.seconds
        assert all(a.end <= b.begin for a, b in zip(lane, lane[1:], strict=False))


def test_lanes_show_waits_weight_gradients_and_messages():
    split = step_timeline(candidate(schedule="zbv_zero_bubble", stages_per_rank=2).job)
    assert {bar.use for bar in split.work[0]} >= {LaneUse.FORWARD, LaneUse.INPUT, LaneUse.WEIGHT, LaneUse.EXPOSED}
    assert {bar.use for lane in split.beside for bar in lane} == {LaneUse.SENT}
    for rank in range(4):
        assert 0 < split.seconds - split.busy(rank) < split.seconds / 2
    alone = candidate(pp=1)
    (lane,) = step_timeline(alone.job).beside
    assert sum(bar.end - bar.begin for bar in lane) == pytest.approx(alone.time.hidden_s)


def test_figures_have_the_values_of_the_answer():
    one = candidate()
    text = page_of(one)
    figures = figures_of(text)
    assert [*figures] == ["Layouts by memory and time", "Memory over a step", "A step of each pipeline rank"]
    step, memory = figures["A step of each pipeline rank"], figures["Memory over a step"]
    assert max(end for _, _, end in bars_of(step)) == pytest.approx(one.time.seconds)
    assert step["lanes"] == [f"rank {rank}" for rank in range(4)]
    assert {int(lane) for lane, _, _ in bars_of(step)} == {0, 1, 2, 3}
    assert memory["curves"][-1]["name"] == "reserved, not used"
    totals = [sum(sizes) for sizes in zip(*(curve["values"] for curve in memory["curves"]), strict=True)]
    assert max(totals) == pytest.approx(one.memory.total)
    (most, card) = memory["limits"]
    assert most[1] == one.memory.total and most[2].startswith("most: ") and card[2] == "the card has 85.0 GB"
    (first,) = [curve for curve in figures["Layouts by memory and time"]["curves"] if curve["name"] == "the first"]
    assert (first["at"], first["values"]) == ([one.memory.total], [one.time.seconds])
    said = [given["aria-label"] for _, given in Elements(text).found if "data-figure" in given]
    assert len(said) == 3 and all(len(words) > 40 for words in said)


def test_a_name_cannot_act_in_the_page():
    text = page_of(candidate("<script>alert(1)</script>&\"'<"))
    assert text.count("<script") == 2 and "&lt;script&gt;" in text and len(figures_of(text)) == 3
    elements = Elements(text).found
    assert not {tag for tag, _ in elements} & {"img", "iframe", "object", "a", "image", "use"}
    named = [pair for _, given in elements for pair in given.items()]
    assert not [name for name, _ in named if name.startswith("on") or name == "style"]
    assert [value for name, value in named if name in ("src", "href", "action")] == ["data:,"]
    assert "default-src 'none'" in text.replace("&#x27;", "'")


def test_very_many_actions_are_drawn_by_columns_with_the_same_waits():
    one = candidate(microbatches=600)
    text = page_of(one)
    assert len(text) < 400_000
    timeline = step_timeline(one.job)
    drawn = sum(
        end - begin for lane, begin, end in bars_of(figures_of(text)["A step of each pipeline rank"]) if lane % 1 == 0
    )
    assert drawn == pytest.approx(sum(timeline.busy(rank) for rank in range(4)), rel=0.02)


def test_the_command_writes_the_page_beside_its_answer(tmp_path, capsys):
    config, target = tmp_path / "c.toml", tmp_path / "a.html"
    config.write_text(CONFIG)
    words = ["plan", str(config), "--gpus", "8", "--gpu", "h100", "--pin", "pp=2", "--html", str(target)]
    assert main([*words, "--json"]) == 0
    printed = capsys.readouterr()
    answer, text = json.loads(printed.out), target.read_text(encoding="utf-8")
    assert f"wrote {target}" in printed.err and len(figures_of(text)) == 3
    chosen = answer["chosen"]
    assert f"{chosen['mem_gb']:.1f} of " in text and f"most: {chosen['mem_gb']:.1f} GB at" in text
    assert main(words) == 0  # an older page is replaced, by the same bytes
    printed = capsys.readouterr()
    assert target.read_text(encoding="utf-8") == text and f"wrote {target}" in printed.out
    cells = [re.sub("<wbr/>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", text)]
    lines = printed.out.splitlines()
    head = next(number for number, line in enumerate(lines) if line.strip().startswith("layout "))
    for line in lines[head + 1 : head + 1 + len(answer["candidates"])]:
        assert all(cell in cells for cell in re.split(r"  +", line.strip()))
    assert "[layout]\npp = 2\n" in text


def test_a_file_that_cannot_be_written_is_refused_before_the_search(tmp_path, capsys, monkeypatch):
    def nobody_searches(*_, **__):
        raise AssertionError("searched")

    monkeypatch.setattr("meshwright.simulation.search", nobody_searches)
    (tmp_path / "c.toml").write_text(CONFIG)
    words = ["plan", str(tmp_path / "c.toml"), "--gpus", "8", "--gpu", "h100"]
    for target, why in ((tmp_path / "no" / "a.html", "there is no folder"), (tmp_path, "it is a folder")):
        assert main([*words, "--html", str(target)]) == 2
        error = capsys.readouterr().err
        assert why in error and "cannot write this file" in error and "Traceback" not in error
    assert main(["plan", str(tmp_path / "c.toml"), "--html", str(tmp_path / "a.html")]) == 2
    assert "--gpus N and --gpu CARD" in capsys.readouterr().err and not (tmp_path / "a.html").exists()
