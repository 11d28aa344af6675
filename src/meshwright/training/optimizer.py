"""Build the plan's optimizer in the fastest implementation, and its learning rate as a pure function of the step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from meshwright.planning.optimizer import OptimizerPlan
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
    known = [argument for argument, _ in row.arguments]
    for key in options:
        if key not in known:
            raise ConfigError(
                f"{row.title} takes no '{key}' here; known are lr, {', '.join(known)}.{nearest(key, known)}"
            )
    options = {**row.takes(OptimizerConfig()), **options}
    groups = [{**group, **({"params": list(group["params"])} if "params" in group else {})} for group in groups]
    kept = list(_parts_of_groups(groups, ("params", "lr_scale", "name", *known), lr))
    if not kept:
        frozen, n = sum(len(group["params"]) for group in groups), len(groups)
        raise ConfigError(
            f"nothing to train on this rank: all {frozen} parameters in {n} group(s) are frozen (requires_grad is"
            " False). Unfreeze some, or add adapters, before the optimizer is built"
            if frozen
            else f"nothing to train on this rank: the {n} parameter group(s) hold no parameters"
        )
    if plan.needs_torchao:
        made = TorchaoAdamW(kept, plan, named_parameters=named_parameters, seed=seed, lr=lr, **options)
        words = [f"moments in {plan.state}"] * (plan.state != "full")
        words += ["stochastic rounding"] * plan.stochastic_rounding
        note = f"AdamW by torchao, {', '.join(words)}; compiled at the first step, once for each shape"
        return BuiltOptimizer(made, "torchao", note)
    if row.by_role:
        kept = split_by_role(kept, named_parameters, plan.matrices)
    params = [p for group in kept for p in group["params"]]
    devices = sorted({p.device.type for p in params})
    no_fused = [d for d in devices if d != CPU and not is_accelerator(d)]
    if "fused" not in row.kernels:
        no_fused = [f"{row.title} on sharded parameters"]
    no_fused = no_fused or sorted({str(p.dtype) for p in params if not p.is_floating_point()})
    why = f"torch has no fused kernel for {', '.join(no_fused)}"
    implementation: Implementation = "fused"
    note = f"{row.title}, fused"
    if no_fused and "foreach" in row.kernels and all(map(is_accelerator, devices)):
        implementation, note = "foreach", f"{row.title}, foreach ({why})"
    elif no_fused:
        implementation, note = "plain", f"{row.title}, one parameter at a time ({why}, nor a foreach one)"
    kind = optimizer_class(row)
    takes = inspect.signature(kind).parameters
    flags = {kernel: implementation == kernel for kernel in ("fused", "foreach") if kernel in takes}
    return BuiltOptimizer(kind(kept, lr=lr, **options, **flags), implementation, note)


def _parts_of_groups(groups: Sequence[Mapping[str, Any]], known: Sequence[str], lr: float) -> Iterator[dict[str, Any]]:
    """Yield the groups' trainable parameters, each part such that one kernel call takes it; refuse wrong groups."""
    seen: set[int] = set()
    for index, group in enumerate(groups):
        if "lr" in group:
            raise ConfigError(
                f"optimizer group {index} sets lr = {group['lr']}, which the schedule would overwrite; "
                "set lr_scale instead, a factor on the scheduled rate"
            )
        if "params" not in group:
            raise ConfigError(f"optimizer group {index} has no 'params'")
        for key in group:
            if key not in known:
                raise ConfigError(
                    f"optimizer group {index}: unknown key '{key}'; known are {', '.join(known)}.{nearest(key, known)}"
                )
        by_mesh: dict[object, list[nn.Parameter]] = {}
        for position, param in enumerate(p for p in group["params"] if p.requires_grad):
            # torch only warns of a parameter that occurs twice in one group, and then steps it twice
            if id(param) in seen:
                raise ConfigError(
                    f"optimizer group {index}: parameter {position}, of shape {tuple(param.shape)}, occurs in the"
                    " groups twice and would be stepped twice. A tied parameter belongs in one group, once"
                )
            seen.add(id(param))
            by_mesh.setdefault(getattr(param, "device_mesh", None), []).append(param)  # only a DTensor has one
        scale = float(group.get("lr_scale", 1.0))
        for part in by_mesh.values():
            yield {**group, "params": part, "lr_scale": scale, "lr": lr * scale}


# --- compute learning rates as pure functions of the step, or of the tokens so far

KINDS = ("cosine", "linear", "wsd", "inverse_sqrt", "constant")


@dataclass(frozen=True)
class LearningRateSchedule:
    """A learning rate that follows from the step alone, counted from 0.

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
        kind, total, warmup = self.kind, self.total_steps, self.warmup_steps
        unit = "tokens" if self.by_tokens else "steps"
        key, of_warmup = "schedule.tokens" if self.by_tokens else "steps", f"schedule.warmup_{unit}"
        if kind not in KINDS:
            raise ConfigError(f"schedule.kind = {kind!r} is none of {', '.join(KINDS)}.{nearest(kind, KINDS)}")
        if not (math.isfinite(self.peak) and self.peak >= 0):
            raise ConfigError(f"peak = {self.peak}: the highest learning rate is a finite number, 0 or more")
        if total < 1:
            raise ConfigError(f"total_{unit} = {total}: a run has 1 {unit[:-1]} or more")
        if not 0 <= self.final_ratio <= 1:
            raise ConfigError(
                f"schedule.final_ratio = {self.final_ratio}: the last rate as a fraction of the peak lies between 0"
                f" and 1"
            )
        if not 0 < self.decay_fraction <= 1:
            raise ConfigError(
                f"schedule.decay_fraction = {self.decay_fraction}: the decaying part of the run is above 0 and at most"
                f" 1"
            )
        if warmup < 0 or warmup >= max(total, 2):
            raise ConfigError(
                f"{of_warmup} = {warmup} in a run of {total} {unit}: the warm-up has 0 {unit} or more and ends before"
                f" the run does. Set {of_warmup} to at most {max(total - 1, 1)}, or raise {key}"
            )
        if self.by_tokens and kind == "inverse_sqrt" and not warmup:
            raise ConfigError(
                "schedule.kind = inverse_sqrt by tokens falls from the peak as the inverse root of tokens, so its first"
                " step would be far down already. Set schedule.warmup_tokens to the tokens of some steps"
            )
        at_peak = max(warmup, 1)  # step 0 is at the peak where there is no warm-up
        if kind == "wsd" and total > 1 and at_peak + self.decay_steps > total:
            raise ConfigError(
                f"schedule.kind = wsd: reaching the peak takes {at_peak} {unit} and the decay {self.decay_steps}"
                f" (schedule.decay_fraction = {self.decay_fraction} of {total}), together more than {key} = {total}."
                f" Lower {of_warmup}, or set schedule.decay_fraction to at most"
                f" {Context(4, ROUND_FLOOR).divide(total - at_peak, total)}"
            )

    @property
    def decay_steps(self) -> int:
        """Steps (or tokens) over which the rate of wsd falls."""
        return max(1, round(self.decay_fraction * self.total_steps))

    def place(self, step: int, tokens: int) -> int:
        """Return what a step's rate depends on.

        Args:
            step: number of the step, from 0.
            tokens: those of all steps up to this one, itself included.
        """
        return max(tokens - 1, 0) if self.by_tokens else step

    def __call__(self, step: int) -> float:
        """Return the learning rate of optimizer step ``step``, or of the token ``step``, counted from 0."""
        peak, last, warmup = self.peak, self.total_steps - 1, self.warmup_steps
        if step < 0:
            raise ConfigError(f"the learning rate of step {step}: steps are counted from 0")
        if step < warmup:
            return peak * ((step + 1) / warmup)
        if self.kind == "inverse_sqrt":
            return peak * math.sqrt(max(warmup, 1) / (min(step, last) + 1))
        progress = 0.0  # of the decay: 0 at the last step of the peak, 1 at the last step of the run
        if self.kind != "constant" and last:
            last_at_peak = last - self.decay_steps if self.kind == "wsd" else max(warmup, 1) - 1
            progress = min(max(step - last_at_peak, 0) / (last - last_at_peak), 1.0)
        above_final = 0.5 * (1.0 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1.0 - progress
        # Both ends are exact in floating point: above_final 1 gives the peak, 0 gives final_ratio * peak.
        return peak * (above_final + self.final_ratio * (1.0 - above_final))

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
        unit, total = "token" if self.by_tokens else "step", self.total_steps
        rise = f"{self.peak:g} from the first {unit}"
        if self.warmup_steps > 1:
            rise = f"up to {self.peak:g} over {self.warmup_steps:,} {unit}s"
        if self.kind == "constant" or total == 1:
            return f"{self.kind}: {rise}, held to the end"
        if self.kind == "inverse_sqrt":
            return f"{self.kind}: {rise}, then as the {unit}'s inverse root, down to {self(total - 1):g}"
        held = f", held until {unit} {total - self.decay_steps:,}" if self.kind == "wsd" else ""
        return f"{self.kind}: {rise}{held}, down to {self.final_ratio * self.peak:g} at {unit} {total:,}"
