"""Answer ``meshwright plan --gpus N --gpu CARD``: which layout to use, whether it fits, how fast a step is."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .pages import write_page

if TYPE_CHECKING:
    from pathlib import Path

    from meshwright.introspection.cluster import Cluster
    from meshwright.planning.memory.step import MemoryEstimate
    from meshwright.training.config import Config

PATIENCE_S = 2.0


def run(
    config: Config,
    cluster: Cluster,
    pins: tuple[str, ...],
    *,
    as_json: bool,
    html: Path | None = None,
    rehearsed: Path | None = None,
    dry_run: bool = False,
) -> int:
    """Print what is foreseen of a config on a cluster of GPUs.

    Args:
        html: file to draw the answer into.
        rehearsed: file of rehearsals, whose figures replace those that would be foreseen.
        dry_run: print the first layout's memory by a dry run too.
    """
    from meshwright.simulation.hardware.cards import machines
    from meshwright.simulation.search.foresee import foresee
    from meshwright.training.build import batch_of, estimated_memory, facts_of
    from meshwright.training.model_source import model_source
    from meshwright.training.rehearsal.forecast import check_same, rehearsals_for, rehearsed_ranks
    from meshwright.training.tokenizer import planned_tokenizer

    rehearsals = []
    if rehearsed is not None:
        cards = machines(cluster.gpu, cluster.world, per_node=cluster.ranks_per_node, across=cluster.link)
        rehearsals = rehearsals_for(rehearsed, cluster, cards)
    tokenizer = planned_tokenizer(config)
    batch, facts = batch_of(config, tokenizer), facts_of(model_source(config, tokenizer))
    answer = foresee(
        facts,
        config.layout,
        batch=batch,
        cluster=cluster,
        techniques=config.techniques,
        pins=pins,
        progress=_progress(),
        rehearsed=rehearsed_ranks(rehearsals),
    )
    if rehearsed is not None:
        check_same(rehearsed, rehearsals, answer.candidates[0].plan, batch)
    first = answer.candidates[0]
    drawn = replace(batch, microbatch_rows=first.microbatch)
    by_dry_run = None
    if dry_run:
        chosen = replace(config, techniques=first.techniques)
        by_dry_run = estimated_memory(chosen, facts, first.plan, drawn)
    if as_json:
        values = answer.to_dict() if by_dry_run is None else {**answer.to_dict(), "dry_run": _figures(by_dry_run)}
        print(json.dumps(values, indent=1))
    else:
        print(answer, *([] if by_dry_run is None else [_words(by_dry_run)]), sep="\n\n")
    if html is not None:
        from meshwright.training.views.forecast.page import forecast_page

        shown, front = ([one.candidate for one in found] for found in (answer.candidates, answer.front))
        page = forecast_page(shown, front, first.plan, drawn, first.toml() if answer.searched else "")
        print(write_page(html, page), file=sys.stderr if as_json else sys.stdout)
    return 0


def _figures(estimate: MemoryEstimate) -> dict[str, Any]:
    """Return the bytes of the fullest rank by the dry run, under the documented keys."""
    if estimate.why_not:
        return {"why_not": estimate.why_not}
    fullest = estimate.of()
    least = estimate.least[estimate.fullest] if estimate.least else fullest.total
    parts = {str(kind): size / 1e9 for kind, size in fullest.peak.items() if size}
    return {"mem_gb": fullest.total / 1e9, "least_gb": least / 1e9, "mem_parts_gb": parts}


def _words(estimate: MemoryEstimate) -> str:
    values = _figures(estimate)
    if estimate.why_not:
        return f"by a dry run of the run's own code: unknown, {estimate.why_not}"
    parts = ", ".join(f"{name} {size:.1f}" for name, size in values["mem_parts_gb"].items())
    least = f"{values['least_gb']:.1f} to " * bool(estimate.least)
    return (
        f"by a dry run of the run's own code: {least}{values['mem_gb']:.1f} GB of tensors ({parts}); the driver and"
        " fragmentation come on top"
    )


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
