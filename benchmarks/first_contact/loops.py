"""Our step against a bare FSDP2 loop and against the plain module: seconds, kernel time, gaps, launches, memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import SIZES, DecoderConfig

from .child import Outcome
from .machine import machine
from .speed import BF16, MIXED, batch_of

Step = Callable[[], float]


def sizes() -> tuple[DecoderConfig, int, int, int]:
    """Return the model, rows, tokens of a row, and rounds."""
    return (DecoderConfig(97, 32, 2, 4, 2, 48, 64), 4, 16, 3) if machine().is_dry else (SIZES["1B"], 4, 2048, 8)


def plain_module(dtype: torch.dtype) -> nn.Module:
    from meshwright.distributed.weights.weights import materialise

    config = sizes()[0]
    with torch.device("meta"):
        model = Decoder(config)
    model = model.to(dtype)
    ties = {"head.weight": "embedding.weight"} if config.tied_embeddings else {}
    materialise(model, torch.device(machine().device), 0, ties)
    return model


def own_step(model: nn.Module, *, average: bool) -> Step:
    """Return what a careful person writes by hand: a global mean, clipping, fused AdamW."""
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-5, betas=(0.9, 0.95), fused=not machine().is_dry)
    config, rows, seq, _ = sizes()
    batch = batch_of(config, rows, seq, machine().device)

    def step() -> float:
        count = (batch["labels"] != -100).sum()
        if average:
            torch.distributed.all_reduce(count)
        logits = model(batch["tokens"]).flatten(0, 1).float()
        loss = F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100, reduction="sum") / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def bare_fsdp2() -> Step:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from meshwright.distributed.parallelize import single_process_mesh

    mesh = single_process_mesh(machine().device)["dp_shard"]
    model = plain_module(torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = list(model.get_submodule("layers").children())
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=block is not blocks[-1])
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return own_step(model, average=True)


def ours(precision: dict[str, str]) -> Step:
    from meshwright import Layout, parallelize
    from meshwright.training.optimizer import make_optimizer

    config, rows, seq, _ = sizes()
    model = parallelize(config, Layout(), techniques={"precision": precision})
    optimizer = make_optimizer(model.make_parameter_groups(), lr=1e-5).optimizer
    batch = batch_of(config, rows, seq, model.device)

    def step() -> float:
        loss = model.forward_backward(batch)
        model.optimizer_step(optimizer, max_norm=1.0)
        return float(loss)

    return step


PAIRS: dict[str, tuple[Callable[[], Step], Callable[[], Step]]] = {
    "fully_shard": (lambda: ours(MIXED), bare_fsdp2),
    "plain module": (lambda: ours(BF16), lambda: own_step(plain_module(torch.bfloat16), average=False)),
}


def compare(name: str) -> Outcome:
    """Measure our step and another one in rounds that alternate, then profile each."""
    here = machine()
    steps = dict(zip(("ours", "theirs"), (make() for make in PAIRS[name]), strict=True))
    losses = {who: [step() for _ in range(3)] for who, step in steps.items()}
    seconds: dict[str, list[float]] = {who: [] for who in steps}
    for number in range(sizes()[3]):
        for who in ("ours", "theirs") if number % 2 else ("theirs", "ours"):
            here.finish()
            begun = time.perf_counter()
            steps[who]()
            here.finish()
            seconds[who].append(time.perf_counter() - begun)
    figures: dict[str, Any] = {
        "losses": losses,
        "ratio": statistics.median(seconds["ours"]) / statistics.median(seconds["theirs"]),
    }
    for who, step in steps.items():
        figures[who] = {"seconds": statistics.median(seconds[who]), **profiled(step)}
    del steps
    gc.collect()
    apart = max(abs(a - b) / b for a, b in zip(losses["ours"], losses["theirs"], strict=True))
    assert apart < 0.02, f"the two loops train apart: {losses}"
    said = [
        f"{who}: {1e3 * row['seconds']:.1f} ms, {row['launches']} launches, device busy {1e3 * row['busy']:.1f} ms of"
        f" {1e3 * row['span']:.1f} ms"
        for who, row in figures.items()
        if isinstance(row, dict) and "span" in row
    ]
    return figures, [f"ours / theirs: {figures['ratio']:.3f}", *said]


def profiled(step: Step) -> dict[str, Any]:
    """Return the kernels of one step: their number, seconds in which one runs, and from the first to the last."""
    here = machine()
    if here.is_dry:
        from support import pretend_gpu

        begun = time.perf_counter()
        with pretend_gpu.watching() as seen:
            step()
        took = time.perf_counter() - begun
        return {"launches": seen.launches, "busy": took, "span": took, "host reads": len(seen.host_reads)}
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        here.finish()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    )
    return {"launches": len(spans), **covered(spans)}


def covered(spans: list[tuple[float, float]]) -> dict[str, float]:
    """Return seconds that spans (begin and end in µs, sorted) cover together, and from the first to the last."""
    if not spans:
        return {"busy": 0.0, "span": 0.0}
    busy, end = 0.0, spans[0][0]
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return {"busy": busy / 1e6, "span": (end - spans[0][0]) / 1e6}
