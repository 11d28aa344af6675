"""Watch the loop beside its figures: memory, recordings, pipeline's work, the comparison with a trace."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from meshwright.core.dtypes import bytes_text
from meshwright.core.errors import ConfigError, IntegrityError, MeshwrightError
from meshwright.core.files import inside, read_object, replace_text
from meshwright.distributed.memory.account import MemoryAccount, dims_of_logits
from meshwright.distributed.mesh import get_pp_rank
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import is_rank_zero
from meshwright.planning.memory import MemoryEstimate, MemoryUse
from meshwright.planning.pipeline.orders import schedule_kind
from meshwright.planning.pipeline.schedule import (
    PipelineSchedule,
    actions_in,
    read_schedule,
    simulate,
    spans_of,
    svg_of,
    text_of,
)
from meshwright.training.build import Run
from meshwright.training.memory import MemoryShares, is_out_of_memory, memory_words, out_of_memory, read_memory
from meshwright.training.preference import is_on_pairs

# --- watch the memory of a run's first step, and explain out-of-memory errors


class MemoryWatch:
    """Measures the memory of the first step that this process takes.

    Attributes:
        found: peak bytes by use, after that step.
    """

    def __init__(self, run: Run):
        self.r = run
        self.found: dict[MemoryUse, int] = {}
        self._account: MemoryAccount | None = MemoryAccount(
            run.model.parts, dims_of_logits(run.shape.vocab_size, run.plan.size("tp"))
        )

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Measure the memory of forward and backward.

        Operators inside compiled blocks cannot be observed: in such runs only the states are counted.
        """
        account = self._account
        try:
            with account if account is not None and not self.r.plan.compiled else nullcontext():
                yield
        except Exception as error:
            if account is not None:
                self.found = dict(account.most)
            self._explain(error)
            raise
        if account is not None:
            account.look()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Explain an out-of-memory error of the optimizer step."""
        try:
            yield
        except Exception as error:
            self._explain(error)
            raise

    def end_first_step(self) -> bool:
        """Count the optimizer's state, and measure no more; return whether there was a measurement to end."""
        account, self._account = self._account, None
        if account is None:
            return False
        account.add_optimizer(self.r.optimizer.optimizer)
        self.found = dict(account.most)
        return True

    def first_step_report(self) -> str:
        """Return the report on the first step's memory; empty after the first call."""
        if not self.end_first_step():
            return ""
        seen = " (blocks are compiled: what they keep is not seen)" if self.r.plan.compiled else ""
        reading = read_memory(self.r.model.device)
        estimate = self.r.estimate_memory() if is_rank_zero() else MemoryEstimate((), "the first rank says it")
        by_kind = memory_words(self.found, self.r.plan, memory_shares(self.r), self._of_this_rank(estimate))
        unknown = f"\n  activations and logits were not estimated: {estimate.why_not}" if estimate.why_not else ""
        unknown += "".join(f"\n  plan: {note}" for note in estimate.notes)
        whole, longest = self.r.config.data.seq_len, int(self.r.feed.row_lengths().max())
        if longest < whole:
            unknown += f"\n  plan: at most, with rows of data.seq_len = {whole}; the longest of this step has {longest}"
        of = f"{reading.label} {bytes_text(reading.peak)}"
        return f"memory of the first step on this rank{seen}; {of}: {by_kind}{unknown}"

    def _of_this_rank(self, estimate: MemoryEstimate) -> Mapping[MemoryUse, int]:
        pipeline, mesh = self.r.plan.pipeline, self.r.model.mesh
        return estimate.of(None if pipeline is None or mesh is None else get_pp_rank(mesh)).most

    def _explain(self, error: Exception) -> None:
        if is_out_of_memory(error):
            kept = self._of_this_rank(self.r.estimate_memory())
            raise MeshwrightError(out_of_memory(error, self.found, self.r.plan, memory_shares(self.r), kept)) from error


def memory_shares(run: Run) -> MemoryShares:
    """Return the cut of this rank's part of a step into microbatches."""
    plan, batch = run.plan, run.config.batch
    own = max(1, batch.global_batch // plan.data_ranks)
    together = 2 if is_on_pairs(run.feed) else 1
    suggested = plan.pipeline.rows_per_microbatch(own, together) if plan.pipeline is not None else own
    rows = min(own, batch.microbatch or suggested)
    return MemoryShares(rows, math.ceil(own / rows), together)


# --- draw the work of a pipeline's ranks over time, as scheduled or as measured in the last step

TIMES = "schedule_times.json"
"""File in a run's folder: each pipeline rank's actions in the run's last step, and their times."""
DEEP = 64
"""Assumed blocks per rank if the stages per rank are not given: enough for any schedule."""


def keep_times(model: ParallelModel, folder: Path) -> None:
    """Write the actions and times of the pipeline's last step; nothing without a pipeline. Collective."""
    times = {rank: spans for rank, spans in filter(None, agree.everybody_says(model.action_times())) if spans}
    if times and is_rank_zero():
        ranks = [[[str(action), begin, end] for action, begin, end in times[rank]] for rank in sorted(times)]
        replace_text(
            folder / TIMES,
            json.dumps({"schedule": model.plan.pipeline.schedule if model.plan.pipeline else "", "ranks": ranks}),
        )


def schedule_of(name: str, ranks: int, microbatches: int, per_rank: int | None) -> PipelineSchedule:
    """Find a schedule by name, or in a CSV file, which states ranks and microbatches itself.

    Raises:
        ConfigError: an unknown name, or numbers that the schedule does not support.
    """
    if name.endswith(".csv"):
        return read_schedule(name)
    if ranks < 2 or microbatches < 1:
        raise ConfigError(
            f"--pp = {ranks}, --microbatches = {microbatches}: a pipeline has 2 ranks or more, and a step 1"
            f" microbatch or more"
        )
    kind = schedule_kind(name)
    stages = kind.per_rank(DEEP * ranks, ranks) if per_rank is None else per_rank
    if stages < 1 or (stages != 2 if kind.is_v else stages > 1 and not kind.loops):
        legal = "2" if kind.is_v else "1 or more" if kind.loops else "1"
        raise ConfigError(f"--stages-per-rank = {stages}: {kind.name} has {legal}")
    return kind.build(ranks, microbatches, stages)


def drawn(schedule: PipelineSchedule) -> tuple[str, str]:
    """Draw a schedule as text and SVG; forward, input and weight gradient take the same time, messages none."""
    timeline = simulate(schedule)
    title = (
        f"{schedule.name}, {len(schedule.ranks)} ranks, {schedule.microbatches} microbatches: bubble"
        f" {timeline.bubble:.1%}"
    )
    return text_of(schedule, timeline), svg_of(title, spans_of(schedule, timeline))


def drawn_run(folder: Path) -> tuple[str, str]:
    """Draw a run's last step as text and SVG.

    Raises:
        ConfigError: the run had no pipeline, or has not ended yet.
    """
    file = inside(folder, TIMES)
    if not file.is_file():
        raise ConfigError(f"{folder} holds no {TIMES}: it is written at the end of a run with layout.pp > 1")
    try:
        raw = read_object(file)
        name = str(raw["schedule"])
        ranks = [
            [(actions_in(word)[0], float(begin), float(end)) for word, begin, end in spans] for spans in raw["ranks"]
        ]
        first, last = min(s[1] for spans in ranks for s in spans), max(s[2] for spans in ranks for s in spans)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise IntegrityError(
            f"{file} is damaged: it holds no times of a schedule ({type(error).__name__}: {error})"
        ) from None
    lines = [f"  the last step of {folder}: {name}, {len(ranks)} ranks, {(last - first) * 1e3:.1f} ms"]
    for rank, spans in enumerate(ranks):
        busy = sum(end - begin for _, begin, end in spans)
        by_work: dict[str, list[float]] = {}
        for action, begin, end in spans:
            by_work.setdefault(str(action.work), []).append(end - begin)
        means = ", ".join(f"{work} {sum(times) / len(times) * 1e3:.2f} ms" for work, times in by_work.items())
        lines.append(
            f"  rank {rank:>2}  computed {busy * 1e3:8.1f} ms of it; waited {1 - busy / (last - first):6.1%}  ({means})"
        )
    return "\n".join(lines), svg_of(f"{folder}: {name}, measured", ranks)
