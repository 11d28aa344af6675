"""Cut a model into pipeline stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from meshwright.core.errors import ConfigError

Cost = Callable[[int, int, int], float]
"""Cost of a stage: (stage, first block, block after its last) -> number."""


def compute_layer_assignment(n_layers: int, pp_size: int) -> list[tuple[int, int]]:
    """List (start, end) of ``pp_size`` stages, as even as possible; earlier stages take the remainder.

    Raises:
        ValueError: fewer layers than stages, or a size below 1.
    """
    if pp_size < 1 or n_layers < pp_size:
        raise ValueError(f"{n_layers} layers cannot be cut into {pp_size} stages: each stage has one layer or more")
    share, left = divmod(n_layers, pp_size)
    ends = [(stage + 1) * share + min(stage + 1, left) for stage in range(pp_size)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def balanced(
    blocks: Sequence[float], stages: int, *, head: float = 0.0, embedding: float = 0.0
) -> list[tuple[int, int]]:
    """Cut stages (start, end) with the least work of the slowest, then memory of the largest, then unevenness.

    Args:
        blocks: number of parameter elements of each block, a measure of its memory and its multiplications per token.
        head: further elements of the last stage, which count as multiplications and memory.
        embedding: further elements of the first stage, which are only looked up.
    """
    sums = [0.0]
    for size in blocks:
        sums.append(sums[-1] + size)

    def work(stage: int, start: int, end: int) -> float:
        return sums[end] - sums[start] + (head if stage == stages - 1 else 0.0)

    def memory(stage: int, start: int, end: int) -> float:
        return work(stage, start, end) + (embedding if stage == 0 else 0.0)

    slowest = _cheapest(len(blocks), stages, [work])[0][0]
    largest = _cheapest(len(blocks), stages, [work, memory], (slowest,))[0][0]

    def spread(stage: int, start: int, end: int) -> float:
        return (end - start) ** 2 - stage * 1e-9 * (len(blocks) - (end - start))  # ties: earlier stages take more

    return _cheapest(len(blocks), stages, [work, memory, spread], (slowest, largest))[1]


def _cheapest(
    blocks: int, stages: int, costs: list[Cost], limits: tuple[float, ...] = ()
) -> tuple[tuple[float], list[tuple[int, int]]]:
    """Minimize the last cost, its largest over stages (its sum if two limits are given); limits bound the others."""
    join = sum if len(limits) == 2 else max
    best: dict[int, tuple[float, list[tuple[int, int]]]] = {0: (0.0, [])}
    for stage in range(stages):
        found: dict[int, tuple[float, list[tuple[int, int]]]] = {}
        for start, (before, cuts) in best.items():
            for end in range(start + 1, blocks - (stages - 1 - stage) + 1):
                if any(
                    cost(stage, start, end) > limit * (1 + 1e-9) for cost, limit in zip(costs, limits, strict=False)
                ):
                    continue
                total = join((before, costs[-1](stage, start, end)))
                if total < found.get(end, (math.inf, []))[0]:
                    found[end] = total, [*cuts, (start, end)]
        best = found
    total, cuts = best[blocks]
    return (total,), cuts


def given_cuts(cuts: Sequence[int], blocks: int, stages: int) -> list[tuple[int, int]]:
    """List (start, end) of each stage, given the first blocks of all stages but the first.

    Raises:
        ConfigError: not one number less than stages, or not rising.
    """
    bounds = [0, *cuts, blocks]
    if len(cuts) != stages - 1 or any(a >= b for a, b in zip(bounds, bounds[1:], strict=False)):
        raise ConfigError(
            f"techniques.pipeline_cuts = {list(cuts)}: {stages} stages of {blocks} blocks need {stages - 1} rising"
            f" numbers between 1 and {blocks - 1}, the first block of every stage but the first"
        )
    return list(zip(bounds, bounds[1:], strict=False))
