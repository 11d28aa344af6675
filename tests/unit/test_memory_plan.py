"""What a plan says of memory, by arithmetic: what is cut is divided, the largest stage counts, ZeRO saves what the
paper says.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import ConfigError, Layout, Plan, plan
from meshwright.distributed.memory.dry_run import estimate_memory
from meshwright.introspection.cluster import Cluster
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import as_module
from meshwright.models.decoder_config import DecoderConfig, MoEConfig
from meshwright.planning.explain import table
from meshwright.planning.memory import MemoryUse, plan_memory
from meshwright.planning.values import Batch
from meshwright.simulation.cards import machines
from meshwright.simulation.from_model import job_of_plan
from meshwright.simulation.step_memory import HeldBytes, SavedBytes, step_memory

MODEL = DecoderConfig(256, 64, 4, 4, 2, 128, 64)
FP32 = {"precision": {"compute": "float32"}}


def made(layout: Layout, model: DecoderConfig = MODEL, **techniques) -> Plan:
    return plan(model, layout, cluster=Cluster(layout.world), techniques={**FP32, **techniques})


def size(model: DecoderConfig = MODEL) -> int:
    return sum(p.numel for p in model_facts(as_module(model)).parameters)


@pytest.mark.all
def test_stages_keep_what_the_paper_says():
    """fp32 and AdamW: 16 bytes for each of P elements, of which a stage shards 0, 8 (with the weights at rest 12), 12
    (16) or 16.
    """
    every, ranks = size(), 8
    kept = {}
    for stage in range(4):
        layout = Layout(dp_shard=ranks) if stage else Layout(dp_replicate=ranks, dp_shard=1)
        memory = plan_memory(made(layout, zero_stage=stage), microbatches=4)
        assert memory.parameters + memory.gradients + memory.optimizer == 16 * every // (ranks if stage else 1)
        kept[stage] = memory
    assert kept[1].gathered == kept[2].gathered == 4 * every > kept[3].gathered
    assert kept[1].gradients_at_peak == 4 * every > kept[2].gradients_at_peak
    assert kept[0].kept_between_steps == 4 * every and kept[1].kept_between_steps == 0
    assert kept[0].at_peak > kept[1].at_peak > kept[2].at_peak > kept[3].at_peak


WIDE = DecoderConfig(258, 256, 4, 4, 2, 1024, 64)
ON_FOUR = {
    "ddp": (Layout(dp_replicate=4, dp_shard=1), {}),
    "ZeRO-1": (Layout(dp_shard=4), {"zero_stage": 1}),
    "ZeRO-2": (Layout(dp_shard=4), {"zero_stage": 2}),
    "ZeRO-3": (Layout(dp_shard=4), {}),
    "tp": (Layout(dp_shard=2, tp=2), {}),
    "pp": (Layout(dp_shard=2, pp=2), {}),
}


@pytest.mark.all
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("name", ON_FOUR)
def test_three_ways_to_know_states_agree(name, microbatches):
    """The run's own code on tensors without memory, the formula of a plan, and the forecast from a model's dims."""
    layout, techniques = ON_FOUR[name]
    facts = model_facts(as_module(WIDE))
    batch = Batch(4 * microbatches, 64, 4 // (layout.dp_replicate * layout.dp_shard))
    planned = plan(facts, layout, techniques=techniques, batch=batch)
    formula = plan_memory(planned, microbatches=microbatches)
    run = estimate_memory(facts, planned, batch, keys=("tokens", "labels")).of().most
    assert run[MemoryUse.OPTIMIZER] == pytest.approx(formula.optimizer, rel=1e-3)
    assert run[MemoryUse.GRADIENTS] <= formula.gradients_at_peak + formula.reducing
    block = sum(4 * p.numel for p in facts.of_unit("layers.0"))
    assert (
        formula.parameters + formula.gathered
        <= run[MemoryUse.PARAMETERS] + 1
        <= 1 + formula.parameters + (formula.gathered + block)
    )
    job = job_of_plan(facts, planned, batch, machines("h100", 4, per_node=4))
    forecast = step_memory(job)
    assert forecast.parameters == pytest.approx(formula.parameters, rel=1e-2)
    assert forecast.optimizer == pytest.approx(formula.optimizer, rel=1e-2)
    states = forecast.parameters + forecast.gradients + forecast.optimizer + forecast.gathered
    if microbatches > 1:  # else the forecast's peak is at the loss, before there are gradients
        reduced = HeldBytes.of(job, forecast.rank, SavedBytes(job)).backward
        assert states + reduced == pytest.approx(formula.at_peak, rel=0.1)


def test_optimizers_differ_in_what_they_keep():
    of = {n: plan_memory(made(Layout(dp_shard=2)), state_tensors_per_parameter=n).optimizer for n in range(3)}
    assert of == {0: 0, 1: 2 * size(), 2: 4 * size()}


def test_frozen_parameters_have_neither_gradients_nor_state():
    memory = plan_memory(made(Layout(dp_shard=2), freeze=("layers",)))
    assert memory.parameters == 2 * size() and memory.optimizer == 2 * memory.gradients < memory.parameters


def test_gradients_in_bf16_accumulate_in_the_dtype_of_their_reduction():
    in_half = {"precision": {"compute": "bfloat16"}, "zero_stage": 1}
    one, several = (plan_memory(made(Layout(dp_shard=8), **in_half), microbatches=n) for n in (1, 2))
    assert one.gathered == 2 * size()
    assert several.gradients_at_peak > 4 * size() > one.gradients_at_peak


@pytest.mark.all
def test_the_figures_of_a_pipeline_are_those_of_its_largest_stage():
    uneven = made(Layout(pp=2, dp_shard=2), pipeline_cuts=(3,))
    blocks = [unit.elements for unit in uneven.units if unit.name]
    memory = plan_memory(uneven)
    assert memory.pipeline_rank == 0 and [len(stage) for stage in uneven.stage_units] == [4, 2]
    assert memory.parameters == 4 * (3 * blocks[0] + 256 * 64) // 2
    assert plan_memory(made(Layout(pp=2, dp_shard=2), pipeline_cuts=(1,))).pipeline_rank == 1
    assert Plan.from_json(uneven.to_json()) == uneven


def test_what_is_tied_waits_for_its_other_end():
    tied, untied = (made(Layout(dp_shard=2), replace(MODEL, tied_embeddings=yes)).units[0] for yes in (True, False))
    assert tied.trainable_behind == untied.trainable_behind == 256 * 64 + 64
    assert tied.elements == tied.trainable_behind


def test_other_axes_divide_too():
    whole, cut = (plan_memory(made(Layout(dp_shard=2, tp=tp))).parameters for tp in (1, 2))
    norms = 4 * sum(p.numel for p in model_facts(as_module(MODEL)).parameters if len(p.shape) == 1) // 2
    assert cut - norms == (whole - norms) // 2
    sparse = replace(MODEL, moe=MoEConfig(n_experts=8))
    assert plan_memory(made(Layout(dp_shard=4, ep=2), sparse)).parameters == size(sparse)


def test_offloading_is_said():
    offloaded = made(Layout(dp_shard=2), cpu_offload=True)
    assert plan_memory(offloaded).in_host_memory
    assert "at rest in host memory" in table(offloaded, Batch(8, 8, 2))


@pytest.mark.first
@pytest.mark.parametrize(("state", "of_each"), [("8bit", 1 + 4 / 256), ("4bit", 0.5 + 4 / 128)])
def test_moments_in_few_bits_take_a_byte_or_half_of_one_and_their_scales(state, of_each):
    """Of parameters that are large enough on a rank; others keep 8 bytes an element in fp32."""
    table = 4 * 2 ** int(state[0])
    parameters = model_facts(as_module(MODEL)).parameters
    for ranks in (1, 2, 4):
        sizes = [p.numel // ranks for p in parameters]
        few = [n for n in sizes if n >= 4096]
        bytes_of = plan_memory(made(Layout(dp_shard=ranks), optimizer_state=state)).optimizer
        assert bytes_of == 2 * (sum(few) * of_each + table * len(few)) + 8 * (sum(sizes) - sum(few))
    deep = made(Layout(pp=2, dp_shard=1), optimizer_state=state)
    assert plan_memory(deep).optimizer < plan_memory(made(Layout(dp_shard=1), optimizer_state=state)).optimizer
    another = plan_memory(made(Layout(dp_shard=1), optimizer_state=state), state_tensors_per_parameter=1)
    assert another.optimizer == 4 * size(), "of another optimizer nothing is in few bits"


def test_state_in_host_memory_is_not_counted_on_the_device():
    beside, away = (plan_memory(made(Layout(dp_shard=2), cpu_offload=yes)) for yes in (False, "optimizer"))
    assert away.optimizer == beside.optimizer == away.moving and beside.moving == 0
    assert away.at_rest == beside.at_rest - beside.optimizer
    assert away.at_peak == max(beside.at_peak - beside.optimizer, beside.parameters + beside.gradients + away.moving)
    large = plan_memory(made(Layout(dp_shard=1), replace(MODEL, dim=4096, n_layers=1), cpu_offload="optimizer"))
    assert large.moving == 1 << 27 < large.optimizer, "the state of the largest parameter, 4096 x 4096"


def test_what_a_rank_has_beside_copies_is_kept_whole():
    from meshwright.core.parts import FusedPart, mixes_copies

    assert mixes_copies((FusedPart(64, 4), FusedPart(32, 2)), 4) and not mixes_copies(
        (FusedPart(64, 4), FusedPart(32, 2)), 2
    )
    assert not mixes_copies((FusedPart(32, 2),), 4)


@pytest.mark.parametrize("wrong", [{"microbatches": 0}, {"state_tensors_per_parameter": -1}])
def test_numbers_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigError, match="microbatches = .* start at 1, state_tensors_per_parameter = .* at 0"):
        plan_memory(made(Layout(dp_shard=2)), **wrong)


def test_the_plan_prints_it():
    text = table(made(Layout(dp_shard=4), zero_stage=2), Batch(16, 8, 1))
    assert "memory of each rank without activations (4 microbatches)" in text and "(ZeRO-2)" in text
    assert "ZeRO-2: P + m·P travel per step of m microbatches" in text
    # the head, which is as large as the embedding, has the last norm beside it
    assert "of rank 1 of the pipeline without" in table(made(Layout(pp=2, dp_shard=1)))
