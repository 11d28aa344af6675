"""Price the host: how long it takes to launch a block's kernels, and when the device waits for it."""

from __future__ import annotations

from .architecture import BlockShape
from .execution import Job
from .products import CAST

FORWARD_OPERATORS, BACKWARD_OPERATORS = 26, 44
"""Operators that a block of a decoder dispatches, forward and backward, where chains run as one kernel: assumed."""
EXPERT_OPERATORS, PER_EXPERT = 280, 4
"""Further operators of a mixture's forward: routing, permutations, dispatch; and for each of a rank's experts, since a
grouped product launches a kernel, and in 8 bits casts, for each. The first was chosen on published mixtures."""
ROUTING = 31
"""Those of a mixture's operators that route, in fused kernels (NVIDIA/Megatron-LM, section 2.1.4 of
docs/discussions/deepseek-v3-gb200-optimization/deepseek-v3-gb200-optimization.md)."""
CASTING = 2.0
"""Operators in 8 or 4 bits, over those in half precision: each product's operands are cast and scaled."""
UNFUSED = 1.6
"""Operators without fusion, over those with it."""


def host_seconds(block: BlockShape, job: Job) -> tuple[tuple[float, float], float]:
    """Return the seconds in which the host launches a block's forward, (of its experts, of the rest), and backward.

    A CUDA graph launches the kernels of its part at once: of a whole step; or of all but the experts, whose numbers of
    rows only the device knows.
    """
    run = job.execution
    if run.graphs == "full":
        return (0.0, 0.0), 0.0
    rest, experts = FORWARD_OPERATORS, 0.0
    if block.experts:
        rest, experts = rest + ROUTING, EXPERT_OPERATORS - ROUTING + PER_EXPERT * block.experts.number / job.layout.ep
    if run.graphs == "partial":
        rest = 1
    each = job.machines.device.host_operator_s * (1.0 if run.fused else UNFUSED)
    each *= CASTING if run.products in CAST else 1.0
    times = BACKWARD_OPERATORS / FORWARD_OPERATORS + (1 if run.recompute == "full" else 0)
    return (experts * each, rest * each), times * (experts + rest) * each


def starved_seconds(host: tuple[float, float], mixture: float, rest: float) -> float:
    """Return the seconds of a forward in which the device has nothing to do, since the host has launched nothing.

    Once in a mixture the host waits for the device, to learn how many rows each expert gets. Then both begin at once,
    and what the device takes longer than the host for the experts is the host's lead for the rest.

    Args:
        host: seconds of the host, for the experts and for the rest.
        mixture: the device's seconds for experts and their messages; 0 where the host does not wait.
        rest: the device's other seconds.
    """
    experts, others = host
    if not mixture:
        return max(0.0, experts + others - rest)
    lead = max(0.0, mixture - experts)
    return max(0.0, experts - mixture) + max(0.0, others - rest - lead)
