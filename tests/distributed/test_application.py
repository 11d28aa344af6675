"""What is applied is what was planned: unequal ranks, second and misordered applications are refused, and every field
of a plan acts.
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from support import foreign
from support.oracle import relative_errors
from support.problems import DDP2, FSDP2, HSDP, Problem, Way, share
from support.ranks import ranks, refusal
from support.train import gradients, lay_out, local

from meshwright import ConfigError, IntegrityError, Layout, parallelize, plan
from meshwright.distributed import apply_ac, apply_fsdp2, init_distributed
from meshwright.distributed.process.absent_peers import WireCounter
from meshwright.distributed.process.world import get_world_info
from meshwright.distributed.weights import constructed

EVERY_KIND = pytest.mark.parametrize("layout", [DDP2, FSDP2, HSDP], ids=["ddp2", "fsdp2", "hsdp2x2"])


@pytest.mark.parametrize("buffers_only", [False, True])
@EVERY_KIND
@ranks(lambda layout: layout.world)
def test_ranks_that_bring_different_weights_are_refused(layout, buffers_only):
    model = foreign.on_cpu()
    rank = get_world_info()[0]
    with torch.no_grad():
        (model.waves.table if buffers_only else model.out.bias)[0] += rank * 1e-3
    text = refusal(lambda: parallelize(model, layout), IntegrityError)
    assert f"{'waves.table' if buffers_only else 'out.bias'} differs between ranks" in text
    assert "build the model on meta, or seed every rank alike" in text
    assert "embed.weight" not in text


@pytest.mark.parametrize("layout", [DDP2, HSDP], ids=["ddp2", "hsdp2x2"])
@ranks(lambda layout: layout.world)
def test_the_audit_sees_one_bit_of_drift_between_replicas(layout):
    """A replica that changes on one rank after all was well."""
    model = lay_out(Problem(), Way(layout))
    if get_world_info()[0] == layout.world - 1:
        with torch.no_grad():
            local(model.parts[0].norm.weight)[0] += 1e-9
    text = refusal(lambda: model.audit(), IntegrityError)
    assert "norm.weight differs between ranks" in text


@ranks(2)
def test_the_audit_can_be_skipped_and_knows_buffers():
    draw, said = constructed.draw_rows, []

    def drifting(local, *args):
        draw(local, *args)
        local.add_(get_world_info()[0])

    with patch.object(constructed, "draw_rows", drifting):
        for audit in (True, False):
            try:
                lay_out(Problem(), Way(DDP2), audit=audit)
                said.append("")
            except IntegrityError as error:
                said.append(str(error))
    model = parallelize(foreign.on_meta, DDP2, audit=False)
    del model.parts[0].waves._buffers["table"]
    with pytest.raises(IntegrityError) as caught:
        model.audit()
    with_audit, without, gone = (*said, str(caught.value))
    assert "differs between ranks" in with_audit and without == "" and "the buffer waves.table is gone" in gone


def told(layout: Layout, techniques: tuple) -> tuple[str, list[str]]:
    """What a model says of itself; and what its audit says of plans that it does not follow."""
    model = lay_out(Problem(freeze=("wq",)), Way(layout, techniques))
    said, heard = str(model), []
    first = model.plan.parameters[0]
    for lie in (
        replace(first, placements=tuple((axis, "Shard(1)") for axis, _ in first.placements)),
        replace(first, dtype="float32"),
    ):
        model.plan = replace(model.plan, parameters=(lie, *model.plan.parameters[1:]))
        with pytest.raises(IntegrityError) as caught:
            model.audit()
        heard.append(str(caught.value))
    return said, heard


@pytest.mark.first("fsdp2")
@EVERY_KIND
def test_a_model_says_what_is_and_the_audit_compares_it_with_the_plan(spmd, layout):
    shards = layout.dp_shard
    for said, heard in spmd(layout.world, told, layout, (("activation_checkpointing", "full"),)):
        rows = {line.split("  ")[1]: line for line in said.splitlines() if line.startswith("  layers")}
        place = {1: "dp_replicate: Replicate()", 2: "dp_shard: Shard(0)"}[shards]
        wq = rows["layers.*.attention.wq.weight (frozen)"]
        assert place in wq and "10×10" in wq and "float64" in wq and " 3 " in wq
        assert f"{3 * 100 * 8 // shards / 1024:.2f} KiB" in wq, "three matrices of 10 × 10 in fp64, shared out"
        assert "recomputed: layers.* (3)" in said and ("sharded units: the root (1), layers.* (3)" in said) == (
            shards > 1
        )
        assert "embedding.weight is placed" in heard[0] and "and the plan says" in heard[0] and "Shard(1)" in heard[0]
        assert "embedding.weight is kept in float64, and the plan says float32" in heard[1]


@ranks(2)
def test_the_audit_sees_an_optimizer_that_holds_other_parameters():
    model = lay_out(Problem(freeze=("wq",)), Way(FSDP2))
    every, trained = list(model.parameters()), [p for p in model.parameters() if p.requires_grad]
    model.audit(torch.optim.SGD(trained, lr=1.0))
    heard = []
    for wrong in (every, trained[1:], [*trained, torch.nn.Parameter(torch.zeros(1))]):
        with pytest.raises(IntegrityError) as caught:
            model.audit(torch.optim.SGD(wrong, lr=1.0))
        heard.append(str(caught.value))
    frozen, missing, foreign_one = heard
    assert "layers.0.attention.wq.weight is frozen, and the optimizer holds it" in frozen
    assert "embedding.weight is trained, and the optimizer holds it 0 times" in missing
    assert (
        "holds 1 tensors that are no parameters of the model (was it made before the model was laid out?)"
        in foreign_one
    )


@pytest.mark.parametrize(("layout", "technique"), [(DDP2, "ddp"), (FSDP2, "fully_shard")])
@ranks(2)
def test_a_second_application_and_a_misordered_one_are_refused(layout, technique):
    model = foreign.on_cpu()
    laid_out = parallelize(model, layout)
    told = []
    for again in (model, laid_out.module):
        for attempt in (lambda m: parallelize(m, layout), lambda m: apply_ac(m, "full")):
            with pytest.raises(ConfigError) as caught:
                attempt(again)
            told.append(str(caught.value))
    assert [technique in text and "already" in text for text in told] == [True] * 4
    assert "apply it once" in told[0]
    assert "must come before" in told[1]


@ranks(2)
def test_sharding_twice_is_refused():
    mesh = init_distributed(FSDP2)
    model = apply_fsdp2(apply_ac(foreign.on_cpu(), "full"), mesh)
    text = refusal(lambda: apply_fsdp2(model, mesh), ConfigError)
    assert "fully_shard is on this" in text


@ranks(2)
def test_a_plan_for_another_mesh_is_refused():
    text = refusal(
        lambda: parallelize(Problem().model, init_distributed(FSDP2), plan=plan(Problem().model, DDP2)), ConfigError
    )
    assert "the plan is for the mesh {'dp_replicate': 2}, but the mesh here is {'dp_shard': 2}" in text


# --- the plan is what is applied


def applied(edits: dict, layout: Layout):
    """What a model does whose plan was edited: all-gathers and forwards of each block in a step, gradients, trained
    parameters.
    """
    problem = Problem(dtype="float32")
    made = plan(problem.model, layout)
    data = edits.pop("data", {})
    units = tuple(replace(unit, **edits.get("units", {})) if unit.name else unit for unit in made.units)
    made = replace(made, data=replace(made.data, **data), **{**edits, "units": units})
    model = parallelize(problem.model, layout, plan=made, seed=11)
    runs = dict.fromkeys(model.facts.blocks, 0)
    for name in runs:
        model.parts[0].get_submodule(name).attention.register_forward_hook(
            lambda *_, name=name: runs.update({name: runs[name] + 1})
        )
    with WireCounter() as wire:
        model.forward_backward(share(problem.data.step(0), *get_world_info()[::2]))
    gathers = sum(sent.op == "all_gather" for sent in wire.sent)
    return gathers, runs, gradients(model), {name for name, p in model.named_parameters() if not p.requires_grad}


@pytest.mark.all
def test_editing_one_field_of_a_plan_changes_the_applied_model(spmd):
    gathers, runs, whole_gradients, frozen = spmd(2, applied, {}, FSDP2)[0]
    assert (gathers, set(runs.values()), frozen) == (4 + 2, {1}, set())

    assert spmd(2, applied, {"units": {"reshard_after_forward": False}}, FSDP2)[0][0] == 4

    runs = spmd(2, applied, {"checkpointed": ("layers.1",)}, FSDP2)[0][1]
    assert runs == {"layers.0": 1, "layers.1": 2, "layers.2": 1}

    halves = spmd(2, applied, {"data": {"reduction": "mean"}}, FSDP2)[0][2]
    assert max(relative_errors(halves, {name: g / 2 for name, g in whole_gradients.items()}).values()) == 0
    halves = spmd(2, applied, {"data": {"reduction": "mean"}}, DDP2)[0][2]
    assert max(relative_errors(halves, {name: g / 2 for name, g in whole_gradients.items()}).values()) < 1e-6

    frozen = spmd(2, applied, {"frozen": ("norm.weight",)}, FSDP2)[0][3]
    assert frozen == {"norm.weight"}
