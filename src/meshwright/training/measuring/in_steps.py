"""Find how much longer work and messages take within steps of several ranks than each by itself."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from statistics import median

import torch

from meshwright.core.devices import is_accelerator
from meshwright.distributed.measuring.clock import Effort
from meshwright.distributed.parallelize import parallelize
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import get_world_info
from meshwright.distributed.recording.steps import record_steps
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import as_module
from meshwright.models.decoder_config import DecoderConfig
from meshwright.planning.build import plan
from meshwright.planning.layout import Layout
from meshwright.planning.plan import Plan
from meshwright.planning.step.operators import StepOfRank
from meshwright.planning.values import Batch
from meshwright.simulation.hardware.profile import ALONE, InSteps, MachineProfile
from meshwright.simulation.operators.forecast import forecast_step

from .around import CLIP, KEYS, WARM

SEQ = 96
SENDS = DecoderConfig(1024, 192, 2, n_heads=4, n_kv_heads=4, hidden_dim=512, max_seq_len=SEQ)
"""A model whose messages, cut over two tensor ranks, outweigh its products."""
MIDDLE = DecoderConfig(2048, 320, 3, n_heads=5, n_kv_heads=5, hidden_dim=896, max_seq_len=SEQ)
"""A model whose products outweigh its messages."""
TRIED = InSteps(1.25, 1e-3)
"""The factor and the seconds of which the effects on a forecast are compared."""


@dataclass(frozen=True)
class _Case:
    """A model on a layout, with rows of each data rank."""

    model: DecoderConfig
    layout: Layout
    rows: int

    def planned(self) -> tuple[Plan, Batch]:
        """Return the plan and the batch of a step."""
        batch = Batch(self.rows * self.layout.dp_shard, self.model.max_seq_len, self.rows)
        facts = model_facts(as_module(self.model))
        return plan(facts, self.layout, techniques={"precision": {"compute": "float32"}}, batch=batch), batch


def within_steps(profile: MachineProfile, device: torch.device, effort: Effort) -> InSteps:
    """Compare two real steps of all ranks with their forecasts, and return what explains both. Collective.

    Of two small models one mostly sends (over two tensor ranks) and one mostly computes (sharded over all ranks). Ranks
    wake for a message from work, and work finds its data pushed out of caches by messages: neither shows where one of
    them is measured by itself. One rank alone, or accelerators, need no comparison.
    """
    rank, _, world = get_world_info()
    if world == 1 or is_accelerator(device):
        return ALONE
    pairs = world // 2 if world % 2 == 0 else 0
    sends = Layout(dp_shard=pairs, tp=2) if pairs else Layout(dp_shard=world)
    cases = _Case(SENDS, sends, 2), _Case(MIDDLE, Layout(dp_shard=world), 4)
    seconds = [_seconds(case, effort) for case in cases]
    found = None
    if rank == 0:
        found = _explained(profile, [_recorded(case) for case in cases], seconds)
    return agree.from_rank_zero(found)


def _recorded(case: _Case) -> tuple[StepOfRank, ...]:
    """Record the steps of a case's ranks, on tensors without memory."""
    return record_steps(model_facts(as_module(case.model)), *case.planned(), max_norm=CLIP, keys=KEYS)


def _seconds(case: _Case, effort: Effort) -> float:
    """Return the seconds of a real step: the median, on the slowest rank. Collective."""
    laid = parallelize(case.model, case.layout, plan=case.planned()[0])
    optimizer = torch.optim.AdamW(laid.parameters(), lr=1e-3)
    length = case.model.max_seq_len
    tokens = torch.arange(case.rows * length).view(case.rows, length) % case.model.vocab_size
    found = []
    for _ in range(WARM + 4 * effort.windows):
        agree.any_rank(False)  # ranks begin together
        began = time.perf_counter()
        laid.forward_backward({"tokens": tokens, "labels": tokens})
        laid.optimizer_step(optimizer, CLIP)
        found.append(time.perf_counter() - began)
    return max(agree.everybody_says(median(found[WARM:])))


def _explained(profile: MachineProfile, steps: list[tuple[StepOfRank, ...]], seconds: list[float]) -> InSteps:
    """Solve for the factor of work and the seconds of a message with which both forecasts are right; none helps less
    than nothing."""

    def foreseen(in_steps: InSteps) -> list[float]:
        known = replace(profile, in_steps=in_steps)
        return [forecast_step(step, known).seconds for step in steps]

    alone = foreseen(ALONE)
    more_work, more_sent = replace(ALONE, computing=TRIED.computing), replace(ALONE, message=TRIED.message)
    work, sent, missing = (
        [there - here for here, there in zip(alone, found, strict=True)]
        for found in (foreseen(more_work), foreseen(more_sent), seconds)
    )
    determinant = work[0] * sent[1] - work[1] * sent[0]
    slower = (missing[0] * sent[1] - missing[1] * sent[0]) / determinant if determinant else 0.0
    later = (work[0] * missing[1] - work[1] * missing[0]) / determinant if determinant else 0.0
    if slower < 0:
        slower, later = 0.0, missing[0] / sent[0]
    elif later < 0:
        slower, later = missing[1] / work[1], 0.0
    return InSteps(1 + max(0.0, slower) * (TRIED.computing - 1), max(0.0, later) * TRIED.message)
