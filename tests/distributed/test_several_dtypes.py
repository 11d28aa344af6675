"""Parameters of several dtypes: kept on every layout that can, converted where the user asked, else refused."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from support.adapters import adapted
from support.families import config_of, on_cpu
from support.laid_out import assert_estimated, counted, estimated
from support.users import DIM, VOCABULARY, Attention, User
from test_memory import Held, Watching, assert_within, stored
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright import Layout, UnsupportedError, load, parallelize, plan, save
from meshwright.distributed.mesh import data_position
from meshwright.distributed.process.absent_peers import WireCounter
from meshwright.planning.memory.states import plan_memory
from meshwright.planning.values import Batch

SHARDED = {"dp_shard": 2}
HYBRID = {"dp_replicate": 2, "dp_shard": 2}
LAYOUTS = {
    "one process": (1, {"dp_shard": 1}, {}),
    "ddp": (2, {"dp_replicate": 2, "dp_shard": 1}, {}),
    "sharded": (2, SHARDED, {}),
    "hybrid": (4, HYBRID, {}),
    "ZeRO-1": (2, SHARDED, {"zero_stage": 1}),
    "ZeRO-2, hybrid": (4, HYBRID, {"zero_stage": 2}),
    "recomputed": (2, SHARDED, {"activation_checkpointing": "full"}),
    "in host memory": (2, SHARDED, {"cpu_offload": True}),
    "sharded, one rank": (1, {"dp_shard": 1}, {"data_parallel": "fully_shard"}),
}
CUT = ({"tp": 2, "dp_shard": 1}, {"cp": 2, "dp_shard": 1})
PIPELINES = ({"pp": 2, "dp_shard": 1}, {"pp": 2, "dp_shard": 2})
LR, STEPS, ROWS, SEQ = 0.1, 2, 8, 6


class InFront(User):
    """A float64 parameter that is registered first."""

    def __init__(self):
        nn.Module.__init__(self)
        self.temperature = nn.Parameter(torch.ones(1, dtype=torch.float64))
        before = self.temperature
        super().__init__()
        self.temperature = before
        self._parameters["temperature"] = self._parameters.pop("temperature")

    def logits(self, x):
        return super().logits(x) * self.temperature


class Behind(User):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def logits(self, x):
        return super().logits(x) * self.temperature


class WideNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x):
        return F.layer_norm(x.to(self.weight.dtype), (DIM,), self.weight).to(x.dtype)


class Gated(nn.Module):
    """A block with a gate as routers are: computed in a wider dtype than the rest."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.gate = WideNorm(), Attention(), nn.Linear(DIM, 2)

    def opened(self, x):
        return self.gate(x)

    def forward(self, x):
        gate = torch.sigmoid(self.opened(x.to(self.gate.weight.dtype))).mean(-1, keepdim=True)
        return x + (self.attention(self.norm(x)) * gate).to(x.dtype)


class ReadsItsGate(Gated):
    """The gate is not called: its weight is read by the block."""

    def opened(self, x):
        return F.linear(x, self.gate.weight, self.gate.bias)


class Scaled(Gated):
    """Wide parameters of the block itself."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, x):
        return super().forward(x) * self.scale.to(x.dtype)


class InLists(Gated):
    """Wide parameters in a container that is never called."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(DIM), torch.ones(DIM)])

    def forward(self, x):
        return super().forward(x) * (self.scales[0] * self.scales[1]).to(x.dtype)


class Tied(User):
    def __init__(self):
        super().__init__(Gated)
        self.norm = WideNorm()
        self.head.weight = self.embed.weight


class FromNarrow(User):
    """An embedding in another dtype than all that follows."""

    def __init__(self):
        super().__init__(Gated)

    def embedded(self, tokens):
        return self.embed(tokens).to(self.head.weight.dtype)


class OneModule(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class InOne(Gated):
    """Two dtypes in one module, which no unit can part."""

    def __init__(self):
        super().__init__()
        self.gate = OneModule(DIM, 2)


class Even(User):
    """One whose shards need no padding."""

    def __init__(self):
        super().__init__(Gated)
        self.embed, self.head = nn.Embedding(VOCABULARY + 1, DIM), nn.Linear(DIM, VOCABULARY + 1, bias=False)


def mixed(block, *, narrow=torch.float32, wide=torch.float64, frozen=(), named=("norm", "gate", "scale"), kind=None):
    """A model in ``narrow``, but for modules and parameters ``named`` so.

    Args:
        frozen: parts of names.
        named: without the s of a plural.
    """
    torch.manual_seed(0)
    model = User(block) if kind is None else kind()
    model.norm = WideNorm()
    for name, parameter in model.named_parameters():
        of = {step.rstrip("s") for step in name.split(".")}
        parameter.data = parameter.data.to(wide if of & set(named) else narrow)
        parameter.requires_grad_(not any(part in name for part in frozen))
    return model


VARIANTS = {
    "float64 in front": (InFront,),
    "float64 behind": (Behind,),
    "wide norms and gates": (mixed, Gated),
    "wide norms": (mixed, Gated, {"named": ("norm",)}),
    "a weight that is read elsewhere": (mixed, ReadsItsGate),
    "a block's own": (mixed, Scaled),
    "in a list": (mixed, InLists),
    "tied ends": (mixed, None, {"kind": Tied}),
    "narrow base frozen": (mixed, Gated, {"frozen": ("attention", "embed")}),
    "wide norms frozen": (mixed, Gated, {"frozen": ("norm", "gate")}),
    "narrow embedding": (mixed, None, {"kind": FromNarrow, "named": ("layer", "norm", "head")}),
    "narrow embedding frozen": (
        *(mixed, None),
        {"kind": FromNarrow, "named": ("layer", "norm", "head"), "frozen": ("embed",)},
    ),
    "even shards": (mixed, None, {"kind": Even}),
    "even shards, wide norms": (mixed, None, {"kind": Even, "named": ("norm",)}),
    "even shards, base frozen": (mixed, None, {"kind": Even, "frozen": ("attention", "embed")}),
    "one dtype trained in a module": (mixed, InOne, {"named": ("norm", "bia"), "frozen": ("gate.weight",)}),
    "two dtypes trained in a module": (mixed, InOne, {"named": ("norm", "bia")}),
    "all but the head frozen": (mixed, Gated, {"frozen": ("layers", "embed", "norm")}),
}
TIGHT, LOOSE = 1e-5, 0.05
HALF = {"narrow": torch.bfloat16, "wide": torch.float32}
IN_HALF = ("wide norms and gates", "narrow base frozen", "wide norms frozen", "tied ends", "narrow embedding frozen")
REFUSED = "two dtypes trained in a module"


def made(variant, half=False):
    torch.manual_seed(0)
    make, *arguments = VARIANTS[variant] if isinstance(variant, str) else (variant,)
    options = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
    return make(*arguments, **options, **(HALF if half else {}))


def batch(number=0):
    tokens = (torch.arange(ROWS * SEQ).view(ROWS, SEQ) * (number + 3)) % VOCABULARY
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def alone(variant, half=False, to=None):
    """Losses of some steps of one process in plain torch, its first gradients and last weights."""
    model, losses, gradients = made(variant, half).to(to), [], {}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    for number in range(STEPS):
        given = batch(number)
        loss = F.cross_entropy(model(given["tokens"]).float().flatten(0, 1), given["labels"].flatten())
        loss.backward()
        gradients = gradients or {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients, {n: p.detach() for n, p in model.named_parameters()}


def steps(variant, sizes, techniques, half=False, rows=0):
    """The same laid out; and what the plan estimates to be sent in a step, with what is sent in the third."""
    model = parallelize(made(variant, half), Layout(**sizes), techniques=techniques, audit=True, microbatch_rows=rows)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
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
    foreseen = estimated(model.plan, Batch(ROWS, SEQ, rows or ROWS // ranks))
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


def compared(spmd, variant, world, sizes, techniques, half=False, rows=0, to=None):
    expected = alone(variant, half, to)
    for found in spmd(world, steps, variant, sizes, techniques, half, rows):
        assert_equal(expected, found, LOOSE if half else TIGHT, is_part=sizes.get("pp", 1) > 1)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != REFUSED])
@pytest.mark.parametrize("layout", ["one process", "ddp", "sharded"])
def test_each_parameter_keeps_its_own(layout, variant, spmd):
    compared(spmd, variant, *LAYOUTS[layout])


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("one process", "ddp", "sharded")])
def test_on_every_data_layout(layout, spmd):
    for variant in ("wide norms and gates", "narrow base frozen"):
        compared(spmd, variant, *LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["ddp", "sharded", "hybrid"])
@pytest.mark.parametrize("variant", IN_HALF)
def test_in_half_precision_beside_float32(layout, variant, spmd):
    compared(spmd, variant, *LAYOUTS[layout], half=True)


@pytest.mark.parametrize("sync", [False, True, "shard"])
def test_gradients_accumulate_over_microbatches(sync, spmd):
    compared(spmd, "wide norms and gates", 4, HYBRID, {"sync_grad_accum": sync}, rows=1)


@pytest.mark.parametrize("sizes", PIPELINES, ids=str)
@pytest.mark.parametrize(
    "variant", ["wide norms and gates", "narrow base frozen", "a block's own", "narrow embedding frozen"]
)
def test_between_stages_blocks_of_several_dtypes_give_one(variant, sizes, spmd):
    compared(spmd, variant, 2 * sizes["dp_shard"], sizes, {})


@pytest.mark.parametrize("sizes", [*CUT, {"tp": 2, "dp_shard": 2}, {"cp": 2, "dp_shard": 2}], ids=str)
def test_activations_travel_in_one_dtype_past_modules_of_another(sizes, spmd):
    compared(spmd, "even shards, wide norms", 2 * sizes["dp_shard"], sizes, {})


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


# --- peft: adapters in float32 beside a frozen base in bfloat16


def with_adapters(frozen_in=torch.bfloat16):
    model = adapted("llama")
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.to(frozen_in)
    return model


def llama_in_bf16():
    sizes = {"hidden_size": 64, "intermediate_size": 128}  # as blocks of 4 bits take them
    return on_cpu(config_of("llama", use_cache=False, **sizes)).to(torch.bfloat16)


def adapters_alone(frozen_in=torch.bfloat16):
    """First gradients in one process in plain torch and peft."""
    model, given = with_adapters(frozen_in), batch()
    loss = F.cross_entropy(model(given["tokens"]).logits.float().flatten(0, 1), given["labels"].flatten())
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def adapters_laid_out(sizes, techniques):
    model = parallelize(with_adapters(), Layout(**sizes), techniques=techniques, audit=True)
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
}


@pytest.mark.parametrize("layout", ADAPTED)
def test_adapters_in_float32_beside_a_base_in_bfloat16(layout, spmd):
    world, sizes, techniques = ADAPTED[layout]
    loss, expected = adapters_alone()
    _, exact = adapters_alone(torch.float32)
    for other, gradients, dtypes, foreseen, sent in spmd(world, adapters_laid_out, sizes, techniques):
        assert other == pytest.approx(loss, rel=LOOSE)
        assert gradients and all((dtype == torch.float32) == ("lora_" in name) for name, dtype in dtypes.items())
        for name, gradient in gradients.items():
            bound = 2 * (expected[name] - exact[name]).norm() + 1e-3 * exact[name].norm()
            assert gradient.dtype == torch.float32 and (gradient - expected[name]).norm() <= bound, name
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
    compared(spmd, REFUSED, 2, {"dp_replicate": 2, "dp_shard": 1}, {}, half)
    compared(spmd, REFUSED, 2, SHARDED, {"precision": {"master": wide}}, half, to=getattr(torch, wide))


@pytest.mark.parametrize("sizes", CUT, ids=str)
@pytest.mark.parametrize("kind", [InFront, Behind])
def test_a_layout_that_needs_one_names_parameter_dtypes_and_setting(kind, sizes):
    words = r"'temperature' is float64, and most elements of \w+ are float32 .* techniques.precision.master = float64"
    with pytest.raises(UnsupportedError, match=words):
        plan(made(kind), Layout(**sizes))


@pytest.mark.parametrize("sizes", [*CUT, *PIPELINES[:1]], ids=str)
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
