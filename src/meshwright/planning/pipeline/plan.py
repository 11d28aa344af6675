"""Decide a pipeline: the blocks and the rank of each stage, and the order of work; and check it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.names import around, is_within, owner
from meshwright.introspection.facts import ModelFacts
from meshwright.introspection.stages import BlockFlow, flow_of
from meshwright.planning.layout import Layout
from meshwright.planning.pipeline.orders import schedule_kind
from meshwright.planning.pipeline.schedule import PipelineSchedule, read_schedule
from meshwright.planning.techniques import Techniques
from meshwright.planning.values import Case, Found, PrecisionPlan, no_blocks

# --- cut a model into pipeline stages

Cost = Callable[[int, int, int], float]
"""Cost of a stage: (stage, first block, block after its last) -> number."""
ROUNDING = 1e-9
"""Relative difference up to which two costs are equal."""


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

    slowest = _least_largest(len(blocks), stages, work)
    largest = _least_largest(len(blocks), stages, memory, lambda *stage: work(*stage) <= slowest * (1 + ROUNDING))
    best: dict[int, tuple[float, list[tuple[int, int]]]] = {0: (0.0, [])}
    for stage in range(stages):
        found: dict[int, tuple[float, list[tuple[int, int]]]] = {}
        for start, (before, cuts) in best.items():
            for end in range(start + 1, len(blocks) - (stages - 1 - stage) + 1):
                sizes = work(stage, start, end), memory(stage, start, end)
                if any(size > most * (1 + ROUNDING) for size, most in zip(sizes, (slowest, largest), strict=True)):
                    break  # further blocks cost no less
                # ties: earlier stages take more
                total = before + ((end - start) ** 2 - stage * 1e-9 * (len(blocks) - (end - start)))
                if total < found.get(end, (math.inf, []))[0]:
                    found[end] = total, [*cuts, (start, end)]
        best = found
    return best[len(blocks)][1]


def _least_largest(
    blocks: int, stages: int, cost: Cost, is_legal: Callable[[int, int, int], bool] = lambda *_: True
) -> float:
    """Return the least limit that some cut keeps in all stages; neither cost nor legality falls with more blocks."""

    def is_kept(limit: float) -> bool:
        start = 0
        for stage in range(stages):
            ends = range(start + 1, blocks - (stages - 1 - stage) + 1)
            kept = takewhile(lambda end: cost(stage, start, end) <= limit and is_legal(stage, start, end), ends)  # noqa: B023
            start = max(kept, default=-1)
            if start < 0:
                return False
        return start == blocks

    ends = {0, stages // 2, stages - 1}  # stages between the first and the last cost alike
    costs = sorted({cost(stage, a, b) for stage in ends for a in range(blocks) for b in range(a + 1, blocks + 1)})
    return costs[bisect_left(costs, True, key=is_kept)]


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
        counts_tokens_behind: whether the code after the blocks cannot take fewer tokens than the sequence has.
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
        return has_split_backward(self.schedule)

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
        return stage in self.stages_with(path)

    def stages_with(self, path: str) -> tuple[int, ...]:
        """Return the stages that have the module (or parameter) at ``path``: several if it is tied."""
        block = next((block for block in around(path) if block in self._stage_of), None)
        if block is not None:
            return (self._stage_of[block],)
        if any(is_within(path, module) for module in self.of_images):
            return (0,)
        ends = ((0, self.before), (len(self.stages) - 1, self.behind))
        return tuple(number for number, modules in ends if path in modules or owner(path) in modules)

    @cached_property
    def _stage_of(self) -> dict[str, int]:
        return {block: number for number, stage in enumerate(self.stages) for block in stage.blocks}

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


# --- check pipeline parallelism


def pipeline_requested(case: Case) -> Found:
    """Require that the pipeline settings fit together, the model and the mesh."""
    t, ranks = case.techniques, case.layout.pp
    if ranks == 1:
        if not t.pipeline_schedule.endswith(".csv"):
            schedule_kind(t.pipeline_schedule)
        for key in ("pipeline_cuts", "layers_per_stage", "pipeline_schedule"):
            if getattr(t, key) != getattr(Techniques, key):
                yield ConfigError(
                    f"techniques.{key} is about pipeline stages, but layout.pp = 1. Leave it out, or set layout.pp."
                )
        return
    blocks = len(case.facts.token_blocks)
    if not blocks:
        yield ConfigError(no_blocks(f"layout.pp = {ranks}", case.facts))
        return
    try:
        stages = count_stages(t, ranks, blocks)
        if t.pipeline_cuts:
            given_cuts(t.pipeline_cuts, blocks, stages)
    except ConfigError as error:
        yield error
        return
    if stages > blocks:
        most = blocks // (stages // ranks)
        way = f"Legal here: layout.pp = 1 to {most}." if most else "Use 1f1b, which makes one stage for each rank."
        yield ConfigError(
            f"layout.pp = {ranks} with {t.pipeline_schedule} makes {stages} stages, but {case.facts.kind} has {blocks}"
            f" blocks, and each stage needs one. {way}"
        )


def pipeline_companions(case: Case) -> Found:
    """Refuse techniques that do not combine with a pipeline."""
    t, ranks = case.techniques, case.layout.pp
    if ranks == 1:
        return
    if case.technique == "ddp":
        yield UnsupportedError(
            f"techniques.data_parallel = ddp does not go with layout.pp = {ranks}: it reduces its buckets in the"
            f" first backward that it"
            f" sees. Set techniques.data_parallel = fully_shard, which replicates over layout.dp_replicate too."
        )
    try:
        splits = has_split_backward(t.pipeline_schedule)
    except ConfigError:  # another rule reports it
        splits = False
    if t.sync_grad_accum is not False and splits:
        by_stage = t.zero_stage in (2, 3)
        key = f"zero_stage = {t.zero_stage}" if by_stage else f"sync_grad_accum = {str(t.sync_grad_accum).lower()}"
        yield UnsupportedError(
            f"techniques.{key} does not go with techniques.pipeline_schedule = {t.pipeline_schedule}, which computes"
            f" input and weight gradients apart, so that no microbatch has all of its gradients at one time. Use 1f1b"
            f" or interleaved_1f1b, or techniques.{'zero_stage = 1' if by_stage else 'sync_grad_accum = false'}."
        )
    if t.compile and splits:
        yield UnsupportedError(
            f"techniques.compile does not go with techniques.pipeline_schedule = {t.pipeline_schedule}, which computes"
            f" input and weight gradients apart: a compiled block computes both at once. Use 1f1b or interleaved_1f1b,"
            f" or techniques.compile = false."
        )


def check_trained(facts: ModelFacts, plan: PipelinePlan) -> None:
    """Check that every rank has something to train.

    Raises:
        ConfigError: a rank has nothing; the message names its blocks.
    """
    trained = [name for p in facts.parameters if p.trainable for name in (p.name, *p.aliases)]
    for rank in range(plan.ranks):
        stages = plan.stages_on(rank)
        if not any(plan.has(stage, name) for stage in stages for name in trained):
            blocks = [block for stage in stages for block in plan.stages[stage].blocks]
            raise ConfigError(
                f"layout.pp = {plan.ranks}: all that rank {rank} of the pipeline has ({blocks[0]} to {blocks[-1]}) is"
                f" frozen, so an optimizer there would have nothing to train. Cut elsewhere (techniques.pipeline_cuts),"
                f" or freeze less."
            )


def check_microbatches(plan: PipelinePlan, rows: int, microbatch_rows: int, together: int = 1) -> None:
    """Check that the rows of a rank make a number of microbatches that can be scheduled; ``together`` stay in one.

    Raises:
        ConfigError: they do not; the message names that number, and the least that can be scheduled.
    """
    size = microbatch_rows or plan.rows_per_microbatch(rows, together)
    number = -(-rows // size)
    if (legal := plan.legal(number)) == number:
        return
    takes = (
        f"{legal} microbatches and no other number"
        if plan.schedule.endswith(".csv")
        else f"{plan.least} microbatches at least"
    )
    if not plan.schedule.endswith(".csv") and schedule_kind(plan.schedule).multiple(plan.ranks) > 1:
        takes = f"a multiple of {plan.least} microbatches"
    raise ConfigError(
        f"techniques.pipeline_schedule = {plan.schedule} on layout.pp = {plan.ranks} takes {takes}, but the {rows} rows"
        f" of a rank make {number} of {size} rows each. Set batch.global_batch to {legal} times batch.microbatch for"
        f" each data rank, or use 1f1b, which takes any number."
    )


def count_stages(t: Techniques, ranks: int, blocks: int) -> int:
    """Count the stages that the request makes; ConfigError if its schedule cannot be read."""
    if t.pipeline_schedule.endswith(".csv"):
        schedule = read_schedule(t.pipeline_schedule)
        if len(schedule.ranks) != ranks:
            raise ConfigError(
                f"techniques.pipeline_schedule = {t.pipeline_schedule}: it has {len(schedule.ranks)} rows, one for each"
                f" rank, but layout.pp = {ranks}"
            )
        return schedule.stages
    kind = schedule_kind(t.pipeline_schedule)
    if t.pipeline_cuts and kind.loops:
        return len(t.pipeline_cuts) + 1
    if not t.layers_per_stage:
        return ranks * kind.per_rank(blocks, ranks)
    layers = t.layers_per_stage
    stages = -(-blocks // layers) if layers > 0 else 0
    per_rank = stages // ranks
    can = per_rank >= 1 and stages % ranks == 0 and (per_rank == 2 if kind.is_v else kind.loops or per_rank == 1)
    if not can:
        wanted = f"{2 * ranks}" if kind.is_v else f"a multiple of {ranks}" if kind.loops else f"{ranks}"
        raise ConfigError(
            f"techniques.layers_per_stage = {layers} makes {stages} stages of {blocks} blocks, but {kind.name} on"
            f" layout.pp = {ranks} takes {wanted}"
        )
    return stages


def has_split_backward(schedule: str) -> bool:
    """Return whether a schedule, by its name or CSV file, splits backwards; ConfigError if it cannot be read."""
    if schedule.endswith(".csv"):
        return read_schedule(schedule).splits_backward
    return schedule_kind(schedule).splits_backward


# --- build a PipelinePlan from model facts and requested techniques


def make_pipeline_plan(
    facts: ModelFacts, layout: Layout, requested: Techniques, precision: PrecisionPlan
) -> PipelinePlan:
    """Decide stages, ranks and cuts; UnsupportedError tells why a model cannot be cut between its blocks."""
    measured = facts.measurements.structure(layout.tp)
    flow = flow_of(facts.module, measured)
    own = measured.structure.blocks
    stages = count_stages(requested, layout.pp, len(own))
    schedule = requested.pipeline_schedule
    if schedule.endswith(".csv"):
        ranks = read_schedule(schedule).rank_of
    else:
        kind = schedule_kind(schedule)
        schedule, ranks = kind.name, kind.rank_of(layout.pp, stages // layout.pp)
    if requested.pipeline_cuts:
        cuts = given_cuts(requested.pipeline_cuts, len(own), stages)
    elif size := requested.layers_per_stage:
        cuts = [(start, min(start + size, len(own))) for start in range(0, len(own), size)]
    else:
        sizes = [float(sum(p.numel for p in facts.of_unit(block))) for block in own]
        before, behind = (
            float(sum(p.numel for p in facts.parameters if any(owner(n) in modules for n in (p.name, *p.aliases))))
            for modules in (flow.before, flow.behind)
        )
        before += sum(p.numel for p in facts.parameters if facts.is_of_images(p.name))
        cuts = balanced(sizes, stages, head=behind, embedding=before)
    tied = []  # parameters that are used both before and after the blocks, each by a name on either side
    for p in facts.parameters:
        first, last = (
            next((name for name in (p.name, *p.aliases) if owner(name) in modules), None)
            for modules in (flow.before, flow.behind)
        )
        if first is not None and last is not None:
            tied.append((first, last))
    return PipelinePlan(
        ranks=layout.pp,
        schedule=schedule,
        stages=tuple(StagePlan(rank, own[start:end]) for rank, (start, end) in zip(ranks, cuts, strict=True)),
        kinds=flow.kinds,
        before=flow.before,
        behind=flow.behind,
        tied=tuple(tied),
        width=flow.width,
        dtype=precision.compute,
        counts_tokens_behind=flow.counts_tokens_behind,
        of_images=measured.structure.of_images,
    )
