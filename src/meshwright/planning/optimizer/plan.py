"""Decide the number of bits of each parameter's optimizer state, and where it rests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.introspection.facts import ModelFacts
from meshwright.planning.techniques import Techniques

from .kinds import OptimizerKind, kind_of

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
