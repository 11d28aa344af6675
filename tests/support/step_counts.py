"""Python calls, operators and messages of a small decoder's step, ours and as torch alone does it, by layout."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from meshwright import Layout, parallelize
from meshwright.distributed.process.absent_peers import WireCounter
from meshwright.distributed.setup import init_distributed
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig

from . import bare_steps

BLOCKS, MICROBATCHES, MAX_NORM = 4, 4, 1e-3
TORCH = "2.13"
"""The release that the counts are of."""
CHANCE = 10
"""Calls that come and go with what the process ran before."""
LOOKUPS = {"DTensorSpec.__eq__", "DTensorSpec._check_equals", "DeviceMesh.__eq__"}
"""Not counted: torch's caches; hashes follow addresses, so runs compare different numbers of keys."""
WRAPPERS = "/torch/_dynamo/", "/torch/compiler/"
"""Files whose calls are not counted: optimizers' methods pass through them where something imported the compiler."""


class Counts(NamedTuple):
    """Counts of a step on the rank with most; Python calls are those of 3.11, later ones make fewer."""

    calls: int
    operators: int
    messages: int
    norm: float = 0.0
    """Of the gradients of the fourth step."""


@dataclass(frozen=True)
class Way:
    """A layout of two ranks, laid out by ``parallelize`` and by torch alone.

    Attributes:
        bare: the step of torch alone, of a config, a batch, a norm and ``options``.
        share: most Python calls that ours may make, by those of torch alone.
        ours: what a step may have at most; operators and messages, exactly.
        per_unit: blocks that FSDP gathers together; 0: there is no FSDP.
    """

    layout: dict[str, int]
    bare: Callable[..., Any]
    options: dict[str, Any]
    techniques: dict[str, Any]
    share: float
    ours: Counts
    per_unit: int = 0
    microbatch_rows: int = 0


DDP, TP, PP, CP = ({axis: 2, "dp_shard": 1} for axis in ("dp_replicate", "tp", "pp", "cp"))
RING = {"context_parallel_method": "ring"}
WHOLE = RING | {"activation_checkpointing": "full"}
WAYS = {
    "ddp": Way(DDP, bare_steps.data, {"stage": 0}, {}, 1.0, Counts(965, 991, 4)),
    "zero2": Way({"dp_shard": 2}, bare_steps.data, {"stage": 2}, {"zero_stage": 2}, 1.0, Counts(5039, 1150, 13), 1),
    "zero3": Way({"dp_shard": 2}, bare_steps.data, {"stage": 3}, {"zero_stage": 3}, 1.0, Counts(6068, 1204, 16), 1),
    "zero3, one unit": Way({"dp_shard": 2}, bare_steps.data, {"stage": 3}, {}, 1.0, Counts(3778, 1057, 7), BLOCKS),
    "tp": Way(TP, bare_steps.tensor, {"sequence": False}, {"sequence_parallel": False}, 0.8, Counts(4046, 1073, 23)),
    "tp and sp": Way(TP, bare_steps.tensor, {"sequence": True}, {}, 0.8, Counts(4518, 1396, 50)),
    "pp, 1f1b": Way(
        PP,
        bare_steps.pipeline,
        {"microbatches": MICROBATCHES},
        {"pipeline_schedule": "1f1b"},
        1.1,
        Counts(1853, 1980, 6),
        microbatch_rows=1,
    ),
    "cp": Way(CP, bare_steps.context, {"recompute": False}, RING, 1.1, Counts(5679, 1493, 20), BLOCKS),
    "cp, recomputed": Way(CP, bare_steps.context, {"recompute": True}, WHOLE, 1.1, Counts(11151, 2161, 24), BLOCKS),
}


def counted(name: str, is_ours: bool, blocks: int = BLOCKS) -> Counts:
    """Count a steady step (forward, backward, clipping, update) on this rank."""
    torch.manual_seed(0)
    step = (_ours if is_ours else _bare)(WAYS[name], DecoderConfig(64, 16, blocks, 2, 2, 16, max_seq_len=256))
    step(), step()
    with WireCounter() as wire:
        step()
    gc.collect()  # finalizers make calls
    gc.disable()
    try:
        calls, norm = calls_of(step)
    finally:
        gc.enable()
    return Counts(sum(calls.values()), sum(wire.operations.values()), len(wire.sent), norm)


def largest(ranks: list[Counts]) -> Counts:
    return Counts(*map(max, zip(*ranks, strict=True)))


def calls_of(step: Callable[[], float]) -> tuple[Counter[tuple[Any, Any]], float]:
    """Count a step's calls of Python functions, by the code of the function and of its caller; return its norm too."""
    calls: Counter[tuple[Any, Any]] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_qualname not in LOOKUPS and not any(of in code.co_filename for of in WRAPPERS):
            calls[code, frame.f_back and frame.f_back.f_code] += 1

    sys.setprofile(count)
    try:
        norm = step()
    finally:
        sys.setprofile(None)
    return calls, norm


def _ours(way: Way, config: DecoderConfig) -> Callable[[], float]:
    techniques = way.techniques | {"precision": {"compute": "float32"}}
    techniques |= {"blocks_per_unit": way.per_unit} if way.per_unit else {}
    more: dict[str, Any] = {"techniques": techniques, "microbatch_rows": way.microbatch_rows, "audit": False}
    model = parallelize(Decoder(config), Layout(**way.layout), **more)
    optimizer = torch.optim.AdamW(model.make_parameter_groups(), lr=1e-3, fused=True)
    batch = _batch(model.data_rank)

    def step() -> float:
        loss = model.forward_backward(batch)
        norm = model.optimizer_step(optimizer, max_norm=MAX_NORM).grad_norm
        float(loss)  # as one logs it
        return norm

    return step


def _bare(way: Way, config: DecoderConfig) -> Callable[[], float]:
    init_distributed(Layout(**way.layout), 0)
    torch.manual_seed(0)  # data ranks have streams of their own
    shares_rows = way.layout.keys() & {"tp", "pp", "cp"}
    options = way.options | ({"per_unit": way.per_unit} if way.per_unit else {})
    return way.bare(config, _batch(0 if shares_rows else dist.get_rank()), MAX_NORM, **options)


def _batch(rank: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 64, (MICROBATCHES, 257), generator=torch.Generator().manual_seed(rank))
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
