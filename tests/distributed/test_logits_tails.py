"""What models do to their logits, whole and in chunks, on every kind of layout: equal to one process, or refused."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from support.ranks import ranks
from support.tails import CARRIED, OVER_THE_VOCABULARY, REFUSED, ROWS, Tailed
from torch.distributed.tensor import DTensor

from meshwright import Layout, UnsupportedError, parallelize, plan
from meshwright.distributed.mesh import data_position

EXACT = 1e-10
FP64 = {"precision": {"master": "float64", "compute": "float64", "reduce": "float64"}}
LENGTHS = (6, 4)
LAYOUTS = {
    "one process": (1, {"dp_shard": 1}),
    "dp_shard": (2, {"dp_shard": 2}),
    "tp": (2, {"tp": 2, "dp_shard": 1}),
    "cp": (2, {"cp": 2, "dp_shard": 1}),
    "pp": (2, {"pp": 2, "dp_shard": 1}),
}
OF_THE_LENGTH = ("by length", "if long", "by position")
"""Context parallelism gives a model a part of the length."""
OF_ONE_STAGE = ("number of a parameter", "keeps one token")
"""A stage without the head has neither; a model that is built so is refused by the rehearsal of stages."""
TREATMENTS = {**CARRIED, **OVER_THE_VOCABULARY, **REFUSED}


def made(name):
    torch.manual_seed(0)
    return Tailed(name).double()


def batch(step):
    drawn = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 40, (ROWS, LENGTHS[step] + 1), generator=drawn)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def plain(name, temperatures):
    """Each step's loss, with its gradients added to those before; then a loss in evaluation mode."""
    model, found = made(name), []
    for step, temperature in enumerate(temperatures):
        model.temperature, given = temperature, batch(step)
        loss = F.cross_entropy(model(given["tokens"]).flatten(0, 1), given["labels"].flatten())
        loss.backward()
        found.append(loss.detach())
    model.eval()
    with torch.no_grad():
        found.append(F.cross_entropy(model(given["tokens"]).flatten(0, 1), given["labels"].flatten()))
    return found, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def error(model, name):
    """The largest relative error of losses and gradients, or the words of a refusal."""
    temperatures = (1.5, 2.5)
    expected, slopes = plain(name, temperatures)
    found, gradients = [], {}
    try:
        for step, model.temperature in enumerate(temperatures):
            given = batch(step)
            rank, ranks = data_position(model.mesh)
            mine = {key: value.chunk(ranks)[rank] for key, value in given.items()}
            found.append(model.forward_backward(mine).loss)
            for n, p in model.named_parameters():
                if p.grad is not None:
                    whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                    gradients[n] = gradients.get(n, 0) + whole.clone()
                    p.grad = None
        found.append(model.evaluate(mine).loss)
    except UnsupportedError as refusal:
        return str(refusal)
    errors = [float(abs(a - b) / abs(b)) for a, b in zip(found, expected, strict=True)]
    norm = torch.stack([value.norm() for value in slopes.values()]).norm()
    errors += [
        float((gradients[n] - slopes[n]).norm() / max(slopes[n].norm(), 1e-6 * norm)) for n in gradients if n in slopes
    ]
    return max(math.inf if math.isnan(error) else error for error in errors)


def laid_out(name, sizes, chunks):
    return parallelize(made(name), Layout(**sizes), techniques={**FP64, "loss_chunks": chunks}, audit=False)


def of_one_model(names, sizes, chunks):
    """One model, whose treatment of its logits is another in each step."""
    model, found = laid_out("nothing", sizes, chunks), {}
    for name in names:
        for part in model.parts:
            part.treatment = TREATMENTS[name]
        found[name] = error(model, name)
    return found


def of_own_models(names, sizes, chunks):
    found = {}
    for name in names:
        try:
            found[name] = error(laid_out(name, sizes, chunks), name)
        except UnsupportedError as refusal:
            found[name] = str(refusal)
    return found


@pytest.mark.all
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_treatment_is_that_of_its_own_step(layout, chunks, spmd):
    world, sizes = LAYOUTS[layout]
    left_out = {"cp": OF_THE_LENGTH, "pp": OF_ONE_STAGE}.get(layout, ())
    names = [name for name in CARRIED if name not in left_out]
    for found in spmd(world, of_one_model, names, sizes, chunks, timeout=300.0):
        bounds = {name: 1e-6 if name == "float" else EXACT for name in found}
        assert {name: value for name, value in found.items() if not (value <= bounds[name])} == {}


@pytest.mark.all
def test_what_a_stage_without_the_head_lacks_is_refused_or_moved(spmd):
    for found in spmd(2, of_own_models, OF_ONE_STAGE, {"pp": 2, "dp_shard": 1}, 1):
        assert all(isinstance(value, str) or value <= EXACT for value in found.values()), found


@pytest.mark.all
@pytest.mark.parametrize("layout", ["tp", "cp"])
def test_what_needs_the_whole_vocabulary_is_given_it(layout, spmd):
    world, sizes = LAYOUTS[layout]
    for found in spmd(world, of_own_models, ["log_softmax", "centred", "other order"], sizes, 1):
        assert {name: value for name, value in found.items() if not (value <= EXACT)} == {}


@pytest.mark.all
def test_what_was_not_seen_before_the_first_step_is_refused_in_the_step(spmd):
    for chunks, instead in ((1, "loss_fn=lambda logits"), (3, "techniques.loss_chunks = 1")):
        for found in spmd(2, of_one_model, ["centred"], {"tp": 2, "dp_shard": 1}, chunks):
            assert "mean over the vocabulary at tails.py:" in found["centred"] and instead in found["centred"]


@pytest.mark.parametrize("chunks", [1, 3])
@ranks(2)
def test_hooks_of_the_whole_model_are_carried_too(chunks):
    user, plain_model = made("nothing"), made("nothing")
    for model in (user, plain_model):
        model.register_forward_hook(lambda module, args, logits: logits.index_fill(-1, torch.tensor([50]), 3.0))
    model = parallelize(user, Layout(tp=2, dp_shard=1), techniques={**FP64, "loss_chunks": chunks}, audit=False)
    given = batch(0)
    user.treatment = REFUSED["mean of all"]
    with pytest.raises(UnsupportedError, match="mean over all tokens"):
        model.forward_backward(given)
    user.treatment = TREATMENTS["nothing"]
    expected = F.cross_entropy(plain_model(given["tokens"]).flatten(0, 1), given["labels"].flatten())
    logits = model.logits({"tokens": given["tokens"]})
    found = [
        float(abs(model.forward_backward(given).loss - expected) / expected),
        float((logits - plain_model(given["tokens"])).abs().max()),
    ]
    assert max(found) <= EXACT


@ranks(2)
def test_a_loss_of_whole_logits_is_given_them():
    model = parallelize(
        made("nothing"),
        Layout(tp=2, dp_shard=1),
        techniques=FP64,
        audit=False,
        loss_fn=lambda logits, labels: F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum"),
    )
    model.parts[0].treatment = TREATMENTS["centred"]
    found = error(model, "centred")
    assert not isinstance(found, str), found
    assert found <= 1e-6


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_to_a_piece_is_refused_before_the_first_step(name):
    with pytest.raises(UnsupportedError, match=r"loss_chunks = 3: what Tailed does .* Set techniques.loss_chunks = 1"):
        plan(made(name), Layout(dp_shard=1), techniques={"loss_chunks": 3})


@pytest.mark.parametrize("name", OVER_THE_VOCABULARY)
def test_a_cut_vocabulary_in_chunks_is_refused_before_the_first_step(name):
    with pytest.raises(UnsupportedError, match=r"over the vocabulary at tails.py:\d+|no linear layer"):
        plan(made(name), Layout(dp_shard=1, tp=2), techniques={"loss_chunks": 3})
