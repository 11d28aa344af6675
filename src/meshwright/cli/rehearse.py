"""``meshwright rehearse [CONFIG.toml | RUN] [--gpus 512] --rank 37|--each-kind [--key=value …]``: take real steps of
one rank of a run, on one device.

It builds the run of the config as one of its ranks and prints memory, seconds and messages. The very code of a training
run computes; nobody answers its messages, which take no time. What only a peer has is made up, and peers are taken to
send to experts as many tokens as this rank does. Nothing is written. Exit status 0, or that of the first error that a
rank met. More: docs/rent.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from meshwright.core.config import take_flags
from meshwright.core.config.ranges import FROM_1
from meshwright.core.errors import ConfigError
from meshwright.training.fine_tuning import of_forecast

from .arguments import check_file, read_config, write_file


@dataclass(frozen=True)
class RehearseOptions:
    rank: int | None = None
    """The rank to rehearse."""
    each_kind: bool = False
    """Rehearse one rank of each kind, since ranks with the same work need not be asked twice."""
    gpus: Annotated[int | None, FROM_1] = None
    """Ranks of the run (default: those of the layout)."""
    steps: Annotated[int, FROM_1] = 3
    """Steps that are timed (default: 3), behind two that are watched."""
    per_node: Annotated[int | None, FROM_1] = None
    """Ranks on a host."""
    gpu: str | None = None
    """Card, such as h100: messages take the time that is foreseen on such cards."""
    link: str | None = None
    """Link between hosts, such as ib400 (Gb/s for each GPU)."""
    device: str = ""
    """Such as cpu, in place of this machine's accelerator."""
    json: bool | Path = False
    """Figures for programs; with =PATH into that file, beside the text."""
    trust: bool = False
    """Run code that the config names."""


def run(argv: list[str]) -> int:
    """Print what a rank's steps take; ``argv`` is what ``read_config`` takes, and the verb's own flags."""
    options, argv = take_flags(RehearseOptions, argv)
    if options.link and not options.gpu:
        raise ConfigError("--link is between cards: give --gpu CARD too")
    if options.rank is not None and options.each_kind:
        raise ConfigError("--rank and --each-kind are both given: ask for one rank, or for one of each kind")
    if options.rank is None and not options.each_kind:
        raise ConfigError("which rank? Give --rank 0, or --each-kind for one rank of each kind")
    path = options.json if isinstance(options.json, Path) else None
    if path is not None:
        check_file(path, "--json = ")
    as_json = options.json is True
    config = read_config(argv, prog="meshwright rehearse", trusted=options.trust)
    if not as_json and (taken := of_forecast(config)):
        print(f"{taken}\n", flush=True)
    if options.gpus is None and not config.layout.is_resolved:
        raise ConfigError("the layout leaves open how many ranks there are: say it, such as --gpus 512")
    from meshwright.simulation.cards import machines
    from meshwright.training.rehearsal import cast, one_rank, rehearse_each, to_json

    world = options.gpus or config.layout.world
    cards = None
    if options.gpu:
        cards = machines(options.gpu, world, per_node=options.per_node or 0, across=options.link or "")
    parts = cast(config, world, options.per_node or (cards.per_node if cards else 0), options.device, cards)
    kinds = parts.kinds if options.rank is None else one_rank(parts, options.rank)
    if not as_json and options.rank is None:
        print(f"{len(kinds)} kind{'s' * (len(kinds) > 1)} of ranks among {parts.plan.world}\n", flush=True)
    found = rehearse_each(parts, kinds, options.steps, lambda one: None if as_json else print(f"{one}\n", flush=True))
    if as_json:
        print(to_json(found))
    if path is not None:
        write_file(path, to_json(found), "--json = ")
    return next((one.exit_status for one in found if one.refused), 0)
