"""What a step on rows with images holds was estimated, before any process group existed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.pictures import IMAGE, SEQ, batch_of, config_of
from support.unhurried import Unhurried, least_of
from test_memory_estimate import TOGETHER

from meshwright import Layout, parallelize
from meshwright.core.torch_private import fake_mode, with_values
from meshwright.distributed.memory.account import MemoryAccount, dims_of_logits
from meshwright.distributed.memory.dry_run import default_optimizer, estimate_memory
from meshwright.distributed.memory.live import stored
from meshwright.distributed.mesh import data_position, get_pp_rank
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.weights.shards import memory_of
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import CausalLM, as_module
from meshwright.planning.build import plan
from meshwright.planning.memory import MemoryEstimate, plan_memory
from meshwright.planning.plan import Plan
from meshwright.planning.values import Batch

BF16: dict[str, Any] = {"precision": {"compute": "bfloat16"}}
CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "one": (Layout(dp_shard=1), {}),
    "one, bf16": (Layout(dp_shard=1), BF16),
    "sharded": (Layout(dp_shard=2), {}),
    "sharded, tower frozen, full": (
        Layout(dp_shard=2),
        {"freeze": (r"\.vision_tower\.",), "activation_checkpointing": "full"},
    ),
    "tensor": (Layout(dp_shard=1, tp=2), {}),
    "stages": (Layout(dp_shard=1, pp=2), {}),
}


def foreseen(name: str, *, seq_len: int = SEQ, family: str = "llava") -> tuple[Plan, MemoryEstimate]:
    layout, techniques = CASES[name]
    facts = model_facts(as_module(CausalLM(config_of(family))))
    made = plan(facts, layout, techniques=techniques)
    return made, estimate_memory(facts, made, Batch(4 * layout.dp_shard, seq_len, 1))


def states_of(laid: ParallelModel, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of parameters, gradients and optimizer state, numbers of steps left out."""
    tensors = [tensor for p in laid.parameters() for tensor in (p, p.grad) if tensor is not None]
    tensors += [tensor for state in optimizer.state.values() for tensor in state.values() if tensor.ndim]
    return sum(stored(plain for tensor in tensors for plain in memory_of(tensor)).values())


def compared(name: str, images: int) -> tuple[int, int, int, MemoryEstimate, tuple[int, int]]:
    """Bytes found in a third step, the pipeline rank, its data ranks, the estimate, and bytes of states: found before
    the optimizer steps, and by the formula."""
    layout, techniques = CASES[name]
    laid = parallelize(CausalLM(config_of("llava")), layout, techniques=techniques, microbatch_rows=1)
    optimizer = default_optimizer(laid)
    batch = {
        key: value.float() if value.is_floating_point() else value
        for key, value in batch_of("llava", 0, (images,) * 4).items()
    }
    watches = [MemoryAccount(laid.parts, dims_of_logits(128, layout.tp), optimizer=optimizer) for _ in range(2)]
    states = 0
    for _ in range(2):
        laid.forward_backward(batch)
        states = states_of(laid, optimizer)
        laid.optimizer_step(optimizer)
    for watch in watches:
        with Unhurried(), watch:
            laid.forward_backward(batch)
            laid.optimizer_step(optimizer)
    rank = get_pp_rank(laid.mesh) if laid.plan.pipeline is not None else 0
    made, estimate = foreseen(name)
    formula = plan_memory(made, microbatches=4, pipeline_rank=rank).without(estimate.of(rank).idle)
    together = formula.parameters + formula.gradients + formula.optimizer
    return sum(least_of(watches)[1].values()), rank, data_position(laid.mesh)[1], estimate, (states, together)


@pytest.mark.all
@pytest.mark.parametrize("name", CASES)
def test_a_step_with_an_image_in_each_row_holds_what_was_estimated(spmd, name):
    for found, rank, _, estimate, (states, formula) in spmd(CASES[name][0].world, compared, name, 1):
        assert not estimate.why_not, estimate.why_not
        assert formula == pytest.approx(states, rel=0.01)
        assert estimate.of(rank).total == pytest.approx(found, rel=TOGETHER)
        assert 0 < estimate.least[rank] <= estimate.of(rank).total


@pytest.mark.all
def test_rows_without_images_lie_at_the_lower_end(spmd):
    """Packed positions, which an estimate without images counts on, come on top."""
    for found, rank, _, estimate, _ in spmd(2, compared, "sharded", 0):
        assert found <= 1.005 * estimate.least[rank]
        assert estimate.least[rank] < estimate.of(rank).total


def test_images_of_which_nothing_is_known_are_left_out_and_said():
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("the size of one is not known", {"family": "qwen2_5_vl"}),
        ("tokens, and data.seq_len is 4", {"seq_len": 4}),
    )
    for words, options in cases:
        _, estimate = foreseen("sharded", **options)
        assert estimate.ranks and not estimate.least
        assert any("no images" in note and words in note for note in estimate.notes), estimate.notes


def test_known_values_are_kept_where_nothing_else_decides():
    tokens = torch.tensor([3, IMAGE, IMAGE, 5])
    with fake_mode(keeps_known=True):
        known = with_values(tokens)
        assert int((known == IMAGE).sum()) == 2 and len(known[known == IMAGE]) == 2
        unknown = known + torch.randint(0, 5, (4,))
        with pytest.raises(Exception, match="local_scalar"):
            int(unknown.sum())


def test_one_rank_accumulates_microbatches_of_which_none_has_an_image():
    """Mixed precision shards over one rank, where torch accumulates nothing of a block that was never gathered."""
    laid = parallelize(CausalLM(config_of("llava")), techniques=BF16, microbatch_rows=1)
    assert laid.forward_backward(batch_of("llava", 0, (0, 0))).loss > 0
    assert all(not unit.name.startswith("model.vision_tower") for unit in laid.plan.units)
