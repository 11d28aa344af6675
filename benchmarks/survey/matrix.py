"""The matrix: every supported layout in every way of computing it, against one process, with what came of each cell."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from typing import Any

from meshwright.core.errors import MeshwrightError
from meshwright.distributed.process.workers import WorkerPool
from meshwright.introspection.cluster import Cluster
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.introspection.source import as_module
from meshwright.models.decoder_config import DecoderConfig, MoEConfig
from meshwright.planning.build import plan
from meshwright.planning.layout import Layout, data_layouts
from meshwright.planning.pipeline.orders import KINDS
from meshwright.planning.values import Batch
from meshwright.verification.problem import Problem, RandomBatches
from meshwright.verification.verify import Report, verify

WORLDS = (2, 4, 8)
EVERY_WAY = 4
"""Up to so many ranks a layout is judged in every way.

Beyond, in those of ``AT_LARGE``: what more ranks can change shows there too.
"""

# Nothing divides: 257 tokens, 10 features, 7 hidden ones; heads of 2 features, so that the q/k norms and the one kv
# head have fewer rows
# than there are ranks. Three layers: a first, a middle and a last block are treated differently.
UNTIED = DecoderConfig(257, 10, 3, n_heads=5, n_kv_heads=1, hidden_dim=7, max_seq_len=16, qk_norm=True)
TIED = replace(UNTIED, tied_embeddings=True)
CUTTABLE = {"dim": 24, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 20}
"""Sizes of the models where ranks share heads out: heads must divide, but key heads are fewer than four ranks."""
ROUNDED = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 96}
"""Of the models that multiply in float8: what two ranks have of a layer divides by 16."""
DEEP = {"n_layers": 4}
"""Of the models where a pipeline cuts them: two stages on each of two ranks."""
SOFTMAX = MoEConfig(n_experts=8, sequence_loss=0.05, z_loss=0.01)
SIGMOID = MoEConfig(
    n_experts=8,
    top_k=3,
    hidden_dim=6,
    n_shared=1,
    first_dense=1,
    router="sigmoid",
    n_groups=4,
    top_groups=2,
    scale=2.5,
    bias_rate=0.01,
)
"""Of the models where experts are shared out: of the tied one, and of the untied."""
BATCHES = RandomBatches(UNTIED.vocab_size, rows=2 * max(WORLDS), seq_len=10)
STEPS = 2
"""The second step shows what the first one left in the optimizer."""
MAX_NORM = 0.03
"""So small that every step is clipped."""

EXACT, HALF = ("float64", "float32"), ("bfloat16",)


@dataclass(frozen=True)
class Way:
    """How a layout computes.

    ``techniques``: (name, value) pairs of Techniques; ``microbatch_rows``: rows per forward (0: all at once).
    """

    name: str
    techniques: tuple[tuple[str, Any], ...] = ()
    microbatch_rows: int = 0


@dataclass(frozen=True)
class Row:
    """A layout, computed in a way."""

    layout: Layout
    way: Way

    @property
    def name(self) -> str:
        return f"{self.layout}: {self.way.name}"


@dataclass(frozen=True)
class Column:
    """What is computed.

    ``parts``: models, each with the dtypes it is verified in; ``errors``: names of what comes of them, in order.
    """

    name: str
    parts: tuple[tuple[DecoderConfig, tuple[str, ...]], ...]
    errors: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """One place of the matrix."""

    row: Row
    column: Column

    @property
    def name(self) -> str:
        return f"{self.row.name}: {self.column.name}"

    @property
    def parts(self) -> tuple[tuple[DecoderConfig, tuple[str, ...]], ...]:
        """The column's models, as they can be cut, each with its dtypes."""
        layout = self.row.layout
        shares_heads = layout.tp > 1 or "ulysses" in self.row.way.name
        cut = ROUNDED if self.rounds else CUTTABLE if shares_heads else {}
        sizes = cut | (DEEP if layout.pp > 1 else {})
        found = [(replace(model, **sizes), self._legal(dtypes)) for model, dtypes in self.column.parts]
        if layout.ep > 1:
            softmax = SOFTMAX if layout.cp == 1 else replace(SOFTMAX, sequence_loss=0.0)  # of whole sequences
            found = [
                (replace(model, moe=softmax if model.tied_embeddings else SIGMOID), dtypes) for model, dtypes in found
            ]
        return tuple(found)

    def problems(self) -> Iterator[Problem]:
        """What is computed, one problem for each of the column's errors."""
        for model, dtypes in self.parts:
            for dtype in dtypes:
                yield Problem(
                    model,
                    BATCHES,
                    dtype=dtype,
                    techniques=self.techniques,
                    microbatch_rows=self.row.way.microbatch_rows,
                )

    @property
    def techniques(self) -> dict[str, Any]:
        return dict(self.row.way.techniques)

    @property
    def rounds(self) -> bool:
        """Whether it multiplies in float8; around the products is then no float64."""
        return "float8" in self.techniques

    @property
    def errors(self) -> tuple[str, ...]:
        """Names of what comes of it, in order."""
        return tuple(name for name in self.column.errors if not (self.rounds and name == "fp64"))

    def _legal(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dtype for dtype in dtypes if not (self.rounds and dtype == "float64"))


@dataclass(frozen=True)
class Judged:
    """What came of a cell."""

    state: str
    """equal, refused, or DIFFERS."""
    reason: str = ""
    """The rule's, in one sentence; or where it first differs."""
    errors: tuple[float, ...] = ()
    """Of the gradients of the first step, the largest of all parameters; one for each of the column's errors."""
    seconds: float = 0.0
    day: str = ""
    """ISO date on which it was judged."""


COMPILED = (("compile", True), ("compile_backend", "aot_eager"))
FROZEN = (("freeze", ("embedding", r"layers\.0")),)
RECOMPUTED = (("activation_checkpointing", "full"),)
FURTHER_MODES: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = (
    ("every_n", ()),
    ("modules", (("checkpoint_modules", ("layers.*.feed_forward",)),)),
    ("selective_op", ()),
    ("offload", ()),
    ("memory_budget", COMPILED),
)
"""Of activation_checkpointing, each with what it needs."""
IN_FLOAT8: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = (
    ("float8 = tensorwise", (("float8", "tensorwise"),)),
    ("float8 = rowwise", (("float8", "rowwise"),)),
    ("float8_all_gather", (("float8", "tensorwise"), ("float8_all_gather", True))),
)
"""Each with its techniques."""

PLAIN = Way("plain")
WHOLE_SHARDS = Way("data_parallel = fully_shard", (("data_parallel", "fully_shard"),))
"""Said of layouts that do not shard; of those that do it is plain."""

WAYS = (
    PLAIN,
    Way("microbatches of one row", microbatch_rows=1),
    Way("sync_grad_accum = true, microbatches", (("sync_grad_accum", True),), 1),
    Way('sync_grad_accum = "shard", microbatches', (("sync_grad_accum", "shard"),), 1),
    *(Way(f"zero_stage = {stage}, microbatches", (("zero_stage", stage),), 1) for stage in (1, 2, 3)),
    Way("activation_checkpointing = full", RECOMPUTED),
    Way("activation_checkpointing = selective", (("activation_checkpointing", "selective"),)),
    *(
        Way(f"activation_checkpointing = {name}", (("activation_checkpointing", name), *more))
        for name, more in FURTHER_MODES
    ),
    Way("reshard_after_forward = false", (("reshard_after_forward", False),)),
    Way("reshard_after_forward = 2", (("reshard_after_forward", 2),)),
    Way("cpu_offload", (("cpu_offload", True),)),
    Way("cpu_offload = optimizer", (("cpu_offload", "optimizer"),)),
    Way("loss_chunks = 3", (("loss_chunks", 3),)),
    *(Way(name, techniques) for name, techniques in IN_FLOAT8),
    Way("compile", COMPILED),
    Way("freeze", FROZEN),
    WHOLE_SHARDS,
    Way("data_parallel = ddp", (("data_parallel", "ddp"),)),
    Way(
        "all at once",
        (
            ("sync_grad_accum", True),
            *RECOMPUTED,
            ("reshard_after_forward", False),
            ("cpu_offload", True),
            *COMPILED,
            *FROZEN,
        ),
        1,
    ),
)
AT_LARGE = ("plain", "microbatches of one row", "all at once")
TENSOR_WAYS = (
    Way("sequence_parallel = false", (("sequence_parallel", False),)),
    Way("regather = false", (("regather", False),)),
)
"""Said of layouts with a tensor axis."""
PIPELINE_WAYS = tuple(
    Way(f"pipeline_schedule = {name}", (("pipeline_schedule", name),)) for name in KINDS if name != "1f1b"
)
"""Said of layouts with a pipeline; that of the others is 1f1b."""
TENSOR = (
    Layout(dp_shard=2, tp=2),
    Layout(dp_shard=1, tp=2),
    Layout(dp_shard=1, tp=4),
    Layout(dp_replicate=2, dp_shard=1, tp=2),
    Layout(dp_replicate=2, dp_shard=2, tp=2),
)
"""Layouts with a tensor axis; the first in every way but all at once, the others in those of AT_LARGE."""
PIPELINES = (
    Layout(pp=2, dp_shard=2),
    Layout(pp=2, dp_shard=1),
    Layout(pp=2, dp_shard=1, tp=2),
    Layout(pp=2, dp_replicate=2, dp_shard=1),
    Layout(pp=2, dp_replicate=2, dp_shard=2),
)
"""Layouts with a pipeline.

The first in every way but all at once, the others in those of AT_LARGE; all with every schedule.
"""
EXPERTS = (
    Layout(dp_shard=4, ep=2),
    Layout(dp_shard=2, ep=2),
    Layout(dp_shard=4, ep=4),
    Layout(dp_replicate=2, dp_shard=2, ep=2),
    Layout(dp_shard=2, tp=2, ep=2),
    Layout(pp=2, dp_shard=2, ep=2),
    Layout(dp_shard=8, ep=8),
    Layout(dp_replicate=2, dp_shard=4, ep=4),
)
"""Layouts with an expert axis; the first in every way, the others in those of AT_LARGE."""
METHODS = tuple(
    Way(f"context_parallel_method = {kind}", (("context_parallel_method", kind),))
    for kind in ("all_gather", "ring", "halo", "ulysses", "ulysses_ring")
)
CONTEXT = (
    Layout(dp_shard=1, cp=2),
    Layout(dp_shard=1, cp=4),
    Layout(dp_replicate=2, dp_shard=1, cp=2),
    Layout(dp_shard=1, cp=2, tp=2),
    Layout(pp=2, dp_shard=1, cp=2),
    Layout(dp_shard=2, cp=2, ep=2),
)
"""Layouts with a context axis; the first in every way, the others in those of AT_LARGE."""

COLUMNS = (
    Column("tied", ((TIED, EXACT),), ("fp64", "fp32")),
    Column("untied", ((UNTIED, EXACT),), ("fp64", "fp32")),
    Column("bf16", ((TIED, HALF), (UNTIED, HALF)), ("tied", "untied")),
)


def rows() -> list[Row]:
    """Every layout of the data axes on 2 and 4 ranks in every way, on 8 in a few.

    Some with other axes; then one of each axis that does not exist yet.
    """
    layouts = [layout for layout in data_layouts(max(WORLDS)) if layout.world in WORLDS]
    return [Row(layout, way) for layout in (*layouts, *TENSOR, *PIPELINES, *EXPERTS, *CONTEXT) for way in _ways(layout)]


def _ways(layout: Layout) -> list[Way]:
    ways = [way for way in WAYS if way is not WHOLE_SHARDS or (layout.dp_shard == 1 and layout.tp * layout.pp == 1)]
    if layout.tp > 1:  # all at once compiles every block by itself there, which takes a minute
        ways = [*(way for way in ways if way.name != "all at once"), *TENSOR_WAYS]
    if layout.pp > 1:  # all at once compiles every stage by itself there
        ways = [way for way in ways if way.name != "all at once"]
        ways += PIPELINE_WAYS if layout.ep == 1 else [way for way in PIPELINE_WAYS if "zbv" in way.name]
    if layout.cp > 1:
        ways += [way for way in METHODS if way is not METHODS[-1] or layout.cp > 2]
    few = layout.world > EVERY_WAY or layout in (*TENSOR[1:], *PIPELINES[1:], *EXPERTS[1:], *CONTEXT[1:])
    return [way for way in ways if way.name in AT_LARGE or way in (*PIPELINE_WAYS, *METHODS)] if few else ways


def cells() -> list[Cell]:
    """The matrix, column by column: cells that follow each other ask one process for the same."""
    return [Cell(row, column) for column in COLUMNS for row in rows()]


def judge(cell: Cell, pool: WorkerPool) -> Judged:
    """Plan a cell, which may refuse it, and verify it.

    Whatever goes wrong after the plan was made is DIFFERS: what is not equal must be refused before it starts.
    """
    begun, today = time.monotonic(), date.today().isoformat()
    error = refusal(cell)
    if error is not None:
        return Judged("refused", first_sentence(str(error)), day=today)
    try:
        reports = [_verified(cell, model, dtypes, pool) for model, dtypes in cell.parts]
    except MeshwrightError as trouble:
        last = str(trouble).strip().splitlines()[-1:]
        return Judged(
            "DIFFERS", f"{type(trouble).__name__}: {''.join(last)}", seconds=time.monotonic() - begun, day=today
        )
    comparisons = [comparison for report in reports for comparison in report.comparisons]
    errors = tuple(max(d.error for d in comparison.of("gradient")) for comparison in comparisons)
    firsts = [(c.dtype, c.first) for c in comparisons if c.first is not None]
    reason = f"{firsts[0][0]} first differs at {firsts[0][1].place}" if firsts else ""
    return Judged("DIFFERS" if firsts else "equal", reason, errors, time.monotonic() - begun, today)


def refusal(cell: Cell) -> MeshwrightError | None:
    """Why the plan refuses a cell; None where it does not."""
    for problem in cell.problems():
        batch = Batch(BATCHES.rows, BATCHES.seq_len, problem.microbatch_rows, BATCHES.vocab_size)
        layout = cell.row.layout
        try:
            plan(
                _facts(problem.model), layout, batch=batch, cluster=Cluster(layout.world), techniques=problem.requested
            )
        except MeshwrightError as error:
            return error
    return None


def first_sentence(text: str) -> str:
    """Of an error: what is wrong, without how to mend it."""
    first = text.strip().splitlines()[0].split(". ")[0]
    return f"{first.rstrip('.')}."


def _verified(cell: Cell, model: DecoderConfig, dtypes: tuple[str, ...], pool: WorkerPool) -> Report:
    return verify(
        model,
        cell.row.layout,
        BATCHES,
        steps=STEPS,
        dtypes=dtypes,
        techniques=cell.techniques,
        max_norm=MAX_NORM,
        microbatch_rows=cell.row.way.microbatch_rows,
        pool=pool,
    )


@cache
def _facts(model: DecoderConfig) -> ModelFacts:
    return model_facts(as_module(model))
