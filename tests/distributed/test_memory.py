"""What a rank holds is what the plan said: parameters, gathered ones, gradients and optimizer state, at rest and at
peak.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import chain
from typing import Any

import pytest
import torch
from support.laid_out import own_rows
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright import Layout
from meshwright.core.dtypes import bytes_text
from meshwright.distributed.data import fully_sharded
from meshwright.distributed.memory.live import stored as storages_of
from meshwright.distributed.memory.live import tensors_in
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.parallelize import parallelize
from meshwright.models.decoder_config import DecoderConfig, MoEConfig
from meshwright.planning.memory import plan_memory
from meshwright.verification.problem import RandomBatches

pytestmark = pytest.mark.all

MODEL = DecoderConfig(256, 64, 4, 4, 2, 128, 64)
SPARSE = DecoderConfig(256, 64, 3, 4, 2, 128, 64, moe=MoEConfig(n_experts=8))
FSDP4, DDP4, HSDP = Layout(dp_shard=4), Layout(dp_replicate=4, dp_shard=1), Layout(dp_replicate=2, dp_shard=2)
PIPELINE = Layout(pp=2, dp_shard=2)
BF16 = {"precision": {"master": "float32", "compute": "bfloat16", "reduce": "float32"}}
FLOAT8 = {"float8": "tensorwise", "float8_all_gather": True}


def stored(*tensors: Any) -> int:
    """Bytes of the storages that tensors lie in, each counted once."""
    return sum(storages_of(tensors_in(tensors)).values())


@dataclass
class Held:
    parameters: int = 0
    gathered: int = 0
    gradients: int = 0
    gradients_at_peak: int = 0
    reducing: int = 0
    optimizer: int = 0


class Watching(TorchDispatchMode):
    """Looks at what is held before every operation, and keeps the most."""

    def __init__(self, model: ParallelModel, buckets: list[Any]):
        super().__init__()
        self.model, self.most, self.buckets = model, Held(), buckets
        self.groups = [group for part in model.parts for group in fully_sharded.parameter_groups(part)]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.look()
        return func(*args, **(kwargs or {}))

    def look(self) -> None:
        self.most.gathered = max(self.most.gathered, sum(gathered(group) for group in self.groups))
        self.most.gradients_at_peak = max(self.most.gradients_at_peak, self.gradients())
        reducing = {
            id(g.comm_ctx): [s.reduce_scatter_input for s in g.comm_ctx.reduce_scatter_states]
            for g in self.groups
            if began(g)
        }
        self.most.reducing = max(self.most.reducing, max((stored(*inputs) for inputs in reducing.values()), default=0))

    def gradients(self) -> int:
        if not self.groups:
            return stored(*self.buckets, *(parameter.grad for parameter in self.model.parameters()))
        found: list[Any] = [group._partial_reduce_output for group in self.groups]
        for parameter in chain.from_iterable(group.fsdp_params for group in self.groups):
            whole = getattr(parameter, "_unsharded_param", None)
            found += [
                parameter.unsharded_accumulated_grad,
                None if whole is None else whole.grad,
                parameter.sharded_param.grad,
            ]
        return stored(*found)


def began(group: Any) -> bool:
    return hasattr(group.comm_ctx, "reduce_scatter_states")


def gathered(group: Any) -> int:
    """Bytes of a group's parameters that are gathered, or on their way."""
    if group.is_unsharded:
        return stored(*(tensor for parameter in group.fsdp_params for tensor in parameter.all_gather_outputs))
    return stored(group._all_gather_result.all_gather_output) if group._all_gather_result is not None else 0


def held_and_planned(
    model: DecoderConfig, layout: Layout, techniques: dict[str, Any], microbatches: int
) -> tuple[Held, Held]:
    rows = RandomBatches(256, rows=12 * layout.dp_replicate * layout.dp_shard, seq_len=8)
    laid = parallelize(model, layout, techniques=techniques, seed=3, microbatch_rows=12 // microbatches)
    optimizer = torch.optim.AdamW(laid.parameters(), lr=1e-3)
    buckets: list[Any] = []  # DDP settles them in its first two steps, and keeps them
    for step in range(3):
        with Watching(laid, buckets) as watching:
            laid.forward_backward(own_rows(laid, rows(step)))
        buckets = [p.grad for p in laid.parameters()] if laid.plan.data.technique == "ddp" else []
        found = watching.most
        found.gradients = watching.gradients()
        laid.optimizer_step(optimizer)
    found.parameters = stored(*laid.parameters())
    found.optimizer = stored(*(value for state in optimizer.state.values() for value in state.values()))
    planned = plan_memory(laid.plan, microbatches=microbatches)
    return found, Held(**{key: value for key, value in asdict(planned).items() if key in asdict(found)})


CASES = {
    **{f"ZeRO-{stage}": (MODEL, FSDP4 if stage else DDP4, {"zero_stage": stage}) for stage in range(4)},
    "auto": (MODEL, FSDP4, {}),
    "kept until backward": (MODEL, FSDP4, {"reshard_after_forward": False}),
    "DDP, synced": (MODEL, DDP4, {"sync_grad_accum": True}),
    "ZeRO-1, bf16": (MODEL, FSDP4, {"zero_stage": 1, **BF16}),
    "ZeRO-2, bf16": (MODEL, FSDP4, {"zero_stage": 2, **BF16}),
    "ZeRO-2, hybrid": (MODEL, HSDP, {"zero_stage": 2}),
    "ZeRO-3, tensor": (MODEL, Layout(dp_shard=2, tp=2), {"zero_stage": 3}),
    "ZeRO-2, whole sequences": (MODEL, Layout(dp_shard=2, tp=2), {"zero_stage": 2, "sequence_parallel": False}),
    "ZeRO-2, experts": (SPARSE, Layout(dp_shard=4, ep=2), {"zero_stage": 2}),
    "ZeRO-3, offloaded": (MODEL, FSDP4, {"zero_stage": 3, "cpu_offload": True}),
    "ZeRO-3, start frozen": (MODEL, FSDP4, {"zero_stage": 3, "freeze": ("embedding", r"layers\.[01]")}),
}
if find_spec("torchao") is not None:
    CASES |= {
        "gathered in float8": (MODEL, FSDP4, BF16 | FLOAT8),
        "gathered in float8, kept": (MODEL, FSDP4, BF16 | FLOAT8 | {"reshard_after_forward": False}),
    }


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_plan_estimates_what_is_held(spmd, measured, name, microbatches):
    for found, planned in spmd(4, held_and_planned, *CASES[name], microbatches):
        assert_within(found, planned)
    ratios = {key: planned_bytes / max(asdict(found)[key], 1) for key, planned_bytes in asdict(planned).items()}
    measured(f"{name}, {microbatches}", "bytes, planned of held", ratios)


def assert_within(found: Held, planned: Held) -> None:
    said = {key: (bytes_text(value), bytes_text(asdict(planned)[key])) for key, value in asdict(found).items()}
    for key, value in asdict(found).items():
        estimated = asdict(planned)[key]
        assert value <= 1.01 * estimated and estimated <= 1.01 * value, (key, said)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_plan_estimates_what_a_pipeline_holds(spmd, stage):
    jobs = spmd(4, held_and_planned, MODEL, PIPELINE, {"zero_stage": stage}, 4)
    most = Held(**{key: max(getattr(found, key) for found, _ in jobs) for key in asdict(jobs[0][0])})
    assert_within(most, jobs[0][1])
