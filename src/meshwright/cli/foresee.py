"""Answer ``meshwright plan --gpus N --gpu CARD``: which layout to use, whether it fits, how fast a step is."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.core.errors import ConfigError

from .arguments import take_option
from .views.pages import check_page, write_page

if TYPE_CHECKING:
    from meshwright.planning.memory.states import MemoryEstimate
    from meshwright.planning.values import Batch
    from meshwright.simulation.search.answer import Foresight
    from meshwright.training.config import Config

PATIENCE_S = 2.0


@dataclass(frozen=True)
class Asked:
    """The flags of a question about GPUs that need not be here.

    Attributes:
        gpus, gpu, link: how many, which card, and the link between nodes.
        profile: file of a measured machine, in place of a card.
        pins: parts of a layout that a search keeps.
        html: file to draw the answer into.
        rehearsed: file of rehearsals, whose figures replace those that would be foreseen.
        dry_run: whether to print the first layout's memory by a dry run too.
        imbalance, straggler: as ``simulation.search.foresee.foresee`` has them.
    """

    gpus: int
    gpu: str
    link: str
    profile: Path | None
    pins: tuple[str, ...]
    html: Path | None
    rehearsed: Path | None
    dry_run: bool
    imbalance: float
    straggler: float


def take(argv: list[str]) -> tuple[Asked | None, list[str]]:
    """Split off the flags about GPUs: return None where there are none, and the other words.

    Raises:
        ConfigError: some are given without --gpus and --gpu, or contradict each other.
    """
    words = list(argv)
    gpus, argv = take_option(argv, "--gpus", int)
    gpu, argv = take_option(argv, "--gpu", str)
    link, argv = take_option(argv, "--link", str)
    profile, argv = take_option(argv, "--profile", Path)
    pins, argv = _take_pins(argv)
    html, argv = take_option(argv, "--html", Path)
    rehearsed, argv = take_option(argv, "--with", Path)
    imbalance, argv = take_option(argv, "--imbalance", float)
    straggler, argv = take_option(argv, "--straggler", float)
    dry_run, argv = "--dry-run" in argv, [word for word in argv if word != "--dry-run"]
    if len(argv) == len(words):
        return None, argv
    if profile is not None and (gpu is not None or link is not None):
        raise ConfigError("--profile has the measured device and its messages: leave out --gpu and --link")
    if gpus is None and gpu is None and profile is None:
        alone = next(word for word in words if word not in argv).partition("=")[0]
        raise ConfigError(f"{alone} is about a forecast for GPUs: give --gpus N and --gpu CARD too")
    if gpus is None or (gpu is None and profile is None):
        raise ConfigError(
            "--gpus N and --gpu CARD (or --profile FILE) go together: how many, and which, such as --gpus 64 --gpu h100"
        )
    if html is not None:
        if rehearsed is not None:
            raise ConfigError("--html draws what is foreseen, and --with has what was rehearsed: leave one out")
        check_page(html)
    uneven = 1.0 if imbalance is None else imbalance, 1.0 if straggler is None else straggler
    return Asked(gpus, gpu or "", link or "", profile, tuple(pins), html, rehearsed, dry_run, *uneven), argv


def _take_pins(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split off every ``--pin CONDITION``; return the conditions, and the other words."""
    pins, rest, words = [], [], iter(argv)
    for word in words:
        if word == "--pin":
            pins.append(next(words, ""))
        elif word.startswith("--pin="):
            pins.append(word.removeprefix("--pin="))
        else:
            rest.append(word)
    return pins, rest


def run(config: Config, asked: Asked, per_node: int, *, as_json: bool) -> int:
    """Print what is foreseen of a config on a cluster of GPUs."""
    from meshwright.introspection.cluster import Cluster
    from meshwright.simulation.hardware.measured import machines_of, notes, profile_of
    from meshwright.simulation.search.foresee import foresee
    from meshwright.training.build import batch_of, estimated_memory, facts_of
    from meshwright.training.model_source import model_source
    from meshwright.training.rehearsal import check_same, rehearsals_for, rehearsed_ranks
    from meshwright.training.tokenizer import planned_tokenizer

    profile = "" if asked.profile is None else str(asked.profile)
    cluster = Cluster(asked.gpus, per_node, gpu=asked.gpu, link=asked.link, profile=profile)
    rehearsals = [] if asked.rehearsed is None else rehearsals_for(asked.rehearsed, cluster, machines_of(cluster))
    tokenizer = planned_tokenizer(config)
    batch, facts = batch_of(config, tokenizer), facts_of(model_source(config, tokenizer))
    answer = foresee(
        facts,
        config.layout,
        batch=batch,
        cluster=cluster,
        techniques=config.requested,
        pins=asked.pins,
        progress=_progress(),
        rehearsed=rehearsed_ranks(rehearsals),
        imbalance=asked.imbalance,
        straggler=asked.straggler,
    )
    first = answer.candidates[0]
    if asked.rehearsed is not None:
        check_same(asked.rehearsed, rehearsals, first.plan, batch)
    drawn = replace(batch, microbatch_rows=first.microbatch)
    values: dict[str, Any] = {}
    paragraphs = [] if asked.profile is None else [" ".join(notes(profile_of(str(asked.profile)), asked.gpus))]
    if asked.dry_run:
        estimate = estimated_memory(replace(config, techniques=first.techniques), facts, first.plan, drawn)
        values["dry_run"] = _figures(estimate)
        paragraphs.append(_words(estimate))
    print(json.dumps({**answer.to_dict(), **values}, indent=1) if as_json else "\n\n".join([str(answer), *paragraphs]))
    if asked.html is not None:
        _draw(asked.html, answer, drawn, aside=as_json)
    return 0


def _draw(file: Path, answer: Foresight, batch: Batch, *, aside: bool) -> None:
    """Write the page of an answer; where it is, is printed, ``aside`` to standard error."""
    from meshwright.training.views.page.forecast import forecast_page

    first = answer.candidates[0]
    shown, front = ([one.candidate for one in found] for found in (answer.candidates, answer.front))
    page = forecast_page(shown, front, first.plan, batch, first.toml() if answer.searched else "")
    print(write_page(file, page), file=sys.stderr if aside else sys.stdout)


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
