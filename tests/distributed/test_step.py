"""The step: skipped by all or by none, refused in the words of the rank concerned, undisturbed.

Evaluation, generation, clipping.
"""

from __future__ import annotations

import time

import pytest
import torch
from support.oracle import build, faults, loss_sum, real_tokens, relative_errors
from support.problems import DDP2, FSDP2, HSDP, LAYOUTS, ONE, Data, Problem, Way, as_brought, make_optimizer, share
from support.ranks import ranks, refusal
from support.train import DISTURBANCES, Loss, gradients, gradients_of_first_step, lay_out, local, train, whole
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshwright import Layout, MeshwrightError
from meshwright.distributed import clip_grad_norm_, init_distributed
from meshwright.distributed.process.world import get_world_info

EXACT = 1e-10
EVERY_KIND = pytest.mark.parametrize("layout", [DDP2, FSDP2, HSDP], ids=["ddp2", "fsdp2", "hsdp2x2"])


def mine(problem: Problem, way: Way, step: int = 0):
    """This rank's share of a step, as the way brings it."""
    rank, _, world = get_world_info()
    return as_brought(share(problem.data.step(step), rank, world), way)


# --- skipping


@pytest.mark.all
@EVERY_KIND
@ranks(lambda layout: layout.world)
def test_what_is_not_finite_on_one_rank_is_skipped_by_all(layout):
    """A good step, then by turns a poisoned one and a good one: (weights unchanged, skipped, gradients left) of each;
    how many.
    """
    good, bad = (False, False, 0), (True, True, 0)
    poisons = ["infinite", "nan", "nan in backward"]
    problem, way, loss_fn = Problem(), Way(layout, (), "list"), Loss()
    model = lay_out(problem, way, loss_fn=loss_fn)
    optimizer = make_optimizer("adamw", model.parameters())
    seen = []
    for number, disturbance in enumerate(["", *(step for poison in poisons for step in (poison, ""))]):
        loss_fn.disturbance = disturbance
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        model.forward_backward(mine(problem, way, number))
        result = model.optimizer_step(optimizer, 1.0)
        unchanged = all(
            torch.equal(local(before[name]), local(parameter)) for name, parameter in model.named_parameters()
        )
        left = [p.grad for p in model.parameters() if p.grad is not None]
        seen.append((unchanged, result.skipped, len(left)))
    skipped = model.skipped_steps
    assert seen == [good, bad, good, bad, good, bad, good]
    assert skipped == 3


# --- refusals


def refusals(layout: Layout, spoilt: list[str]):
    """For each way to spoil the batch of rank 1: what this rank was told, and after how long.

    A good step must follow.
    """
    problem, way = Problem(), Way(layout)
    model = lay_out(problem, way)
    told = []
    for how in spoilt:
        batch = mine(problem, way)
        if get_world_info()[0] == 1:
            batch = SPOIL[how](batch)
        begin = time.monotonic()
        try:
            model.forward_backward(batch)
            told.append(("nothing", "", 0.0))
        except MeshwrightError as error:
            told.append((type(error).__name__, str(error), time.monotonic() - begin))
    model.forward_backward(mine(problem, way))
    return told, gradients(model)


def changed(key, change):
    return lambda batch: {**batch, key: change(batch[key])}


def first_is(value):
    return lambda ids: ids.clone().index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(value))


SPOIL = {
    "no labels": lambda batch: {key: value for key, value in batch.items() if key != "labels"},
    "unknown key": lambda batch: {**batch, "colour": batch["tokens"]},
    "too long": lambda batch: {key: value.repeat(1, 2) for key, value in batch.items()},
    "token too large": changed("tokens", first_is(257)),
    "token below zero": changed("tokens", first_is(-1)),
    "label too large": lambda batch: changed("labels", first_is(257))(changed("loss_mask", first_is(True))(batch)),
    "labels of other shape": changed("labels", lambda labels: labels[:, 1:]),
    "labels are a list": changed("labels", lambda labels: labels.tolist()),
    "labels are int32": changed("labels", lambda labels: labels.int()),
    "tokens are floats": changed("tokens", lambda tokens: tokens.float()),
    "one dim": lambda batch: {key: value[0] for key, value in batch.items()},
    "not a batch": lambda batch: None,
    "no microbatch": lambda batch: [],
    "other number of microbatches": lambda batch: [batch, batch],
}
WORDS = {
    "no labels": "no 'labels'",
    "unknown key": "'colour'",
    "too long": "22 tokens, more than the model's maximum of 16",
    "token too large": "holds 257 in row 0, but the model knows the ids 0 to 256",
    "token below zero": "holds -1 in row 0",
    "label too large": "holds 257 in row 0, but the model knows the ids 0 to 256 (model.vocab_size): a token without a"
    " loss, such as padding, has the label -100",
    "labels of other shape": "['labels'] has shape",
    "labels are a list": "['labels'] is a list",
    "labels are int32": "['labels'] holds torch.int32",
    "tokens are floats": "['tokens'] holds torch.float32",
    "one dim": "must be (rows, seq)",
    "not a batch": "not NoneType",
    "no microbatch": "at least one",
}


@EVERY_KIND
def test_a_bad_batch_on_one_rank_is_refused_by_all_in_its_own_words(spmd, reference, layout):
    results = spmd(layout.world, refusals, layout, list(WORDS))
    for number, (how, words) in enumerate(WORDS.items()):
        for rank, (told, _) in enumerate(results):
            kind, text, seconds = told[number]
            assert kind == "ConfigError", (how, rank, text)
            assert words in text, (how, rank)
            assert seconds < 30, how  # no waiting for a time limit
    assert max(relative_errors(results[0][1], reference(Problem()).gradients).values()) <= EXACT  # the step after them


@EVERY_KIND
def test_unequal_numbers_of_microbatches_are_refused_on_every_rank(spmd, layout):
    for told, _ in spmd(layout.world, refusals, layout, ["other number of microbatches"]):
        assert told[0][0] == "ConfigError"
        assert f"{layout.world + 1} on {layout.world} data ranks" in told[0][1]
        assert told[0][2] < 30


# --- what must not disturb a step


@pytest.mark.all
@pytest.mark.parametrize(
    ("layout", "disturbances"),
    [(DDP2, DISTURBANCES), (HSDP, DISTURBANCES), *((FSDP2, (disturbance,)) for disturbance in DISTURBANCES)],
    ids=lambda value: " and ".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_disturbed_run_ends_like_an_undisturbed_one(spmd, reference, layout, disturbances):
    found = faults(spmd(layout.world, train, Problem(), Way(layout), disturbances), reference(Problem()), EXACT)
    assert not found, found[:8]


@pytest.mark.all
@pytest.mark.parametrize("layout", [FSDP2, HSDP], ids=["fsdp2", "hsdp2x2"])
def test_a_broken_backward_in_bf16_leaves_nothing_behind(spmd, layout):
    """Mixed precision keeps what a microbatch accumulated in a place of its own."""
    problem, way = Problem(dtype="float32"), Way(layout, (("precision", {"compute": "bfloat16"}),))
    disturbed = spmd(layout.world, gradients_of_first_step, problem, way, "", "raise in backward")[0]
    undisturbed = spmd(layout.world, gradients_of_first_step, problem, way)[0]
    assert [name for name in undisturbed if not torch.equal(disturbed[name], undisturbed[name])] == []


def interrupted_context(layout: Layout):
    """Break off inside the public accumulation context, then run a plain backward outside any."""
    problem, way = Problem(), Way(layout)
    model = lay_out(problem, way)
    try:
        with model.accumulation_context(False):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    (loss_sum(model.module, mine(problem, way), problem) / real_tokens(problem.data.step(0))).backward()
    return gradients(model)


@EVERY_KIND
def test_the_accumulation_context_is_restored_after_an_exception(spmd, reference, layout):
    found = spmd(layout.world, interrupted_context, layout)[0]
    assert max(relative_errors(found, reference(Problem()).gradients).values()) <= EXACT


def two_calls(layout: Layout, sync: bool):
    """Gradients after the first step's batch, and after the second's on top of it."""
    problem, way = Problem(), Way(layout, (("sync_grad_accum", sync),), "list")
    model = lay_out(problem, way)
    found = []
    for step in range(2):
        model.forward_backward(mine(problem, way, step))
        found.append(gradients(model))
    return found


def two_calls_in_one_process(problem: Problem):
    model = build(problem)
    for step in range(2):
        batch = problem.data.step(step)
        (loss_sum(model, batch, problem) / real_tokens(batch)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("sync", [False, True])
@EVERY_KIND
def test_gradients_of_two_calls_add_up(spmd, reference, layout, sync):
    first, both = spmd(layout.world, two_calls, layout, sync)[0]
    assert max(relative_errors(first, reference(Problem()).gradients).values()) <= EXACT
    assert max(relative_errors(both, reference(Problem(), two_calls_in_one_process)).values()) <= EXACT


# --- without gradients


def evaluated(layout: Layout, microbatches: str):
    """(evaluation loss, training loss, anything left behind) of the first step."""
    problem, way = Problem(), Way(layout, (), microbatches)
    model = lay_out(problem, way)
    modes = [module.training for module in model.module.modules()]
    evaluation = model.evaluate(mine(problem, way))
    left = [name for name, p in model.named_parameters() if p.grad is not None]
    kept = [module.training for module in model.module.modules()] == modes
    return float(evaluation), evaluation.tokens, float(model.forward_backward(mine(problem, way))), left, kept


@pytest.mark.parametrize(
    ("name", "microbatches"), [*((name, "one") for name in LAYOUTS), ("ddp2", "list"), ("fsdp2", "list")]
)
def test_evaluation_is_the_training_loss_and_the_same_on_every_layout(spmd, reference, name, microbatches):
    for evaluation, tokens, training, left, kept in spmd(LAYOUTS[name].world, evaluated, LAYOUTS[name], microbatches):
        assert evaluation == pytest.approx(reference(Problem()).losses[0], rel=EXACT)
        assert evaluation == pytest.approx(training, rel=EXACT)
        assert (tokens, left, kept) == (real_tokens(Data().step(0)), [], True)


@pytest.mark.follows("evaluate()", "generate()")
@ranks(2)
def test_whole_outputs_of_a_model_in_parts_are_evaluated_or_generated():
    problem, pp = Problem(dtype="float32"), Way(Layout(pp=2, dp_shard=1))
    batch, plain, model = problem.data.step(0), build(problem), lay_out(problem, pp)
    text = refusal(lambda: model(batch["tokens"]))
    assert "computes whole outputs of whole rows, and layout.pp gives each rank a part of them: use evaluate" in text
    loss, ids = float(model.evaluate(batch)), model.generate(PROMPT, 2, temperature=0)
    assert loss == pytest.approx(float(loss_sum(plain, batch, problem)) / real_tokens(batch), rel=1e-5)
    assert ids == greedy(problem)[:2]
    assert torch.allclose(lay_out(problem, Way(FSDP2))(batch["tokens"]), plain(batch["tokens"]), atol=1e-5)


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
"""Two tokens short of the model's window, so that generation has to slide it."""


def generated(layout: Layout):
    model = lay_out(Problem(dtype="float32"), Way(layout))
    return (
        model.generate(PROMPT, 6, temperature=0),
        model.generate(PROMPT, 6, seed=1),
        model.generate(PROMPT, 6, seed=2),
    )


def greedy(problem: Problem) -> list[int]:
    model, ids = build(problem), list(PROMPT)
    for _ in range(6):
        ids.append(int(model(torch.tensor([ids[-16:]]))[0, -1].argmax()))
    return ids[len(PROMPT) :]


@pytest.mark.all
def test_every_layout_generates_the_same_text(spmd, reference):
    alone = spmd(1, generated, ONE)[0]
    assert alone[0] == reference(Problem(dtype="float32"), greedy)
    assert alone[1] != alone[2] != alone[0]
    for layout in LAYOUTS.values():
        assert spmd(layout.world, generated, layout) == [alone] * layout.world


# --- clipping


def clipped(layout: Layout, max_norm: float, foreach: bool):
    problem, way = Problem(), Way(layout)
    model = lay_out(problem, way)
    model.forward_backward(mine(problem, way))
    norm = clip_grad_norm_(model.parts[0], max_norm, foreach=foreach)
    return float(norm), gradients(model)


def clipped_by_torch(problem: Problem):
    """(norm, clipped gradients) for each of the two limits."""
    found = {}
    for max_norm in (0.1, 10.0):
        model, batch = build(problem), problem.data.step(0)
        (loss_sum(model, batch, problem) / real_tokens(batch)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        found[max_norm] = float(norm), {name: p.grad for name, p in model.named_parameters()}
    return found


@pytest.mark.parametrize(
    ("layout", "max_norm", "foreach"),
    [
        (DDP2, 0.1, True),
        (DDP2, 0.1, False),
        (FSDP2, 0.1, True),
        (FSDP2, 0.1, False),
        (FSDP2, 10.0, True),
        (HSDP, 0.1, True),
    ],
    ids=str,
)
def test_clipping_equals_torch_on_one_process(spmd, reference, layout, max_norm, foreach):
    norm, expected = reference(Problem(), clipped_by_torch)[max_norm]
    runs = spmd(layout.world, clipped, layout, max_norm, foreach)
    assert len({run[0] for run in runs}) == 1
    assert runs[0][0] == pytest.approx(norm, rel=EXACT)
    assert max(relative_errors(runs[0][1], expected).values()) <= EXACT


def clipped_over_mixed_meshes():
    """Gradients on four different placements, made of known numbers; returns (norm, gradients as a whole)."""
    mesh = init_distributed(HSDP)
    places = [
        (mesh["dp_shard"], [Shard(0)]),
        (mesh["dp_replicate", "dp_shard"], [Replicate(), Shard(0)]),
        (mesh["dp_replicate", "dp_shard"], [Shard(0), Shard(1)]),
        (mesh["dp_replicate"], [Shard(1)]),
        None,
    ]
    model = torch.nn.Module()
    for number, place in enumerate(places):
        values = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        parameter = torch.nn.Parameter(values if place is None else distribute_tensor(values, *place))
        parameter.grad = values.clone() if place is None else distribute_tensor(values, *place)
        model.register_parameter(f"p{number}", parameter)
    norm = clip_grad_norm_(model, 0.5)
    return float(norm), [whole(p.grad) for p in model.parameters()]


def test_clipping_counts_every_gradient_once_over_mixed_meshes(spmd):
    values = [
        torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(number)) for number in range(5)
    ]
    norm = torch.stack(values).norm()
    for found, clipped_values in spmd(4, clipped_over_mixed_meshes):
        assert found == pytest.approx(norm.item(), rel=1e-14)
        for value, one in zip(values, clipped_values, strict=True):
            torch.testing.assert_close(one, value * (0.5 / (norm + 1e-6)), rtol=1e-12, atol=0)
