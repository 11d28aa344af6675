"""``meshwright rehearse [CONFIG.toml | RUN] [--gpus 512] --rank 37|--each-kind [--key=value …]``: take real steps of
one rank of a run, on one device.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.core.errors import ConfigError
from meshwright.training.optim.fine_tuning import of_forecast

from .arguments import read_config, take_option

if TYPE_CHECKING:
    from meshwright.training.rehearsal import Rehearsal


def run(argv: list[str]) -> int:
    """Build the run of the config as one of its ranks, take real steps, and print memory, seconds and messages.

    The very code of a training run computes; nobody answers its messages, which take no time. What only a peer has is
    made up, and peers are taken to send to experts as many tokens as this rank does. Nothing is written. Exit status 0,
    or that of the first error that a rank met. More: docs/rehearse.md.

    ``--gpus N`` ranks of the run (by default those of the layout), ``--rank R``, or ``--each-kind``: one rank of each
    kind, since ranks with the same work need not be asked twice. ``--steps N`` are timed, behind two that are watched.
    With ``--gpu h100`` (and ``--link ib400`` between hosts) messages take the time that is foreseen on such cards.
    ``--per-node N`` ranks on a host, ``--device cpu`` in place of this machine's accelerator, ``--json`` for programs
    or ``--json=FILE`` beside the text; ``--trust`` runs code that the config names.
    """
    gpus, argv = take_option(argv, "--gpus", int)
    rank, argv = take_option(argv, "--rank", int)
    steps, argv = take_option(argv, "--steps", int)
    per_node, argv = take_option(argv, "--per-node", int)
    device, argv = take_option(argv, "--device", str)
    gpu, argv = take_option(argv, "--gpu", str)
    link, argv = take_option(argv, "--link", str)
    if link and not gpu:
        raise ConfigError("--link is between cards: give --gpu CARD too")
    as_json, argv = "--json" in argv, [word for word in argv if word != "--json"]
    file, argv = take_option(argv, "--json", str)
    each, argv = "--each-kind" in argv, [word for word in argv if word != "--each-kind"]
    _check(rank, each=each, numbers={"--gpus": gpus, "--steps": steps, "--per-node": per_node})
    path = _writable(file)
    told = f"{__doc__}\n\n{run.__doc__}"
    config = read_config(argv, prog="meshwright rehearse", description=told)
    if not as_json and (taken := of_forecast(config)):
        print(f"{taken}\n", flush=True)
    if gpus is None and not config.layout.is_resolved:
        raise ConfigError("the layout leaves open how many ranks there are: say it, such as --gpus 512")
    from meshwright.simulation.hardware.cards import machines
    from meshwright.training.rehearsal import cast, one_rank, rehearse_each, to_json

    world = gpus or config.layout.world
    cards = machines(gpu, world, per_node=per_node or 0, across=link or "") if gpu else None
    parts = cast(config, world, per_node or (cards.per_node if cards else 0), device or "", cards)
    kinds = parts.kinds if rank is None else one_rank(parts, rank)
    if not as_json and rank is None:
        print(f"{len(kinds)} kind{'s' * (len(kinds) > 1)} of ranks among {parts.plan.world}\n", flush=True)
    found = rehearse_each(parts, kinds, steps or 3, (lambda one: None) if as_json else _show)
    if as_json:
        print(to_json(found))
    if path is not None:
        path.write_text(to_json(found))
    return next((one.exit_status for one in found if one.refused), 0)


def _show(found: Rehearsal) -> None:
    print(f"{found}\n", flush=True)


def _check(rank: int | None, *, each: bool, numbers: dict[str, int | None]) -> None:
    """Raise ConfigError where the flags contradict each other, or a number is out of its range."""
    if rank is not None and each:
        raise ConfigError("--rank and --each-kind are both given: ask for one rank, or for one of each kind")
    if rank is None and not each:
        raise ConfigError("which rank? Give --rank 0, or --each-kind for one rank of each kind")
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} = {value}: there is at least 1")


def _writable(file: str | None) -> Path | None:
    """Return the path of the result. Raises ConfigError, before anything is computed, where its folder is not there."""
    path = None if file is None else Path(file).expanduser()
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"--json = {file}: there is no folder {path.parent}")
    return path
