"""Define the parts of a model that one process runs, and the results of an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.core.dtypes import torch_dtype
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.introspection.facts import ModelFacts
from meshwright.planning.pipeline.schedule import Action
from meshwright.planning.plan import Plan

Batch = Mapping[str, Tensor]
Inputs = Callable[[Batch], dict[str, Any]]
"""Map a batch to the arguments of the model's forward."""


@dataclass
class ModelPart:
    """A part of a model, as one process runs it.

    Attributes:
        module: the module to call: the model with this stage's parameters alone, or a wrapper of it.
        plan: this part's share of the model's plan.
        facts: facts about the part before the plan was applied.
        stage: number of the stage.
    """

    module: nn.Module
    plan: Plan
    facts: ModelFacts
    stage: int = 0

    @property
    def model(self) -> nn.Module:
        """The module without a wrapper."""
        return self.module.module if isinstance(self.module, DistributedDataParallel) else self.module


class LaidOut(nn.Module):
    """A module that refuses what would change it behind its layout: device and dtypes, modules and tensors."""

    plan: Plan

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the model if it is there already, and of that dtype; else raise ConfigError."""
        for wanted in (*args, kwargs.get("device"), kwargs.get("dtype")):
            is_so = wanted is None or isinstance(wanted, bool)
            if isinstance(wanted, torch.dtype):
                is_so = wanted == torch_dtype(self.plan.precision.master)
            elif isinstance(wanted, (str, torch.device)):
                is_so = torch.device(wanted).type == self.plan.device
            if not is_so:
                self._apply(None)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> NoReturn:
        raise ConfigError(
            f"the model is laid out: its weights lie on {self.plan.device} in {self.plan.precision.master}, as shards"
            f" that torch's groups and buckets know, so .to, .half and the like can neither move nor cast it. Choose"
            f" the device by the mesh, and dtypes by parallelize(..., techniques={{'precision': {{'master':"
            f" 'bfloat16'}}}})"
        )

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ConfigError: blocks are compiled by the plan."""
        raise ConfigError("the model is laid out: have it compiled by parallelize(..., techniques={'compile': True})")

    def add_module(self, name: str, *unused: Any, **options: Any) -> NoReturn:
        """Raise ConfigError: no forward would read it, and no state dict would have it."""
        raise ConfigError(
            f"'{name}' cannot be added or replaced here: the model is laid out, and neither its forward nor its state"
            f" would have the new one. Change the model before parallelize; whole tensors give its parameters other"
            f" values by model.load_state_dict({{name: tensor}}, strict=False)"
        )

    register_parameter = register_buffer = add_module  # type: ignore[assignment]

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise UnsupportedError: such a hook would see one microbatch of one rank."""
        raise UnsupportedError(
            "a backward hook of the whole model would see one rank's gradient of one microbatch: register it on a"
            " module (get_submodule), or read the gradients behind forward_backward"
        )

    register_full_backward_pre_hook = register_full_backward_hook
    register_backward_hook = register_full_backward_hook


class Runner(Protocol):
    """A way in which the parts of a process compute together."""

    def forward_backward(self, pieces: Sequence[Batch], weight: float, scale: float = 1.0) -> Tensor:
        """Return this process's share of the sum of all losses, divided by ``weight``: 0-dim float64.

        Gradients accumulate in ``.grad``, ``scale`` times as large, and are whole over all axes at the end.
        """
        ...

    def evaluate(self, pieces: Sequence[Batch]) -> Tensor:
        """Return this process's share of the sum of all losses, without gradients: 0-dim float64."""
        ...

    def logits(self, batch: Batch) -> Tensor:
        """Return (rows, seq, vocabulary), without gradients, on every rank that has these rows."""
        ...

    def row_log_probs(self, batch: Batch) -> Tensor:
        """Return (rows,) sums of the labels' log-probabilities, without gradients, on every rank with these rows."""
        ...

    def action_times(self) -> list[tuple[Action, float, float]]:
        """List a pipeline rank's actions in the last step, with begin and end in seconds since the epoch."""
        ...

    def copy_shared(self) -> None:
        """Copy each shared parameter's values from the first part to the others that hold it."""
        ...


@dataclass(frozen=True)
class StepLoss:
    """The (weighted) mean loss of all ranks' real ``tokens``, in nats, 0-dim float64, equal on all ranks.

    ``tokens`` is the number that it is a mean over: tokens, other labels or rows. ``parts``: each loss's share of it,
    where several were declared. ``weight``: what the sum of losses was divided by: the number of real tokens, the sum
    of their weights, or the number of pairs; 1 with declared losses, each of which has its own count. ``figures``: of
    pairs of answers, means over them by name (``loss.preference.FIGURES``).
    """

    loss: Tensor
    tokens: int
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    weight: float = 1.0
    figures: Mapping[str, Tensor] = field(default_factory=dict)

    def __float__(self) -> float:
        return float(self.loss)


@dataclass(frozen=True)
class StepResult:
    """The global gradient 2-norm before clipping; ``skipped``: weights unchanged.

    A step is skipped for a loss or gradient that is not finite, or by a guard's verdict.
    """

    grad_norm: float
    skipped: bool


class OpenedStep(NamedTuple):
    """This rank's microbatches of a step, and counts over all ranks.

    Attributes:
        tokens: tokens that have a loss.
        weight: sum of the weights of these tokens' losses.
        routed: tokens that are no padding.
    """

    pieces: list[Batch]
    tokens: int
    weight: float
    routed: int
