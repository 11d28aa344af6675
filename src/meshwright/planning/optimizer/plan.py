"""What the optimizer holds of each parameter, in how many bits, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StateWord = Literal["full", "8bit", "4bit"]

BLOCKS = {"8bit": 256, "4bit": 128}
"""Elements that share a scale."""
LEAST = 4096
"""Elements of a parameter on a rank, below which torchao keeps its state in high precision."""
ROOM = 1 << 26
"""Bytes of state that are on the device at a time where it rests in host memory; a single parameter may have more."""
MOMENTS = 2
"""AdamW's tensors like the parameter; the first is signed."""
SCALE_BYTES = 4


@dataclass(frozen=True)
class OptimizerPlan:
    """AdamW's state: its bits, how new weights are rounded, and where it rests.

    Attributes:
        state: "full": the moments in the master dtype; "8bit", "4bit": by torchao, codes with a scale for each block of what a rank has.
        stochastic_rounding: new bfloat16 weights are rounded up or down at random, so that on average nothing is lost.
        in_host_memory: the state rests in host memory, and comes to the device by portions for the step.
    """

    state: StateWord = "full"
    stochastic_rounding: bool = False
    in_host_memory: bool = False

    @property
    def needs_torchao(self) -> bool:
        """Whether its arithmetic is torchao's."""
        return self.state != "full" or self.stochastic_rounding

    @property
    def wish(self) -> str:
        """The key that makes it need torchao, as the user writes it."""
        return f"techniques.optimizer_state = {self.state}" if self.state != "full" else "techniques.stochastic_rounding = true"

    def rounds(self, elements: int) -> bool:
        """Whether the state of so many elements of a parameter, those of one rank, is kept in few bits."""
        return self.state != "full" and elements >= LEAST and elements % BLOCKS[self.state] == 0

    def bytes_of_rounded(self, elements: int, tensors: int) -> int:
        """Of both moments: codes, scales, and each tensor's table of what codes mean."""
        bits = int(self.state.removesuffix("bit"))
        codes = elements * bits // 8
        return MOMENTS * (codes + SCALE_BYTES * (elements // BLOCKS[self.state]) + SCALE_BYTES * 2**bits * tensors)
