"""Describe a pipeline: the blocks and the rank of each stage, and the order of work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.core.errors import ConfigError
from meshwright.core.names import is_within, owner
from meshwright.introspection.structure.structure import BlockFlow
from meshwright.planning.pipeline.schedules.simulate import PipelineSchedule

from .schedules.orders import schedule_kind
from .schedules.table import read_schedule

# --- cut a model into pipeline stages

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


# --- describe a pipeline


@dataclass(frozen=True)
class StagePlan:
    """Consecutive blocks, and the rank of the pipeline axis that has them."""

    rank: int
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class PipelinePlan:
    """The work of every rank of the pipeline axis.

    Attributes:
        ranks: size of the axis.
        schedule: name of the schedule, or the path of a CSV file.
        stages: the stages in forward order.
        kinds: kinds of blocks, and how they pass on their output.
        before: modules with parameters before the blocks, on the first stage.
        behind: modules with parameters after the blocks, on the last stage.
        tied: (name on the first stage, name on the last) of each parameter that both have.
        width: number of features of the tensor between stages.
        dtype: dtype of the tensor between stages.
        counts_tokens_behind: whether the modules after the blocks cannot take fewer tokens than the sequence has.
        of_images: modules of images, on the first stage with all inside them.
    """

    ranks: int
    schedule: str
    stages: tuple[StagePlan, ...]
    kinds: tuple[BlockFlow, ...]
    before: tuple[str, ...]
    behind: tuple[str, ...]
    tied: tuple[tuple[str, str], ...]
    width: int
    dtype: str
    counts_tokens_behind: bool = False
    of_images: tuple[str, ...] = ()

    @property
    def _is_table(self) -> bool:
        return self.schedule.endswith(".csv")

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(block for stage in self.stages for block in stage.blocks)

    @property
    def splits_backward(self) -> bool:
        return (
            read_schedule(self.schedule).splits_backward
            if self._is_table
            else schedule_kind(self.schedule).splits_backward
        )

    @property
    def least(self) -> int:
        """Least number of microbatches that can be scheduled."""
        return self.legal(1)

    def stages_on(self, rank: int) -> tuple[int, ...]:
        return tuple(number for number, stage in enumerate(self.stages) if stage.rank == rank)

    def part_of(self, rank: int) -> str:
        """Name a rank's part: "stage 1 of 2: layers.2 to layers.3", "stages 0 and 3 of 4: layers.0, layers.3"."""
        numbers = self.stages_on(rank)
        ends = [self.stages[number].blocks for number in numbers]
        blocks = ", ".join(b[0] if len(b) == 1 else f"{b[0]} to {b[-1]}" for b in ends)
        listed = " and ".join(filter(None, (", ".join(map(str, numbers[:-1])), str(numbers[-1]))))
        return f"stage{'s' if len(numbers) > 1 else ''} {listed} of {len(self.stages)}: {blocks}"

    def kind_of(self, block: str) -> BlockFlow:
        return next(kind for kind in self.kinds if block in kind.blocks)

    def has(self, stage: int, path: str) -> bool:
        """Return whether a stage has the module (or parameter) at ``path``."""
        if any(is_within(path, block) for block in self.blocks):
            return any(is_within(path, block) for block in self.stages[stage].blocks)
        if any(is_within(path, module) for module in self.of_images):
            return stage == 0
        ends = ((0, self.before), (len(self.stages) - 1, self.behind))
        return any(stage == number and (path in modules or owner(path) in modules) for number, modules in ends)

    def legal(self, microbatches: int) -> int:
        """Return the least number of microbatches, from ``microbatches`` up, that can be scheduled."""
        if self._is_table:
            return read_schedule(self.schedule).microbatches
        return schedule_kind(self.schedule).legal(microbatches, self.ranks)

    def order(self, microbatches: int) -> PipelineSchedule:
        """Order every rank's actions in a step; ConfigError if ``microbatches`` cannot be scheduled."""
        if self._is_table:
            return read_schedule(self.schedule)
        return schedule_kind(self.schedule).build(self.ranks, microbatches, len(self.stages) // self.ranks)

    def rows_per_microbatch(self, rows: int, together: int = 1) -> int:
        """Return the default rows of a microbatch: two equal microbatches per rank, or as many as the rows allow.

        Args:
            together: rows that stay in one microbatch.
        """
        wanted, rows = max(self.legal(2 * self.ranks), 1), max(rows // together, 1)
        return together * next((rows // n for n in range(min(wanted, rows), 0, -1) if rows % n == 0), 1)
