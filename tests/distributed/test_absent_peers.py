"""A process can be any rank of a world that is not there, and its own world is untouched behind it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from meshwright.core.errors import ConfigError
from meshwright.distributed import DistributedConfig, init_distributed
from meshwright.distributed.mesh import build_mesh
from meshwright.distributed.process import agree
from meshwright.distributed.process.absent_peers import OperatorRecorder, absent_peers, peers_are_absent
from meshwright.planning.layout import Layout

REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""Its name since torch 2.13, if it exists."""


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


@pytest.mark.all
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


def test_values_that_only_a_peer_has_are_small_numbers_beside_the_runs_streams():
    torch.manual_seed(3)
    drawn = torch.rand(4)
    torch.manual_seed(3)
    with absent_peers(1, 4):
        mesh = build_mesh(Layout(pp=2, dp_shard=1, tp=2), "cpu")
        group = mesh.get_group("tp")
        received, whole, part = torch.full((64, 8), torch.nan), torch.zeros(64, 8), torch.full((32, 8), torch.nan)
        work = dist.irecv(received, group=mesh.get_group("pp"), group_src=1)
        assert work is not None and work.is_completed()
        dist.all_reduce(whole, group=group)
        REDUCE_SCATTER(part, torch.zeros(64, 8), group=group)
        flat, numbers = torch.ones(64), torch.ones(64, 8, dtype=torch.int64)
        for tensor in (flat, numbers):
            dist.all_reduce(tensor, group=group)
        scattered = torch.full((4,), torch.nan)
        dist.scatter(scattered, None, group=group, group_src=0)
    for made in (received, whole, part):
        assert 0.005 < float(made.std()) < 0.05 and len(made.unique()) > made.numel() / 2
    assert bool(scattered.isfinite().all()) and flat.unique().tolist() == [1] and numbers.unique().tolist() == [1]
    assert torch.equal(torch.rand(4), drawn)


def test_peers_have_what_this_rank_has():
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    with absent_peers(2, 4):
        mine, parts = torch.arange(6.0).view(2, 3), torch.full((8, 3), torch.nan)
        gather(parts, mine)
        assert torch.equal(parts, mine.repeat(4, 1))
        parts[4:6] += 1
        gather(parts, parts[4:6])  # in its place already, as FSDP2 has it
        assert torch.equal(parts, (mine + 1).repeat(4, 1))
        counts, theirs = torch.tensor([1, 2, 3, 4]), torch.zeros(4, dtype=torch.int64)
        dist.all_to_all_single(theirs, counts)
        assert torch.equal(theirs, counts)  # each sends to this rank what this rank sends to it
        rows, received = torch.rand(10, 5), torch.full((10, 5), torch.nan)
        dist.all_to_all_single(received, rows, theirs.tolist(), counts.tolist())
        assert torch.equal(received, rows)
        more, none = torch.full((3, 5), torch.nan), torch.zeros(0, 5)
        dist.all_to_all_single(more, none, [3, 0, 0, 0], [0, 0, 0, 0])
        assert bool(more.isfinite().all())


def test_what_is_made_up_is_written_below_autograd_and_counts_as_no_operator():
    with absent_peers(0, 2):
        x = torch.ones(4, 4)
        before = x._version
        with OperatorRecorder() as seen:
            dist.all_reduce(x)
        assert x._version == before and [name for name, _ in seen.recorded] == ["c10d.allreduce_.default"]
        assert seen.messages == [("all_reduce", (0, 1), 64, 64.0)]


def test_absent_peers_agree_with_this_rank():
    with absent_peers(3, 8):
        group = dist.group.WORLD
        assert agree.from_rank_zero("mine") == "mine" and agree.everybody_says(3) == [3] * 8
        assert agree.total(torch.tensor([2.0, 5.0]), [group]).tolist() == [16, 40]
        assert agree.decided_once(lambda: dist.is_initialized()) is False
        agree.set_timeout(10, [group])
    assert agree.everybody_says(3) == [3]
