"""Build the plan's optimizer in the fastest implementation that every parameter of the run supports."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from meshwright.core.devices import CPU, is_accelerator
from meshwright.core.errors import ConfigError, nearest
from meshwright.distributed.optimizer.classes import optimizer_class
from meshwright.distributed.optimizer.parameter_groups import split_by_role
from meshwright.distributed.optimizer.torchao_adamw import TorchaoAdamW
from meshwright.planning.optimizer.kinds import OptimizerKind
from meshwright.planning.optimizer.plan import OptimizerPlan
from meshwright.training.config import OptimizerConfig

Implementation = Literal["fused", "foreach", "plain", "torchao"]

FULL = OptimizerPlan()


class BuiltOptimizer(NamedTuple):
    """An optimizer and how it will run."""

    optimizer: torch.optim.Optimizer
    implementation: Implementation
    note: str
    """One line for the log: the implementation, and the reason where it is not the fastest."""


def make_optimizer(
    groups: Sequence[Mapping[str, Any]],
    *,
    lr: float,
    plan: OptimizerPlan = FULL,
    named_parameters: Iterable[tuple[str, nn.Parameter]] = (),
    seed: int = 0,
    **options: Any,
) -> BuiltOptimizer:
    """Make the plan's optimizer over parameter groups, fused where its class and every trainable parameter allow that.

    A group is a dict with ``params`` (plain tensors or DTensors, of any placement), and optionally arguments of the
    optimizer (``weight_decay``, ...), ``lr_scale`` (a factor on a :class:`LearningRateSchedule`'s rate; default 1.0)
    and ``name`` (for the log). Frozen parameters are left out, and so are groups that hold no others.

    A group that mixes plain tensors with DTensors, or DTensors of several meshes, becomes one group per mesh with equal
    settings, because a fused or foreach kernel takes a whole list and torch refuses a list that mixes plain tensors
    with DTensors. Checkpoints that address optimizer state by parameter name do not see the difference.

    Args:
        groups: parameter groups as above, of this rank; under pipeline parallelism those of its stages.
        lr: learning rate of the first step; a schedule replaces it before every step.
        plan: the optimizer of a model's plan (``plan.optimizer``), low-bit state and stochastic rounding by torchao.
        named_parameters: (global name, parameter) of all parameters; stochastic rounding draws its numbers by name, and
            Muon knows its matrices by name.
        seed: seed of the stochastic rounding.
        options: arguments of the optimizer's class, for groups that set none; by default the values of
            ``OptimizerConfig``.

    Raises:
        MissingExtraError: the plan needs torchao, which is not installed.
        ConfigError: an option that the optimizer does not take, no trainable parameter on this rank, a parameter that
            occurs twice, or a group with an unknown key.
    """
    row = plan.row
    _check_options(row, options)
    options = {**row.takes(OptimizerConfig()), **options}
    kept: list[dict[str, Any]] = []
    seen: set[int] = set()
    frozen = 0
    for index, group in enumerate(groups):
        _check_group(row, index, group)
        params = list(group["params"])
        frozen += sum(not p.requires_grad for p in params)
        trainable = [p for p in params if p.requires_grad]
        _refuse_repeats(index, trainable, seen)
        scale = float(group.get("lr_scale", 1.0))
        for part in _split_by_mesh(trainable):
            kept.append({**group, "params": part, "lr_scale": scale, "lr": lr * scale})
    if not kept:
        raise ConfigError(_nothing_to_train(len(groups), frozen))
    if plan.needs_torchao:
        made = TorchaoAdamW(kept, plan, named_parameters=named_parameters, seed=seed, lr=lr, **options)
        return BuiltOptimizer(made, "torchao", _torchaos(plan))
    if row.by_role:
        kept = split_by_role(kept, named_parameters, plan.matrices)
    kind = optimizer_class(row)
    implementation, note = _choose(row, [p for group in kept for p in group["params"]])
    takes = inspect.signature(kind).parameters
    flags = {kernel: implementation == kernel for kernel in ("fused", "foreach") if kernel in takes}
    return BuiltOptimizer(kind(kept, lr=lr, **options, **flags), implementation, note)


def _check_options(row: OptimizerKind, options: Mapping[str, Any]) -> None:
    known = [argument for argument, _ in row.arguments]
    for key in options:
        if key not in known:
            raise ConfigError(
                f"{row.title} takes no '{key}' here; known are lr, {', '.join(known)}.{nearest(key, known)}"
            )


def _torchaos(plan: OptimizerPlan) -> str:
    parts = [f"moments in {plan.state}"] * (plan.state != "full") + ["stochastic rounding"] * plan.stochastic_rounding
    return f"AdamW by torchao, {', '.join(parts)}; compiled at the first step, once for each shape"


def _nothing_to_train(groups: int, frozen: int) -> str:
    if not frozen:
        return f"nothing to train on this rank: the {groups} parameter group(s) hold no parameters"
    return (
        f"nothing to train on this rank: all {frozen} parameters in {groups} group(s) are frozen (requires_grad is"
        " False). Unfreeze some, or add adapters, before the optimizer is built"
    )


def _check_group(row: OptimizerKind, index: int, group: Mapping[str, Any]) -> None:
    if "lr" in group:
        raise ConfigError(
            f"optimizer group {index} sets lr = {group['lr']}, which the schedule would overwrite; "
            "set lr_scale instead, a factor on the scheduled rate"
        )
    if "params" not in group:
        raise ConfigError(f"optimizer group {index} has no 'params'")
    known = ("params", "lr_scale", "name", *[argument for argument, _ in row.arguments])
    for key in group:
        if key not in known:
            raise ConfigError(
                f"optimizer group {index}: unknown key '{key}'; known are {', '.join(known)}.{nearest(key, known)}"
            )


def _refuse_repeats(index: int, params: Sequence[nn.Parameter], seen: set[int]) -> None:
    # torch only warns of a parameter that occurs twice in one group, and then steps it twice.
    for position, param in enumerate(params):
        if id(param) in seen:
            raise ConfigError(
                f"optimizer group {index}: parameter {position}, of shape {tuple(param.shape)}, occurs in the groups"
                " twice and would be stepped twice. A tied parameter belongs in one group, once"
            )
        seen.add(id(param))


def _split_by_mesh(params: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters so that one kernel call takes each group, in first-seen order; empty for no parameters."""
    by_mesh: dict[object, list[nn.Parameter]] = {}
    for param in params:
        by_mesh.setdefault(getattr(param, "device_mesh", None), []).append(param)  # only a DTensor has one
    return list(by_mesh.values())


def _choose(row: OptimizerKind, params: Sequence[nn.Parameter]) -> tuple[Implementation, str]:
    devices = sorted({p.device.type for p in params})
    odd_dtypes = sorted({str(p.dtype) for p in params if not p.is_floating_point()})
    no_fused = [d for d in devices if d != CPU and not is_accelerator(d)]
    if "fused" not in row.kernels:
        no_fused = [f"{row.title} on sharded parameters"]
    if not no_fused and not odd_dtypes:
        return "fused", f"{row.title}, fused"
    why = f"torch has no fused kernel for {', '.join(no_fused or odd_dtypes)}"
    if "foreach" in row.kernels and all(map(is_accelerator, devices)):
        return "foreach", f"{row.title}, foreach ({why})"
    return "plain", f"{row.title}, one parameter at a time ({why}, nor a foreach one)"
