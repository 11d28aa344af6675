"""Meshwright, deliberately broken: each mutant is a fault that has been met in the wild, as a context manager of a
few lines.

The parity tests are only as good as what they catch; test_mutants runs them against this gallery.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from meshwright.core.axes import Axis
from meshwright.distributed import order, parallelize
from meshwright.distributed.data import accumulation, fully_sharded, replicated
from meshwright.distributed.exchange import ProcessGroupRanks
from meshwright.distributed.optimizer import grad_clip
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.process import agree
from meshwright.distributed.step import batch as step_batch
from meshwright.distributed.step import objective, whole_model
from meshwright.distributed.step.whole_model import WholeModel
from meshwright.distributed.weights import constructed
from meshwright.models import decoder


def per_rank_mean():
    """Every rank divides by its own tokens; the mean of the ranks' means is taken."""
    whole = ParallelModel._open_step

    def opened(self, batch):
        found, tokens, _, routed = whole(self, batch)
        return found, tokens, step_batch.count(found) * self.plan.data_ranks, routed

    return patch.object(ParallelModel, "_open_step", opened)


@contextmanager
def mean_of_microbatch_means():
    """Every microbatch divides by its own tokens; accumulation takes the mean of the means."""
    whole_open, whole_sum = ParallelModel._open_step, WholeModel._loss_sum

    def opened(self, batch):
        found, tokens, _, routed = whole_open(self, batch)
        return found, tokens, len(found) * self.plan.data_ranks, routed

    def mean(self, piece):
        return whole_sum(self, piece) / max(step_batch.count([piece]), 1)

    with patch.object(ParallelModel, "_open_step", opened), patch.object(WholeModel, "_loss_sum", mean):
        yield


def same_batch_on_every_rank():
    """All ranks are fed rank 0's rows."""
    whole = ParallelModel.forward_backward
    return patch.object(ParallelModel, "forward_backward", lambda self, batch: whole(self, agree.from_rank_zero(batch)))


def averaged_gradients():
    """Gradients of a loss that is divided by the global token count already are divided by the number of ranks once
    more.
    """
    made = parallelize.make_plan

    def averaging(*args, **kwargs):
        return made(*args, **kwargs, reduction="mean")

    return patch.object(parallelize, "make_plan", averaging)


@contextmanager
def ddp_hook_without_sum():
    """The communication hook hands back what it was given."""

    def alone(group, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    with patch.object(replicated, "_sum", alone), unaudited():
        yield


def divide_factor_on_the_root_only():
    """The sum is switched on for the root; the blocks still average."""
    return patch.object(
        fully_sharded, "sharded_modules", lambda model: [model] if isinstance(model, FSDPModule) else []
    )


@contextmanager
def untied():
    """Tied weights come out of meta as two."""
    with patch.object(constructed, "tie", lambda model, ties: None), unaudited():
        yield


@contextmanager
def frozen_parameter_trained():
    with patch.object(order, "freeze", lambda model, plan: model), unaudited():
        yield


def clipped_by_the_local_norm():
    """Each rank clips by the norm of its own shards."""
    return patch.object(grad_clip, "_summed", lambda value, group: value)


def last_microbatch_unsynced():
    """Gradients never travel."""
    context = accumulation.context
    return patch.object(accumulation, "context", lambda module, plan, is_last: context(module, plan, False))


def synced_gradients_summed_again():
    """With gradients synced at every microbatch, DDP sums what it has summed already."""

    def naive(wrapped, data, is_last):
        return nullcontext() if is_last or data.sync_grad_accum else wrapped.no_sync()

    return patch.object(replicated, "accumulation", naive)


def documents_mixed():
    """The mask of packed documents is dropped: plain causal attention."""
    mask = decoder.document_mask
    return patch.object(decoder, "document_mask", lambda ids, dtype: mask(torch.zeros_like(ids), dtype))


def positions_dropped():
    """Positions count from the start of the row, not from the document's."""
    tables = decoder.rotary_tables

    def from_zero(config, positions, dtype):
        return tables(config, torch.arange(positions.shape[1]).expand_as(positions), dtype)

    return patch.object(decoder, "rotary_tables", from_zero)


@contextmanager
def loss_mask_dropped():
    made = {"labels_of": lambda batch: batch["labels"]}
    with patch.multiple(step_batch, **made), patch.multiple(objective, **made):
        yield


def padding_counted():
    """Tokens without a loss count in the denominator."""
    return patch.object(step_batch, "count", lambda pieces: sum(piece["labels"].numel() for piece in pieces))


def context_not_restored():
    """What a microbatch switches off stays off when it raises."""

    @contextmanager
    def naive(model, sync, is_last):
        modules = fully_sharded.sharded_modules(model)
        if not is_last:
            for module in modules:
                module.set_requires_gradient_sync(False, recurse=False)
        yield
        if not is_last:
            for module in modules:
                module.set_requires_gradient_sync(True, recurse=False)

    return patch.object(fully_sharded, "accumulation", naive)


def stale_after_evaluation():
    """Parameters that were gathered for an evaluation are used again after the optimizer step."""
    return patch.object(fully_sharded, "reshard", lambda model: None)


def stale_after_the_step():
    """What was gathered for the first step is used in all that follow."""
    whole = FSDPParamGroup.wait_for_unshard

    def remembering(self):
        whole(self)
        for parameter in self.fsdp_params:
            gathered = parameter._unsharded_param
            if not hasattr(parameter, "first_gathered"):
                parameter.first_gathered = gathered.detach().clone()
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(gathered):
                gathered.copy_(parameter.first_gathered)

    return patch.object(FSDPParamGroup, "wait_for_unshard", remembering)


def shards_lost_between_microbatches():
    """ZeRO-2: a microbatch's shard of the gradients takes the place of what was there."""
    context = accumulation.context

    def forgetting(module, plan, is_last):
        for group in fully_sharded.parameter_groups(module):
            for parameter in group.fsdp_params:
                parameter.sharded_param.grad = None
        return context(module, plan, is_last)

    return patch.object(accumulation, "context", forgetting)


@contextmanager
def uneven_experts_padded():
    """Stacks are cut at experts also where the shards do not divide them, and padded."""
    with patch.object(fully_sharded, "sharded_dim", lambda shape, shards: 0), unaudited():
        yield


@contextmanager
def skip_not_agreed():
    """Every rank decides by its own loss; what it reports is right."""
    reduced, stepped = ParallelModel._of_all_ranks, ParallelModel.optimizer_step
    own = {}

    def remember(self, value, *counts):
        own["loss"] = value.clone()
        return reduced(self, value, *counts)

    def step(self, *args, **verdict):
        self._last_loss = own["loss"]
        return stepped(self, *args, **verdict)

    with patch.object(ParallelModel, "_of_all_ranks", remember), patch.object(ParallelModel, "optimizer_step", step):
        yield


def never_skips():
    """A non-finite loss is stepped on."""
    return patch("meshwright.distributed.parallel_model.math.isfinite", lambda value: True)


def same_block_on_every_rank():
    """Every rank draws its shard as if it were the first."""
    whole = constructed.pieces
    return patch.object(constructed, "pieces", lambda p: [replace(piece, offset=(0,) * p.dim()) for piece in whole(p)])


def norm_over_all_ranks():
    """The squares of a gradient's norm are summed over the world, not over the ranks that share the parameter out."""
    summed = grad_clip._summed
    return patch.object(grad_clip, "_summed", lambda value, group: summed(value, dist.group.WORLD))


@contextmanager
def tensor_sums_over_all_ranks():
    """What tensor ranks find of a whole parameter's gradient is summed over the data ranks too."""
    summing = whole_model.summing

    def over_the_world(sums, group):
        return summing(sums, ProcessGroupRanks(dist.group.WORLD))

    with patch.object(whole_model, "summing", over_the_world), unaudited():
        yield


def optimizer_state_lost_on_load():
    """A checkpoint's optimizer state is read, and reaches no optimizer."""
    return patch.object(
        importlib.import_module("meshwright.checkpoint.loading"), "put_optimizer_tensors", lambda *args: None
    )


def moments_exchanged_on_load():
    """First moments are loaded as second ones, and those as first."""
    loading = importlib.import_module("meshwright.checkpoint.loading")
    put = loading.put_optimizer_tensors

    def exchanged(model, optimizer, state, path):
        put(model, optimizer, state, path)
        for known in optimizer.state.values():
            if "exp_avg_sq" in known:
                known["exp_avg"], known["exp_avg_sq"] = known["exp_avg_sq"], known["exp_avg"]

    return patch.object(loading, "put_optimizer_tensors", exchanged)


def state_dict_of_the_first_weights():
    """torch's state dict gives the weights that training began with."""
    made = ParallelModel.__init__

    def init(self, *args, **kwargs):
        made(self, *args, **kwargs)
        for part in self.parts:
            first = {id(p): p.detach().clone() for p in part.parameters()}

            def stale(module, state, prefix, metadata, first=first):
                for name, parameter in module.named_parameters():
                    state[prefix + name] = first[id(parameter)]

            part.register_state_dict_post_hook(stale)

    return patch.object(ParallelModel, "__init__", init)


def unaudited() -> AbstractContextManager:
    """The audit sees some mutants before a parity check could: away with it."""
    return patch.object(ParallelModel, "audit", lambda self, optimizer=None: None)


def bf16_reduction():
    """Gradients are summed over ranks in bf16."""
    policy = fully_sharded.policy
    return patch.object(
        fully_sharded, "policy", lambda precision, *unit: policy(replace(precision, reduce="bfloat16"), *unit)
    )


def loss_divided_by_the_ranks_of_a_row():
    """Tokens are counted as if each rank of the context axis had whole rows."""
    whole = ParallelModel._open_step

    def opened(self, batch):
        pieces, tokens, weight, routed = whole(self, batch)
        return pieces, tokens, weight * self.plan.size(Axis.CP), routed

    return patch.object(ParallelModel, "_open_step", opened)


def reduced_in_the_dtype_of_most():
    """A unit of a wider dtype sums its gradients in the dtype of the others."""
    policy = fully_sharded.policy
    return patch.object(fully_sharded, "policy", lambda precision, unit: policy(replace(precision, widens=False), unit))


def reduced_in_the_dtype_of_the_root():
    """All units take the dtype of the first for theirs."""
    apply = fully_sharded.apply

    def applied(model, plan, device_mesh):
        units = tuple(replace(unit, dtype=plan.units[0].dtype) for unit in plan.units)
        return apply(model, replace(plan, units=units), device_mesh)

    return patch.object(fully_sharded, "apply", applied)


def last_blocks_left_to_the_root():
    """A unit of several blocks has all but the last, which the root gathers, and never frees."""
    apply = fully_sharded.apply

    def applied(model, plan, device_mesh):
        units = tuple(replace(unit, blocks=unit.blocks[:-1] or unit.blocks) for unit in plan.units)
        return apply(model, replace(plan, units=units), device_mesh)

    return patch.object(fully_sharded, "apply", applied)


@contextmanager
def frozen_in_the_dtype_of_most():
    """Frozen parameters lose their dtype."""
    whole = order.freeze

    def applied(model, plan):
        made = whole(model, plan)
        for parameter in made.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(getattr(torch, plan.precision.master))
        return made

    with patch.object(order, "freeze", applied), unaudited():
        yield
