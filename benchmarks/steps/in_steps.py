"""Find how much longer work and messages take within steps of several ranks than each by itself."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from statistics import median

import torch

from meshwright.core.devices import is_accelerator
from meshwright.distributed.measuring import Effort
from meshwright.distributed.parallelize import parallelize
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import get_world_info
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import as_module
from meshwright.models.decoder_config import DecoderConfig, MoEConfig
from meshwright.planning.build import plan
from meshwright.planning.layout import Layout
from meshwright.planning.plan import Plan
from meshwright.planning.values import Batch

from .around import CLIP, KEYS, WARM
from .forecast import forecast_step
from .operators import StepOfRank
from .profile import ALONE, InSteps, StepProfile
from .record import record_steps

SEQ = 96
SENDS = DecoderConfig(1024, 192, 2, n_heads=4, n_kv_heads=4, hidden_dim=512, max_seq_len=SEQ)
"""A model whose messages, cut over two tensor ranks, outweigh its products."""
MIDDLE = DecoderConfig(2048, 320, 3, n_heads=5, n_kv_heads=5, hidden_dim=896, max_seq_len=SEQ)
"""A model whose products outweigh its messages."""
MIXTURE = replace(SENDS, moe=MoEConfig(n_experts=4, hidden_dim=256))
TRIED = InSteps(1.25, 1.25, 1e-3)
"""The factors and the seconds of which the effects on a forecast are compared."""
ALIKE = 0.1
"""Weight by which the host's factor is drawn to that of its operators, beside errors of steps: few steps tell them
apart."""
ROUNDS = 2


@dataclass(frozen=True)
class _Case:
    """A model on a layout, with rows of each data rank's microbatches."""

    model: DecoderConfig
    layout: Layout
    rows: int
    microbatches: int = 1
    recomputed: str = "none"

    def planned(self) -> tuple[Plan, Batch]:
        """Return the plan and the batch of a step."""
        rows = self.rows * self.microbatches * self.layout.dp_shard
        batch = Batch(rows, self.model.max_seq_len, self.rows)
        techniques = {"precision": {"compute": "float32"}, "activation_checkpointing": self.recomputed}
        return plan(model_facts(as_module(self.model)), self.layout, techniques=techniques, batch=batch), batch


def within_steps(profile: StepProfile, device: torch.device, effort: Effort) -> InSteps:
    """Compare real steps of all ranks with their forecasts, and return what explains them best. Collective.

    Of small models one mostly sends (over two tensor ranks), one mostly computes (sharded over all ranks), one has
    experts and computes its forwards twice, and one is a pipeline. Ranks wake for a message from work, and work finds
    its data pushed out of caches by messages: neither shows where one of them is measured by itself. One rank alone,
    or accelerators, need no comparison.
    """
    rank, _, world = get_world_info()
    if world == 1 or is_accelerator(device):
        return ALONE
    every = Layout(dp_shard=world)
    cases = [_Case(MIDDLE, every, 4), _Case(MIXTURE, every, 2, 2, recomputed="full")]
    if world % 2 == 0:
        cases.append(_Case(SENDS, Layout(dp_shard=world // 2, tp=2), 2))
        cases.append(_Case(SENDS, Layout(pp=2, dp_shard=world // 2), 2, 4))
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
    laid = parallelize(case.model, case.layout, plan=case.planned()[0], microbatch_rows=case.rows)
    optimizer = torch.optim.AdamW(laid.parameters(), lr=1e-3)
    shape = case.rows * case.microbatches, case.model.max_seq_len
    tokens = torch.arange(shape[0] * shape[1]).view(shape) % case.model.vocab_size
    found = []
    for _ in range(WARM + 4 * effort.windows):
        agree.any_rank(False)  # ranks begin together
        began = time.perf_counter()
        laid.forward_backward({"tokens": tokens, "labels": tokens})
        laid.optimizer_step(optimizer, CLIP)
        found.append(time.perf_counter() - began)
    return max(agree.everybody_says(median(found[WARM:])))


def _explained(profile: StepProfile, steps: list[tuple[StepOfRank, ...]], seconds: list[float]) -> InSteps:
    """Return the factors of operators and of the host, and the seconds of a message, with which the relative errors of
    all forecasts are least in the sum of their squares; none helps less than nothing."""

    def foreseen(in_steps: InSteps) -> list[float]:
        known = replace(profile, in_steps=in_steps)
        return [forecast_step(step, known).seconds for step in steps]

    found = ALONE
    for _ in range(ROUNDS):  # what one adds depends on the others, where it is hidden
        here, effects = foreseen(found), []
        for name in ("computing", "host", "message"):
            tried = getattr(TRIED, name) - getattr(ALONE, name)
            there = foreseen(replace(found, **{name: getattr(found, name) + tried}))
            effects.append([(b - a) / tried / second for a, b, second in zip(here, there, seconds, strict=True)])
        known = [found.computing - 1, found.host - 1, found.message]
        missing = [
            1 - a / second + sum(effect[place] * value for effect, value in zip(effects, known, strict=True))
            for place, (a, second) in enumerate(zip(here, seconds, strict=True))
        ]
        computing, host, message = _least_squares(effects, missing)
        found = InSteps(1 + computing, 1 + host, message)
    return found


def _least_squares(effects: list[list[float]], missing: list[float]) -> list[float]:
    """Return the values, none below zero, whose effects add up to what is missing: of all subsets that may differ from
    zero, the best one without negative values."""
    matrix = torch.tensor([*zip(*effects, strict=True), (ALIKE, -ALIKE, 0.0)], dtype=torch.float64)
    wanted = torch.tensor([*missing, 0.0], dtype=torch.float64)
    scale = matrix.abs().amax(0).clamp(min=1e-30)
    best, least = torch.zeros(3, dtype=torch.float64), float(wanted.square().sum())
    for number in range(1, 8):
        columns = [place for place in range(3) if number >> place & 1]
        solved = torch.linalg.pinv(matrix[:, columns] / scale[columns]) @ wanted
        left = float((matrix[:, columns] / scale[columns] @ solved - wanted).square().sum())
        if bool((solved >= 0).all()) and left < least:
            best, least = torch.zeros(3, dtype=torch.float64), left
            best[columns] = solved / scale[columns]
    return best.tolist()
