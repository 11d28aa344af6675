"""Parameters of several dtypes: kept on every layout that can, converted where the user asked, else refused.

Layouts beside techniques are in the array (tests/ways.txt, ``dtypes=two``); here are models, and what each asks alone.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from support.adapters import adapted
from support.families import config_of, on_cpu
from support.laid_out import assert_estimated, counted, estimated
from support.muon import MATRICES, PlainMuon, optimizer_of
from support.several_dtypes import IN_HALF, REFUSED, VARIANTS, Behind, InFront, made
from support.users import VOCABULARY
from test_memory import Held, Watching, assert_within, stored
from torch.distributed.tensor import DTensor

from meshwright import Layout, UnsupportedError, load, parallelize, plan, save
from meshwright.core.names import is_within
from meshwright.distributed.mesh import data_position
from meshwright.distributed.process.absent_peers import WireCounter
from meshwright.planning import build, data
from meshwright.planning.data import Holding
from meshwright.planning.memory import plan_memory
from meshwright.planning.values import Batch

SHARDED = {"dp_shard": 2}
HYBRID = {"dp_replicate": 2, "dp_shard": 2}
COMPILED = {"compile": True, "compile_backend": "aot_eager"}
LAYOUTS = {
    "one process": (1, {"dp_shard": 1}, {}),
    "ddp": (2, {"dp_replicate": 2, "dp_shard": 1}, {}),
    "sharded": (2, SHARDED, {}),
    "sharded, one rank": (1, {"dp_shard": 1}, {"data_parallel": "fully_shard"}),
    "compiled": (2, SHARDED, COMPILED),
}
CUT = ({"tp": 2, "dp_shard": 1}, {"cp": 2, "dp_shard": 1})
PIPELINE = {"pp": 2, "dp_shard": 1}
LR, STEPS, ROWS, SEQ = 0.1, 2, 8, 6


TIGHT, LOOSE, BY_MUON = 1e-5, 0.05, 1e-3


def batch(number=0):
    tokens = (torch.arange(ROWS * SEQ).view(ROWS, SEQ) * (number + 3)) % VOCABULARY
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def by_sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)


def alone(variant, half=False, to=None, make=by_sgd):
    """Losses of some steps of one process in plain torch, its first gradients and last weights."""
    model, losses, gradients = made(variant, half).to(to), [], {}
    optimizer = make(model)
    for number in range(STEPS):
        given = batch(number)
        loss = F.cross_entropy(model(given["tokens"]).float().flatten(0, 1), given["labels"].flatten())
        loss.backward()
        gradients = gradients or {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients, {n: p.detach() for n, p in model.named_parameters()}


def steps(variant, sizes, techniques, half=False, make=by_sgd):
    """The same laid out; and what the plan estimates to be sent in a step, with what is sent in the third."""
    torch._dynamo.reset()  # earlier jobs of this worker count towards the limit of recompilations
    model = parallelize(made(variant, half), Layout(**sizes), techniques=techniques, audit=True)
    optimizer = make(model)
    rank, ranks = data_position(model.mesh)
    losses, gradients = [], {}
    for number in range(STEPS):
        mine = {key: value.chunk(ranks)[rank] for key, value in batch(number).items()}
        losses.append(float(model.forward_backward(mine).loss))
        found = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        gradients = gradients or {name: gradient.clone() for name, gradient in found.items()}
        model.optimizer_step(optimizer)
        optimizer.zero_grad()
    weights = {name: whole(p).detach().clone() for name, p in model.named_parameters()}
    with WireCounter() as wire:
        model.forward_backward(mine)
        model.optimizer_step(optimizer, max_norm=1.0)
    foreseen = estimated(model.plan, Batch(ROWS, SEQ, ROWS // ranks))
    return losses, gradients, weights, foreseen, counted(wire)


def assert_equal(expected, found, error, *, is_part=False):
    (losses, gradients, weights), (other_losses, other_gradients, other_weights, foreseen, sent) = expected, found
    if is_part:
        gradients, weights = (
            {n: found[n] for n in own} for found, own in ((gradients, other_gradients), (weights, other_weights))
        )
    assert other_losses == pytest.approx(losses, rel=error)
    assert list(gradients) == list(other_gradients) and list(weights) == list(other_weights)
    largest = max(float(gradient.double().norm()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert gradient.dtype == other_gradients[name].dtype, name
        apart = (gradient.double() - other_gradients[name].double()).norm()
        assert apart <= error * gradient.double().norm() + 1e-3 * error * largest, name
    for name, weight in weights.items():
        assert weight.dtype == other_weights[name].dtype, name
        assert (weight.double() - other_weights[name].double()).norm() <= error * weight.double().norm(), name
    if not is_part:  # a pipeline's figures are those of the rank that sends most
        assert_estimated(foreseen, sent)


def compared(spmd, variant, world, sizes, techniques, half=False, to=None):
    expected = alone(variant, half, to)
    for found in spmd(world, steps, variant, sizes, techniques, half):
        assert_equal(expected, found, LOOSE if half else TIGHT, is_part=sizes.get("pp", 1) > 1)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != REFUSED])
@pytest.mark.parametrize("layout", ["one process", "ddp", "sharded"])
def test_each_parameter_keeps_its_own(layout, variant, spmd):
    compared(spmd, variant, *LAYOUTS[layout])


@pytest.mark.parametrize("variant", ["wide norms and gates", "narrow base frozen", "a weight that is read elsewhere"])
@pytest.mark.parametrize("layout", ["sharded, one rank", "compiled"])
def test_units_inside_others(layout, variant, spmd):
    compared(spmd, variant, *LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["ddp", "sharded"])
@pytest.mark.parametrize("variant", IN_HALF)
def test_in_half_precision_beside_float32(layout, variant, spmd):
    compared(spmd, variant, *LAYOUTS[layout], half=True)


@pytest.mark.parametrize("variant", ["narrow base frozen", "a block's own", "narrow embedding frozen"])
def test_between_stages_blocks_of_several_dtypes_give_one(variant, spmd):
    compared(spmd, variant, 2, PIPELINE, {})


def test_matrices_of_one_dtype_are_stepped_by_muon_beside_norms_of_another(spmd):
    losses, gradients, weights = alone("wide norms", make=lambda model: PlainMuon(model, (*MATRICES, "gate")))
    for found in spmd(2, steps, "wide norms", SHARDED, {"optimizer": "muon"}, False, optimizer_of):
        assert_equal((losses, gradients, weights), found, BY_MUON)


def test_matrices_of_two_dtypes_are_refused_for_muon():
    words = (
        r"the optimizer muon computes on parts of several matrices together, and those that it trains rest in float32"
        r" and float64\. Set techniques.precision.master = float64, or choose the optimizer adamw"
    )
    with pytest.raises(UnsupportedError, match=words):
        plan(made("wide norms and gates"), Layout(dp_shard=2), techniques={"optimizer": "muon"})


# --- the units of a plan


def test_units_have_the_modules_of_another_dtype():
    made_of = {
        "wide norms and gates": {"", "norm", "layers.0", "layers.0.norm", "layers.0.gate"},
        "a weight that is read elsewhere": {"", "norm", "layers.0"} | {f"layers.0.attention.w{n}" for n in "qkvo"},
        "narrow base frozen": {"", "norm", "layers.0"},
        "two dtypes trained in a module": {"", "norm", "layers.0", "layers.0.norm", "layers.0.gate"},
    }
    for variant, expected in made_of.items():
        kept = plan(
            made(variant), Layout(dp_shard=2), techniques={"freeze": ["gate.weight"]} if variant == REFUSED else {}
        )
        assert {unit.name for unit in kept.units if not unit.name.startswith("layers.1")} == expected, variant


def faults_of_units(variant):
    """Differences between the units of a plan and the parameters that each of them has."""
    model, found = made(variant), []
    units = {unit.name: unit for unit in plan(model, Layout(dp_shard=2)).units}
    own = {name: [] for name in units}
    for name, parameter in model.named_parameters():
        own[max((unit for unit in units if is_within(name, unit)), key=len)].append(parameter)
    for name, unit in units.items():
        trained = {str(p.dtype).removeprefix("torch.") for p in own[name] if p.requires_grad}
        found += [f"{name or 'root'} is {unit.dtype}"] if trained - {unit.dtype} else []
        held = sum(p.numel() * p.itemsize for p in own[name])
        found += [f"{name or 'root'}: {unit.bytes_at_rest} bytes, not {held}"] if unit.bytes_at_rest != held else []
    return found


EVEN = [name for name in VARIANTS if name.startswith("even")]


@pytest.mark.parametrize("variant", EVEN)
def test_a_unit_has_one_trained_dtype_and_the_bytes_of_its_parameters(variant):
    assert not faults_of_units(variant)


def first_dtype_for_all():
    """A unit takes the dtype of its first parameter, trained or not."""
    unit = Holding.unit
    return patch.object(
        Holding, "unit", lambda self, name, own, *rest: replace(unit(self, name, own, *rest), dtype=own[0].dtype)
    )


def frozen_in_the_dtype_of_most():
    """Frozen parameters count as if they were in the dtype of most."""

    def at_rest(facts, precision):
        frozen = [p if p.trainable else replace(p, dtype=precision.master) for p in facts.parameters]
        return replace(facts, parameters=tuple(frozen))

    return patch.object(build, "at_rest", at_rest)


def one_unit_for_a_block():
    """All of a block is one unit, whatever its dtypes."""
    return patch.object(data, "apart", lambda facts, unit, holding: [(unit, list(facts.of_unit(unit)))])


@pytest.mark.kills("dtypes", "mutant")
@pytest.mark.parametrize("mutant", [first_dtype_for_all, frozen_in_the_dtype_of_most, one_unit_for_a_block])
def test_a_unit_of_another_dtype_is_seen(mutant):
    with mutant():
        assert any(map(faults_of_units, EVEN))


# --- peft: adapters in float32 beside a frozen base in bfloat16


TARGETS = {"llama": "all-linear", "mixtral": ["q_proj", "v_proj"]}


def with_adapters(frozen_in=torch.bfloat16, family="llama"):
    model = adapted(family, TARGETS[family])
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.to(frozen_in)
    return model


def llama_in_bf16():
    sizes = {"hidden_size": 64, "intermediate_size": 128}  # as blocks of 4 bits take them
    return on_cpu(config_of("llama", use_cache=False, **sizes)).to(torch.bfloat16)


def adapters_alone(frozen_in=torch.bfloat16, family="llama"):
    """First gradients in one process in plain torch and peft."""
    model, given = with_adapters(frozen_in, family), batch()
    loss = F.cross_entropy(model(given["tokens"]).logits.float().flatten(0, 1), given["labels"].flatten())
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def adapters_laid_out(sizes, techniques, family="llama"):
    model = parallelize(with_adapters(family=family), Layout(**sizes), techniques=techniques, audit=True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    rank, ranks = data_position(model.mesh)
    mine = {key: value.chunk(ranks)[rank] for key, value in batch().items()}
    loss = model.forward_backward(mine).loss
    gradients = {n: whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
    model.optimizer_step(optimizer)
    with WireCounter() as wire:
        model.forward_backward(mine)
        model.optimizer_step(optimizer, max_norm=1.0)
    dtypes = {n: p.dtype for n, p in model.named_parameters()}
    return loss.item(), gradients, dtypes, estimated(model.plan, Batch(ROWS, SEQ, ROWS // ranks)), counted(wire)


ADAPTED = {
    "sharded": (2, SHARDED, {}),
    "hybrid, ZeRO-2": (4, HYBRID, {"zero_stage": 2}),
    "recomputed": (2, SHARDED, {"activation_checkpointing": "full"}),
    "tp": (2, {"tp": 2, "dp_shard": 1}, {}),
    "tp × dp": (4, {"tp": 2, "dp_shard": 2}, {}),
    "pp × dp": (4, {"pp": 2, "dp_shard": 2}, {}),
    "cp": (2, {"cp": 2, "dp_shard": 1}, {}),
    "ep": (2, {"dp_shard": 2, "ep": 2}, {}, "mixtral"),
    "tp × ep": (2, {"tp": 2, "dp_shard": 1, "ep": 2}, {}, "mixtral"),
}


@pytest.mark.parametrize("layout", ADAPTED)
def test_adapters_in_float32_beside_a_base_in_bfloat16(layout, spmd):
    world, sizes, techniques, *family = ADAPTED[layout]
    loss, expected = adapters_alone(torch.bfloat16, *family)
    _, exact = adapters_alone(torch.float32, *family)
    for other, gradients, dtypes, foreseen, sent in spmd(world, adapters_laid_out, sizes, techniques, *family):
        assert other == pytest.approx(loss, rel=LOOSE)
        assert gradients and all((dtype == torch.float32) == ("lora_" in name) for name, dtype in dtypes.items())
        for name, gradient in gradients.items():
            bound = 2 * (expected[name] - exact[name]).norm() + 1e-3 * exact[name].norm()
            assert gradient.dtype == torch.float32 and (gradient - expected[name]).norm() <= bound, name
        if "ep" in sizes:  # how many tokens travel to experts is the routers' affair
            assert foreseen.pop(("all_to_all", 2))[0] == sent.pop(("all_to_all", 2))[0]
        if "pp" not in sizes:
            assert_estimated(foreseen, sent)


def test_adapters_are_converted_where_the_user_asks(spmd):
    loss, expected = adapters_alone(torch.float32)
    for other, gradients, dtypes, *_ in spmd(2, adapters_laid_out, SHARDED, {"precision": {"master": "float32"}}):
        assert set(dtypes.values()) == {torch.float32} and other == pytest.approx(loss, rel=0.01)
        for name, gradient in gradients.items():
            assert (gradient - expected[name]).norm() <= LOOSE * expected[name].norm(), name


def own_adapters(sizes, techniques, folder):
    model = parallelize(llama_in_bf16, Layout(**sizes), techniques={"adapters": {"rank": 4}} | techniques, audit=True)
    rank, ranks = data_position(model.mesh)
    mine = {key: value.chunk(ranks)[rank] for key, value in batch().items()}
    loss = model.forward_backward(mine).loss
    gradients = {n: whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
    model.optimizer_step(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0))
    with WireCounter() as wire:
        model.forward_backward(mine)
    save(model, folder, only_trained=True)
    load(model, folder)
    dtypes = {n: p.dtype for n, p in model.named_parameters()}
    gathers = [
        figures[("all_gather", 2)]
        for figures in (estimated(model.plan, Batch(ROWS, SEQ, ROWS // ranks)), counted(wire))
        if ranks > 1
    ]
    return loss.item(), gradients, dtypes, gathers


@pytest.mark.parametrize("techniques", [{}, {"quantize_frozen": "nf4"}], ids=str)
def test_requested_adapters_keep_their_dtype_beside_a_module_in_bfloat16(techniques, spmd, tmp_path):
    ((loss, expected, own, _),) = spmd(1, own_adapters, {"dp_shard": 1}, techniques, str(tmp_path / "one"))
    for other, gradients, dtypes, gathers in spmd(2, own_adapters, SHARDED, techniques, str(tmp_path / "two")):
        assert other == pytest.approx(loss, rel=0.01) and dtypes == own and gathers[0] == gathers[1]
        assert all((dtype == torch.float32) == ("lora_" in name) for name, dtype in dtypes.items())
        for name, gradient in gradients.items():
            assert (gradient - expected[name]).norm() <= LOOSE * expected[name].norm() + 1e-8, name


# --- what is refused, and the advice


@pytest.mark.parametrize("half", [False, True])
def test_two_dtypes_trained_in_one_module_are_refused_and_the_advice_works(half, spmd):
    wide = "float32" if half else "float64"
    words = (
        rf"parameters 'layers.0.gate.bias' \({wide}\) and 'layers.0.gate.weight' \(\w+\) are trained in one module,"
        rf" layers.0.gate, .* Set techniques.precision.master = {wide}"
    )
    with pytest.raises(UnsupportedError, match=words):
        plan(made(REFUSED, half), Layout(dp_shard=2))
    compared(spmd, REFUSED, *LAYOUTS["ddp"], half)
    compared(spmd, REFUSED, 2, SHARDED, {"precision": {"master": wide}}, half, to=getattr(torch, wide))


@pytest.mark.parametrize("sizes", CUT, ids=str)
@pytest.mark.parametrize("kind", [InFront, Behind])
def test_a_layout_that_needs_one_names_parameter_dtypes_and_setting(kind, sizes):
    words = r"'temperature' is float64, and most elements of \w+ are float32 .* techniques.precision.master = float64"
    with pytest.raises(UnsupportedError, match=words):
        plan(made(kind), Layout(**sizes))


@pytest.mark.parametrize("sizes", [*CUT, PIPELINE], ids=str)
def test_where_activations_travel_the_advice_works(sizes, spmd):
    compared(spmd, "wide norms and gates", 2, sizes, {"precision": {"master": "float64"}}, to=torch.float64)


# --- memory


def held_and_planned(variant, sizes, techniques, half, microbatches):
    own = ROWS // sizes.get("dp_replicate", 1) // sizes["dp_shard"]
    model = parallelize(
        made(variant, half), Layout(**sizes), techniques=techniques, microbatch_rows=own // microbatches
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    rank, ranks = data_position(model.mesh)
    for number in range(2):
        with Watching(model, []) as watching:
            model.forward_backward({key: value.chunk(ranks)[rank] for key, value in batch(number).items()})
        found = watching.most
        found.gradients = watching.gradients()
        model.optimizer_step(optimizer)
    found.parameters = stored(*model.parameters())
    found.optimizer = stored(*(v for state in optimizer.state.values() for k, v in state.items() if k != "step"))
    planned = plan_memory(model.plan, microbatches=microbatches)
    return found, Held(**{key: value for key, value in asdict(planned).items() if key in asdict(found)})


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("half", [False, True])
def test_the_plan_estimates_what_is_held(half, stage, microbatches, spmd):
    for variant in ("even shards", "even shards, base frozen"):
        for pair in spmd(2, held_and_planned, variant, SHARDED, {"zero_stage": stage}, half, microbatches):
            if stage == 1:
                assert_within(*pair)
            for key, held in asdict(pair[0]).items():  # what is freed by parts may be there at different times
                assert held <= 1.01 * asdict(pair[1])[key] and asdict(pair[1])[key] <= 1.1 * held, key


# --- checkpoints


def uninterrupted(sizes):
    model = parallelize(made("wide norms and gates", True), Layout(**sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rank, ranks = data_position(model.mesh)
    for number in range(2):
        model.forward_backward({key: value.chunk(ranks)[rank] for key, value in batch(number).items()})
        model.optimizer_step(optimizer)
        optimizer.zero_grad()
    return {name: whole(p).detach() for name, p in model.named_parameters()}


def saved_and_resumed(folder, first, then):
    """Weights after two steps, one on each of two layouts."""
    mine = None
    for number, sizes in enumerate((first, then)):
        model = parallelize(made("wide norms and gates", True), Layout(**sizes))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if number:
            load(model, folder, optimizer=optimizer)
        rank, ranks = data_position(model.mesh)
        mine = {key: value.chunk(ranks)[rank] for key, value in batch(number).items()}
        model.forward_backward(mine)
        model.optimizer_step(optimizer)
        if not number:
            save(model, folder, optimizer=optimizer)
    states = {key: value.dtype for key, value in optimizer.state[next(iter(model.parameters()))].items()}
    return {name: whole(p).detach() for name, p in model.named_parameters()}, states


def test_a_checkpoint_keeps_dtypes_on_any_layout(spmd, tmp_path):
    for number, (first, then) in enumerate([(SHARDED, SHARDED), (SHARDED, {"dp_replicate": 2, "dp_shard": 1})]):
        found = spmd(2, saved_and_resumed, str(tmp_path / str(number)), first, then)
        expected = spmd(2, uninterrupted, first)
        for (weights, states), other in zip(found, expected, strict=True):
            for name, weight in other.items():
                assert weight.dtype == weights[name].dtype, name
                assert (weights[name].double() - weight.double()).norm() <= 0.01 * weight.double().norm(), name
            assert {dtype for key, dtype in states.items() if key != "step"} == {torch.bfloat16}


def test_weights_of_another_dtype_are_not_rounded_to_4_bits():
    def build():
        model = llama_in_bf16()
        model.model.layers[0].mlp.up_proj.float()
        return model

    techniques = {"adapters": {"rank": 4}, "quantize_frozen": "nf4"}
    words = r"rounds '.*up_proj.*' \(float32\) to 4 bits, and most .* are bfloat16.*precision.master = float32"
    with pytest.raises(UnsupportedError, match=words):
        plan(build, Layout(dp_shard=2), techniques=techniques)
    asked = techniques | {"precision": {"master": "float32"}}
    assert plan(build, Layout(dp_shard=2), techniques=asked).quantize is not None
