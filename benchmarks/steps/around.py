"""Measure what a step costs the host beside its operators: modules, hooks, autograd, the library itself."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from meshwright.core.devices import finish_stream, is_accelerator
from meshwright.distributed.measuring import COLLECTIVES, Effort, seconds_of
from meshwright.distributed.parallelize import parallelize
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import as_module
from meshwright.models.decoder_config import DecoderConfig
from meshwright.planning.build import plan
from meshwright.planning.layout import Layout
from meshwright.planning.plan import Plan
from meshwright.planning.values import Batch
from meshwright.training.rehearsal import alone_as

from .operators import Event, MessageBegin, OperatorWork, Phase
from .pricing import DETACH, OperatorPrices, is_detached
from .profile import StepProfile
from .record import record_steps

SEQ, ROWS = 32, 2
TINY = DecoderConfig(1024, 64, 2, n_heads=4, n_kv_heads=2, hidden_dim=192, max_seq_len=SEQ)
"""A model whose operators take little time beside the host's, and whose weights are in no fast cache in their turn."""
KEYS = ("tokens", "labels")
WARM, LEAST = 3, 1e-9
CLIP = 1e-6


def host_around(profile: StepProfile, device: torch.device, effort: Effort) -> dict[str, float]:
    """Return the seconds of the host beside those of operators and messages themselves.

    Of a tiny model, steps are timed, and priced by the profile; what is missing is spread over what caused it:
    "forward" and "backward" around an operator of a model, "detach" around each tensor that a checkpointed block gives
    its backward, "step" around an operator of the optimizer; then, without the other ranks, of a layout cut over two
    tensor ranks "message" around each message, and of one that is sharded over two "fsdp" around each of FSDP's copies.
    "dtensor" is an operator on a DTensor beyond that on its local tensor.
    """
    run = _Tiny(device, effort)
    host = _of_one_rank(run, profile)
    host["dtensor"], silent = run.dtensor_and_message()
    for name, layout in (("message", Layout(dp_shard=1, tp=2)), ("fsdp", Layout(dp_shard=2))):
        events = run.recorded(layout)
        messages = sum(isinstance(event, MessageBegin) and len(event.ranks) > 1 for event in events)
        number = messages if name == "message" else sum(_is_of_fsdp(event) for event in events)
        known = _priced(profile, host, events) + messages * (silent + host.get("message", 0.0))
        host[name] = max(LEAST, (sum(run.seconds(layout)) - known) / number)
    return host


def _of_one_rank(run: _Tiny, profile: StepProfile) -> dict[str, float]:
    """Return "forward", "backward" and "detach", with which steps with and without recomputation are both right, and
    "step"."""
    nothing = dict.fromkeys((*(phase.value for phase in Phase), DETACH), 0.0)
    around, detaches, missing = [], [], []
    step = LEAST
    for mode in ("none", "full"):
        layout = Layout(dp_shard=1)
        works = [event for event in run.recorded(layout, mode) if isinstance(event, OperatorWork)]
        last = max(place for place, work in enumerate(works) if work.phase is not Phase.STEP) + 1
        computing, stepping = run.seconds(layout, mode)
        around.append(sum(work.tensors for work in works[:last]))
        detaches.append(sum(is_detached(work) for work in works[:last]))
        missing.append(computing - _priced(profile, nothing, works[:last]))
        if mode == "none":
            left = stepping - _priced(profile, nothing, works[last:])
            step = max(LEAST, left / sum(work.tensors for work in works[last:]))
    determinant = around[0] * detaches[1] - around[1] * detaches[0]
    each = (missing[0] * detaches[1] - missing[1] * detaches[0]) / determinant
    detach = (around[0] * missing[1] - around[1] * missing[0]) / determinant
    each = max(LEAST, each if detach > 0 else missing[0] / around[0])
    return {Phase.FORWARD.value: each, Phase.BACKWARD.value: each, Phase.STEP.value: step, DETACH: max(LEAST, detach)}


def _is_of_fsdp(event: Event) -> bool:
    return isinstance(event, OperatorWork) and event.name.startswith("fsdp.")


def _priced(profile: StepProfile, host: Mapping[str, float], events: Sequence[Event]) -> float:
    """Return the seconds of operators by a profile with these seconds of the host."""
    prices = OperatorPrices(replace(profile, host={**profile.host, **host}))
    return sum(prices.price(event).seconds for event in events if isinstance(event, OperatorWork))


class _Tiny:
    """Steps of a tiny model on this rank, with peers that are absent."""

    def __init__(self, device: torch.device, effort: Effort):
        self.device, self.effort = device, effort
        self.facts = model_facts(as_module(TINY))
        is_alone = is_accelerator(device) or torch.get_num_threads() > 1
        self.now = time.perf_counter if is_alone else time.thread_time

    def _plan(self, layout: Layout, recomputed: str) -> tuple[Plan, Batch]:
        batch = Batch(ROWS * layout.dp_shard, SEQ, ROWS)
        techniques = {"precision": {"compute": "float32"}, "activation_checkpointing": recomputed}
        return plan(self.facts, layout, techniques=techniques, batch=batch), batch

    def recorded(self, layout: Layout, recomputed: str = "none") -> tuple[Event, ...]:
        return record_steps(self.facts, *self._plan(layout, recomputed), max_norm=CLIP, keys=KEYS)[0].events

    def seconds(self, layout: Layout, recomputed: str = "none") -> tuple[float, float]:
        """Return the seconds of forward and backward, and those of the optimizer's step: medians."""
        computing, stepping = [], []
        with alone_as(0, layout.world):
            laid = parallelize(TINY, layout, plan=self._plan(layout, recomputed)[0])
            optimizer = torch.optim.AdamW(laid.parameters(), lr=1e-3)
            tokens = torch.arange(ROWS * SEQ).view(ROWS, SEQ)
            for _ in range(WARM + 4 * self.effort.windows):
                began = self.now()
                laid.forward_backward({"tokens": tokens, "labels": tokens})
                finish_stream(self.device)
                between = self.now()
                laid.optimizer_step(optimizer, CLIP)
                finish_stream(self.device)
                computing.append(between - began)
                stepping.append(self.now() - between)
        return median(computing[WARM:]), median(stepping[WARM:])

    def dtensor_and_message(self) -> tuple[float, float]:
        """Return what a DTensor's operator costs more, and a message to which nobody answers."""
        with alone_as(0, 2):
            return silent_seconds(self.device, self.effort)


def silent_seconds(device: torch.device, effort: Effort) -> tuple[float, float]:
    """Return what an operator on a DTensor costs beyond a plain one, and a message of a rank whose peers are absent."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    local = torch.zeros(8, device=device)
    sharded = DTensor.from_local(local, mesh, [Shard(0)])
    extra = seconds_of(lambda: sharded.mul_(1.0), device, effort) - seconds_of(lambda: local.mul_(1.0), device, effort)
    silent = COLLECTIVES["all_gather"](torch.zeros(16, device=device), dist.group.WORLD, 2)  # type: ignore[arg-type]
    return max(1e-9, extra), seconds_of(silent, device, effort)
