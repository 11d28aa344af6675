"""An optimizer that is one row trains as one process does on every layout that the rules allow, and continues from a
checkpoint.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.ranks import ranks
from support.states import DEEP, LAYOUTS, train

from meshwright import Layout, ParallelModel, parallelize
from meshwright.checkpoint import load, save
from meshwright.distributed.parallelizer import to_cpu
from meshwright.planning.optimizer import KINDS
from meshwright.training.optimizer import BuiltOptimizer, make_optimizer
from meshwright.verification.problem import RandomBatches
from meshwright.verification.verify import verify

pytestmark = pytest.mark.all

BATCHES = RandomBatches(256, rows=8, seq_len=8)
REPLICAS, STAGES, BOTH = (
    Layout(dp_replicate=2, dp_shard=1),
    Layout(pp=2, dp_shard=1),
    Layout(dp_replicate=2, pp=2, dp_shard=1),
)
SHARDS = Layout(dp_shard=2)


@pytest.mark.parametrize("layout", [REPLICAS, STAGES], ids=str)
def test_adafactor_is_equal_where_parameters_are_whole(pool, layout):
    report = verify(DEEP, layout, BATCHES, steps=2, pool=pool, techniques={"optimizer": "adafactor"})
    assert report, report
    seen = {d.name.partition(" ")[0] for c in report.comparisons for d in c.differences if d.stage == "optimizer"}
    assert {"row_var", "col_var", "variance"} <= seen, seen


@pytest.mark.parametrize("layout", [SHARDS, BOTH], ids=str)
def test_sgd_is_equal_where_it_is_asked_for(pool, layout):
    assert verify(DEEP, layout, BATCHES, steps=2, pool=pool, dtypes=("float64",), techniques={"optimizer": "sgd"})


@pytest.mark.first("muon-FSDP2")
@pytest.mark.parametrize("place", ["DDP", "FSDP2", "FSDP2 + TP", "PP, tied", "EP"])
@pytest.mark.parametrize("word", ["adafactor", "adam", "lion", "muon", "schedule_free_adamw"])
def test_a_word_is_equal_on_every_cut(pool, word, place):
    _, layout, model = LAYOUTS[place]
    report = verify(model, layout, BATCHES, steps=2, pool=pool, dtypes=("float64",), techniques={"optimizer": word})
    assert report, report
    seen = {d.name.partition(" ")[0] for c in report.comparisons for d in c.differences if d.stage == "optimizer"}
    assert {tensor.name for tensor in KINDS[word].state} <= seen, seen


def _optimizer_of(model: ParallelModel) -> BuiltOptimizer:
    groups, named = model.make_parameter_groups(), model.named_parameters()
    return make_optimizer(groups, lr=1e-2, plan=model.plan.optimizer, named_parameters=named)


@pytest.mark.first("adafactor-dp_shard=2")
@pytest.mark.parametrize("layout", [SHARDS, Layout(dp_shard=2, tp=2)], ids=str)
@pytest.mark.parametrize("word", KINDS)
@ranks(lambda layout: layout.world)
def test_the_kernel_that_is_chosen_steps_sharded_parameters(layout, word):
    fused = "fused" in KINDS[word].kernels
    model = parallelize(DEEP, layout, techniques={"optimizer": word}, seed=3)
    built = _optimizer_of(model)
    train(model, built.optimizer, range(1))
    assert (built.implementation == "fused") == fused


@pytest.mark.parametrize("layout", [REPLICAS, STAGES], ids=str)
@ranks(lambda layout: layout.world)
def test_what_is_shaped_like_a_row_of_the_parameter_is_saved_and_continued(tmp_path, layout):
    folder = str(tmp_path / "at")

    def made():
        model = parallelize(DEEP, layout, techniques={"optimizer": "adafactor"}, seed=3)
        optimizer = _optimizer_of(model).optimizer
        return model, optimizer

    model, optimizer = made()
    begun = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, optimizer, range(1))
    save(model, folder, optimizer=optimizer)
    train(model, optimizer, range(1, 3))
    again, other = made()
    load(again, folder, optimizer=other)
    train(again, other, range(1, 3))
    whole = dict(model.named_parameters())
    apart = max(float((p.detach() - whole[name].detach()).abs().max()) for name, p in again.named_parameters())
    moved = max(float((p.detach() - begun[name]).abs().max()) for name, p in model.named_parameters())
    assert moved > 1e-3 and apart == 0.0 and sum(len(state) for state in other.state.values()) > 20


WHOLE = {"precision": dict.fromkeys(("master", "compute", "reduce"), "float64")}
CUTS = Layout(dp_shard=4), Layout(dp_shard=2, tp=2), Layout(pp=2, dp_shard=2)


def _second_step(layout: Layout, folder: str, word: str, *, first: bool) -> dict[str, torch.Tensor]:
    """Parameters behind the second step, the first of which another run may have taken on another layout."""
    model = parallelize(DEEP, layout, techniques={"optimizer": word, **WHOLE}, seed=3 if first else 4)
    optimizer = _optimizer_of(model).optimizer
    if first:
        train(model, optimizer, range(1))
        save(model, folder, optimizer=optimizer)
    else:
        load(model, folder, optimizer=optimizer)
    train(model, optimizer, range(1, 2))
    return {name: to_cpu(parameter.detach()) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("word", ["adafactor", "adam", "lion", "muon", "schedule_free_adamw", "sgd"])
def test_a_run_goes_on_with_another_layout(spmd, tmp_path, word):
    folder = str(tmp_path / "at")
    (undisturbed, *_), *others = (
        spmd(4, partial(_second_step, first=place == 0), layout, folder, word) for place, layout in enumerate(CUTS)
    )
    for runs in others:
        seen = {name: tensor for rank in runs for name, tensor in rank.items()}
        assert seen.keys() == undisturbed.keys()
        for name, tensor in seen.items():
            torch.testing.assert_close(tensor, undisturbed[name], rtol=1e-10, atol=1e-12)
