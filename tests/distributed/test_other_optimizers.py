"""Optimizers that nobody planned for: updated as in one process, or refused before they change a weight."""

from __future__ import annotations

import re

import pytest
import torch
from support.odd import LAYOUTS, odd, own_rows
from support.ranks import ranks, refusal

from meshwright import Layout, UnsupportedError, parallelize
from meshwright.distributed import DistributedConfig, apply_fsdp2, init_distributed
from meshwright.distributed.weights.shards import whole_on_first
from meshwright.models.decoder_config import DecoderConfig


class Signed(torch.optim.Optimizer):
    """Steps by the sign of the gradient."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


class ByOwnShare(Signed):
    """Divides each gradient by the norm of the share that this rank has."""

    @torch.no_grad()
    def step(self):  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                share = getattr(parameter.grad, "_local_tensor", parameter.grad)
                parameter.sub_(parameter.grad / share.norm(), alpha=group["lr"])


class AsItsGroupSays(torch.optim.Optimizer):
    """Divides in groups with a flag, and wants no other keys, as published classes of Muon do."""

    def __init__(self, groups):
        assert all({*group} == {"params", "lr", "divides"} for group in groups)
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self):  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                share = getattr(parameter.grad, "_local_tensor", parameter.grad)
                parameter.sub_(parameter.grad / (share.norm() if group["divides"] else 1), alpha=group["lr"])


class ByTheWhole(Signed):
    """Divides each gradient by its norm, as LARS does."""

    @torch.no_grad()
    def step(self):  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                norm = parameter.grad.norm()
                parameter.sub_(
                    parameter.grad / getattr(norm, "full_tensor", lambda norm=norm: norm)(), alpha=group["lr"]
                )


class ByAll(Signed):
    """Divides each gradient by the norm of all."""

    @torch.no_grad()
    def step(self):  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = sum(parameter.grad.square().sum() for parameter in parameters) ** 0.5
        for parameter in parameters:
            parameter.sub_(parameter.grad / norm, alpha=self.defaults["lr"])


class ByAnEstimate(Signed):
    """Takes larger steps as all parameters leave their first values, as Prodigy does."""

    @torch.no_grad()
    def step(self):  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        far = sum(float((p.grad * (self.state[p].setdefault("first", p.clone()) - p)).sum()) for p in parameters)
        self.rate = max(getattr(self, "rate", self.defaults["lr"]), far)
        for parameter in parameters:
            parameter.sub_(parameter.grad, alpha=self.rate)


class TakesMore(Signed):
    """Its class wants what its settings do not say, so it cannot be tried out."""

    def __init__(self, params, lr, more):
        super().__init__(params, lr)


def made(name: str, parameters: list) -> torch.optim.Optimizer:
    if name == "Muon":
        return torch.optim.Muon([parameter for parameter in parameters if parameter.dim() == 2], lr=0.01)
    if name == "TakesMore":
        return TakesMore(parameters, 0.01, more=True)
    if name == "AsItsGroupSays":
        parts = {flag: [p for p in parameters if (p.dim() == 2) == flag] for flag in (False, True)}
        return AsItsGroupSays([{"params": own, "lr": 0.01, "divides": flag} for flag, own in parts.items()])
    return {"Adafactor": torch.optim.Adafactor, "Signed": Signed, "ByOwnShare": ByOwnShare, "ByTheWhole": ByTheWhole}[
        name
    ](parameters, lr=0.01)


def stepped(name: str, layout: str) -> str | dict[str, torch.Tensor]:
    model = odd(layout)
    optimizer = made(name, list(model.parameters()))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for step in range(2):
        model.forward_backward(own_rows(model, step))
        try:
            model.optimizer_step(optimizer)
        except UnsupportedError as error:
            assert all(torch.equal(_local(p), _local(before[n])) for n, p in model.named_parameters()), (
                "a weight changed"
            )
            return str(error)
    return whole_on_first({name: parameter.detach() for name, parameter in model.named_parameters()})


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


REFUSED = {
    "Adafactor": "its step fails: RuntimeError: aten.pow_",
    "ByOwnShare": "its update is not that of the whole parameter",
    "AsItsGroupSays": "its update is not that of the whole parameter",
}


@pytest.mark.all
@pytest.mark.parametrize(
    "name", ["Adafactor", "AsItsGroupSays", "ByOwnShare", "ByTheWhole", "Muon", "Signed", "TakesMore"]
)
def test_an_optimizer_updates_as_in_one_process_or_is_refused(spmd, name):
    wanted = spmd(1, stepped, name, "one")[0]
    for layout in ("ddp2", "fsdp2"):
        found = spmd(LAYOUTS[layout][0], stepped, name, layout)[0]
        if layout == "fsdp2" and name in REFUSED:
            assert isinstance(found, str) and found.startswith(
                f"{name} was tried on a small parameter that lies as S(0) over"
            )
            assert REFUSED[name] in found
            continue
        bound = 0.02 if name == "Muon" else 1e-9  # it iterates in bfloat16
        errors = {n: ((found[n] - w).norm() / w.norm().clamp(min=1e-9)).item() for n, w in wanted.items()}  # type: ignore[union-attr,index]
        assert max(errors.values()) <= bound, sorted((e, n) for n, e in errors.items())[-3:]


NEVER = {
    "LBFGS": "computes the loss again inside its step.*one process",
    "SparseAdam": "takes sparse gradients alone.*Adam",
}


@pytest.mark.first("SparseAdam-ddp2")
@pytest.mark.parametrize("layout", ["ddp2", "fsdp2"])
@pytest.mark.parametrize("name", NEVER)
@ranks(lambda layout: LAYOUTS[layout][0])
def test_what_no_trial_can_judge_is_refused_by_name_on_every_layout(name, layout):
    model = odd(layout)
    optimizer = getattr(torch.optim, name)(list(model.parameters()), lr=0.01)
    model.forward_backward(own_rows(model, 0))
    words = refusal(lambda: model.optimizer_step(optimizer), UnsupportedError)
    assert re.match(rf"optimizer: {name} {NEVER[name]}", words)


@pytest.mark.follows("layout.pp = …")
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, ByAll, ByAnEstimate, Signed])
@ranks(2)
def test_an_optimizer_of_all_parameters_together_is_refused_in_stages(kind):
    model = parallelize(
        DecoderConfig(64, 16, 2, n_heads=2, n_kv_heads=2, hidden_dim=24, max_seq_len=8), Layout(pp=2, dp_shard=1)
    )
    tokens = torch.ones(2, 8, dtype=torch.int64)
    optimizer = kind(list(model.parameters()), lr=0.01)

    def loss() -> float:
        return float(model.forward_backward({"tokens": tokens, "labels": tokens}).loss)

    def take() -> None:
        optimizer.step(*([loss] if kind is torch.optim.LBFGS else []))

    loss()
    if kind is Signed:
        return take()
    words = refusal(take, UnsupportedError)
    begin = (
        "LBFGS computes" if kind is torch.optim.LBFGS else f"{kind.__name__} updates a parameter by the gradients of"
    )
    assert begin in words


def _in_a_loop_of_ones_own(name: str) -> str:
    """A module that a door of ours sharded, stepped by the optimizer itself."""
    mesh = init_distributed(DistributedConfig(dp_shard=2))
    torch.manual_seed(0)
    model = apply_fsdp2(Net(), mesh)
    parameters = list(model.parameters())
    kinds = {"LBFGS": torch.optim.LBFGS, "Rprop": torch.optim.Rprop, "AdamW": torch.optim.AdamW}
    optimizer = kinds[name](parameters, lr=0.01) if name in kinds else made(name, parameters)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(torch.ones(4, 8)).square().sum()
        value.backward()
        return value

    loss()
    before = [_local(parameter).clone() for parameter in parameters]
    try:
        optimizer.step(*([loss] if name == "LBFGS" else []))
    except UnsupportedError as error:
        assert all(map(torch.equal, map(_local, parameters), before)), "a weight changed"
        return str(error)
    return "stepped"


class Net(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(8, 8), torch.nn.Linear(8, 6))


OF_LOOPS = {
    "LBFGS": "optimizer: LBFGS computes the loss again",
    "Adafactor": "Adafactor was tried on a small parameter that lies as S(0)",
    "Rprop": "Rprop was tried on a small parameter that lies as S(0)",
    "ByOwnShare": "ByOwnShare was tried on a small parameter that lies as S(0)",
    "ByTheWhole": "stepped",
    "AdamW": "stepped",
}


@pytest.mark.first("Rprop")
@pytest.mark.parametrize("name", OF_LOOPS)
def test_a_loop_of_ones_own_is_told_before_a_weight_changes(spmd, name):
    for words in spmd(2, _in_a_loop_of_ones_own, name):
        assert words.startswith(OF_LOOPS[name])
