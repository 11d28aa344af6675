"""A process can be any rank of a world that is not there, and its own world is untouched behind it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from meshwright.core.errors import ConfigError
from meshwright.distributed import DistributedConfig, init_distributed
from meshwright.distributed.mesh import build_mesh
from meshwright.distributed.process.absent_peers import absent_peers, peers_are_absent
from meshwright.planning.layout import Layout


def sum_over_world() -> float:
    one = torch.ones(())
    dist.all_reduce(one)
    return one.item()


def step_aside_and_return() -> None:
    mesh = init_distributed(DistributedConfig(dp_shard=2))
    assert mesh is not None
    for _ in range(2):
        with absent_peers(5, 16):
            silent = build_mesh(Layout(pp=2, dp_shard=4, tp=2, ep=2), "cpu")
            assert (dist.get_rank(), dist.get_world_size(), peers_are_absent()) == (5, 16, True)
            assert list(silent.get_coordinate() or ()) == [0, 0, 2, 0, 1]
            assert sum_over_world() == 1  # nobody adds
    with pytest.raises(ZeroDivisionError), absent_peers(1, 4):
        raise ZeroDivisionError
    assert not peers_are_absent() and sum_over_world() == 2
    group = mesh.get_group("dp_shard")
    assert dist.get_world_size(group) == 2 and len(dist.get_process_group_ranks(group)) == 2
    again = build_mesh(Layout(dp_shard=2), "cpu")
    whole = torch.ones(2)
    dist.all_reduce(whole, group=again.get_group("dp_shard"))
    assert whole.tolist() == [2, 2]


def test_a_worlds_own_groups_survive_a_world_of_absent_peers(pool):
    pool.run(step_aside_and_return, world=2)


@pytest.mark.parametrize(("rank", "world"), [(4, 4), (-1, 2)])
def test_a_rank_that_cannot_be_is_refused(rank, world):
    with (
        pytest.raises(ConfigError, match=f"rank {rank} of {world} ranks: legal are 0 to {world - 1}"),
        absent_peers(rank, world),
    ):
        pass
    assert not dist.is_initialized()
