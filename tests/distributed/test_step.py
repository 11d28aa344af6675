"""The step and what may go wrong in it: agreement of all ranks, refusals in the words of the rank concerned, and what must not disturb it."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from support import foreign
from support.oracle import build, faults, loss_sum, real_tokens, relative_errors
from support.problems import DDP2, FSDP2, FSDP4, HSDP, LAYOUTS, ONE, Data, Problem, Way, as_brought, make_optimizer, share
from support.train import Loss, gradients, lay_out, train, whole
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshwright import ConfigError, IntegrityError, Layout, MeshwrightError, parallelize, plan
from meshwright.distributed import apply_ac, apply_fsdp2, clip_grad_norm_, init_distributed
from meshwright.distributed.wire import WireCounter
from meshwright.distributed.world import get_world_info

EXACT = 1e-10
EVERY_KIND = pytest.mark.parametrize("layout", [DDP2, FSDP2, HSDP], ids=["ddp2", "fsdp2", "hsdp2x2"])


def mine(problem: Problem, way: Way, step: int = 0):
    """This rank's share of a step, as the way brings it."""
    rank, _, world = get_world_info()
    return as_brought(share(problem.data.step(step), rank, world), way)


# --- skipping


def poisoned_steps(layout: Layout, poison: str):
    """A good step, a poisoned one, a good one: (weights unchanged, skipped, count of skipped steps) of each."""
    problem, way, loss_fn = Problem(), Way(layout, (), "list"), Loss()
    model = lay_out(problem, way, loss_fn=loss_fn)
    optimizer = make_optimizer("adamw", model.parameters())
    seen = []
    for number, disturbance in enumerate(("", poison, "")):
        loss_fn.disturbance = disturbance
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        model.forward_backward(mine(problem, way, number))
        result = model.optimizer_step(optimizer, 1.0)
        unchanged = all(torch.equal(local(before[name]), local(parameter)) for name, parameter in model.named_parameters())
        left = [p.grad for p in model.parameters() if p.grad is not None]
        seen.append((unchanged, result.skipped, model.skipped_steps, len(left)))
    return seen


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("poison", ["infinite", "nan", "nan in backward"])
@EVERY_KIND
def test_what_is_not_finite_on_one_rank_is_skipped_by_all(spmd, layout, poison):
    for seen in spmd(layout.world, poisoned_steps, layout, poison):
        assert seen == [(False, False, 0, 0), (True, True, 1, 0), (False, False, 1, 0)]


# --- refusals


def refusals(layout: Layout, spoilt: list[str]):
    """For each way to spoil the batch of rank 1: what this rank was told, and after how long. A good step must follow."""
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
    "label too large": "to 257, but the model knows 0 to 256 (model.vocab_size); a token without a loss has the label -100",
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
    "token too large": "to 257, but the model knows 0 to 256",
    "token below zero": "from -1 to",
    "label too large": "to 257, but the model knows 0 to 256 (model.vocab_size); a token without a loss has the label -100",
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
            assert (words if rank == 1 else "1 other rank(s) refused their batch") in text, (how, rank)
            assert seconds < 30, how  # no waiting for a time limit
    assert max(relative_errors(results[0][1], reference(Problem()).gradients).values()) <= EXACT  # the step after them


@EVERY_KIND
def test_unequal_numbers_of_microbatches_are_refused_on_every_rank(spmd, layout):
    for told, _ in spmd(layout.world, refusals, layout, ["other number of microbatches"]):
        assert told[0][0] == "ConfigError"
        assert f"{layout.world + 1} on {layout.world} data ranks" in told[0][1]
        assert told[0][2] < 2


# --- what must not disturb a step


@pytest.mark.parametrize("disturbance", ["evaluate", "raise", "raise in backward", "infinite"])
@pytest.mark.parametrize("layout", [DDP2, FSDP4, HSDP], ids=["ddp2", "fsdp4", "hsdp2x2"])
def test_a_disturbed_run_ends_like_an_undisturbed_one(spmd, reference, layout, disturbance):
    found = faults(spmd(layout.world, train, Problem(), Way(layout), disturbance), reference(Problem()), EXACT)
    assert not found, found[:8]


def interrupted_context(layout: Layout):
    """Break off inside the public accumulation context, then take a step of one microbatch."""
    problem, way = Problem(), Way(layout)
    model = lay_out(problem, way)
    try:
        with model.accumulation_context(False):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    model.forward_backward(mine(problem, way))
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


@pytest.mark.parametrize("microbatches", ["one", "list"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_evaluation_is_the_training_loss_and_the_same_on_every_layout(spmd, reference, name, microbatches):
    for evaluation, tokens, training, left, kept in spmd(LAYOUTS[name].world, evaluated, LAYOUTS[name], microbatches):
        assert evaluation == pytest.approx(reference(Problem()).losses[0], rel=EXACT)
        assert evaluation == pytest.approx(training, rel=EXACT)
        assert (tokens, left, kept) == (real_tokens(Data().step(0)), [], True)


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
"""Two tokens short of the model's window, so that generation has to slide it."""


def generated(layout: Layout):
    model = lay_out(Problem(dtype="float32"), Way(layout))
    return model.generate(PROMPT, 6, temperature=0), model.generate(PROMPT, 6, seed=1), model.generate(PROMPT, 6, seed=2)


def greedy(problem: Problem) -> list[int]:
    model, ids = build(problem), list(PROMPT)
    for _ in range(6):
        ids.append(int(model(torch.tensor([ids[-16:]]))[0, -1].argmax()))
    return ids[len(PROMPT) :]


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


@pytest.mark.parametrize(("max_norm", "foreach"), [(0.1, True), (0.1, False), (10.0, True)])
@EVERY_KIND
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
    values = [torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(number)) for number in range(5)]
    norm = torch.stack(values).norm()
    for found, clipped_values in spmd(4, clipped_over_mixed_meshes):
        assert found == pytest.approx(norm.item(), rel=1e-14)
        for value, one in zip(values, clipped_values, strict=True):
            torch.testing.assert_close(one, value * (0.5 / (norm + 1e-6)), rtol=1e-12, atol=0)


# --- what is refused before it does harm


def unequal_ranks(layout: Layout, buffers_only: bool) -> str:
    model = foreign.on_cpu()
    rank = get_world_info()[0]
    with torch.no_grad():
        (model.waves.table if buffers_only else model.out.bias)[0] += rank * 1e-3
    with pytest.raises(IntegrityError) as caught:
        parallelize(model, layout)
    return str(caught.value)


@pytest.mark.parametrize("buffers_only", [False, True])
@EVERY_KIND
def test_ranks_that_bring_different_weights_are_refused(spmd, layout, buffers_only):
    for text in spmd(layout.world, unequal_ranks, layout, buffers_only):
        assert f"{'waves.table' if buffers_only else 'out.bias'} differs between ranks" in text
        assert "build the model on meta, or seed every rank alike" in text
        assert "embed.weight" not in text


def drifted(layout: Layout) -> str:
    """A replica that changes on one rank after all was well."""
    model = lay_out(Problem(), Way(layout))
    if get_world_info()[0] == layout.world - 1:
        with torch.no_grad():
            local(model.parts[0].norm.weight)[0] += 1e-9
    try:
        model.audit()
    except IntegrityError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("layout", [DDP2, HSDP], ids=["ddp2", "hsdp2x2"])
def test_the_audit_sees_one_bit_of_drift_between_replicas(spmd, layout):
    for text in spmd(layout.world, drifted, layout):
        assert "norm.weight differs between ranks" in text


def applied_again(layout: Layout) -> list[str]:
    """What a second application says, of the module that came in and of the one that came out; and one in the wrong order."""
    model = foreign.on_cpu()
    laid_out = parallelize(model, layout)
    told = []
    for again in (model, laid_out.module):
        for attempt in (lambda m: parallelize(m, layout), lambda m: apply_ac(m, "full")):
            with pytest.raises(ConfigError) as caught:
                attempt(again)
            told.append(str(caught.value))
    return told


@pytest.mark.parametrize(("layout", "technique"), [(DDP2, "ddp"), (FSDP2, "fully_shard")])
def test_a_second_application_and_a_misordered_one_are_refused(spmd, layout, technique):
    for told in spmd(2, applied_again, layout):
        assert [technique in text and "already" in text for text in told] == [True] * 4
        assert "apply it once" in told[0]
        assert "must come before" in told[1]


def sharded_again() -> str:
    mesh = init_distributed(FSDP2)
    model = apply_fsdp2(apply_ac(foreign.on_cpu(), "full"), mesh)
    with pytest.raises(ConfigError) as caught:
        apply_fsdp2(model, mesh)
    return str(caught.value)


def test_sharding_twice_is_refused(spmd):
    assert all("fully_shard is on this" in text for text in spmd(2, sharded_again))


def plan_for_another_mesh() -> str:
    with pytest.raises(ConfigError) as caught:
        parallelize(Problem().model, init_distributed(FSDP2), plan=plan(Problem().model, DDP2))
    return str(caught.value)


def test_a_plan_for_another_mesh_is_refused(spmd):
    assert all(
        "the plan is for the mesh {'dp_replicate': 2}, but the mesh here is {'dp_shard': 2}" in text
        for text in spmd(2, plan_for_another_mesh)
    )


# --- the plan is what is applied


def applied(edits: dict, layout: Layout):
    """What a model does whose plan was edited: all-gathers and forwards of each block in a step, gradients, trained parameters."""
    problem, way = Problem(dtype="float32"), Way(layout)
    made = plan(problem.model, layout)
    data = edits.pop("data", {})
    units = tuple(replace(unit, **edits.get("units", {})) if unit.name else unit for unit in made.units)
    made = replace(made, data=replace(made.data, **data), **{**edits, "units": units})
    model = parallelize(problem.model, layout, plan=made, seed=11)
    runs = dict.fromkeys(model.facts.blocks, 0)
    for name in runs:
        model.parts[0].get_submodule(name).attention.register_forward_hook(lambda *_, name=name: runs.update({name: runs[name] + 1}))
    with WireCounter() as wire:
        model.forward_backward(mine(problem, way))
    gathers = sum(sent.op == "all_gather" for sent in wire.sent)
    return gathers, runs, gradients(model), {name for name, p in model.named_parameters() if not p.requires_grad}


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
