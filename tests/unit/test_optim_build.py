"""AdamW over groups: the update is AdamW's own whatever form runs it, DTensors may stand beside tensors, mistakes are
refused.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshwright.core.errors import ConfigError
from meshwright.training.optimizer import make_optimizer

SETTINGS = {"lr": 0.05, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture
def mesh():
    """Two axes over a world of one: enough for torch to see DTensors of two meshes."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_shard", "tp"))
    dist.destroy_process_group()


def parameter(*shape: int, seed: int = 0, **kwargs) -> nn.Parameter:
    return nn.Parameter(
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), **kwargs
    )


def by_hand(weight: torch.Tensor, grads: list[torch.Tensor], *, lr: float, decay: float) -> torch.Tensor:
    """Decoupled weight decay and Adam as in the paper, in fp64."""
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for t, grad in enumerate(grads, start=1):
        weight = weight * (1 - lr * decay)
        first, second = 0.9 * first + 0.1 * grad, 0.95 * second + 0.05 * grad**2
        weight = weight - lr * (first / (1 - 0.9**t)) / ((second / (1 - 0.95**t)).sqrt() + 1e-8)
    return weight


def step_with(optimizer, params, grads) -> None:
    for step_grads in grads:
        for param, grad in zip(params, step_grads, strict=True):
            if param.requires_grad:
                param.grad = (
                    distribute_tensor(grad, param.device_mesh, param.placements)
                    if isinstance(param, DTensor)
                    else grad.clone()
                )
        optimizer.step()


def test_groups_keep_their_decay_and_rate_and_the_update_is_adamws():
    params = [parameter(4, 3, seed=1), parameter(3, seed=2), parameter(5, 2, seed=3)]
    before = [p.detach().clone() for p in params]
    grads = [[torch.randn_like(p, requires_grad=False) for p in params] for _ in range(4)]
    built = make_optimizer(
        [{"params": params[:1]}, {"params": params[1:2], "weight_decay": 0.0}, {"params": params[2:], "lr_scale": 0.1}],
        **SETTINGS,
    )
    step_with(built.optimizer, params, grads)
    for index, (lr, decay) in enumerate([(0.05, 0.1), (0.05, 0.0), (0.005, 0.1)]):
        torch.testing.assert_close(
            params[index].detach(),
            by_hand(before[index], [g[index] for g in grads], lr=lr, decay=decay),
            rtol=1e-12,
            atol=0,
        )


def test_cpu_tensors_run_fused_and_it_is_said():
    built = make_optimizer([{"params": [parameter(2)]}], **SETTINGS)
    assert built.implementation == "fused" and built.note == "AdamW, fused"
    assert built.optimizer.defaults["fused"] is True


@pytest.mark.parametrize(
    ("param", "reason"),
    [
        (nn.Parameter(torch.zeros(2, device="meta")), "meta"),
        (nn.Parameter(torch.zeros(2, dtype=torch.complex64)), "complex64"),
    ],
)
def test_what_cannot_be_fused_says_why(param, reason):
    built = make_optimizer([{"params": [parameter(2), param]}], **SETTINGS)
    assert built.implementation == "plain" and reason in built.note
    assert not built.optimizer.defaults["fused"] and not built.optimizer.defaults["foreach"]


def test_tensors_beside_dtensors_of_several_meshes_step_as_if_all_were_tensors(mesh):
    plain = [parameter(4, 6, seed=1), parameter(3, seed=2), parameter(8, 2, seed=3), parameter(5, seed=4)]
    cuts = [(mesh, [Shard(0), Shard(1)]), None, (mesh["dp_shard"], [Shard(0)]), (mesh, [Replicate(), Replicate()])]
    mixed = [
        nn.Parameter(distribute_tensor(p.detach().clone(), *cut) if cut else p.detach().clone())
        for p, cut in zip(plain, cuts, strict=True)
    ]
    grads = [[torch.randn_like(p, requires_grad=False) for p in plain] for _ in range(3)]
    # what torch says of the group as it was given
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        naive = [nn.Parameter(p.detach().clone()) for p in mixed]
        step_with(torch.optim.AdamW(naive, fused=True), naive, grads)
    reference = make_optimizer([{"params": plain, "lr_scale": 0.5}], **SETTINGS)
    built = make_optimizer([{"params": mixed, "lr_scale": 0.5}], **SETTINGS)
    assert built.implementation == "fused"
    assert [len(group["params"]) for group in built.optimizer.param_groups] == [2, 1, 1]
    assert {group["lr_scale"] for group in built.optimizer.param_groups} == {0.5}
    step_with(reference.optimizer, plain, grads)
    step_with(built.optimizer, mixed, grads)
    for expected, param in zip(plain, mixed, strict=True):
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        torch.testing.assert_close(whole.detach(), expected.detach(), rtol=1e-14, atol=0)


def test_frozen_parameters_are_left_out():
    frozen, trained = parameter(2, requires_grad=False), parameter(3)
    built = make_optimizer([{"params": [frozen]}, {"params": [frozen, trained], "weight_decay": 0.0}], **SETTINGS)
    assert [group["params"] for group in built.optimizer.param_groups] == [[trained]]


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([{"params": iter([parameter(2, requires_grad=False)])}], "all 1 parameters in 1 group.* frozen.*Unfreeze"),
        ([], "0 parameter group.* hold no parameters"),
        ([{"params": [parameter(2)], "lr": 0.1}], "set lr_scale"),
        ([{"params": [parameter(2)], "lr_scal": 0.1}], "Did you mean 'lr_scale'"),
        ([{"weight_decay": 0.1}], "no 'params'"),
        ([{"params": [parameter(2)] * 2}], "stepped twice"),
    ],
)
def test_mistakes_are_refused_with_the_repair(groups, words):
    with pytest.raises(ConfigError, match=words):
        make_optimizer(groups, **SETTINGS)


def test_a_parameter_in_two_groups_is_refused():
    tied = parameter(2)
    with pytest.raises(ConfigError, match="group 1: parameter 0"):
        make_optimizer([{"params": [tied]}, {"params": [tied]}], **SETTINGS)
