"""Answer ``meshwright plan --gpus N --gpu CARD``: which layout to use, whether it fits, how fast a step is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from meshwright.core.devices import CUDA
from meshwright.core.errors import ConfigError

if TYPE_CHECKING:
    from meshwright.simulation.search.search import Candidate, Found
    from meshwright.simulation.workload.execution import Job
    from meshwright.training.config import Config

PATIENCE_S = 2.0


@dataclass(frozen=True)
class Rented:
    """The cluster that the command line asks about."""

    gpu: str
    gpus: int
    per_node: int = 0
    link: str = ""
    pins: tuple[str, ...] = ()


def foresee(config: Config, rented: Rented, *, as_json: bool) -> int:
    """Judge the config's layout, or search all layouts where the config leaves the layout open; print the answer."""
    from meshwright.introspection.cluster import Cluster
    from meshwright.planning.layout import Layout
    from meshwright.simulation.hardware.cards import machines
    from meshwright.simulation.search.answer import as_json as answer_json
    from meshwright.simulation.search.answer import legal_among
    from meshwright.simulation.search.counts import open_works, refusing, stated_works, words
    from meshwright.simulation.search.from_model import job_of_plan
    from meshwright.simulation.search.pins import Pin
    from meshwright.simulation.search.search import Candidate, Found, search
    from meshwright.simulation.workload.step_memory import step_memory
    from meshwright.simulation.workload.step_time import step_time
    from meshwright.training.build import batch_of, facts_of, plan_run
    from meshwright.training.model_source import model_source
    from meshwright.training.tokenizer import planned_tokenizer

    cards = machines(rented.gpu, rented.gpus, per_node=rented.per_node, across=rented.link)
    pins = tuple(map(Pin.parse, rented.pins))
    tokenizer = planned_tokenizer(config)
    facts, batch = facts_of(model_source(config, tokenizer)), batch_of(config, tokenizer)
    cluster = Cluster(rented.gpus, cards.per_node, CUDA)
    is_open = config.layout == Layout()
    _check_pins(config, rented)

    def stated(count: int):
        return plan_run(config, facts, replace(cluster, world=count), batch)

    with refusing(
        config.layout, rented.gpus, batch.global_rows, stated_works(config.layout, batch.global_rows, stated)
    ):
        plan = plan_run(config, facts, cluster) if is_open else stated(rented.gpus)
    job = job_of_plan(facts, plan, batch, cards)
    _check_products(job)
    if not is_open:
        judged = Candidate(job, step_time(job), step_memory(job))
        shown, refused, found = [judged], [], Found(best=[judged], front=[judged], tried=1)
    else:

        def legal_on(count, layout, techniques, rows):
            chosen = replace(config, layout=layout, techniques=techniques)
            return plan_run(chosen, facts, replace(cluster, world=count), replace(batch, microbatch_rows=rows))

        def of(count):
            return machines(rented.gpu, count, per_node=rented.per_node, across=rented.link)

        works = open_works(job, pins, config.techniques, of, legal_on)
        legal = partial(legal_on, rented.gpus)
        found = search(job, pins, progress=_progress())
        if not found.best:
            raise ConfigError(_nothing(found, rented, works))
        shown, refused = legal_among(found.best, config.techniques, legal)
        found.front, _ = legal_among(found.front, config.techniques, legal)
        if not shown:
            raise ConfigError(
                f"no layout that fits {rented.gpus} GPUs is legal. {refused[0].reason}. {words(rented.gpus, works)}"
            )
    answer = json.dumps(answer_json(shown, found, refused), indent=1) if as_json else ""
    print(answer or _page(config, rented, shown, found, is_open=is_open))
    return 0


def _check_pins(config: Config, rented: Rented) -> None:
    from meshwright.planning.layout import Layout

    if rented.pins and config.layout != Layout():
        raise ConfigError(
            f"--pin is for a layout that is searched, and the config states one ({config.layout}). Leave the layout out"
            f" and pin its sizes, such as --pin tp={config.layout.tp}."
        )


def _check_products(job: Job) -> None:
    device = job.machines.device
    if job.execution.products not in device.flops:
        raise ConfigError(
            f"{device.name} has no products in {job.execution.products}. Set techniques.precision.compute to one"
            f" that it has ({', '.join(device.flops)}), and techniques.float8 = none where it lacks float8."
        )


def _nothing(found: Found, rented: Rented, works: Callable[[int], bool]) -> str:
    from meshwright.simulation.search.counts import words

    if found.smallest is None:
        head = f"--gpus {rented.gpus}: no layout fills them with this batch and these pins."
        return f"{head} {words(rented.gpus, works)}"
    smallest = found.smallest
    job, device = smallest.job, smallest.job.machines.device
    beyond = (smallest.memory.total - device.memory_bytes) / 1e9
    return (
        f"nothing fits on {rented.gpus} {device.name}: the smallest layout ({job.layout}, recompute"
        f" {job.execution.recompute}) needs {smallest.memory.total / 1e9:.1f} GB on a GPU, {beyond:.1f} GB too much."
        f" Take more GPUs or a larger card, techniques.optimizer_state = 8bit, or shorter rows."
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


def _page(config: Config, rented: Rented, shown: list[Candidate], found: Found, *, is_open: bool) -> str:
    from meshwright.planning.explain import columns
    from meshwright.simulation.search.answer import HEADS, figures, row, toml

    chosen, cards = shown[0], shown[0].job.machines
    values = figures(chosen)
    head = (
        f"{chosen.job.architecture.name} on {rented.gpus} {cards.device.name}, {cards.per_node} per node,"
        f" {chosen.job.rows} rows of {chosen.job.seq_len} tokens per step"
    )
    parts = [
        f"{head}\n{columns([row(candidate) for candidate in shown], HEADS)}",
        "memory of the first: "
        + ", ".join(f"{name} {size:.1f}" for name, size in values["mem_parts_gb"].items())
        + " GB",
        f"{values['tokens_per_day'] / 1e9:.2f} billion tokens a day,"
        f" {values['gpu_hours_per_billion_tokens']:,.0f} GPU hours for a billion."
        " MFU: 6 FLOPs per product parameter and 12 per attended feature, over the data sheet's half precision.",
    ]
    if is_open:
        smaller = [row(candidate) for candidate in found.front if candidate.key != chosen.key][:4]
        if smaller:
            parts.append(f"less memory, more time\n{columns(smaller, HEADS)}")
        parts.append(
            f"{found.tried} candidates were simulated. To train with the first:\n\n{toml(chosen, config.techniques)}"
        )
    return "\n\n".join(parts)
