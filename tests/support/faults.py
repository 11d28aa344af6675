"""More faults met in the wild, for verify: in the optimizer, in accumulation, in recomputation, at one rank or one
step only.

Each is a context manager of a few lines, as in support/mutants.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from meshwright.distributed import exchange, setup
from meshwright.distributed.data import accumulation, fully_sharded
from meshwright.distributed.mesh import data_groups
from meshwright.distributed.optimizer.grad_clip import local_gradients
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.process.world import get_world_info
from meshwright.distributed.recompute import recompute
from meshwright.distributed.step import batch as step_batch
from meshwright.models import decoder
from meshwright.verification.laid_out import Ours


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _after_steps(change):
    """``change(model, optimizer, step)`` after each optimizer step, 1 the first."""
    stepped, count = ParallelModel.optimizer_step, 0

    def step(self, optimizer, max_norm=None, **verdict):
        nonlocal count
        result, count = stepped(self, optimizer, max_norm, **verdict), count + 1
        with torch.no_grad():
            change(self, optimizer, count)
        return result

    return patch.object(ParallelModel, "optimizer_step", step)


def _before_steps(change):
    """The same before it."""
    stepped, count = ParallelModel.optimizer_step, 0

    def step(self, optimizer, max_norm=None, **verdict):
        nonlocal count
        count += 1
        change(self, optimizer, count)
        return stepped(self, optimizer, max_norm, **verdict)

    return patch.object(ParallelModel, "optimizer_step", step)


# --- the optimizer step


@contextmanager
def stale_weights_after_a_step():
    """The next step's weights are gathered before the optimizer has changed them, and the step begins with what it
    finds gathered.
    """

    def gather_early(model, optimizer, number):
        if number == 1:
            blocks = fully_sharded.sharded_modules(model.parts[0])[1:]
            optimizer.register_step_pre_hook(lambda *_: [block.unshard() for block in blocks] and None)

    with _before_steps(gather_early), patch.object(fully_sharded, "reshard", lambda model: None):
        yield


def moments_swapped():
    """State was loaded by position, and two parameters of one shape have changed places."""

    def swap(model, optimizer, number):
        if number == 1:
            named = dict(model.named_parameters())
            one, other = (optimizer.state[named[f"layers.1.attention.{name}.weight"]] for name in ("wk", "wv"))
            one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]

    return _after_steps(swap)


def moments_of_the_first_shard():
    """Every rank loads the state of the first rank's shard."""

    def load(model, optimizer, number):
        if number == 1:
            state = optimizer.state[dict(model.named_parameters())["head.weight"]]["exp_avg_sq"]
            whole = state.full_tensor()
            state.to_local().copy_(whole[: len(state.to_local())])

    return _after_steps(load)


def moments_in_bf16():
    """Optimizer state is kept in less than it is computed in."""

    def narrow(model, optimizer, number):
        for state in optimizer.state.values():
            local = _local(state["exp_avg"])
            local.copy_(local.bfloat16())

    return _after_steps(narrow)


def moments_forgotten():
    """Optimizer state is lost between two steps."""
    return _after_steps(lambda model, optimizer, number: optimizer.state.clear())


def weights_in_bf16():
    """No master weights: the optimizer steps on rounded ones."""

    def narrow(model, optimizer, number):
        for parameter in model.parameters():
            _local(parameter).copy_(_local(parameter).bfloat16())

    return _after_steps(narrow)


def decayed_twice_on_one_rank():
    """Rank 1 decays its weights once more."""

    def decay(model, optimizer, number):
        if get_world_info()[0] == 1:
            for parameter in model.parameters():
                _local(parameter).mul_(1 - 1e-3)

    return _after_steps(decay)


def last_rank_does_not_step_at_the_end():
    """The last replica leaves out the last of two updates."""
    kept = {}

    def step_back(model, optimizer, number):
        rank, _, world = get_world_info()
        if rank == world - 1:
            for name, parameter in model.named_parameters():
                if number == 2:
                    parameter.copy_(kept[name])
                kept[name] = parameter.clone()

    return _after_steps(step_back)


def state_of_one_rank_differs_at_the_end():
    """Only the second moments of rank 1 after the last step are wrong: nothing has used them yet."""

    def change(model, optimizer, number):
        if get_world_info()[0] == 1 and number == 2:
            for state in optimizer.state.values():
                _local(state["exp_avg_sq"]).mul_(1.001)

    return _after_steps(change)


def learning_rate_of_one_rank():
    """From the second step on, rank 1 steps with another learning rate."""

    def change(model, optimizer, number):
        if get_world_info()[0] == 1 and number == 2:
            optimizer.param_groups[0]["lr"] *= 1.01

    return _before_steps(change)


def left_out_of_the_optimizer():
    """The optimizer does not hold the last norm."""

    def some(self):
        named = [(name, parameter) for name, parameter in self.parallel.named_parameters() if name != "norm.weight"]
        return self.problem.make_optimizer(named, self.parallel.plan.optimizer.matrices)

    return patch.object(Ours, "optimizer", some)


def gradients_not_cleared():
    """What a step leaves in .grad is added to the next one."""
    return patch.object(torch.optim.AdamW, "zero_grad", lambda self, set_to_none=True: None)


# --- clipping


def replicas_counted_in_the_norm():
    """The squares of all replicas are added up."""

    def over_all(parameters):
        return [part._replace(groups=(*part.groups, *_replicas(part.groups))) for part in local_gradients(parameters)]

    made, known = ParallelModel.__init__, []

    def note(self, *args, **kwargs):
        made(self, *args, **kwargs)
        known[:] = data_groups(self.mesh)

    def _replicas(groups):
        return [group for group in known if group not in groups]

    @contextmanager
    def both():
        with (
            patch.object(ParallelModel, "__init__", note),
            patch("meshwright.distributed.parallel_model.local_gradients", over_all),
        ):
            yield

    return both()


def clipped_twice():
    """The gradients are scaled down once more by the same factor."""
    scale = "meshwright.distributed.parallel_model.scale_gradients"
    return patch(scale, lambda parts, factor: [part.tensor.mul_(factor**2) for part in parts])


# --- accumulation


def first_microbatch_forgotten():
    """Gradients are cleared before the last microbatch instead of before the first."""
    whole = accumulation.context

    def context(module, plan, is_last):
        if is_last:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        return whole(module, plan, is_last)

    return patch.object(accumulation, "context", context)


def replicas_not_summed():
    """HSDP: gradients are summed over shards and never over replicas."""
    whole = fully_sharded.accumulation

    @contextmanager
    def context(model, sync, is_last):
        with whole(model, sync, is_last):
            for module in fully_sharded.sharded_modules(model):
                module.set_requires_all_reduce(False, recurse=False)
            yield

    return patch.object(fully_sharded, "accumulation", context)


def tied_gradient_lost():
    """Of a tied weight, only the embedding's gradient arrives."""
    linear = nn.Linear.forward

    def forward(self, x):
        return nn.functional.linear(x, self.weight.detach()) if self.out_features == 257 else linear(self, x)

    return patch.object(nn.Linear, "forward", forward)


# --- the loss


def loss_mask_shifted():
    """The mask is one token off."""

    def labels_of(batch):
        return batch["labels"].masked_fill(~batch["loss_mask"].roll(1, 1), -100)

    return patch.object(step_batch, "labels_of", labels_of)


def ignored_labels_learnt():
    """A label of -100 (at a document's end, in padding) is taken for token 0."""
    labels_of = step_batch.labels_of
    return patch.object(step_batch, "labels_of", lambda batch: labels_of(batch).clamp(min=0))


def an_empty_microbatch_counts_as_one_token():
    """What keeps a mean from dividing by zero is added up."""
    count = step_batch.count
    return patch.object(step_batch, "count", lambda pieces: sum(max(count([piece]), 1) for piece in pieces))


# --- forward and recomputation


def sequences_gathered_in_another_order():
    """Tensor-parallel ranks put the tokens of a row together as they come in."""
    joined = exchange.joined
    gather = lambda self, x, length: joined(self.gather_features(x).flip(0), length)  # noqa: E731
    return patch.object(exchange.ProcessGroupRanks, "gather", gather)


def rotary_tables_cached():
    """The rotary tables of the first step's positions are kept for all batches of that shape."""
    tables, kept = decoder.rotary_tables, {}

    def cached(config, positions, dtype):
        return kept.setdefault(positions.shape, tables(config, positions, dtype))

    return patch.object(decoder, "rotary_tables", cached)


def recomputed_with_another_mask():
    """What is recomputed sees the tokens of other documents."""

    def computed(forward, x, cos, sin, mask, **options):
        calls = []

        def again(x, cos, sin, mask):
            calls.append(1)
            return forward(x, cos, sin, mask if len(calls) == 1 else torch.ones_like(mask).tril())

        return checkpoint(again, x, cos, sin, mask, **options)

    return patch.object(recompute, "checkpoint", computed)


def gradient_of_an_activation_doubled():
    """A backward of somebody's own returns twice the gradient, in the middle of the model."""
    forward = decoder.FeedForward.forward

    def doubled(self, x):
        x = x.view_as(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: 2 * gradient)
        return forward(self, x)

    return patch.object(decoder.FeedForward, "forward", doubled)


def one_row_of_the_last_rank_attends_everywhere():
    """On the last rank, the last row's documents are mixed."""
    mask = decoder.document_mask

    def mixed(ids, dtype):
        rank, _, world = get_world_info()
        ids = ids.clone()
        ids[-1] *= rank != world - 1
        return mask(ids, dtype)

    return patch.object(decoder, "document_mask", mixed)


# --- random numbers


def ranks_seeded_alike():
    """Every data rank draws the same dropout."""
    return patch.object(setup, "seed_streams", lambda seed, mesh: torch.manual_seed(seed))


def recomputed_with_other_random_numbers():
    """What is recomputed draws its own dropout."""
    return patch.object(recompute, "checkpoint", partial(checkpoint, preserve_rng_state=False))


def seeded_at_every_step():
    """Every step begins with the seed, and so drops the same."""
    whole = ParallelModel.forward_backward

    def seeded(self, batch):
        torch.manual_seed(get_world_info()[0])
        return whole(self, batch)

    return patch.object(ParallelModel, "forward_backward", seeded)
