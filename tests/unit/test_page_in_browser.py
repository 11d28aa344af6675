"""The pages of one run and of two compared, in a browser at the widths of a desk and of a phone: nothing overflows, is
cut off or broken inside a word, every figure and value has its unit, and the colours are those of the scheme.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from support.browser import BROWSER, WHY_NOT, Browser

from meshwright.cli.main import main
from meshwright.core.config import to_toml
from meshwright.core.files import replace_text
from meshwright.planning.layout import Layout
from meshwright.training.config import Config, OptimizerConfig
from meshwright.training.metrics import MetricsWriter
from meshwright.training.run.occupancy import occupied

pytestmark = pytest.mark.skipif(BROWSER is None, reason=WHY_NOT)
WIDTHS = (1280, 390)

JUDGE = r"""(() => {
  document.querySelectorAll("details").forEach((one) => { one.open = true; });
  const found = {overflow: [], clipped: [], broken: [], small: [], unit: []};
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) found.overflow.push("page " + root.scrollWidth + " > " + root.clientWidth);
  for (const element of document.body.querySelectorAll("*:not(script):not(#tip)")) {
    const box = element.getBoundingClientRect(), says = element.tagName + ": " + element.textContent.slice(0, 40);
    if (box.width && (box.right > root.clientWidth + 0.5 || box.left < -0.5)) found.overflow.push(says);
    if (element.clientWidth && element.scrollWidth > element.clientWidth + 1) found.clipped.push(says);
  }
  for (const svg of document.querySelectorAll("figure > svg, .drawing > svg, body > svg")) {
    const view = svg.viewBox.baseVal, places = [];
    for (const text of svg.querySelectorAll("text")) {
      const box = text.getBBox();
      const right = box.x + box.width, bottom = box.y + box.height, says = "text " + text.textContent;
      if (box.x < 0 || box.y < 0 || right > view.width || bottom > view.height) found.clipped.push(says);
      for (const [other, name] of places) {
        const beside = box.x >= other.x + other.width || other.x >= right;
        if (!beside && box.y < other.y + other.height && other.y < bottom) found.clipped.push(says + " over " + name);
      }
      places.push([box, text.textContent]);
      const size = parseFloat(getComputedStyle(text).fontSize) * svg.getBoundingClientRect().width / view.width;
      if (size < 9) found.small.push(size + " px: " + text.textContent);
    }
    const units = [...svg.querySelectorAll("text.unit")].map((one) => one.textContent.trim());
    if (units.length !== 2 || units.includes("")) found.unit.push(svg.textContent.slice(0, 40) + ": " + units);
  }
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (node.parentElement.closest("script, svg, #tip")) continue;
    for (const word of node.textContent.matchAll(/[^\s-]+/g)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const lines = [...range.getClientRects()].filter((box) => box.width).map((box) => Math.round(box.top));
      if (new Set(lines).size > 1) found.broken.push(word[0]);
    }
  }
  const style = getComputedStyle(document.body);
  return {...found, colours: [style.backgroundColor, style.color],
          figures: document.querySelectorAll(".drawing > svg").length,
          values: [...document.querySelectorAll("dd")].map((one) => one.textContent), drawn: root.dataset.drawn};
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as one:
        yield one


def written(folder: Path, name: str, *, steps: int, lr: float = 3e-3, layout: Layout | None = None) -> Path:
    """The folder of a run of 40 steps, of which ``steps`` are taken."""
    run = folder / "a-folder-with-quite-a-long-name" / f"{name}-20261126-120000"
    run.mkdir(parents=True)
    layout = layout or Layout(dp_shard=4)
    config = Config(steps=40, name=name, layout=layout, optimizer=OptimizerConfig(lr=lr))
    (run / "config.toml").write_text(to_toml(config))
    clock = [1_764_000_000.0]
    with MetricsWriter(run) as writer, pytest.MonkeyPatch.context() as patched:
        patched.setattr("meshwright.training.metrics._now", lambda: clock[0])
        writer.event("startup", {"imports": 1.5, "process group": 0.25, "data": 0.01, "first step": 0.76})
        for step in range(1, steps + 1):
            clock[0] += 12.5
            values = {
                "loss": 2.0 + 3.5 * math.exp(-step * lr * 20),
                "grad_norm": 0.5 + 12_345.678 / step,
                "learning_rate": lr * (1 + math.cos(math.pi * step / 40)) / 2,
                "tokens_per_second": 1_234_567.0 + 100 * step,
                "memory_bytes": 1023 * 2**20 + step * 2**18,
                "mfu": 0.4 + step / 1000,
                "tokens": 524_288 * step,
                "skipped": int(step > 12),
            }
            writer.log(step, values | ({"validation_loss": values["loss"] + 0.1} if step % 10 == 0 else {}))
        if steps == 40:
            writer.event("sample", {"prompt": "def ", "text": "def add(a, b):\n    return a + b\n" + "word " * 60}, 40)
    return run


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    done = written(folder, "done", steps=40)
    going = written(folder, "going", steps=17, lr=1e-2, layout=Layout(dp_shard=2, tp=2))
    found = {name: folder / f"{name}.html" for name in ("ended", "live", "compared", "by seconds")}
    assert main(["inspect", str(done), "--html", str(found["ended"])]) == 0
    with occupied(going):
        from meshwright.cli.arguments import open_run
        from meshwright.training.views.page import page

        found["live"].write_text(page(*open_run(str(going)), refresh=600), encoding="utf-8")
        assert main(["compare", str(done), str(going), "--html", str(found["compared"])]) == 0
    assert main(["compare", str(done), str(going), "--by=seconds", "--html", str(found["by seconds"])]) == 0
    return found


@pytest.mark.all
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["ended", "live", "compared", "by seconds"])
def test_a_page_fits_its_window_and_breaks_no_word(browser, pages, name, width):
    for dark in (False, True):
        browser.console.clear()
        browser.show(pages[name], width, dark=dark)
        found = browser.value(JUDGE)
        troubles = {key: found[key] for key in ("overflow", "clipped", "broken", "small", "unit")}
        assert troubles == {key: [] for key in troubles}, (name, width, dark)
        assert found["figures"] >= 5 and int(found["drawn"]) >= found["figures"]
        paper, ink = (sum(map(int, re.findall(r"\d+", colour)[:3])) / 3 for colour in found["colours"])
        assert (paper < 60 and ink > 200) if dark else (paper > 240 and ink < 60)
        assert browser.console == []


EVIL_RANGES = [
    [0.0],
    [1.0000000000000002e-300, 1e-300],
    [-1e300, 1e300],
    [1e-300, 1.0, 1e300],
    [5e-324, 1e-320],
    [0.1, 0.30000000000000004],
    [123456789.0, 123456789.5],
    [-3.0, -3.0],
    [1023 * 2**20, 1025 * 2**20],
]


@pytest.mark.all
@pytest.mark.parametrize("form", ["plain", "count", "bytes", "GB", "seconds", "percent", "steps"])
def test_an_axis_holds_its_values_and_its_ticks_whatever_they_are(browser, pages, form):
    """Places of values and ticks lie on the axis, and the texts of ticks can be told apart."""
    browser.show(pages["ended"], 390)
    for values in EVIL_RANGES:
        low, high = min(values), max(values)
        axis = browser.value(
            f"""(() => {{const axis = scale([{low}, {high}], 202, 24, {{form: "{form}", unit: "u"}}, 5, true);
            return {{places: [{low}, {high}, ...axis.ticks].map(axis), texts: axis.texts}}; }})()"""
        )
        assert all(23.9 <= place <= 202.1 for place in axis["places"]), (form, values, axis)
        assert len(axis["texts"]) <= 20 and len(set(axis["texts"])) == len(axis["texts"]), (form, values, axis)


def test_a_name_of_the_legend_hides_its_curve_and_a_drag_shows_a_part(browser, pages):
    browser.show(pages["compared"], 1280)
    names = """[...document.querySelectorAll(".drawing")][0].querySelectorAll(".curve").length"""
    ticks = (
        """[...document.querySelectorAll(".drawing")[0].querySelectorAll("text.step")].map((one) => one.textContent)"""
    )
    first = browser.value(ticks)
    assert browser.value(names) == 2
    browser.value('document.querySelector(".legend li").click()')
    assert browser.value(names) == 1
    browser.value('document.querySelector(".legend li").click()')
    assert browser.value(names) == 2
    drag = """(() => { const svg = document.querySelector(".drawing svg"), box = svg.getBoundingClientRect();
      for (const [kind, x] of [["pointerdown", 100], ["pointerup", 200]])
        svg.dispatchEvent(new PointerEvent(kind, {clientX: box.left + x, clientY: box.top + 90})); })()"""
    browser.value(drag)
    assert browser.value(ticks) != first
    browser.value('document.querySelector(".drawing svg").dispatchEvent(new MouseEvent("dblclick"))')
    assert browser.value(ticks) == first and browser.console == []


@pytest.mark.all
def test_every_value_of_a_run_has_its_unit(browser, pages):
    browser.show(pages["ended"], 390)
    values = browser.value(JUDGE)["values"]
    units = r"steps?|nats/token|tokens|tokens/s|[KMG]?i?B|s|ms|min|h"
    assert len(values) >= 8 and all(re.search(rf"\d ?[KMB]? ?({units})$", value) for value in values), values


def test_a_live_page_is_read_again_and_an_ended_one_is_not(pages):
    refresh = '<meta http-equiv="refresh"'
    assert refresh in pages["live"].read_text() and "live at step 17 of 40" in pages["live"].read_text()
    assert refresh not in pages["ended"].read_text() and "complete, 40 steps" in pages["ended"].read_text()


@pytest.mark.all
def test_a_browser_reads_a_live_page_again_until_it_is_told_no_longer(browser, pages, tmp_path):
    live, ended = pages["live"].read_text(), pages["ended"].read_text()
    file = tmp_path / "page.html"
    file.write_text(live.replace('content="600"', 'content="1"'))
    browser.show(file, 390)
    assert browser.value("document.querySelector('.state').textContent").startswith("live at step 17 of 40")
    replace_text(file, ended)
    for _ in range(5):  # the first may have begun before the file was replaced
        browser.wait_for_load(browser.loads)
        state = browser.value("document.querySelector('.state').textContent")
        if not state.startswith("live"):
            break
    assert state == "complete, 40 steps"
    assert browser.value("document.querySelector('meta[http-equiv=refresh]')") is None


@pytest.mark.all
def test_judging_sees_what_it_is_there_for(browser, tmp_path):
    """Each fault that a page could have is put into a page of its own, and is seen."""
    long = "x" * 200
    axes = '<text class="unit" x="4" y="12">s</text><text class="unit" x="4" y="90">steps</text>'
    faults = {
        "overflow": f"<p>{long}</p>",
        "clipped": f'<p style="overflow:hidden;white-space:nowrap;width:90px">{long}</p>',
        "broken": f'<p style="word-break:break-all;width:90px">{long}</p>',
        "small": f'<svg viewBox="0 0 4000 100" width="200">{axes}</svg>',
        "unit": '<svg viewBox="0 0 100 100" width="200"><text class="unit" x="4" y="12">s</text></svg>',
    }
    for name, body in faults.items():
        file = tmp_path / f"{name}.html"
        file.write_text(f"<!DOCTYPE html><meta name=viewport content=width=device-width><body>{body}</body>")
        browser.show(file, 390)
        found = browser.value(JUDGE)
        assert found[name], (name, json.dumps(found))
