"""A laid-out model behaves as a module: calls, modes, names, hooks, whole state dicts, averages of its weights."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from support.own_models import ROWS, ConvNet, built, ids, random
from support.ranks import ranks
from support.ranks import told as said
from support.train import local
from support.written_out import GPT, GPTConfig
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from meshwright import Layout, parallelize
from meshwright.distributed.averaging import WeightCopy
from meshwright.distributed.mesh import data_position
from meshwright.distributed.optimizer.grad_clip import clip_grad_norm_
from meshwright.distributed.weights import shards
from meshwright.models.decoder_config import DecoderConfig, MoEConfig

FP64 = {"precision": {"master": "float64", "compute": "float64", "reduce": "float64"}}
EXPERTS = DecoderConfig(
    48, 16, 2, n_heads=4, n_kv_heads=2, hidden_dim=20, max_seq_len=20, moe=MoEConfig(n_experts=4, hidden_dim=12)
)
MAKE = functools.partial(GPT, GPTConfig())
BATCH = {"tokens": ids(7, 48, 4, 9), "labels": ids(8, 48, 4, 9)}
DDP, FSDP, TENSOR, PIPELINE = (
    {"dp_replicate": 2, "dp_shard": 1},
    {"dp_shard": 2},
    {"tp": 2, "dp_shard": 1},
    {"pp": 2, "dp_shard": 1},
)
LAYOUTS = {"ddp": DDP, "fsdp": FSDP, "tp": TENSOR, "pp": PIPELINE}
EACH = pytest.mark.parametrize("sizes", LAYOUTS.values(), ids=LAYOUTS)


def laid_out(sizes, make=MAKE, **options):
    return parallelize(built(make), Layout(**sizes), techniques=FP64 | options, audit=False)


def share(model, batch=BATCH):
    rank, ranks = data_position(model.mesh)
    return {key: value.chunk(ranks)[rank] for key, value in batch.items()}


def trained(model, steps=2, after=lambda: None):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(steps):
        model.forward_backward(share(model))
        model.optimizer_step(optimizer)
        after()


def plainly_trained(model, steps=2, after=lambda: None):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(steps):
        F.cross_entropy(model(BATCH["tokens"]).flatten(0, 1), BATCH["labels"].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        after()
    return model


def furthest(found, expected):
    assert sorted(found) == sorted(expected)
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


# --- state


def states(sizes):
    plain, model = plainly_trained(built(MAKE)), laid_out(sizes)
    trained(model)
    state = model.state_dict()
    strict = built(MAKE).load_state_dict(state)
    first = model.state_dict(rank0_only=True, prefix="a.")
    other = laid_out(sizes)
    keys = other.load_state_dict(plain.state_dict())
    loss = float(other.evaluate(share(other)))
    wanted = F.cross_entropy(plain(BATCH["tokens"]).flatten(0, 1), BATCH["labels"].flatten()).item()
    copied = furthest(other.state_dict(), plain.state_dict())
    kinds = {type(value) for value in state.values()} | {value.device.type for value in state.values()}
    return furthest(state, plain.state_dict()), str(strict), sorted(first)[:1], list(keys), loss - wanted, copied, kinds


@EACH
def test_state_dicts_are_whole_and_those_of_one_process(sizes, spmd):
    for rank, (error, strict, first, keys, loss, copied, kinds) in enumerate(spmd(2, states, sizes)):
        assert error < 1e-10 and copied == 0 and abs(loss) < 1e-12
        assert "matched" in strict and keys == [[], []] and kinds == {torch.Tensor, "cpu"}
        assert first == ([] if rank else ["a.lm_head.weight"])


@pytest.mark.all
@pytest.mark.parametrize(
    "sizes",
    [{"dp_replicate": 2, "dp_shard": 2}, {"tp": 2, "dp_shard": 2}, {"pp": 2, "dp_shard": 2}],
    ids=["hsdp", "fsdp and tp", "fsdp and pp"],
)
def test_state_dicts_of_several_axes(sizes, spmd):
    for error, _, _, keys, loss, copied, _ in spmd(4, states, sizes):
        assert error < 1e-10 and copied == 0 and abs(loss) < 1e-12 and keys == [[], []]


@pytest.mark.all
@ranks(2)
def test_experts_have_whole_state_dicts():
    model = parallelize(EXPERTS, Layout(dp_shard=2, ep=2), seed=1, audit=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.forward_backward(share(model))
    model.optimizer_step(optimizer)
    state, alone = model.state_dict(), parallelize(EXPERTS, Layout(dp_shard=2), seed=2, audit=False)
    alone.load_state_dict(state)
    losses = [float(one.evaluate(share(one))) for one in (model, alone)]
    mean = copy.deepcopy(model)
    error, loss, copied = (
        furthest(alone.state_dict(), state),
        abs(losses[0] - losses[1]),
        furthest(mean.state_dict(), state),
    )
    assert error == copied == 0 and loss < 1e-5


@ranks(2)
def test_a_state_dict_that_does_not_fit_is_refused_on_all_ranks():
    model = laid_out(FSDP)
    rank = data_position(model.mesh)[0]
    good = model.state_dict()
    missing = {name: value for name, value in good.items() if name != "transformer.wpe.weight" or not rank}
    shapes = good | ({"transformer.wpe.weight": torch.zeros(3, 3)} if rank else {})
    told = [said(lambda given=given: model.load_state_dict(given)) for given in (missing, shapes, good | {"b": 1})]
    assigned = said(lambda: model.load_state_dict(good, assign=True))
    loose = model.load_state_dict(good | {"b": 1}, strict=False)
    told, loose, error = [*told, assigned], list(loose), furthest(model.state_dict(), good)
    assert "lacks transformer.wpe.weight (1 names)" in told[0]
    assert "transformer.wpe.weight has shape (3, 3), the model's (16, 32)" in told[1]
    assert "has b (1 names), unknown to the model" in told[2]
    assert "leave assign out" in told[3]
    assert loose == [[], ["b"]] and error == 0


# --- calls


@pytest.mark.parametrize("sizes", [DDP, FSDP, TENSOR], ids=["ddp", "fsdp", "tp"])
@ranks(2)
def test_calls_modes_names_and_hooks(sizes):
    plain, model = built(MAKE), laid_out(sizes)
    batch = share(model)
    seen = []
    handle = model.register_forward_hook(lambda module, args, output: seen.append(output.shape[0]))
    found = model(batch["tokens"])
    model.forward_backward(batch)
    handle.remove()
    model(batch["tokens"])
    error = float((found.detach() - plain(batch["tokens"])).detach().abs().max())
    told = said(lambda: found.sum().backward())
    held = [p.grad is not None for p in model.parameters()]
    with torch.no_grad():
        still = model(batch["tokens"]).requires_grad
    model.eval()
    modes = {module.training for module in model.modules()}
    model.train()
    names = {path for path, _ in built(MAKE).named_modules()}
    paths = [path for path, _ in model.named_modules()]
    module = type(model.get_submodule("transformer.h.1")).__name__
    training, names, held = model.training, names == set(paths), all(held)
    assert error < 1e-12 and held
    assert "Train by forward_backward(batch), with loss_fn=meshwright.Loss(...)" in told
    assert len(seen) == 2 and not still and modes == {False} and training and names
    assert module.endswith("Block")


@ranks(2)
def test_moves_and_casts_are_answered_in_a_sentence():
    model = laid_out(FSDP)
    same = model.to("cpu") is model and model.to(torch.float64) is model
    acts = (model.half, model.double, lambda: model.to(torch.bfloat16), lambda: model.to("meta"), model.compile)
    told, nothing = [said(act) for act in acts], said(lambda: model.get_submodule("nothing"))
    assert same
    assert all("the model is laid out: its weights lie on cpu in float64" in text for text in told[:4])
    assert "techniques={'compile': True}" in told[4] and "no module at 'nothing'" in nothing


@pytest.mark.follows("load_state_dict()", "strict=")
@pytest.mark.parametrize("sizes", [{"dp_shard": 1}, *LAYOUTS.values()], ids=["one process", *LAYOUTS])
@ranks(lambda sizes: 1 if sizes == {"dp_shard": 1} else 2)
def test_no_part_is_added_or_replaced_on_a_laid_out_model(sizes):
    """Its forward and its state are of the parts that were laid out, so it would be ignored."""
    model, new = laid_out(sizes), nn.Linear(2, 2)
    acts = {
        "lm_head": (lambda: setattr(model, "lm_head", new), lambda: setattr(model, "lm_head", None)),
        "new": (
            lambda: setattr(model, "new", new),
            lambda: setattr(model, "new", new.weight),
            lambda: model.add_module("new", new),
            lambda: model.register_module("new", new),
            lambda: model.register_parameter("new", new.weight),
            lambda: model.register_buffer("new", torch.zeros(1), persistent=False),
        ),
    }
    for name, ways in acts.items():
        for act in ways:
            assert f"'{name}' cannot be added or replaced here: the model is laid out" in said(act)
            assert not hasattr(model, "new")
    model.note, model.limit = "plain", torch.zeros(1)  # plain values are the user's
    whole = torch.full_like(built(MAKE).lm_head.weight, 0.25)
    model.load_state_dict({"lm_head.weight": whole}, strict=False)
    assert torch.equal(model.state_dict()["lm_head.weight"], whole) and (model.note, model.limit) == ("plain", 0)


@ranks(2)
def test_a_pipeline_says_what_is_there_instead():
    model = laid_out(PIPELINE)
    acts = (lambda: model(BATCH["tokens"]), lambda: model.register_forward_hook(print))
    called, hooked = [said(act) for act in acts]
    assert "layout.pp gives each rank a part of them: use evaluate(batch)" in called
    assert "register it on a module of this rank, model.get_submodule(path), which raises AttributeError" in hooked


def hooked(sizes):
    """The loss with a hook on a block, where it is, and the classes of all modules."""
    plain, model = built(MAKE), laid_out(sizes)
    batch, seen = share(model), []
    for made in (plain, model):
        for number, factor in enumerate((1.5, 0.5)):
            try:
                block = made.get_submodule(f"transformer.h.{number}")
            except AttributeError as error:
                seen.append(str(error))
            else:
                block.register_forward_hook(lambda module, args, output, factor=factor: factor * output)
    wanted = F.cross_entropy(plain(BATCH["tokens"]).flatten(0, 1), BATCH["labels"].flatten()).item()
    kinds = {type(module).__name__ for module in model.modules()} | {type(m).__name__ for m in model.children()}
    return float(model.forward_backward(batch).loss) - wanted, seen, sorted(kinds)


def test_a_pipelines_rank_shows_its_own_modules_alone(spmd):
    """A stand-in of another rank's block would call a hook a second time."""
    found = spmd(2, hooked, PIPELINE)
    for rank, (error, seen, kinds) in enumerate(found):
        assert abs(error) < 1e-12 and not any(kind.startswith("Absent") for kind in kinds)
        assert seen == [f"GPT has no module at 'transformer.h.{1 - rank}' on this rank"]


def frozen(sizes):
    plain, model = built(MAKE), laid_out(sizes)
    for module in (plain, model):
        module.requires_grad_(False)
        module.get_submodule("transformer.h.1").requires_grad_()
    told = said(lambda: trained(model))
    plainly_trained(plain)
    return told, furthest(model.state_dict(), plain.state_dict()) if told is None else None


@pytest.mark.all
def test_freezing_behind_the_layout_is_followed_or_refused(spmd):
    for told, error in spmd(2, frozen, FSDP):
        assert told is None and error < 1e-10
    for told, _ in spmd(2, frozen, DDP):
        assert "was changed behind parallelize" in told


@EACH
@ranks(2)
def test_an_optimizer_of_other_parameters_is_refused(sizes):
    """One made before the layout has the tensors that sharding has put others in place of."""
    whole = built(MAKE)
    before, other = torch.optim.SGD(whole.parameters(), lr=0.5), torch.optim.SGD(built(MAKE).parameters(), lr=0.5)
    model = parallelize(whole, Layout(**sizes), techniques=FP64, audit=False)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    model.forward_backward(share(model))
    refused = said(lambda: model.optimizer_step(other))
    assert f"lacks {len(weights)} of the {len(weights)} trained parameters" in refused and "made before" in refused
    stays = sizes in (DDP, PIPELINE)  # there they are the same tensors
    assert stays or "the optimizer lacks" in said(lambda: model.optimizer_step(before))
    extra = torch.nn.Parameter(torch.zeros(1))
    model.optimizer_step(before if stays else torch.optim.SGD([*model.parameters(), extra], lr=0.5))
    assert not any(map(torch.equal, map(local, model.parameters()), map(local, weights)))


@EACH
@pytest.mark.follows("clip_grad_norm_()", "optimizer_step()", "max_norm=")
@ranks(2)
def test_a_norm_taken_by_hand_is_of_the_whole_model_or_refused(sizes):
    """A pipeline's rank has the gradients of its stages, which torch's functions take for all."""
    expected = built(MAKE)
    F.cross_entropy(expected(BATCH["tokens"]).flatten(0, 1), BATCH["labels"].flatten()).backward()
    whole = torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
    model = laid_out(sizes)
    model.forward_backward(share(model))
    norms = (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9),
        lambda: torch.nn.utils.get_total_norm(p.grad for p in model.parameters()),
    )
    if sizes == PIPELINE:
        assert all("of this rank's pipeline stage alone" in said(norm) for norm in norms)
        torch.nn.utils.clip_grad_norm_(torch.nn.Linear(2, 2).parameters(), 1.0)  # nobody's stage
    else:
        for norm in (take() for take in norms):
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            assert float(norm) == pytest.approx(float(whole), rel=1e-10)
    assert float(clip_grad_norm_(model, 0.1)) == pytest.approx(float(whole), rel=1e-10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    assert model.optimizer_step(optimizer, max_norm=1.0).grad_norm == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("max_norm", [-1.0, float("nan")])
@ranks(1)
def test_a_norm_that_is_none_is_refused(max_norm):
    """A negative one would turn the gradients round."""
    model = laid_out({})
    model.forward_backward(BATCH)
    assert f"max_norm = {max_norm}" in said(
        lambda: model.optimizer_step(torch.optim.SGD(model.parameters(), lr=0.5), max_norm)
    )


@ranks(2)
def test_one_part_of_the_parameters_may_be_trained():
    model = laid_out(FSDP)
    few = [*model.parameters()][:2]
    model.forward_backward(share(model))
    assert not model.optimizer_step(torch.optim.SGD(few, lr=0.5)).skipped


def replace_layer(model):
    model.get_submodule("transformer.h.1.mlp").c_fc = nn.Linear(32, 128).double()


def append_block(model):
    model.get_submodule("transformer.h").append(copy.deepcopy(built(MAKE).transformer.h[0]))


def replace_parameter(model):
    norm = model.get_submodule("transformer.ln_f")
    norm.weight = nn.Parameter(norm.weight.detach().clone())


def tie_weights(model):
    block = model.get_submodule("transformer.h.0")
    block.ln_2.weight = block.ln_1.weight


CHANGES = {
    "transformer.h.1.mlp.c_fc.weight": replace_layer,
    "transformer.h.2.": append_block,
    "transformer.ln_f.weight": replace_parameter,
    "transformer.h.0.ln_2.weight": tie_weights,
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("sizes", [DDP, FSDP, TENSOR, {"cp": 2, "dp_shard": 1}], ids=["ddp", "fsdp", "tp", "cp"])
@ranks(2)
def test_a_parameter_that_was_not_laid_out_is_refused(sizes, name):
    """No mesh has placed it, and nothing adds up its gradients; what an evaluation has gathered is no other one."""
    model = laid_out(sizes)
    model.evaluate(share(model))
    trained(model)
    CHANGES[name](model)
    for act in (lambda: trained(model), lambda: model.evaluate(share(model))):
        told = said(act)
        assert told.startswith(f"ConfigError: {name}") and "was added, replaced, tied or taken away behind" in told
    plain = built(MAKE)
    CHANGES[name](plain)
    trained(parallelize(plain, Layout(**sizes), techniques=FP64, audit=False))


@ranks(1)
def test_one_process_trains_what_replaces_a_part():
    plain, model = built(MAKE), laid_out({"dp_shard": 1})
    for made in (plain, model):
        torch.manual_seed(3)
        replace_layer(made)
    trained(model)
    assert furthest(model.state_dict(), plainly_trained(plain).state_dict()) < 1e-12


# --- averages


def averaged(sizes, mutant=False):
    plain, model = built(MAKE), laid_out(sizes)
    options = [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.6)}]
    means, wanted = ([AveragedModel(one, **how) for how in options] for one in (model, plain))

    def update(averages, one):
        return lambda: [average.update_parameters(one) for average in averages]

    trained(model, 3, update(means, model))
    plainly_trained(plain, 3, update(wanted, plain))
    before = model.state_dict()
    errors, losses = [], []
    swap = shards.swap
    if mutant:
        shards.swap = lambda tensors, copies: None
    for mean, expected in zip(means, wanted, strict=True):
        errors.append(furthest(mean.module.state_dict(), expected.module.state_dict()))
        with mean.module.lent():
            loss = float(model.evaluate(share(model)))
        want = F.cross_entropy(expected(BATCH["tokens"]).flatten(0, 1), BATCH["labels"].flatten()).item()
        losses.append(abs(loss - want))
    shards.swap = swap
    return (
        max(errors),
        max(losses),
        furthest(model.state_dict(), before),
        "module.lm_head.weight" in means[0].state_dict(),
    )


@EACH
def test_averaged_models_are_those_of_one_process(sizes, spmd):
    for error, loss, changed, named in spmd(2, averaged, sizes):
        assert error < 1e-10 and loss < 1e-10 and changed == 0 and named


@pytest.mark.all
def test_weights_that_are_not_lent_are_seen(spmd):
    for error, loss, _, _ in spmd(2, averaged, FSDP, True):
        assert error > 1e-6 and loss > 1e-6


@pytest.mark.all
@ranks(2)
def test_averages_are_saved_and_loaded():
    model = laid_out(FSDP)
    mean, other = AveragedModel(model), AveragedModel(model)
    trained(model, 2, lambda: mean.update_parameters(model))
    other.load_state_dict(mean.state_dict())
    error, again = furthest(other.state_dict(), mean.state_dict()), said(lambda: parallelize(model, Layout()))
    assert error == 0 and "is laid out already" in again


@ranks(2)
def test_a_deep_copy_keeps_its_weights():
    model = laid_out({"dp_shard": 2})
    reference = copy.deepcopy(model)
    before = reference(BATCH["tokens"])
    trained(model)
    after = reference(BATCH["tokens"])
    reference.load_state_dict(model.state_dict())
    found = (
        type(reference) is WeightCopy,
        bool(torch.equal(before, after)),
        bool(torch.equal(reference(BATCH["tokens"]), model(BATCH["tokens"]).detach())),
    )
    assert found == (True, True, True)


@ranks(1)
def test_it_is_a_module():
    model = parallelize(built(functools.partial(ConvNet, "group")), Layout(), techniques=FP64)
    images = random(1, ROWS, 3, 8, 8)
    found = isinstance(model, nn.Module), torch.equal(model(images).detach(), built(ConvNet)(images).detach())
    assert found == (True, True)
