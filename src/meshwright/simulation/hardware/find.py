"""Find the machines of a cluster: public cards by name, or those that were measured."""

from __future__ import annotations

from pathlib import Path

from meshwright.introspection.cluster import Cluster

from .cards import machines
from .links import Machines
from .measured import measured_machines
from .profile import read_profile


def machines_of(cluster: Cluster, gpus: int = 0) -> Machines:
    """Return the machines of a cluster that names a card or a profile.

    Args:
        gpus: number of devices; 0: the cluster's.

    Raises:
        ConfigError: an unknown card or link, a file that is no profile, or a cluster that cannot be.
    """
    gpus = gpus or cluster.world
    if cluster.profile:
        return measured_machines(read_profile(Path(cluster.profile)), gpus, cluster.ranks_per_node)
    return machines(cluster.gpu, gpus, per_node=cluster.ranks_per_node, across=cluster.link)
