"""List where the host waits for an accelerator in a step: its queue of kernels runs dry there.

The list is complete for meshwright's own code and for torch's under it; what a model's own code reads, such as a loop
over experts, is not in it. A recomputed layer of experts counts twice, also where no gradient reaches it. On a CPU
nothing is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.core.devices import is_accelerator
from meshwright.core.names import is_within

if TYPE_CHECKING:
    from meshwright.planning.plan import Plan


@dataclass(frozen=True)
class HostWait:
    """One reason to wait, and how often in a step."""

    reason: str
    calls: int

    def __str__(self) -> str:
        return self.reason if self.calls == 1 else f"{self.calls} × {self.reason}"


def host_waits(plan: Plan, microbatches: int = 1) -> tuple[HostWait, ...]:
    """Return where one optimizer step of a rank waits for the device.

    Args:
        microbatches: forward passes of this rank in the step.
    """
    if not is_accelerator(plan.device):
        return ()
    found = [HostWait("loss", 1)]
    if plan.data.cpu_offload:
        trained = sum(p.count for p in plan.parameters if p.trainable)
        reductions = microbatches if plan.data.sync_grad_accum is True else 1
        found.append(HostWait("gradient in host memory", trained * reductions))  # fully_shard waits for each of them
    else:
        found.append(HostWait("gradient norm", 1))
    if plan.optimizer.in_host_memory:
        found.append(HostWait("optimizer state in host memory", 1))
    if plan.experts is not None:
        recomputed = () if plan.activation_checkpointing == "offload" else plan.checkpointed
        again = sum(any(is_within(stack.path, module) for module in recomputed) for stack in plan.experts.stacks)
        layers = len(plan.experts.stacks) + again
        found.append(HostWait("number of tokens for each expert", layers * microbatches))
    return tuple(found)


def described(plan: Plan, microbatches: int = 1) -> str:
    """Return the list as a line of text."""
    waits = host_waits(plan, microbatches)
    return ", ".join(map(str, waits)) if waits else "none"
