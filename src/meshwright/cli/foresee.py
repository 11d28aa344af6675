"""Answer ``meshwright plan --gpus N --gpu CARD``: which layout to use, whether it fits, how fast a step is."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meshwright.core.devices import is_accelerator
from meshwright.core.errors import ConfigError

from .pages import write_page

if TYPE_CHECKING:
    from pathlib import Path

    from meshwright.introspection.facts import ModelFacts
    from meshwright.planning.plan import Plan
    from meshwright.planning.values import Batch
    from meshwright.simulation.hardware.links import Machines
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
    profile: Path | None = None


def foresee(config: Config, rented: Rented, *, as_json: bool, html: Path | None = None) -> int:
    """Judge the config's layout, or search all layouts where the config leaves the layout open; print the answer.

    Args:
        html: file to draw the answer into.
    """
    from meshwright.introspection.cluster import Cluster
    from meshwright.planning.layout import Layout
    from meshwright.simulation.hardware.measured import computing_in
    from meshwright.simulation.search.answer import as_json as answer_json
    from meshwright.simulation.search.answer import legal_among, techniques_of, toml
    from meshwright.simulation.search.from_model import job_of_plan
    from meshwright.simulation.search.pins import Pin
    from meshwright.simulation.search.search import Candidate, Found, search
    from meshwright.simulation.workload.step_memory import step_memory
    from meshwright.simulation.workload.step_time import step_time
    from meshwright.training.build import batch_of, facts_of, plan_run
    from meshwright.training.model_source import model_source
    from meshwright.training.tokenizer import planned_tokenizer
    from meshwright.training.views.forecast.page import forecast_page

    cards = _machines(rented)
    pins = tuple(map(Pin.parse, rented.pins))
    tokenizer = planned_tokenizer(config)
    facts, batch = facts_of(model_source(config, tokenizer)), batch_of(config, tokenizer)
    cluster = Cluster(rented.gpus, cards.per_node, cards.device.kind)
    is_open = config.layout == Layout()
    if pins and not is_open:
        raise ConfigError(
            f"--pin is for a layout that is searched, and the config states one ({config.layout}). Leave the layout out"
            f" and pin its sizes, such as --pin tp={config.layout.tp}."
        )
    plan = plan_run(config, facts, cluster, None if is_open else batch)
    job = job_of_plan(facts, plan, batch, computing_in(cards, plan.precision.compute))
    _check_products(job)

    def legal(layout, techniques, rows):
        chosen = replace(config, layout=layout, techniques=techniques)
        return plan_run(chosen, facts, cluster, replace(batch, microbatch_rows=rows))

    if not is_open:
        judged = Candidate(job, step_time(job), step_memory(job))
        shown, refused, found = [judged], [], Found(best=[judged], front=[judged], tried=1)
    else:
        found = search(job, pins, progress=_progress())
        if not found.best:
            raise ConfigError(_nothing(found, rented))
        shown, refused = legal_among(found.best, config.techniques, legal)
        found.front, _ = legal_among(found.front, config.techniques, legal)
        if not shown:
            raise ConfigError(f"no layout that fits is legal. {refused[0].reason}.")
    more, words = ({}, "") if is_open else _of_operators(config, rented, facts, plan, batch)
    if as_json:
        print(json.dumps(answer_json(shown, found, refused) | more, indent=1))
    else:
        print(_text(config, rented, shown, found, is_open=is_open) + words)
    if html is not None:
        if is_open:
            job = shown[0].job
            batch = replace(batch, microbatch_rows=int(job.microbatch))
            plan = legal(job.layout, techniques_of(job, config.techniques), batch.microbatch_rows)
        page = forecast_page(shown, found.front, plan, batch, toml(shown[0], config.techniques) if is_open else "")
        print(write_page(html, page), file=sys.stderr if as_json else sys.stdout)
    return 0


def _machines(rented: Rented) -> Machines:
    """Return the cards by their data sheet, or the machine of a profile."""
    from meshwright.simulation.hardware.cards import machines
    from meshwright.simulation.hardware.measured import measured_machines
    from meshwright.simulation.hardware.profile import read_profile

    if rented.profile is not None:
        return measured_machines(read_profile(rented.profile), rented.gpus, rented.per_node)
    return machines(rented.gpu, rented.gpus, per_node=rented.per_node, across=rented.link)


def _of_operators(
    config: Config, rented: Rented, facts: ModelFacts, plan: Plan, batch: Batch
) -> tuple[dict[str, Any], str]:
    """Forecast the step of a plan from its operators, where a CPU was measured: keys for the JSON, and a paragraph."""
    from meshwright.simulation.hardware.profile import read_profile
    from meshwright.simulation.operators.answer import figures, text
    from meshwright.training.measuring.forecast import forecast_of_operators

    profile = None if rented.profile is None else read_profile(rented.profile)
    if profile is None or is_accelerator(profile.device):
        return {}, ""
    forecast = forecast_of_operators(facts, plan, batch, profile, max_norm=config.optimizer.max_norm)
    return {"from_operators": figures(forecast)}, f"\n\n{text(forecast)}"


def _check_products(job: Job) -> None:
    cards = job.machines
    if job.execution.products not in cards.device.flops:
        choices = ", ".join(cards.device.flops)
        raise ConfigError(
            f"{cards.device.name} has no products in {job.execution.products}. Set techniques.precision.compute to one"
            f" that it has ({choices}), and techniques.float8 = none where it lacks float8."
        )


def _nothing(found: Found, rented: Rented) -> str:
    if found.smallest is None:
        legal = "a count that the rows of batch.global_batch and the model's heads and blocks divide"
        return f"--gpus {rented.gpus}: no layout fills them with this batch and these pins. Ask for {legal}."
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


def _text(config: Config, rented: Rented, shown: list[Candidate], found: Found, *, is_open: bool) -> str:
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
    if rented.profile is not None:
        from meshwright.simulation.hardware.measured import notes
        from meshwright.simulation.hardware.profile import read_profile

        parts.append(" ".join(notes(read_profile(rented.profile), rented.gpus)))
    if is_open:
        smaller = [row(candidate) for candidate in found.front if candidate.key != chosen.key][:4]
        if smaller:
            parts.append(f"less memory, more time\n{columns(smaller, HEADS)}")
        parts.append(
            f"{found.tried} candidates were compared. To train with the first:\n\n{toml(chosen, config.techniques)}"
        )
    return "\n\n".join(parts)
