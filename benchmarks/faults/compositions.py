"""Compositions with plain torch, for verify's ``parallelize_fn``: sound ones, and each broken in one place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from meshwright import Layout
from meshwright.models.decoder_config import DecoderConfig

MODEL = DecoderConfig(257, 16, 3, n_heads=4, n_kv_heads=2, hidden_dim=12, max_seq_len=24)
TIED = replace(MODEL, tied_embeddings=True)
DDP, FSDP, HSDP, TP = (
    Layout(dp_replicate=2, dp_shard=1),
    Layout(dp_shard=2),
    Layout(dp_replicate=2, dp_shard=2),
    Layout(dp_shard=1, tp=2),
)
FIRST = r"embedding|layers\.0\.attention_norm"

LayOut = Callable[[nn.Module, Any], nn.Module]


# --- sound ways, which the faults change


def ddp(model: Any, mesh: Any) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group("dp_replicate"))


def fsdp(model: Any, mesh: Any, **options: Any) -> nn.Module:
    names = ("dp_replicate", "dp_shard") if mesh["dp_replicate"].size() > 1 else ("dp_shard",)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh[names], **options)
    return fully_shard(model, mesh=mesh[names], **options)


def recomputing_fsdp(model: Any, mesh: Any) -> nn.Module:
    for block in model.layers.values():
        forward = block.forward
        block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
    return fsdp(model, mesh)


def tp(model: Any, mesh: Any, **styles: Any) -> nn.Module:
    plan: dict[str, Any] = {}
    for number in model.layers:
        for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w_gate", "feed_forward.w_up"):
            plan[f"layers.{number}.{name}"] = ColwiseParallel()
        for name in ("attention.wo", "feed_forward.w_down"):
            plan[f"layers.{number}.{name}"] = RowwiseParallel()
    return parallelize_module(model, mesh["tp"], plan | styles)


def fsdp_and_tp(model: Any, mesh: Any) -> nn.Module:
    return fsdp(tp(model, mesh), mesh)


# --- broken ones: replicas


def never_synced(model: Any, mesh: Any) -> nn.Module:
    wrapped = ddp(model, mesh)
    wrapped.require_backward_grad_sync = False
    return wrapped


def divided_twice(model: Any, mesh: Any) -> nn.Module:
    wrapped = ddp(model, mesh)
    whole = mesh.get_group("dp_replicate")

    def hook(_, bucket):  # torch reads annotations, and not as words
        work = dist.all_reduce(bucket.buffer(), group=whole, async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / whole.size() ** 2)

    wrapped.register_comm_hook(None, hook)
    return wrapped


def one_rank_begins_otherwise(model: Any, mesh: Any) -> nn.Module:
    if dist.get_rank():
        with torch.no_grad():
            model.layers["1"].attention.wo.weight.add_(1e-3)
    return DistributedDataParallel(model, process_group=mesh.get_group("dp_replicate"), init_sync=False)


def reduced_in_bfloat16(model: Any, mesh: Any) -> nn.Module:
    wrapped = ddp(model, mesh)
    whole = mesh.get_group("dp_replicate")

    def hook(_, bucket):
        narrow = bucket.buffer().bfloat16()
        work = dist.all_reduce(narrow, group=whole, async_op=True)
        return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0] / whole.size()))

    wrapped.register_comm_hook(None, hook)
    return wrapped


def one_rank_forgets_positions(model: Any, mesh: Any) -> nn.Module:
    if dist.get_rank():
        model.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | {"positions": None}), with_kwargs=True)
    return ddp(model, mesh)


# --- shards


def half_the_gradient(model: Any, mesh: Any) -> nn.Module:
    made = fsdp(model, mesh)
    for module in made.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(4.0)
    return made


def a_block_is_left_out(model: Any, mesh: Any) -> nn.Module:
    return fully_shard(model, mesh=mesh["dp_shard"], ignored_params=set(model.layers["1"].parameters()))


def replicas_are_not_reduced(model: Any, mesh: Any) -> nn.Module:
    for block in model.layers.values():
        fully_shard(block, mesh=mesh["dp_shard"])
    return fully_shard(model, mesh=mesh["dp_shard"])


def untied(model: Any, mesh: Any) -> nn.Module:
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    return fsdp(model, mesh)


def frozen(model: Any, mesh: Any) -> nn.Module:
    model.layers["1"].feed_forward.w_up.weight.requires_grad_(False)
    return fsdp(model, mesh)


def a_norm_in_bfloat16(model: Any, mesh: Any) -> nn.Module:
    norm = model.layers["1"].feed_forward_norm
    forward = norm.forward
    norm.forward = lambda x: forward(x.bfloat16().to(x.dtype))
    return fsdp(model, mesh)


def a_residual_is_detached(model: Any, mesh: Any) -> nn.Module:
    block = model.layers["1"]
    attention, feed_forward = block.attention, block.feed_forward

    def forward(x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x.detach() + attention(block.attention_norm(x), cos, sin, mask)
        return x + feed_forward(block.feed_forward_norm(x))

    block.forward = forward
    return fsdp(model, mesh)


def recomputed_without_documents(model: Any, mesh: Any) -> nn.Module:
    block = model.layers["0"]
    forward, calls = block.forward, [0]

    def changing(x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        calls[0] += 1
        return forward(x, cos, sin, mask if calls[0] % 2 else torch.ones_like(mask).tril())

    block.forward = lambda *args: checkpoint(changing, *args, use_reentrant=False)
    return fsdp(model, mesh)


def stepped_by_a_copy(model: Any, mesh: Any) -> nn.Module:
    """The head computes with weights of before the first step."""
    kept = copy.deepcopy(model.head)
    head = model.head
    head.forward = lambda x: torch.nn.functional.linear(x, kept.weight) + 0 * nn.functional.linear(x, head.weight)
    return ddp(model, mesh)


# --- tensor parallelism


class _Unsummed(RowwiseParallel):
    """What each rank has of the sum is taken for the sum."""

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: Any
    ) -> Tensor:
        return outputs.to_local()


def a_row_is_not_summed(model: Any, mesh: Any) -> nn.Module:
    return tp(model, mesh, **{"layers.1.attention.wo": _Unsummed()})


def heads_are_dealt_the_other_way(model: Any, mesh: Any) -> nn.Module:
    """Keys of the first rank's heads are computed on the second."""
    with torch.no_grad():
        weight = model.layers["1"].attention.wk.weight
        weight.copy_(torch.cat(weight.chunk(2)[::-1]))
    return tp(model, mesh)


def an_input_gradient_is_halved(model: Any, mesh: Any) -> nn.Module:
    made = tp(model, mesh)
    made.layers["1"].feed_forward.w_up.register_forward_pre_hook(lambda _, args: (_Halved.apply(args[0]),))
    return made


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0] * 0.5


def one_rank_drops_a_token(model: Any, mesh: Any) -> nn.Module:
    made = tp(model, mesh)
    if mesh["tp"].get_local_rank():
        made.layers["0"].attention_norm.register_forward_hook(
            lambda *args: args[2] * (torch.arange(args[2].shape[1]) > 0).unsqueeze(-1)
        )
    return made


# --- cases


@dataclass(frozen=True)
class Case:
    """A composition, and what should be said of it.

    Attributes:
        where: a pattern of the place that a person would have named; empty for a sound one.
        packs: rows hold documents, with positions; False: what verify takes by default.
    """

    what: str
    lay_out: LayOut
    layout: Layout
    where: str = ""
    model: Any = MODEL
    packs: bool = False


GRADIENT = "the gradient of the parameter "
BROKEN = [
    Case("DDP never synchronises", never_synced, DDP, GRADIENT),
    Case("DDP's hook divides twice", divided_twice, DDP, GRADIENT),
    Case(
        "one replica begins with another weight",
        one_rank_begins_otherwise,
        DDP,
        r"initial (weight|value of the parameter) layers\.1\.attention\.wo\.weight",
    ),
    Case("gradients are reduced in bfloat16", reduced_in_bfloat16, DDP, GRADIENT),
    Case(
        "one replica forgets positions",
        one_rank_forgets_positions,
        DDP,
        r"output of layers\.0\.attention(\.core)? \(forward\)",
        packs=True,
    ),
    Case("FSDP divides by too many ranks", half_the_gradient, FSDP, GRADIENT),
    Case("FSDP leaves a block out", a_block_is_left_out, FSDP, rf"{GRADIENT}layers\.1\."),
    Case("replicas of shards are not reduced", replicas_are_not_reduced, HSDP, GRADIENT),
    Case("a tied head is untied", untied, FSDP, r"(embedding|head)\.weight", model=TIED),
    Case("a weight is frozen by mistake", frozen, FSDP, r"layers\.1\.feed_forward\.w_up\.weight"),
    Case(
        "a norm computes in bfloat16", a_norm_in_bfloat16, FSDP, r"output of layers\.1\.feed_forward_norm \(forward\)"
    ),
    Case(
        "the gradient of a residual is cut off",
        a_residual_is_detached,
        FSDP,
        r"layers\.0(\.[\w.]+)?'s output \(backward\)",
    ),
    Case(
        "a block is recomputed without documents",
        recomputed_without_documents,
        FSDP,
        r"recomputes of layers\.0",
        packs=True,
    ),
    Case("the head keeps its first weights", stepped_by_a_copy, DDP, r"(head|step 1)"),
    Case(
        "a row-parallel layer is not summed",
        a_row_is_not_summed,
        TP,
        r"output of layers\.1\.attention(\.wo)? \(forward\)",
    ),
    Case(
        "key heads are dealt the other way",
        heads_are_dealt_the_other_way,
        TP,
        r"initial (weight|value of the parameter) layers\.1\.attention\.wk\.weight",
    ),
    Case(
        "half of an input's gradient is lost",
        an_input_gradient_is_halved,
        TP,
        r"layers\.1\.feed_forward_norm's output \(backward\)",
    ),
    Case(
        "one tensor rank drops a token",
        one_rank_drops_a_token,
        TP,
        r"output of layers\.0\.attention(_norm|\.wo)? \(forward\)",
    ),
]
SOUND = [
    Case(
        f"{name}, {'packed' if packs else 'default'} batches{', tied' if model is TIED else ''}",
        made,
        layout,
        model=model,
        packs=packs,
    )
    for name, made, layout in (
        ("DDP", ddp, DDP),
        ("FSDP2", fsdp, FSDP),
        ("FSDP2, recomputing", recomputing_fsdp, FSDP),
        ("HSDP", fsdp, HSDP),
        ("TP", tp, TP),
        ("FSDP2 and TP", fsdp_and_tp, Layout(dp_shard=2, tp=2)),
    )
    for packs in (False, True)
    for model in (MODEL, TIED)
]
CASES = [*BROKEN, *SOUND]
