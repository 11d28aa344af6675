"""List the optimizers that ``train`` builds and ``verify`` steps with, one row each; decide their state, and check it.

To add one of torch's optimizers, add its row here and its test; classes of ours are in
``distributed/optimizer/muon``. The plan's rules, the memory estimate, parameter groups, low-bit states, ``train``
and ``verify`` read the row; checkpoints save whatever tensors an optimizer keeps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from meshwright.core.dtypes import dtype_bytes
from meshwright.core.errors import ConfigError, UnsupportedError, nearest
from meshwright.planning.techniques import Techniques

if TYPE_CHECKING:  # a config's checks read the rows without torch
    from meshwright.introspection.facts import ModelFacts
    from meshwright.planning.values import Case, Found


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


# --- decide the number of bits of each parameter's optimizer state, and where it rests


StateWord = Literal["full", "8bit", "4bit"]

BLOCKS = {"8bit": 256, "4bit": 128}
"""Number of elements that share a scale."""
LEAST = 4096
"""Number of elements of a parameter on a rank below which torchao keeps its state in high precision."""
ROOM = 1 << 26
"""Bytes on the device at a time of state in host memory; a single parameter may have more."""
SCALE_BYTES = 4


@dataclass(frozen=True)
class OptimizerPlan:
    """The optimizer and its state: bits, rounding of new weights, and memory.

    Attributes:
        state: "full": the moments in the master dtype; "8bit", "4bit": torchao's codes with a scale for each block of a
            rank's elements.
        stochastic_rounding: whether new bfloat16 weights are rounded up or down at random, so that on average nothing
            is lost.
        in_host_memory: whether the state rests in host memory, and comes to the device by portions for the step.
        kind: word of its row in ``kinds``: the optimizer that ``train`` builds and whose memory is estimated.
        matrices: names of the parameters that it steps as whole matrices, if it does so by their role.
    """

    state: StateWord = "full"
    stochastic_rounding: bool = False
    in_host_memory: bool = False
    kind: str = "adamw"
    matrices: tuple[str, ...] = ()

    @property
    def row(self) -> OptimizerKind:
        """The optimizer's row."""
        return kind_of(self.kind)

    @property
    def needs_torchao(self) -> bool:
        """Whether torchao computes the step."""
        return self.state != "full" or self.stochastic_rounding

    @property
    def request(self) -> str:
        """The setting that requires torchao, as the user writes it."""
        return (
            f"techniques.optimizer_state = {self.state}"
            if self.state != "full"
            else "techniques.stochastic_rounding = true"
        )

    def rounds(self, elements: int) -> bool:
        """Decide whether the state of a parameter with ``elements`` elements on a rank is low-bit."""
        return self.state != "full" and elements >= LEAST and elements % BLOCKS[self.state] == 0

    def bytes_of_rounded(self, elements: int, tensors: int) -> int:
        """Count bytes of all states: codes, scales, and each tensor's code table."""
        bits = int(self.state.removesuffix("bit"))
        codes = elements * bits // 8
        return len(self.row.state) * (
            codes + SCALE_BYTES * (elements // BLOCKS[self.state]) + SCALE_BYTES * 2**bits * tensors
        )


def optimizer_plan(facts: ModelFacts, requested: Techniques) -> OptimizerPlan:
    """Return the plan of the requested optimizer; ``facts`` tell what is trained."""
    by_role = kind_of(requested.optimizer).by_role
    return OptimizerPlan(
        requested.optimizer_state,
        requested.stochastic_rounding,
        requested.cpu_offload == "optimizer",
        requested.optimizer,
        tuple(p.name for p in facts.parameters if by_role and p.hidden and p.trainable),
    )


# --- check the optimizer's state


ROUNDED_FROM = ("float32", "bfloat16")
"""Dtypes of parameters for which torchao's low-bit state is allowed: torchao computes the step in float32."""


def optimizer_fits(case: Case) -> Found:
    """Require a known optimizer, and settings that fit it and the dtypes at rest."""
    t = case.techniques
    try:
        row = kind_of(t.optimizer)
    except ConfigError as unknown:
        yield unknown
        return
    together = [p for p in case.trained if row.sums_parts or (row.by_role and p.hidden)]
    if case.precision.is_kept and len(dtypes := list(dict.fromkeys(p.dtype for p in together))) > 1:
        yield UnsupportedError(
            f"the optimizer {t.optimizer} computes on parts of several {'parameters' if row.sums_parts else 'matrices'}"
            f" together, and those that it trains rest in {' and '.join(dtypes)}. Set techniques.precision.master ="
            f" {max(dtypes, key=dtype_bytes)}, or choose the optimizer adamw."
        )
    if row.by_role:  # computes on whole hidden matrices, on the device
        if case.trained and not any(p.hidden for p in case.trained):
            yield ConfigError(
                f"the optimizer {t.optimizer} steps the matrices of linear layers and experts inside repeated blocks,"
                f" and {case.facts.kind} trains none ({len(case.trained)} parameters in {len(case.facts.blocks)}"
                f" blocks). Choose the optimizer adamw."
            )
        if (offload := t.cpu_offload) is not False:
            where = (
                "its state comes to the device by portions of parameters" if offload == "optimizer" else "on the host"
            )
            why = (
                "and the parts of all matrices travel together"
                if offload == "optimizer"
                else "matrix products are slow"
            )
            yield UnsupportedError(
                f"techniques.cpu_offload = {str(offload).lower()} and the optimizer {t.optimizer}: {where}, {why}. Set"
                f" techniques.cpu_offload = false ({row.title} holds one tensor of state for each matrix, AdamW two),"
                f" or choose the optimizer adamw."
            )
    if row.averages:  # needs weights in which an average can move, and its state where the average is taken
        if narrow := [dtype for dtype in case.trained_dtypes if dtype not in ("float32", "float64")]:
            yield UnsupportedError(
                f"the optimizer {t.optimizer} averages all steps, and in techniques.precision.master = {narrow[0]} an"
                f" average of some hundred steps no longer moves. Set techniques.precision.master = float32 (compute"
                f" may be bfloat16)."
            )
        if t.cpu_offload == "optimizer":
            yield UnsupportedError(
                f"techniques.cpu_offload = optimizer and the optimizer {t.optimizer}: evaluation needs the state of all"
                f" parameters on the device, and it comes there by portions for a step only. Set techniques.cpu_offload"
                f" = false, or true (parameters too)."
            )
    if row.sums_parts and t.cpu_offload == "optimizer":
        yield UnsupportedError(
            f"techniques.cpu_offload = optimizer and the optimizer {t.optimizer}: its state comes to the"
            f" device by portions of parameters, and the sums of all parameters travel together. Set"
            f" techniques.cpu_offload = false: the state of a matrix is a row and a column."
        )
    if not row.low_bit and (t.optimizer_state != "full" or t.stochastic_rounding):
        able = ", ".join(word for word, other in KINDS.items() if other.low_bit)
        yield ConfigError(
            f"techniques.optimizer_state = {t.optimizer_state}, techniques.stochastic_rounding ="
            f" {str(t.stochastic_rounding).lower()} and the optimizer {t.optimizer}: torchao has low-bit state"
            f" and stochastic rounding of {able}. Set optimizer_state = full and stochastic_rounding = false, or"
            f" the optimizer {able}."
        )
    if t.optimizer_state in ("8bit", "4bit") and (others := [d for d in case.trained_dtypes if d not in ROUNDED_FROM]):
        yield UnsupportedError(
            f"techniques.optimizer_state = {t.optimizer_state} is computed in float32, and trained parameters rest in"
            f" {others[0]}. Set techniques.precision.master = float32 (or bfloat16), or optimizer_state = full."
        )
    if t.stochastic_rounding and (others := [dtype for dtype in case.trained_dtypes if dtype != "bfloat16"]):
        yield ConfigError(
            f"techniques.stochastic_rounding = true is about weights that rest in bfloat16, and trained ones rest in"
            f" {others[0]}. Set techniques.precision.master = bfloat16, or leave it out."
        )
