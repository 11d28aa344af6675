"""Watch the memory of a run's first step, and explain out-of-memory errors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

from meshwright.core.errors import MeshwrightError
from meshwright.core.units import bytes_text
from meshwright.distributed.memory.account import MemoryAccount, dims_of_logits
from meshwright.distributed.mesh import get_pp_rank
from meshwright.distributed.process.world import is_rank_zero
from meshwright.planning.memory.step import MemoryEstimate, MemoryUse
from meshwright.training.build import Run
from meshwright.training.metrics.memory import read_memory
from meshwright.training.metrics.memory_table import MemoryShares, is_out_of_memory, memory_table, out_of_memory
from meshwright.training.preference import is_on_pairs


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
        table = memory_table(self.found, self.r.plan, memory_shares(self.r), self._of_this_rank(estimate))
        unknown = f"\n  activations and logits were not estimated: {estimate.why_not}" if estimate.why_not else ""
        unknown += "".join(f"\n  plan: {note}" for note in estimate.notes)
        whole, longest = self.r.config.data.seq_len, int(self.r.feed.row_lengths().max())
        if longest < whole:
            unknown += f"\n  plan: at most, with rows of data.seq_len = {whole}; the longest of this step has {longest}"
        return (
            f"memory of the first step on this rank{seen}; {reading.label} {bytes_text(reading.peak)}\n{table}{unknown}"
        )

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
    return MemoryShares(rows, math.ceil(own / rows))
