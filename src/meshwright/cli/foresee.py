"""Answer ``meshwright plan --gpus N --gpu CARD``: which layout to use, whether it fits, how fast a step is."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from .pages import write_page

if TYPE_CHECKING:
    from pathlib import Path

    from meshwright.introspection.cluster import Cluster
    from meshwright.training.config import Config

PATIENCE_S = 2.0


def run(config: Config, cluster: Cluster, pins: tuple[str, ...], *, as_json: bool, html: Path | None = None) -> int:
    """Print what is foreseen of a config on a cluster of GPUs, and draw it into a page where ``html`` names a file."""
    from meshwright.simulation.search.foresee import foresee
    from meshwright.training.build import batch_of
    from meshwright.training.model_source import model_source
    from meshwright.training.tokenizer import planned_tokenizer

    tokenizer = planned_tokenizer(config)
    batch = batch_of(config, tokenizer)
    answer = foresee(
        model_source(config, tokenizer),
        config.layout,
        batch=batch,
        cluster=cluster,
        techniques=config.techniques,
        pins=pins,
        progress=_progress(),
    )
    print(answer.to_json() if as_json else answer)
    if html is not None:
        from meshwright.training.views.forecast.page import forecast_page

        first = answer.candidates[0]
        shown, front = ([one.candidate for one in found] for found in (answer.candidates, answer.front))
        drawn = replace(batch, microbatch_rows=first.microbatch)
        page = forecast_page(shown, front, first.plan, drawn, first.toml() if answer.searched else "")
        print(write_page(html, page), file=sys.stderr if as_json else sys.stdout)
    return 0


def _progress():
    """Return a callback that shows a bar on a terminal once the search has taken two seconds."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    bar, began = Progress(console=console, transient=True), time.monotonic()
    task = bar.add_task("searching layouts", total=1.0)

    def show(done: float) -> None:
        if console.is_terminal and time.monotonic() - began > PATIENCE_S:
            bar.start()
            bar.update(task, completed=done)
        if done > 0.99:
            bar.stop()

    return show
