"""Measure what a step costs the host beside its operators: modules, hooks, autograd, the library itself."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median

import torch

from meshwright.core.devices import finish_stream, is_accelerator
from meshwright.distributed.measuring.clock import Effort
from meshwright.distributed.parallelize import parallelize
from meshwright.distributed.recording.steps import record_steps
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import as_module
from meshwright.models.decoder_config import DecoderConfig
from meshwright.planning.build import plan
from meshwright.planning.layout import Layout
from meshwright.planning.step.operators import OperatorWork, Phase
from meshwright.planning.values import Batch
from meshwright.simulation.hardware.measured import ProfileCurves
from meshwright.simulation.hardware.profile import MachineProfile
from meshwright.simulation.operators.pricing import OperatorPrices
from meshwright.training.rehearsal.one_rank import alone_as

SEQ, ROWS = 32, 2
TINY = DecoderConfig(1024, 64, 4, n_heads=4, n_kv_heads=2, hidden_dim=192, max_seq_len=SEQ)
"""A model whose operators take little time beside the host's, and whose weights are in no cache when their turn comes."""
KEYS = ("tokens", "labels")
WARM, LEAST = 3, 1e-9
CLIP = 1e-6


def host_around(profile: MachineProfile, device: torch.device, effort: Effort) -> dict[str, float]:
    """Return the seconds of the host around an operator of forward and backward, and of the optimizer's step.

    A tiny model's step is timed, and priced by the profile without them; what is missing is spread over the operators.
    """
    facts = model_facts(as_module(TINY))
    batch = Batch(ROWS, SEQ, ROWS)
    planned = plan(facts, Layout(dp_shard=1), techniques={}, batch=batch)
    (step,) = record_steps(facts, planned, batch, max_norm=CLIP, keys=KEYS)
    prices = OperatorPrices(ProfileCurves(replace(profile, host={**profile.host, **dict.fromkeys(Phase, 0.0)})))
    works = [event for event in step.events if isinstance(event, OperatorWork)]
    last = max(place for place, work in enumerate(works) if work.phase is not Phase.STEP)
    found = {}
    for phases, part, seconds in zip(
        ((Phase.FORWARD, Phase.BACKWARD), (Phase.STEP,)),
        (works[: last + 1], works[last + 1 :]),
        _seconds_of_step(device, effort),
        strict=True,
    ):
        missing = seconds - sum(prices.price(work).seconds for work in part)
        number = sum(work.tensors for work in part)
        found.update(dict.fromkeys((phase.value for phase in phases), max(LEAST, missing / number)))
    return found


def _seconds_of_step(device: torch.device, effort: Effort) -> tuple[float, float]:
    """Return the seconds of forward and backward, and those of the optimizer's step; low ones of several."""
    now = time.perf_counter if is_accelerator(device) or torch.get_num_threads() > 1 else time.thread_time
    computing, stepping = [], []
    with alone_as(0, 1):
        laid = parallelize(TINY, None)
        optimizer = torch.optim.AdamW(laid.parameters(), lr=1e-3)
        tokens = torch.arange(ROWS * SEQ).view(ROWS, SEQ)
        for _ in range(WARM + 5 * effort.windows):
            began = now()
            laid.forward_backward({"tokens": tokens, "labels": tokens})
            finish_stream(device)
            between = now()
            laid.optimizer_step(optimizer, CLIP)
            finish_stream(device)
            computing.append(between - began)
            stepping.append(now() - between)
    return median(computing[WARM:]), median(stepping[WARM:])
