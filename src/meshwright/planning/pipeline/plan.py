"""Describe a pipeline: the blocks and the rank of each stage, and the order of work."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.core.names import is_within, owner
from meshwright.introspection.stages.block_flow import BlockFlow

from .schedules.action import PipelineSchedule
from .schedules.orders import schedule_kind
from .schedules.table import read_schedule


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
