"""``meshwright plan``: what a config becomes on a mesh of any size, without process group, GPU or data."""

from __future__ import annotations

from pathlib import Path

from meshwright.core.devices import check_device_type, local_device
from meshwright.core.errors import ConfigError

from .arguments import read_config, take_option
from .foresee import Rented, foresee
from .pages import check_page


def run(argv: list[str]) -> int:
    """Print the plan, the bytes that a step sends, and its memory estimate.

    With ``--gpus N --gpu CARD`` the answer is about GPUs that need not be here: the memory and time of the config's
    layout, or, where the config leaves its layout open, the best of all layouts and the TOML to train with.
    ``--per-node N`` of them on a host, ``--link ib400`` between hosts (Gb/s for each GPU), ``--pin tp<=8`` (again for
    more) to keep parts of a layout, ``--profile FILE`` in place of ``--gpu``: the machine that ``meshwright measure``
    measured, ``--json`` for programs, ``--html FILE`` for a page with pictures. Forecasts:
    docs/foresight.md.

    Without them: ``--world N`` ranks, ``--per-node N`` of them on a host, ``--device``, ``--json``; ``--trust`` runs
    code that the config names.
    """
    world, argv = take_option(argv, "--world", int)
    per_node, argv = take_option(argv, "--per-node", int)
    device, argv = take_option(argv, "--device", str)
    gpus, argv = take_option(argv, "--gpus", int)
    gpu, argv = take_option(argv, "--gpu", str)
    profile, argv = take_option(argv, "--profile", Path)
    link, argv = take_option(argv, "--link", str)
    pins, argv = _take_pins(argv)
    html, argv = take_option(argv, "--html", Path)
    as_json, argv = "--json" in argv, [word for word in argv if word != "--json"]
    _check(world, per_node, device)
    if profile is not None:
        gpu = _profiled(gpu, link)
    _check_rented(gpus, gpu, link, pins, world, device)
    if html is not None:
        if gpus is None:
            raise ConfigError("--html draws a forecast for GPUs: give --gpus N and --gpu CARD too")
        check_page(html)
    config = read_config(argv, prog="meshwright plan", description=f"{__doc__}\n\n{run.__doc__}")
    if gpus is not None and gpu is not None:
        return foresee(
            config, Rented(gpu, gpus, per_node or 0, link or "", tuple(pins), profile), as_json=as_json, html=html
        )
    from meshwright.introspection.cluster import Cluster
    from meshwright.planning.explain import table
    from meshwright.training.build import batch_of, estimated_memory, facts_of, plan_run
    from meshwright.training.launch import process_count
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
    print(table(plan, batch, estimated_memory(config, facts, plan, batch)))
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


def _profiled(gpu: str | None, link: str | None) -> str:
    """Return the word for a machine that a profile describes. Raises ConfigError where a card is named too."""
    if gpu is not None:
        raise ConfigError("--gpu names a card and --profile a measured machine: give one of the two")
    if link is not None:
        raise ConfigError("--link is for cards, and --profile has the measured messages: leave --link out")
    return "the measured machine"


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
