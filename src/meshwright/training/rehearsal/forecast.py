"""Let rehearsals stand in a forecast for what it would foresee of the same ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from meshwright.core.errors import ConfigError
from meshwright.introspection.cluster import Cluster
from meshwright.planning.plan import Plan
from meshwright.planning.values import Batch
from meshwright.simulation.hardware.links import Machines
from meshwright.simulation.workload.rehearsed import RehearsedRank

from .result import Rehearsal, digest, read


def rehearsals_for(path: Path, cluster: Cluster, machines: Machines) -> list[Rehearsal]:
    """Read the rehearsals in a file, which must be of such a cluster.

    Raises:
        ConfigError: the file cannot be read; a rank was refused; another number of ranks, or another device.
    """
    found = read(path)
    for one in found:
        if one.refused:
            raise ConfigError(f"{path}: rank {one.rank} did not get through its rehearsal: {one.refused}")
        if one.world != cluster.world:
            raise ConfigError(f"{path} is a rehearsal for {one.world} ranks, and --gpus is {cluster.world}")
        if not _is(machines.device.name, one.device):
            raise ConfigError(
                f"{path} was rehearsed on {one.device or 'an unnamed device'}, whose seconds and bytes are not those of"
                f" {machines.device.name}. Rehearse on such a device, or ask about the device that it ran on"
            )
    return found


def _is(card: str, device: str) -> bool:
    """Return whether the name that a driver gives a device is a card's: by its model, such as h100."""
    plain_card, plain_device = (re.sub(r"[^a-z0-9]", "", name.lower()) for name in (card, device))
    model = re.match(r"[a-z]+\d+[a-z]*", card.lower().replace(" ", ""))
    return plain_card == plain_device or (model is not None and model[0] in plain_device)


def rehearsed_ranks(rehearsals: Sequence[Rehearsal]) -> list[RehearsedRank]:
    """Return the figures of rehearsals that a forecast takes over."""
    return [
        RehearsedRank(one.coordinates.get("pp", 0), one.seconds, float(one.peak_bytes), bool(one.links))
        for one in rehearsals
    ]


def check_same(path: Path, rehearsals: Sequence[Rehearsal], plan: Plan, batch: Batch) -> None:
    """Refuse rehearsals of another plan or batch than a forecast is of; raises ConfigError."""
    if any(one.plan != digest(plan, batch) for one in rehearsals):
        raise ConfigError(
            f"{path} is a rehearsal of another run: its model, layout, batch or techniques are not those of this"
            f" config. Rehearse this one: meshwright rehearse CONFIG --gpus {plan.world} --each-kind --json={path}"
        )
