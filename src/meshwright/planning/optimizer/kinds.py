"""List the optimizers that ``train`` builds and ``verify`` steps with: one row each.

To add one of torch's optimizers, add its row here and its test; classes of ours are in
``distributed/optimizer/muon``. The plan's rules, the memory estimate, parameter groups, low-bit states, ``train``
and ``verify`` read the row; checkpoints save whatever tensors an optimizer keeps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.core.errors import ConfigError, nearest


@dataclass(frozen=True)
class StateTensor:
    """A tensor that an optimizer keeps for each parameter.

    Attributes:
        name: key in the parameter's state.
        signed: whether values may be negative.
        kept_for: parameters that have this tensor; "matrices" have two dims or more, "vectors" fewer; "hidden" are the
            hidden matrices (``introspection.roles.hidden``), "others" are not.
        reduced: dim, counted from the end, in which the tensor has size 1 if the parameter is longer; 0: none. Such a
            tensor is whole on every rank.
    """

    name: str
    signed: bool = False
    kept_for: Literal["all", "matrices", "vectors", "hidden", "others"] = "all"
    reduced: int = 0

    def elements(self, shape: tuple[int, ...], *, hidden: bool = False, whole: tuple[int, ...] | None = None) -> int:
        """Count elements for a parameter of ``shape`` on a rank, whose whole shape is ``whole``."""
        whole = shape if whole is None else whole
        if self.kept_for in ("hidden", "others") and hidden != (self.kept_for == "hidden"):
            return 0
        if self.kept_for in ("matrices", "vectors") and (len(whole) > 1) != (self.kept_for == "matrices"):
            return 0
        return math.prod(whole) // max(whole[self.reduced], 1) if self.reduced else math.prod(shape)


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer of ``torch.optim``, or of ours where torch has none.

    Attributes:
        title: its class.
        state: tensors that it keeps for each parameter, step counts aside.
        arguments: (argument of the class, keys of the section ``optimizer`` that give its value; several keys make a
            tuple), without the learning rate. A key that the optimizer's row does not name is refused if it is set.
        verified_with: arguments that ``verify`` steps with: a step far above rounding.
        decayed_dims: least number of dims of a parameter whose weight decays; norms and biases have one.
        low_bit: whether torchao has its step with states of 8 and 4 bits, and with stochastic rounding.
        averages: whether the model is evaluated and saved at an average of the steps, which needs a constant rate.
        kernels: torch's kernels for many parameters at once that the class supports for DTensors too, fastest first.
    """

    title: str
    state: tuple[StateTensor, ...]
    arguments: tuple[tuple[str, tuple[str, ...]], ...]
    verified_with: tuple[tuple[str, Any], ...]
    decayed_dims: int = 2
    low_bit: bool = False
    averages: bool = False
    kernels: tuple[Literal["fused", "foreach"], ...] = ("fused", "foreach")

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the section ``optimizer`` that the class takes."""
        return tuple(dict.fromkeys(key for _, keys in self.arguments for key in keys))

    @property
    def by_role(self) -> bool:
        """Whether hidden matrices are stepped otherwise than other parameters, and whole: the plan counts messages."""
        return any(tensor.kept_for == "hidden" for tensor in self.state)

    @property
    def sums_parts(self) -> bool:
        """Whether ranks that have parts of a matrix sum squares of its rows and columns: the plan counts messages."""
        return any(tensor.reduced for tensor in self.state)

    def state_elements(
        self, shape: tuple[int, ...], *, hidden: bool = False, whole: tuple[int, ...] | None = None
    ) -> int:
        """Count elements of the state of a parameter of ``shape`` on a rank, whose whole shape is ``whole``."""
        return sum(tensor.elements(shape, hidden=hidden, whole=whole) for tensor in self.state)

    def takes(self, settings: Any) -> dict[str, Any]:
        """Return the class's arguments, read from an object that has the section's keys as attributes."""
        read = {argument: [getattr(settings, key) for key in keys] for argument, keys in self.arguments}
        return {argument: tuple(values) if len(values) > 1 else values[0] for argument, values in read.items()}


KINDS = {
    "adamw": OptimizerKind(  # arXiv 1711.05101
        "AdamW",
        state=(StateTensor("exp_avg", signed=True), StateTensor("exp_avg_sq")),
        arguments=(("betas", ("beta1", "beta2")), ("eps", ("eps",)), ("weight_decay", ("weight_decay",))),
        # eps: a key's bias has a gradient of rounding alone, which a smaller eps would turn into a whole step
        verified_with=(("lr", 1e-2), ("betas", (0.9, 0.95)), ("weight_decay", 0.1), ("eps", 1e-6)),
        low_bit=True,
    ),
    "adam": OptimizerKind(  # arXiv 1412.6980; weight decay is added to gradients
        "Adam",
        state=(StateTensor("exp_avg", signed=True), StateTensor("exp_avg_sq")),
        arguments=(("betas", ("beta1", "beta2")), ("eps", ("eps",)), ("weight_decay", ("weight_decay",))),
        verified_with=(("lr", 1e-2), ("betas", (0.9, 0.95)), ("weight_decay", 0.1), ("eps", 1e-6)),
    ),
    "lion": OptimizerKind(  # arXiv 2302.06675
        "Lion",
        state=(StateTensor("exp_avg", signed=True),),
        arguments=(("betas", ("beta1", "beta2")), ("weight_decay", ("weight_decay",))),
        verified_with=(("lr", 1e-2), ("betas", (0.9, 0.99)), ("weight_decay", 0.1)),
        kernels=("foreach",),
    ),
    "schedule_free_adamw": OptimizerKind(  # arXiv 2405.15682
        "ScheduleFreeAdamW",
        state=(StateTensor("z", signed=True), StateTensor("exp_avg_sq")),
        arguments=(("betas", ("beta1", "beta2")), ("eps", ("eps",)), ("weight_decay", ("weight_decay",))),
        verified_with=(("lr", 1e-2), ("betas", (0.9, 0.95)), ("weight_decay", 0.1), ("eps", 1e-6)),
        kernels=("foreach",),
        averages=True,
    ),
    "muon": OptimizerKind(  # hidden matrices as in arXiv 2502.16982, the others by AdamW
        "Muon",
        state=(
            StateTensor("momentum_buffer", signed=True, kept_for="hidden"),
            StateTensor("exp_avg", signed=True, kept_for="others"),
            StateTensor("exp_avg_sq", kept_for="others"),
        ),
        arguments=(
            ("momentum", ("beta1",)),
            ("betas", ("beta1", "beta2")),
            ("eps", ("eps",)),
            ("weight_decay", ("weight_decay",)),
        ),
        verified_with=(("lr", 1e-2), ("betas", (0.9, 0.95)), ("weight_decay", 0.1), ("eps", 1e-6)),
        kernels=("foreach",),
    ),
    "sgd": OptimizerKind(
        "SGD",
        state=(StateTensor("momentum_buffer", signed=True),),
        arguments=(("momentum", ("beta1",)), ("weight_decay", ("weight_decay",))),
        verified_with=(("lr", 0.1), ("momentum", 0.9)),
        kernels=("foreach",),  # torch 2.13 has no sharding strategy for the fused one
    ),
    "adafactor": OptimizerKind(  # arXiv 1804.04235
        "Adafactor",
        state=(
            StateTensor("row_var", kept_for="matrices", reduced=-1),
            StateTensor("col_var", kept_for="matrices", reduced=-2),
            StateTensor("variance", kept_for="vectors"),
        ),
        arguments=(("weight_decay", ("weight_decay",)),),
        verified_with=(("lr", 1e-2), ("weight_decay", 0.1)),
        kernels=(),
    ),
}
"""The optimizers by their words: ``optimizer.kind`` of a run, ``Techniques.optimizer`` of a call."""


def kind_of(word: str) -> OptimizerKind:
    """Return the row of a word. Raises ConfigError for an unknown word."""
    if word not in KINDS:
        raise ConfigError(f"optimizer {word!r}: legal are {', '.join(KINDS)}.{nearest(str(word), tuple(KINDS))}")
    return KINDS[word]
