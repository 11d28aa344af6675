"""Write runs beside each other as one HTML page: figures, curves over each other, and what differs in their configs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

from meshwright.training.views.page.charts import COLOURS, asset, breakable, charts_of_runs, framed, table
from meshwright.training.views.page.document import TIP, curves_section

from .runs import ComparedRun, differences, letter_of, rows

MOST_NAMED = 3
"""Most runs whose names stand beside each figure; of more, their letters do."""


def comparison_page(runs: Sequence[ComparedRun], by: str) -> str:
    """Return the page of several runs.

    Args:
        by: quantity of the x axis: steps, tokens or seconds.
    """
    letters = [letter_of(number) for number in range(len(runs))]
    named = len(runs) <= MOST_NAMED
    names = [f"{letter} {run.label}" if named else letter for letter, run in zip(letters, runs, strict=True)]
    charts = charts_of_runs(dict(zip(names, (run.history for run in runs), strict=True)), by)
    curves, data = curves_section(charts, by)
    found = differences(runs)
    config = (
        table(("key", *letters), [(key, *values) for key, values in found], kind="letters")
        if found
        else '<p class="soft">Nothing: their configs are the same.</p>'
    )
    figures = table(("figure", *letters), [(name, *texts) for name, texts in rows(runs, by)], kind="letters")
    title = f"{len(runs)} runs compared"
    body = [
        f"<h1>{title}</h1>",
        f'<p class="soft">read on {time.strftime("%Y-%m-%d %H:%M:%S")}</p>',
        f'<ul class="runs">{"".join(_run(number, run) for number, run in enumerate(runs))}</ul>',
        f"<h2>Figures</h2>{figures}",
        curves,
        f"<h2>What differs in their configs</h2>{config}",
        TIP,
    ]
    return framed(title, body, script=asset("page.js"), data=data)


def _run(number: int, run: ComparedRun) -> str:
    name = f"{letter_of(number)} {breakable(run.label)}"
    return (
        f'<li class="c{number % COLOURS}"><b>{name}</b><br/><span class="state {run.state.word}">'
        f'{escape(str(run.state))}</span><br/><span class="soft">{breakable(str(run.folder))}</span></li>'
    )
