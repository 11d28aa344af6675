"""A small decoder's step in each layout as torch alone does it, without this library's distributed code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from meshwright.models.decoder import AttentionCore, Decoder, rotary_tables
from meshwright.models.decoder_config import DecoderConfig

Step = Callable[[], float]
Batch = dict[str, Tensor]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, fused=True)


def count_of(labels: Tensor, group: Any = None) -> Tensor:
    count = (labels != -100).sum()
    dist.all_reduce(count, group=group)
    return count


def data(config: DecoderConfig, batch: Batch, max_norm: float, stage: int, per_unit: int = 1) -> Step:
    """``fully_shard`` of ``per_unit`` blocks each, or, in stage 0, DDP."""
    model: Any = Decoder(config)
    if stage:
        shard(model, stage, per_unit)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = optimizer_of(model)

    def step() -> float:
        count = count_of(batch["labels"])
        loss = loss_of(model(batch["tokens"]), batch["labels"]) / count
        (loss if stage else loss * 2).backward()
        loss.item()
        return finish(model, optimizer, max_norm)

    return step


def shard(model: Any, stage: int, per_unit: int) -> None:
    mesh, blocks = init_device_mesh("cpu", (2,)), list(model.layers.values())
    units = [blocks[first : first + per_unit] for first in range(0, len(blocks), per_unit)]
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=stage == 3 and unit is not units[-1])
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def finish(model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> float:
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def tensor(config: DecoderConfig, batch: Batch, max_norm: float, *, sequence: bool) -> Step:
    """``parallelize_module``, and a loss on parts of the vocabulary."""
    model, mesh = Decoder(config), init_device_mesh("cpu", (2,))
    between = Shard(1) if sequence else Replicate()

    def plan_of(columns: list[str], row: str, inputs: int) -> dict[str, Any]:
        rest = (None,) * (inputs - 1)
        whole = PrepareModuleInput(input_layouts=(between, *rest), desired_input_layouts=(Replicate(), *rest))
        return {"": whole} | dict.fromkeys(columns, ColwiseParallel()) | {row: RowwiseParallel(output_layouts=between)}

    top: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, top | ({"norm": SequenceParallel()} if sequence else {}))
    for block in model.layers.values():
        if sequence:
            parallelize_module(
                block, mesh, {"attention_norm": SequenceParallel(), "feed_forward_norm": SequenceParallel()}
            )
        for name, own in (
            ("attention", plan_of(["wq", "wk", "wv"], "wo", 4)),
            ("feed_forward", plan_of(["w_gate", "w_up"], "w_down", 1)),
        ):
            if not sequence:
                del own[""]
            parallelize_module(block.get_submodule(name), mesh, own)
    optimizer = optimizer_of(model)

    def step() -> float:
        with loss_parallel():
            loss = loss_of(model(batch["tokens"]), batch["labels"]) / (batch["labels"] != -100).sum()
            loss.backward()
        kinds = [[p for p in model.parameters() if isinstance(p, DTensor) is kind] for kind in (True, False)]
        norms = [torch.nn.utils.get_total_norm([p.grad for p in kind]) for kind in kinds if kind]
        norm = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
        for kind in kinds:
            torch.nn.utils.clip_grads_with_norm_(kind, max_norm, norm)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        return norm.item()

    return step


class Half(nn.Module):
    """A pipeline's stage, of half of the blocks."""

    def __init__(self, whole: Decoder, stage: int):
        super().__init__()
        blocks, self.config = list(whole.layers.values()), whole.config
        middle = len(blocks) // 2
        self.blocks = nn.ModuleList(blocks[:middle] if stage == 0 else blocks[middle:])
        self.ends = nn.ModuleList([whole.embedding] if stage == 0 else [whole.norm, whole.head])
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.stage else self.ends[0](x)
        cos, sin = rotary_tables(self.config, torch.arange(x.shape[1]).unsqueeze(0), x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin, None)
        return self.ends[1](self.ends[0](x)) if self.stage else x


def pipeline(config: DecoderConfig, batch: Batch, max_norm: float, microbatches: int) -> Step:
    """``Schedule1F1B``."""
    rank = dist.get_rank()
    model = Half(Decoder(config), rank)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    count = (batch["labels"] != -100).sum()
    schedule = Schedule1F1B(stage, microbatches, lambda out, labels: loss_of(out, labels) / count, scale_grads=False)
    optimizer = optimizer_of(model)

    def step() -> float:
        nonlocal count
        count = (batch["labels"] != -100).sum()
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch["tokens"])
        else:
            schedule.step(target=batch["labels"], losses=losses)
        total = torch.stack(losses).sum() if losses else torch.zeros(())
        dist.all_reduce(total)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        square = torch.nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(square)
        norm = square.sqrt()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
        optimizer.step()
        optimizer.zero_grad()
        total.item()
        return norm.item()

    return step


def passed_on(flat: Tensor) -> Callable[[], Tensor]:
    """Begin to trade a tensor with the other rank."""
    rank, room = dist.get_rank(), torch.empty_like(flat)
    operations = [dist.P2POp(dist.isend, flat, 1 - rank), dist.P2POp(dist.irecv, room, 1 - rank)]
    works = dist.batch_isend_irecv(operations)

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return room

    return wait


FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Ring(torch.autograd.Function):
    """Causal attention on two ranks, of which the first has quarters 0 and 3 of each row, and the second 1 and 2."""

    @staticmethod
    def parts(q: Tensor, k: Tensor, v: Tensor, other: list[Tensor]) -> list[tuple[slice, Tensor, Tensor, bool]]:
        """Return (queries, keys, values, is causal) of the calls: own keys in two calls, and the other rank's."""
        half = q.shape[2] // 2
        first, last = slice(0, half), slice(half, None)
        made = [(slice(None), k, v, True)]  # quarter 0, 3 in their own order: each reaches those before
        if dist.get_rank() == 0:
            return [*made, (last, other[0], other[1], False)]
        return [*made, (slice(None), other[0][:, :, first], other[1][:, :, first], False)]

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = torch.stack((k, v))
        wait = passed_on(packed)
        scale = q.shape[-1] ** -0.5
        output, logarithm = FLASH(q, k, v, 0.0, True, scale=scale)
        other = list(wait())
        (_, (at, *keys, _)) = Ring.parts(q, k, v, other)
        more, log = FLASH(q[:, :, at], *keys, 0.0, False, scale=scale)
        total = torch.logaddexp(logarithm[:, :, at], log)
        output[:, :, at].mul_((logarithm[:, :, at] - total).exp_()[..., None])
        output[:, :, at].addcmul_(more, (log - total).exp_()[..., None])
        logarithm[:, :, at] = total
        ctx.save_for_backward(q, k, v, output, logarithm)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        q, k, v, output, logarithm = ctx.saved_tensors
        wait, scale = passed_on(torch.stack((k, v))), q.shape[-1] ** -0.5
        for_q, for_k, for_v = FLASH_BACKWARD(gradient, q, k, v, output, logarithm, 0.0, True, scale=scale)
        other = list(wait())
        (_, (at, *keys, _)) = Ring.parts(q, k, v, other)
        some = (x[:, :, at] for x in (output, logarithm))
        more, *others = FLASH_BACKWARD(gradient[:, :, at], q[:, :, at], *keys, *some, 0.0, False, scale=scale)
        for_q[:, :, at] += more
        travelling = torch.zeros((2, *k.shape), dtype=k.dtype)
        travelling[:, :, :, : keys[0].shape[2]] = torch.stack(others)
        back = passed_on(travelling)()
        return for_q, for_k + back[0], for_v + back[1]


def context(config: DecoderConfig, batch: Batch, max_norm: float, *, recompute: bool, per_unit: int = 1) -> Step:
    """A ring written by hand, under ``fully_shard`` over the same ranks."""
    model: Any = Decoder(config)
    for module in model.modules():
        if isinstance(module, AttentionCore):
            module.forward = lambda q, k, v, mask: Ring.apply(q, k, v)  # type: ignore[method-assign]
    rank = dist.get_rank()
    if recompute:
        for block in model.layers.values():
            forward = block.forward
            block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
    shard(model, 3, per_unit)
    optimizer = optimizer_of(model)
    quarters = torch.arange(batch["tokens"].shape[1]).chunk(4)
    own = torch.cat((quarters[rank], quarters[3 - rank]))

    def step() -> float:
        tokens, labels = batch["tokens"][:, own], batch["labels"][:, own]
        count = count_of(labels)
        loss = loss_of(model(tokens, own.unsqueeze(0)), labels) / count
        loss.backward()
        loss.item()
        return finish(model, optimizer, max_norm)

    return step
