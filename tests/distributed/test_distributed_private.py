"""What torch.distributed and torchao keep private still does what we take it for.

A failure here says what another version moved.
"""

from __future__ import annotations

import inspect
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.odd import odd
from support.ranks import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from meshwright.core.torch_private import fake_mode
from meshwright.distributed import DistributedConfig, init_distributed
from meshwright.distributed import torch_private as private
from meshwright.distributed.process import agree
from meshwright.training.health import heartbeat as stacks


def tensors_and_groups() -> None:
    init_distributed(DistributedConfig(dp_shard=2))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    whole = torch.arange(4.0)
    tensor = distribute_tensor(whole, mesh["a"], [Shard(0)])
    local = private.local_part(tensor)
    assert not isinstance(local, DTensor) and torch.equal(local, whole.chunk(2)[dist.get_rank()])
    assert private.local_part(whole) is whole
    spec = private.spec_of(tensor)
    assert isinstance(spec, private.DTensorSpec) and spec.placements == (Shard(0),) and spec.shape == (4,)
    meta = private.TensorMeta(spec.shape, tensor.stride(), tensor.dtype)
    again = DTensor(local, private.DTensorSpec(mesh["a"], (Shard(0),), tensor_meta=meta), requires_grad=False)
    assert torch.equal(again.full_tensor(), whole)
    (strided,) = private.STRIDED
    assert strided(0, split_factor=2) != Shard(0)
    assert private.flattened(mesh, "both").size() == 2
    with fake_mode():
        assert private.ranks_in(mesh).tolist() == [[0], [1]]
    private.forget_meshes()
    assert torch.equal((tensor + 1).full_tensor(), whole + 1)
    group = mesh["a"].get_group()
    private.set_group_timeout(group, 77)
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
    name = dist.distributed_c10d._get_process_group_name(group)
    assert private.group_of_recorder(name) is group and private.group_of_recorder("no such group") is None
    assert private.recorder_dumps()


def data_parallel() -> None:
    init_distributed(DistributedConfig(dp_shard=2))
    wrapped = DistributedDataParallel(nn.Linear(2, 2), static_graph=True)
    assert not private.has_recorded_graph(wrapped)
    for _ in range(2):
        wrapped(torch.ones(1, 2)).sum().backward()
    assert private.has_recorded_graph(wrapped)


def fully_sharded() -> None:
    mesh = init_distributed(DistributedConfig(dp_shard=2))["dp_shard"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model: nn.Module = fully_shard(nn.Linear(3, 3, bias=False), mesh=mesh, mp_policy=policy)
    assert private.mixed_precision_of(model) == policy
    assert not private.has_begun(model)
    private.begin_forward(model)
    assert private.has_begun(model)
    (group,) = private.groups_of_parameters(model)
    (parameter,) = group.fsdp_params
    assert parameter.sharded_param is model.weight
    assert private.gathered(parameter) is None and private.arriving(group) is None
    assert not private.cuts_beside(parameter)
    shard = private.padded_shard(parameter)
    assert shard.shape == (2, 3), "3 rows on 2 ranks are filled up to 2 on each"
    own = private.local_part(model.weight)
    assert torch.equal(shard[: len(own)], own) and not shard[len(own) :].any()
    assert not private.has_partial_sums(group)
    private.drop_partial_sums(group)
    model.set_requires_gradient_sync(False)
    output = [model(torch.ones(1, 3))]  # a list within a list, into which torch looks; an object of ours it would not
    private.begin_backward_at(model, output[0])
    output[0].sum().backward()
    assert model.weight.grad is None
    model.set_requires_gradient_sync(True)
    group.post_backward()
    private.end_backward(model)
    assert model.weight.grad.full_tensor().eq(1).all(), "the mean over ranks of what was postponed"
    assert inspect.getsourcefile(type(group)).endswith(stacks.FSDP_FILE) and getattr(group, stacks.MODULE_NAME) == ""
    model.unshard()
    assert private.gathered(parameter).shape == (3, 3)


class Doubled:
    """Answers what FSDP2 asks a shard: what arrives is twice what rests."""

    def __init__(self, parameter):
        self.parameter = parameter

    def to(self, *args, **kwargs):
        return self

    def size(self):
        return self.parameter.sharded_size

    def fsdp_pre_all_gather(self, mesh):
        return (private.padded_shard(self.parameter) * 2,), None

    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
        (gathered,) = outputs
        return None if out is not None else (gathered, (gathered,))


def gathered_through() -> None:
    mesh = init_distributed(DistributedConfig(dp_shard=2))["dp_shard"]
    model: nn.Module = fully_shard(nn.Linear(2, 2, bias=False), mesh=mesh)
    whole = model.weight.full_tensor().detach()
    (group,) = private.groups_of_parameters(model)
    (parameter,) = group.fsdp_params
    private.gather_through(parameter, Doubled(parameter))
    x = torch.ones(1, 2)
    assert torch.equal(model(x), x @ (2 * whole).T)


@pytest.mark.parametrize(
    "job", [tensors_and_groups, data_parallel, fully_sharded, gathered_through], ids=lambda job: job.__name__
)
def test_torch_distributed(job, spmd):
    spmd(2, job)


@ranks(4)
def test_torch_distributed_on_two_axes():
    mesh = init_distributed(DistributedConfig(dp_shard=2, tp=2))
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tp"], [Shard(0)]))
    model: nn.Module = fully_shard(layer, mesh=mesh["dp_shard"])
    (group,) = private.groups_of_parameters(model)
    (parameter,) = group.fsdp_params
    ((placement, ranks),) = private.cuts_beside(parameter)
    assert placement == Shard(0) and placement != Replicate()
    assert dist.get_process_group_ranks(ranks) == dist.get_process_group_ranks(mesh["tp"].get_group())


def test_torchao():
    torchao = pytest.importorskip("torchao.float8")
    from meshwright.distributed import products as ao

    linear = torchao.convert_to_float8_training(
        nn.Linear(16, 16, bias=False), config=torchao.Float8LinearConfig(emulate=True)
    )
    x, way = torch.randn(16, 16), ao.products_of(linear, parts=ao.OperandParts(x=True))
    assert torch.equal(way.linear(x, linear.weight, None), linear(x)) and way.parts.x  # one scale for each operand
    assert torch.equal(way.output(x, linear.weight, None), linear(x))
    cast, largest = linear.config.cast_config_input, x.abs().max()
    by_scale = ao.rounded_by(x, ao.scale_for(largest, cast.target_dtype), cast.target_dtype, way.kernels, "INPUT")
    alone, agreed = (way._rounded(x, cast, "INPUT", -1, given) for given in (None, largest))
    assert torch.equal(by_scale._data.float(), alone._data.float()) and ao.role_of(alone) == "input"
    assert torch.equal(agreed._data.float(), alone._data.float())
    before = alone.to_original_precision()
    alone._scale = alone._scale * 2
    assert torch.equal(alone.to_original_precision(), before / 2)


def test_torchaos_optimizers():
    pytest.importorskip("torchao.optim")
    from meshwright.distributed import products as ao

    weight, gradient = torch.ones(4), torch.full((4,), 0.5)
    ours = nn.Parameter(weight.clone())
    ours.grad = gradient.clone()
    torch.optim.AdamW([ours], lr=0.1, weight_decay=0.1).step()
    moments = torch.zeros(4), torch.zeros(4)
    ao.step_of_adam(weight, gradient, torch.tensor(1.0), moments, torch.tensor(0.1), (0.9, 0.999, 0.1, 1e-8))
    torch.testing.assert_close(weight, ours.detach())
    state = ao.kind_of_state("8bit").zeros((256,), signed=True, block_size=256)
    assert state.codes.dtype == torch.uint8 and type(state) is not ao.kind_of_state("4bit")
    table = torch.linspace(-1, 1, 16)
    assert ao.quantize(table.view(1, -1), table).tolist() == [list(range(16))]


def test_kernels_of_messages_can_be_replaced_for_a_while():
    def receive(tensors, group, source, tag):
        tensors[0].fill_(7)
        return private.finished_work(tensors)

    with private.other_groups():
        dist.init_process_group("fake", store=private.silent_store(), rank=0, world_size=2)
        room, version = torch.zeros(3), 0
        with private.other_kernels("c10d", {"recv_": receive}, ["cpu"]):
            work = dist.irecv(room, 1)
            assert work is not None and work.is_completed() and work.get_future().value()[0] is room
        assert room.tolist() == [7, 7, 7] and room._version == version
        dist.recv(torch.zeros(3), 1)
        room.zero_()
        assert dist.irecv(room, 1) is not None and room.tolist() == [0, 0, 0]


def test_the_host_sleeps_where_no_stream_can_be_kept_busy():
    began = time.monotonic()
    private.occupy_stream(torch.device("cpu"), 0.05)
    assert time.monotonic() - began >= 0.05


def store_job() -> bytes:
    odd("fsdp2")  # so that there is a group
    store = dist.PrefixStore("a test", private.default_store())
    if dist.get_rank():
        store.set("said", "by the second")
    agree.everybody_says(0)
    return store.get("said")


def test_ranks_find_the_store_in_which_they_met(spmd):
    assert spmd(2, store_job) == [b"by the second"] * 2
