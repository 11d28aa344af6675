"""Answer ``meshwright plan --gpus N --gpu CARD``: which layout to use, whether it fits, how fast a step is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.introspection.cluster import Cluster
    from meshwright.training.config import Config

PATIENCE_S = 2.0


def run(config: Config, cluster: Cluster, pins: tuple[str, ...], *, as_json: bool) -> int:
    """Print what is foreseen of a config on a cluster of GPUs."""
    from meshwright.simulation.search.foresee import foresee
    from meshwright.training.build import batch_of
    from meshwright.training.model_source import model_source
    from meshwright.training.tokenizer import planned_tokenizer

    tokenizer = planned_tokenizer(config)
    answer = foresee(
        model_source(config, tokenizer),
        config.layout,
        batch=batch_of(config, tokenizer),
        cluster=cluster,
        techniques=config.techniques,
        pins=pins,
        progress=_progress(),
    )
    print(answer.to_json() if as_json else answer)
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
