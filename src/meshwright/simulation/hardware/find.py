"""Find the machines of a cluster: public cards by name, or those that were measured."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from meshwright.introspection.cluster import Cluster

from .cards import machines
from .links import Machines
from .measured import measured_machines
from .profile import MachineProfile, from_json, read_profile

COME_ALONG = {"xeon-2-cores": "xeon-2-cores.json"}
"""Profiles by the name under which ``--profile`` takes them: a virtual machine with two cores of an Intel Xeon,
measured with four ranks."""


def profile_of(text: str) -> MachineProfile:
    """Read a profile that comes along, by its name, or a file of ``meshwright measure``.

    Raises:
        ConfigError: there is no such file, it is damaged, or its format is another one.
    """
    if text in COME_ALONG and not Path(text).exists():
        package = files("meshwright.simulation.hardware")
        return from_json(package.joinpath(COME_ALONG[text]).read_text(encoding="utf-8"), f"--profile {text}")
    return read_profile(Path(text))


def machines_of(cluster: Cluster, gpus: int = 0) -> Machines:
    """Return the machines of a cluster that names a card or a profile.

    Args:
        gpus: number of devices; 0: the cluster's.

    Raises:
        ConfigError: an unknown card or link, a file that is no profile, or a cluster that cannot be.
    """
    gpus = gpus or cluster.world
    if cluster.profile:
        return measured_machines(profile_of(cluster.profile), gpus, cluster.ranks_per_node)
    return machines(cluster.gpu, gpus, per_node=cluster.ranks_per_node, across=cluster.link)
