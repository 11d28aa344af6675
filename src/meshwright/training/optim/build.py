"""Build the plan's optimizer in the fastest implementation, and its learning rate as a pure function of the step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Context
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from meshwright.core.devices import CPU, is_accelerator
from meshwright.core.errors import ConfigError, nearest
from meshwright.distributed.optimizer.low_bit import TorchaoAdamW
from meshwright.distributed.optimizer.muon import optimizer_class
from meshwright.distributed.optimizer.parameter_groups import split_by_role
from meshwright.planning.optimizer import OptimizerKind, OptimizerPlan
from meshwright.training.config import OptimizerConfig

if TYPE_CHECKING:
    from torch.optim import Optimizer


# --- build the plan's optimizer in the fastest implementation that every parameter of the run supports

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


# --- compute learning rates as pure functions of the step, or of the tokens so far

KINDS = ("cosine", "linear", "wsd", "inverse_sqrt", "constant")


def learning_rate(
    step: int,
    *,
    peak: float,
    total_steps: int,
    kind: str = "cosine",
    warmup_steps: int = 0,
    final_ratio: float = 0.1,
    decay_fraction: float = 0.1,
    by_tokens: bool = False,
) -> float:
    """Return the learning rate of optimizer step ``step``, counted from 0.

    By tokens, the same lengths are given in tokens, and a step has the rate of its last token, counted from 0: so with
    equally many tokens in each step, rates are those by steps.

    With W = warmup_steps and T = total_steps:

    * warm-up: steps 0 .. W-1 have ``peak * (step + 1) / W``, so step 0 already learns and step W-1 is at the peak.
      Without warm-up, step 0 is at the peak: W = 0 and W = 1 are the same schedule;
    * cosine: a half cosine from the peak to ``final_ratio * peak`` (Loshchilov & Hutter 2017, SGDR, without restarts);
    * linear: a straight line between the same two points;
    * wsd: warm-up, stable, decay (Hu et al. 2024, MiniCPM): the peak is held, then a straight line over the last
      ``max(1, round(decay_fraction * T))`` steps;
    * inverse_sqrt: step s, counted from 1, has ``peak * sqrt(max(W, 1) / s)`` (Vaswani et al. 2017), whatever the
      length of the run;
    * constant: the peak to the end. This one and inverse_sqrt ignore ``final_ratio``; ``decay_fraction`` applies to wsd
      only.

    For cosine, linear and wsd the last step T-1 has exactly ``final_ratio * peak``; a run of one step has the peak.
    Steps from T on, which occur only in an evaluation or a prolonged run, have the rate of step T-1.

    Raises:
        ConfigError: settings outside their range, or a warm-up (and wsd decay) that does not fit in the run.
    """
    _check(peak, total_steps, kind, warmup_steps, final_ratio, decay_fraction, by_tokens=by_tokens)
    if step < 0:
        raise ConfigError(f"learning_rate of step {step}: steps are counted from 0")
    if step < warmup_steps:
        return peak * ((step + 1) / warmup_steps)
    if kind == "inverse_sqrt":
        return peak * math.sqrt(max(warmup_steps, 1) / (min(step, total_steps - 1) + 1))
    progress = _decay_progress(step, total_steps, kind, warmup_steps, decay_fraction)
    above_final = 0.5 * (1.0 + math.cos(math.pi * progress)) if kind == "cosine" else 1.0 - progress
    # Written so that both ends are exact in floating point: above_final 1 gives the peak, 0 gives final_ratio * peak.
    return peak * (above_final + final_ratio * (1.0 - above_final))


@dataclass(frozen=True)
class LearningRateSchedule:
    """A schedule with its settings, whose value at every step is that of :func:`learning_rate`.

    Raises:
        ConfigError: on construction, where :func:`learning_rate` would raise at some step.
    """

    peak: float
    """Highest learning rate."""
    total_steps: int
    """Optimizer steps of the whole run, those before a resume included; or its tokens."""
    kind: str = "cosine"
    """cosine, linear, wsd, inverse_sqrt or constant."""
    warmup_steps: int = 0
    """Steps (or tokens) of linear warm-up; the last of them is at the peak."""
    final_ratio: float = 0.1
    """Learning rate of the last step, as a fraction of the peak."""
    decay_fraction: float = 0.1
    """wsd: the fraction of all steps, at the end, over which the rate falls."""
    by_tokens: bool = False
    """Whether lengths are in tokens that have a loss, of all ranks, instead of steps."""

    def __post_init__(self) -> None:
        self(0)  # raises what is wrong

    def place(self, step: int, tokens: int) -> int:
        """Return what a step's rate depends on.

        Args:
            step: number of the step, from 0.
            tokens: those of all steps up to this one, itself included.
        """
        return max(tokens - 1, 0) if self.by_tokens else step

    def __call__(self, step: int) -> float:
        """Return the learning rate of optimizer step ``step``, or of the token ``step``, counted from 0."""
        return learning_rate(
            step,
            peak=self.peak,
            total_steps=self.total_steps,
            kind=self.kind,
            warmup_steps=self.warmup_steps,
            final_ratio=self.final_ratio,
            decay_fraction=self.decay_fraction,
            by_tokens=self.by_tokens,
        )

    def apply(self, optimizer: Optimizer, step: int) -> float:
        """Set every parameter group's rate for ``step`` (see ``place``), before it is taken; return the unscaled rate.

        A group's ``lr`` becomes the rate times the group's ``lr_scale`` (1.0 where it has none). A tensor ``lr``, as
        compiled optimizers want, is written in place.
        """
        rate = self(step)
        for group in optimizer.param_groups:
            scaled = rate * group.get("lr_scale", 1.0)
            if hasattr(group["lr"], "fill_"):
                group["lr"].fill_(scaled)
            else:
                group["lr"] = scaled
        return rate

    def describe(self) -> str:
        """Describe it in a line, such as ``"cosine: up to 0.0003 over 100 steps, down to 3e-05 at step 2,000"``."""
        unit = "token" if self.by_tokens else "step"
        rise = (
            f"up to {self.peak:g} over {self.warmup_steps:,} {unit}s"
            if self.warmup_steps > 1
            else f"{self.peak:g} from the first {unit}"
        )
        if self.kind == "constant" or self.total_steps == 1:
            return f"{self.kind}: {rise}, held to the end"
        if self.kind == "inverse_sqrt":
            return f"{self.kind}: {rise}, then as the {unit}'s inverse root, down to {self(self.total_steps - 1):g}"
        held = ""
        if self.kind == "wsd":
            held = f", held until {unit} {self.total_steps - _decay_steps(self.total_steps, self.decay_fraction):,}"
        return f"{self.kind}: {rise}{held}, down to {self.final_ratio * self.peak:g} at {unit} {self.total_steps:,}"


def _decay_steps(total_steps: int, decay_fraction: float) -> int:
    return max(1, round(decay_fraction * total_steps))


def _decay_progress(step: int, total_steps: int, kind: str, warmup_steps: int, decay_fraction: float) -> float:
    """Return the completed fraction of the decay: 0 at the last step of the peak, 1 at the last step of the run."""
    if kind == "constant" or total_steps == 1:
        return 0.0
    last = total_steps - 1
    last_at_peak = last - _decay_steps(total_steps, decay_fraction) if kind == "wsd" else max(warmup_steps, 1) - 1
    return min(max(step - last_at_peak, 0) / (last - last_at_peak), 1.0)


def _check(
    peak: float,
    total_steps: int,
    kind: str,
    warmup_steps: int,
    final_ratio: float,
    decay_fraction: float,
    *,
    by_tokens: bool,
) -> None:
    unit = "tokens" if by_tokens else "steps"
    total, warmup = ("schedule.tokens", "schedule.warmup_tokens") if by_tokens else ("steps", "schedule.warmup_steps")
    if kind not in KINDS:
        raise ConfigError(f"schedule.kind = {kind!r} is none of {', '.join(KINDS)}.{nearest(kind, KINDS)}")
    if not (math.isfinite(peak) and peak >= 0):
        raise ConfigError(f"peak = {peak}: the highest learning rate is a finite number, 0 or more")
    if total_steps < 1:
        raise ConfigError(f"total_{unit} = {total_steps}: a run has 1 {unit[:-1]} or more")
    if not 0 <= final_ratio <= 1:
        raise ConfigError(
            f"schedule.final_ratio = {final_ratio}: the last rate as a fraction of the peak lies between 0 and 1"
        )
    if not 0 < decay_fraction <= 1:
        raise ConfigError(
            f"schedule.decay_fraction = {decay_fraction}: the decaying part of the run is above 0 and at most 1"
        )
    if warmup_steps < 0 or warmup_steps >= max(total_steps, 2):
        raise ConfigError(
            f"{warmup} = {warmup_steps} in a run of {total_steps} {unit}: the warm-up has 0 {unit} or more"
            f" and ends before"
            f" the run does. Set {warmup} to at most {max(total_steps - 1, 1)}, or raise {total}"
        )
    if by_tokens and kind == "inverse_sqrt" and not warmup_steps:
        raise ConfigError(
            "schedule.kind = inverse_sqrt by tokens falls from the peak as the inverse root of tokens, so its first"
            " step would be far down already. Set schedule.warmup_tokens to the tokens of some steps"
        )
    at_peak = max(warmup_steps, 1)  # step 0 is at the peak where there is no warm-up
    if kind == "wsd" and total_steps > 1 and at_peak + _decay_steps(total_steps, decay_fraction) > total_steps:
        raise ConfigError(
            f"schedule.kind = wsd: reaching the peak takes {at_peak} {unit} and the decay"
            f" {_decay_steps(total_steps, decay_fraction)} (schedule.decay_fraction = {decay_fraction} of"
            f" {total_steps}), together more than {total} = {total_steps}. Lower {warmup}, or set"
            f" schedule.decay_fraction to at most {Context(4, ROUND_FLOOR).divide(total_steps - at_peak, total_steps)}"
        )
