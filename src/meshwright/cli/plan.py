"""``meshwright plan [CONFIG.toml | RUN] [--gpus 64 --gpu h100] [--key=value …]``: show what a config becomes on a
mesh of any size, without process group or GPU, and without data (a fine-tuner's is counted where it is there).

It prints the plan, the bytes that a step sends, and its memory estimate. With --gpus N --gpu CARD the answer is about
GPUs that need not be here: the memory and time of the config's layout, or, where the config leaves its layout open, the
best of all layouts and the TOML to train with. More: docs/rent.md.
"""

from __future__ import annotations

import gc
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Annotated, Any

from meshwright.core.config import take_flags
from meshwright.core.config.flags import flag_of
from meshwright.core.config.ranges import ABOVE_0, FROM_1
from meshwright.core.devices import check_device_type, device_memory, local_device
from meshwright.core.errors import ConfigError, MeshwrightError
from meshwright.introspection.cluster import Cluster
from meshwright.training.fine_tuning import (
    WeightsElsewhere,
    batch_follows,
    before_data,
    is_fine_tuning,
    length_follows,
    of_forecast,
)

from .arguments import check_file, read_config, write_file

if TYPE_CHECKING:
    from meshwright.training.config import Config

PATIENCE_S = 2.0
LARGEST_READ = 2**28
"""Bytes of data that are read to count its rows; of more, defaults stand."""
NAMES = ((1e12, " trillion"), (1e9, " billion"), (1e6, " million"))
UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@dataclass(frozen=True)
class PlanOptions:
    gpus: Annotated[int | None, FROM_1] = None
    """How many GPUs; they need not be here."""
    gpu: str = ""
    """Which card, such as h100."""
    per_node: Annotated[int | None, FROM_1] = None
    """GPUs, or ranks, on a host."""
    link: str = ""
    """Link between hosts, such as ib400 (Gb/s for each GPU)."""
    profile: Path | None = None
    """In place of --gpu: a machine that ``meshwright measure`` measured."""
    pin: tuple[str, ...] = ()
    """A part of the layout that the search keeps, such as "tp<=8"; may be given again."""
    imbalance: float = 1.0
    """Tokens of the fullest expert rank over the mean, such as 1.3."""
    straggler: float = 1.0
    """Time of the slowest rank over the others', such as 1.1."""
    price: Annotated[float | None, ABOVE_0] = None
    """Price of a GPU hour, such as 2.5: what the run costs."""
    tokens: str = ""
    """Tokens to train on, such as 15T (default: what the config's steps read)."""
    with_: Path | None = None
    """Figures of ``meshwright rehearse``, in place of those foreseen."""
    dry_run: bool = False
    """Print the first layout's memory by the run's own code beside the forecast."""
    html: Path | None = None
    """Draw the forecast into a page."""
    world: Annotated[int | None, FROM_1] = None
    """Without --gpus: ranks of the mesh."""
    device: str = ""
    """Without --gpus: type of the device, such as cuda."""
    json: bool = False
    """The answer for programs."""
    trust: bool = False
    """Run code that the config names."""


ABOUT_GPUS = ("link", "profile", "pin", "html", "with_", "imbalance", "straggler", "price", "tokens", "dry_run")
"""Options of a forecast, besides --gpus and --gpu."""


def is_asked(options: PlanOptions) -> bool:
    """Return whether a forecast for GPUs is wanted.

    Raises:
        ConfigError: some of its flags are given without --gpus and --gpu, or contradict each other.
    """
    alone = [name for name in ABOUT_GPUS if getattr(options, name) != getattr(PlanOptions(), name)]
    if options.gpus is None and not options.gpu and not alone:
        return False
    if options.profile is not None and (options.gpu or options.link):
        raise ConfigError("--profile has the measured device and its messages: leave out --gpu and --link")
    if options.gpus is None and not options.gpu and options.profile is None:
        raise ConfigError(f"{flag_of(alone[0])} is about a forecast for GPUs: give --gpus N and --gpu CARD too")
    if options.gpus is None or not (options.gpu or options.profile):
        raise ConfigError(
            "--gpus N and --gpu CARD (or --profile FILE) go together: how many, and which, such as --gpus 64 --gpu h100"
        )
    if options.html is not None:
        if options.with_ is not None:
            raise ConfigError("--html draws what is foreseen, and --with has what was rehearsed: leave one out")
        check_file(options.html)
    return True


def forecast(config: Config, options: PlanOptions) -> int:
    """Print what is foreseen of a config on a cluster of GPUs."""
    written = re.fullmatch(r"(\d+(?:_\d+)*\.?\d*(?:e\+?\d\d?)?)([KMBT]?)", options.tokens, re.IGNORECASE)
    wanted = float(written[1]) * UNITS[written[2].upper()] if written else 0.0
    if options.tokens and not wanted:
        raise ConfigError(f"--tokens={options.tokens}: a number of tokens is written as 300M, 2.5B, 15T or 1.5e13")
    with _progress() as progress:  # imports take their part of a user's patience
        from meshwright.simulation.foresee import foresee
        from meshwright.simulation.measured import machines_of, notes, profile_of
        from meshwright.training.build import batch_of, estimated_memory, facts_of, refuse_early, refuse_unfit
        from meshwright.training.model_source import model_source, planned_tokenizer
        from meshwright.training.rehearsal import check_same, rehearsals_for, rehearsed_ranks

        profile = "" if options.profile is None else str(options.profile)
        cluster = Cluster(options.gpus or 1, options.per_node or 0, gpu=options.gpu, link=options.link, profile=profile)
        rehearsals = [] if options.with_ is None else rehearsals_for(options.with_, cluster, machines_of(cluster))
        refuse_early(config)
        tokenizer = planned_tokenizer(config, _warn)
        batch, facts = batch_of(config, tokenizer), facts_of(model_source(config, tokenizer))
        answer = foresee(
            facts,
            config.layout,
            batch=batch,
            cluster=cluster,
            techniques=config.requested,
            pins=options.pin,
            progress=progress,
            rehearsed=rehearsed_ranks(rehearsals),
            imbalance=options.imbalance,
            straggler=options.straggler,
        )
    first = answer.candidates[0]
    refuse_unfit(config, facts, first.plan)
    if options.with_ is not None:
        check_same(options.with_, rehearsals, first.plan, batch)
    drawn = replace(batch, microbatch_rows=first.microbatch)
    values: dict[str, Any] = {}
    paragraphs = [] if options.profile is None else [" ".join(notes(profile_of(str(options.profile)), cluster.world))]
    if options.price is not None or options.tokens:
        tokens = wanted or config.steps * batch.global_rows * batch.seq_len
        hours = tokens / first.tok_s_gpu / 3600
        days = hours / cluster.world / 24
        values["run"] = {"tokens": tokens, "gpu_hours": hours, "days": days}
        scale, word = next((one for one in NAMES if tokens >= one[0]), (1.0, ""))
        words = f"{tokens / scale:,.4g}{word} tokens" if word else f"{tokens:,.0f} tokens"
        words += "" if options.tokens else f" (those of {config.steps:,} steps)"
        words += f": {_figure(hours, 1)} GPU hours, {_figure(days, 2)} days"
        if options.price is not None:
            values["run"]["cost"] = options.price * hours if math.isfinite(options.price * hours) else None
            words += f", {_figure(options.price * hours, 2)} at {options.price:g} for a GPU hour"
        paragraphs.append(words)
    if options.dry_run:
        estimate = estimated_memory(replace(config, techniques=first.techniques), facts, first.plan, drawn)
        found: dict[str, Any] = {"why_not": estimate.why_not}
        said = f"unknown, {estimate.why_not}"
        if not estimate.why_not:
            fullest = estimate.of()
            least = estimate.least[estimate.fullest] if estimate.least else fullest.total
            sizes = {str(kind): size / 1e9 for kind, size in fullest.peak.items() if size}
            found = {"mem_gb": fullest.total / 1e9, "least_gb": least / 1e9, "mem_parts_gb": sizes}
            parts = ", ".join(f"{name} {size:.1f}" for name, size in sizes.items())
            least = f"{found['least_gb']:.1f} to " * bool(estimate.least)
            said = f"{least}{found['mem_gb']:.1f} GB of tensors ({parts}); the driver and fragmentation come on top"
        values["dry_run"] = found
        paragraphs.append(f"by a dry run of the run's own code: {said}")
    print(json.dumps({**answer.to_dict(), **values}, indent=1) if options.json else answer.text(paragraphs))
    if options.html is not None:
        from meshwright.training.views.forecast import forecast_page

        shown, front = ([one.candidate for one in found] for found in (answer.candidates, answer.front))
        page = forecast_page(shown, front, first.toml() if answer.searched else "")
        print(write_file(options.html, page), file=sys.stderr if options.json else sys.stdout)
    return 0 if answer.chosen is not None else 1


def _figure(value: float, places: int) -> str:
    """Write an amount with so many places, or more where it is below 1, to have two digits."""
    return f"{value:,.{max(places, 1 - math.floor(math.log10(min(value, 1.0))))}f}"


def _warn(sentence: str) -> None:
    print(f"{sentence}\n", file=sys.stderr, flush=True)


def as_trained(config: Config, world: int) -> tuple[Config, str]:
    """Return a config with rows, steps and length as training on so many ranks would choose them from its data; or the
    config as it is, and why.
    """
    if not (is_fine_tuning(config) and (length_follows(config) or batch_follows(config))):
        return config, ""
    from meshwright.planning.layout import Shares
    from meshwright.training.feed import build_feed, parts_of
    from meshwright.training.model_source import run_tokenizer
    from meshwright.training.views.progress import Progress

    paths = [Path(source).expanduser() for part in parts_of(config.data) for source in part.source]
    files = (file for path in paths for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())
    why = f"it has more than {LARGEST_READ // 2**20} MiB"
    if sum(file.stat().st_size for file in files) <= LARGEST_READ:
        try:
            ranks = Shares(config.layout.resolve(world).sizes).data_ranks
            tokenizer = run_tokenizer(config, lambda _: None)
            return build_feed(config, tokenizer, 0, ranks, Progress(), accepts=lambda _: True).config, ""
        except (MeshwrightError, OSError) as error:
            why = str(error).splitlines()[0].rstrip(":")
    return config, f"the data was not counted, and training may take other rows and steps: {why}"


@contextmanager
def _progress() -> Iterator[Callable[[float], None]]:
    """Say on stderr after two seconds that a search goes on; on a terminal a bar shows how far."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    bar = Progress(console=console, transient=True)
    task = bar.add_task("searching layouts", total=1.0)

    def begin() -> None:
        if console.is_terminal:
            bar.start()
        else:
            print("meshwright plan: searching layouts …", file=sys.stderr, flush=True)

    timer = Timer(PATIENCE_S, begin)
    timer.start()
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # copies are small: on a busy machine threads that wait took three times the CPU time
    gc.disable()  # a tenth of the time, for hardly any cycles
    try:
        yield lambda done: bar.update(task, completed=done)
    finally:
        gc.enable()
        torch.set_num_threads(threads)
        timer.cancel()
        timer.join()
        bar.stop()


def run(argv: list[str]) -> int:
    """Print the plan, or the forecast; ``argv`` is what ``read_config`` takes, and the verb's own flags."""
    options, argv = take_flags(PlanOptions, argv)
    if options.device:
        check_device_type(options.device, "--device")
    is_forecast = is_asked(options)
    if is_forecast and (options.world is not None or options.device):
        raise ConfigError("--gpus and --gpu stand for --world and --device: leave these out")
    config = read_config(argv, prog="meshwright plan", trusted=options.trust)
    if is_forecast and config.model.hf:
        config = before_data(replace(config, model=replace(config.model, hf=WeightsElsewhere(config.model.hf))))
    from meshwright.training.launch import process_count

    config, uncounted = as_trained(config, options.gpus or options.world or process_count(config))
    for said in () if options.json else filter(None, (of_forecast(config), uncounted)):
        print(f"{said}\n", flush=True)
    if is_forecast:
        return forecast(config, options)
    from meshwright.planning.explain import table
    from meshwright.training.build import batch_of, estimated_memory, facts_of, plan_run
    from meshwright.training.capacity import Capacity, whether_it_fits
    from meshwright.training.memory import host_memory
    from meshwright.training.model_source import model_source, planned_tokenizer

    tokenizer = planned_tokenizer(config, _warn)
    cluster = Cluster(options.world or process_count(config), options.per_node or 0, options.device or local_device())
    source, batch = model_source(config, tokenizer), batch_of(config, tokenizer)
    facts = facts_of(source)
    plan = plan_run(config, facts, cluster)
    if options.json:
        print(plan.to_json())
        return 0
    try:
        plan_run(config, facts, cluster, batch)
    except ConfigError:
        print(f"{table(plan)}\n", flush=True)  # the plan holds for any batch; the refusal of this one follows
        raise
    estimate = estimated_memory(config, facts, plan, batch)
    fits = ""
    if cluster.device == local_device():
        # of ranks that are only planned it is not known which share a host: one alone counts
        ranks = options.per_node or (1 if options.world else cluster.world)
        here = Capacity(cluster.device, device_memory(cluster.device), host_memory(), ranks)
        fits = whether_it_fits(facts, plan, batch, here, estimate)
    print(table(plan, batch, estimate, whether_it_fits=fits))
    return 0
