"""``meshwright plan``: what a config becomes on a mesh of any size, without process group, GPU or data."""

from __future__ import annotations

from pathlib import Path

from meshwright.core.devices import check_device_type, device_memory, local_device
from meshwright.core.errors import ConfigError
from meshwright.introspection.cluster import Cluster

from . import foresee
from .arguments import read_config, take_option
from .pages import check_page


def run(argv: list[str]) -> int:
    """Print the plan, the bytes that a step sends, and its memory estimate.

    With ``--gpus N --gpu CARD`` the answer is about GPUs that need not be here: the memory and time of the config's
    layout, or, where the config leaves its layout open, the best of all layouts and the TOML to train with.
    ``--per-node N`` of them on a host, ``--link ib400`` between hosts (Gb/s for each GPU), ``--pin tp<=8`` (again for
    more) to keep parts of a layout, ``--json`` for programs, ``--html FILE`` for a page with pictures, ``--with FILE``
    for figures of ``meshwright rehearse`` in place of those foreseen, ``--dry-run`` for the first layout's memory by
    the run's own code beside the forecast. More: docs/foresight.md.

    Without them: ``--world N`` ranks, ``--per-node N`` of them on a host, ``--device``, ``--json``; ``--trust`` runs
    code that the config names.
    """
    world, argv = take_option(argv, "--world", int)
    per_node, argv = take_option(argv, "--per-node", int)
    device, argv = take_option(argv, "--device", str)
    gpus, argv = take_option(argv, "--gpus", int)
    gpu, argv = take_option(argv, "--gpu", str)
    link, argv = take_option(argv, "--link", str)
    pins, argv = _take_pins(argv)
    html, argv = take_option(argv, "--html", Path)
    rehearsed, argv = take_option(argv, "--with", Path)
    as_json, argv = "--json" in argv, [word for word in argv if word != "--json"]
    dry_run, argv = "--dry-run" in argv, [word for word in argv if word != "--dry-run"]
    _check(world, per_node, device)
    _check_rented(gpus, gpu, link, pins, world, device)
    if dry_run and gpus is None:
        raise ConfigError(
            "--dry-run is made without GPUs in any case: leave it out, or give --gpus N and --gpu CARD too"
        )
    if rehearsed is not None and (gpus is None or html is not None):
        raise ConfigError("--with replaces figures of a forecast: give --gpus N and --gpu CARD too, and no --html")
    if html is not None:
        if gpus is None:
            raise ConfigError("--html draws a forecast for GPUs: give --gpus N and --gpu CARD too")
        check_page(html)
    config = read_config(argv, prog="meshwright plan", description=f"{__doc__}\n\n{run.__doc__}")
    if gpus is not None and gpu is not None:
        cluster = Cluster(gpus, per_node or 0, gpu=gpu, link=link or "")
        return foresee.run(
            config, cluster, tuple(pins), as_json=as_json, html=html, rehearsed=rehearsed, dry_run=dry_run
        )
    from meshwright.planning.explain import table
    from meshwright.training.build import batch_of, estimated_memory, facts_of, plan_run
    from meshwright.training.capacity import Capacity, whether_it_fits
    from meshwright.training.launch import process_count
    from meshwright.training.metrics.host_memory import host_memory
    from meshwright.training.model_source import model_source
    from meshwright.training.tokenizer import planned_tokenizer

    tokenizer = planned_tokenizer(config)
    cluster = Cluster(world or process_count(config), per_node or 0, device or local_device())
    source, batch = model_source(config, tokenizer), batch_of(config, tokenizer)
    facts = facts_of(source)
    plan = plan_run(config, facts, cluster)
    if as_json:
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
        ranks = per_node or (1 if world else cluster.world)
        here = Capacity(cluster.device, device_memory(cluster.device), host_memory(), ranks)
        fits = whether_it_fits(facts, plan, batch, here, estimate)
    print(table(plan, batch, estimate, whether_it_fits=fits))
    return 0


def _check(world: int | None, per_node: int | None, device: str | None) -> None:
    """Raise ConfigError for an impossible cluster."""
    for name, value in (("--world", world), ("--per-node", per_node)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} = {value}: there is at least 1")
    if device is not None:
        check_device_type(device, "--device")


def _check_rented(
    gpus: int | None, gpu: str | None, link: str | None, pins: list[str], world: int | None, device: str | None
) -> None:
    """Raise ConfigError where the flags about GPUs are incomplete, or mixed with those about this machine's ranks."""
    if (gpus is None) != (gpu is None):
        raise ConfigError("--gpus N and --gpu CARD go together: how many, and which, such as --gpus 64 --gpu h100")
    if gpus is None and (link or pins):
        raise ConfigError("--link and --pin are about GPUs: give --gpus N and --gpu CARD too")
    if gpus is not None and (world is not None or device is not None):
        raise ConfigError("--gpus and --gpu stand for --world and --device: leave these out")


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
