"""Where a model is cut into stages, what the plan says of it, and what the rehearsal of the cut catches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cutting, users
from support.families import MORE, OWN
from torch import nn

from meshwright import ConfigError, Layout, Plan, UnsupportedError, plan
from meshwright.distributed import DistributedConfig
from meshwright.distributed.pipeline import split
from meshwright.distributed.rehearsal import LARGEST_ERROR
from meshwright.distributed.step.deferred import DeferredGradients
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.introspection.source import as_module
from meshwright.introspection.stages import Branch
from meshwright.models.decoder_config import SIZES
from meshwright.planning.pipeline.plan import PipelinePlan, balanced, compute_layer_assignment, given_cuts
from meshwright.planning.values import Batch

DEBUG = replace(SIZES["debug"], n_layers=4)
PP2 = Layout(pp=2, dp_shard=1)


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (10, 4, [(0, 3), (3, 6), (6, 8), (8, 10)]),
        (3, 3, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_an_even_assignment_gives_what_is_left_over_to_earlier_stages(layers, stages, expected):
    assert compute_layer_assignment(layers, stages) == expected


def test_more_stages_than_layers_cannot_be_assigned():
    with pytest.raises(ValueError, match="3 layers cannot be cut into 4 stages"):
        compute_layer_assignment(3, 4)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=9), st.integers(2, 5), st.integers(0, 12), st.integers(0, 12))
def test_no_other_cut_is_faster(sizes, stages, head, embedding):
    stages = min(stages, len(sizes))
    cuts = balanced(sizes, stages, head=head, embedding=embedding)
    assert [start for start, _ in cuts] == [0, *(end for _, end in cuts[:-1])] and cuts[-1][1] == len(sizes)
    assert costs(sizes, cuts, head, embedding) == min(
        costs(sizes, other, head, embedding) for other in every_cut(len(sizes), stages)
    )


def costs(sizes: list[int], cuts: list[tuple[int, int]], head: int, embedding: int) -> tuple[float, float]:
    """(slowest stage, largest stage)."""
    work = [sum(sizes[start:end]) for start, end in cuts]
    work[-1] += head
    return max(work), max(work[0] + embedding, *work[1:])


def every_cut(blocks: int, stages: int):
    if stages == 1:
        yield [(0, blocks)]
        return
    for rest in range(stages - 1, blocks):
        for cut in every_cut(rest, stages - 1):
            yield [*cut, (rest, blocks)]


@pytest.mark.all
def test_the_stage_of_a_large_head_gets_fewer_blocks():
    assert balanced([1.0] * 10, 4, head=2.0) == [(0, 3), (3, 6), (6, 9), (9, 10)]
    made = plan(replace(DEBUG, vocab_size=8192, dim=64), PP2).pipeline
    assert made is not None
    assert [len(stage.blocks) for stage in made.stages] == [3, 1]


def test_given_cuts_rise():
    assert given_cuts((1, 3), 4, 3) == [(0, 1), (1, 3), (3, 4)]
    with pytest.raises(
        ConfigError, match=r"pipeline_cuts = \[3, 1\]: 3 stages of 4 blocks need 2 rising numbers between 1 and 3"
    ):
        given_cuts((3, 1), 4, 3)


@pytest.mark.all
def test_the_plan_says_who_has_what_and_survives_json():
    made = plan(replace(DEBUG, tied_embeddings=True), PP2, techniques={"pipeline_schedule": "zbv_zero_bubble"})
    pipeline = made.pipeline
    assert pipeline is not None
    assert [stage.rank for stage in pipeline.stages] == [0, 1, 1, 0]
    assert (pipeline.before, pipeline.behind) == (("embedding",), ("norm", "head"))
    assert pipeline.tied == (("embedding.weight", "head.weight"),)
    assert pipeline.width == DEBUG.dim
    assert Plan.from_json(made.to_json()) == made


@pytest.mark.all
def test_requested_decide_the_stages():
    def blocks(**techniques: Any) -> list[int]:
        made = plan(replace(DEBUG, n_layers=8), PP2, techniques=techniques).pipeline
        assert made is not None
        return [len(stage.blocks) for stage in made.stages]

    assert blocks(pipeline_cuts=(3,)) == [3, 5]
    assert blocks(pipeline_schedule="interleaved_1f1b", layers_per_stage=2) == [2, 2, 2, 2]
    assert blocks(pipeline_schedule="interleaved_1f1b", layers_per_stage=1) == [1] * 8
    assert blocks(pipeline_schedule="looped_bfs", pipeline_cuts=(1, 2, 7)) == [1, 1, 5, 1]


def test_a_schedule_that_comes_with_the_layout_is_that_of_the_plan():
    config = DistributedConfig(pp=2, dp_shard=1, pp_schedule="ZBVZeroBubble")
    made = plan(DEBUG, config).pipeline
    assert made is not None and made.schedule == "zbv_zero_bubble" and len(made.stages) == 4
    with pytest.raises(ConfigError, match="Did you mean 'gpipe'"):
        plan(DEBUG, replace(config, pp_schedule="gpip"))
    with pytest.raises(
        ConfigError, match="pp_schedule = ZBVZeroBubble, but techniques.pipeline_schedule = gpipe: they are one thing"
    ):
        plan(DEBUG, config, techniques={"pipeline_schedule": "gpipe"})


@pytest.mark.all
def test_what_a_rank_has_is_said_in_words():
    def said(**requested: Any) -> list[str]:
        made = plan(replace(DEBUG, n_layers=5), PP2, techniques=requested).pipeline
        assert made is not None
        return [made.part_of(rank) for rank in range(2)]

    assert said(pipeline_cuts=(4,)) == ["stage 0 of 2: layers.0 to layers.3", "stage 1 of 2: layers.4"]
    both = ["stages 0 and 3 of 4: layers.0, layers.3 to layers.4", "stages 1 and 2 of 4: layers.1, layers.2"]
    assert said(pipeline_schedule="zbv_zero_bubble", pipeline_cuts=(1, 2, 3)) == both


@pytest.mark.all
def test_parameters_stay_gathered_in_a_pipeline_unless_somebody_says_otherwise():
    layout = Layout(pp=2, dp_shard=2)
    said = {
        request: plan(DEBUG, layout, techniques={"reshard_after_forward": request}).units[1].reshard_after_forward
        for request in ("auto", True)
    }
    assert said == {"auto": False, True: True}
    assert plan(DEBUG, Layout(dp_shard=2)).units[1].reshard_after_forward is True


@pytest.mark.first
@pytest.mark.parametrize(
    ("schedule", "rows", "microbatch", "words"),
    [
        ("dualpipe_v", 3, 1, "takes 4 microbatches at least, but the 3 rows of a rank make 3 of 1 rows each"),
        (
            "interleaved_1f1b",
            6,
            2,
            "takes a multiple of 2 microbatches, but the 6 rows of a rank make 3 of 2 rows each",
        ),
    ],
)
def test_microbatches_that_cannot_be_scheduled_are_refused_with_both_numbers(schedule, rows, microbatch, words):
    with pytest.raises(ConfigError) as found:
        plan(DEBUG, PP2, batch=Batch(rows, 16, microbatch), techniques={"pipeline_schedule": schedule})
    assert words in str(found.value)


@pytest.mark.first
@pytest.mark.parametrize(("rows", "expected"), [(8, 2), (4, 1), (6, 2), (3, 1), (12, 3), (1, 1)])
def test_without_a_word_about_microbatches_a_step_has_two_for_each_rank(rows, expected):
    made = plan(DEBUG, PP2).pipeline
    assert made is not None
    assert made.rows_per_microbatch(rows) == expected


@pytest.mark.first
@pytest.mark.parametrize(
    ("requested", "words"),
    [
        ({"pipeline_schedule": "1f2b"}, "techniques.pipeline_schedule = '1f2b': legal are gpipe, 1f1b, "),
        (
            {"freeze": (r"embedding", r"layers\.[01]")},
            "all that rank 0 of the pipeline has (layers.0 to layers.1) is frozen, so an optimizer",
        ),
        ({"pipeline_schedule": "no.csv"}, "techniques.pipeline_schedule = no.csv: there is no such file"),
        (
            {"pipeline_cuts": (3, 1)},
            "techniques.pipeline_cuts = [3, 1]: 2 stages of 4 blocks need 1 rising numbers between 1 and 3",
        ),
        (
            {"pipeline_cuts": (4,)},
            "techniques.pipeline_cuts = [4]: 2 stages of 4 blocks need 1 rising numbers between 1 and 3",
        ),
        (
            {"layers_per_stage": 1},
            "techniques.layers_per_stage = 1 makes 4 stages of 4 blocks, but 1f1b on layout.pp = 2 takes 2",
        ),
        (
            {"layers_per_stage": 2, "pipeline_schedule": "dualpipe_v"},
            "techniques.layers_per_stage = 2 makes 2 stages of 4 blocks, but dualpipe_v on layout.pp = 2 takes 4",
        ),
    ],
)
def test_requests_that_do_not_fit_are_refused(requested, words):
    with pytest.raises(ConfigError) as found:
        plan(DEBUG, PP2, techniques=requested)
    assert words in str(found.value)


def pipeline_of(facts: ModelFacts, schedule: str = "1f1b") -> PipelinePlan:
    made = plan(facts, PP2, techniques={"pipeline_cuts": (1,)}).pipeline
    assert made is not None
    return replace(made, schedule=schedule)


@pytest.mark.first("bloom-zbv_zero_bubble")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv_zero_bubble"])
@pytest.mark.parametrize("name", [*OWN, *MORE])
def test_every_family_goes_through_stages(monkeypatch, name, schedule):
    """With every kind of input, by as many stages as there are blocks, in the way of the plan's schedule."""
    facts, found, rehearse = cutting.family(name), [], split.rehearse

    def noted(model, plan, inputs):
        found.append((plan, rehearse(model, plan, inputs)))
        return found[-1][1]

    monkeypatch.setattr(split, "rehearse", noted)
    split.prove(facts, pipeline_of(facts, schedule), 1)
    assert found and all(len(plan.stages) > 1 and plan.schedule == schedule for plan, _ in found)
    for _, errors in found:
        assert len(errors) > 5 and max(errors.values()) <= LARGEST_ERROR, max(errors.items(), key=lambda item: item[1])


CANNOT = {
    "one block": "none was found in OneBlock",
    "two embeddings": "its forward reads the parameter factor itself, outside of the modules that it calls",
    "learnt scale": "behind layers.1 its forward reads the parameter scale, first at users.py:",
    "repeated": "the loss is wrong (relative error nan)",
    "shared bias": "the loss is wrong (relative error nan)",
    "skipping": "the loss is wrong (relative error nan): behind layers.1 its forward reads a tensor made before the"
    " first block",
    "mixed between": "behind layers.0 its forward reads the parameter mixes, a tensor made before the first block",
    "hourglass": "behind layers.2 its forward reads the output of layers.0",
    "one norm": "layers.0.norm_1.weight is one parameter with layers.1.norm_1.weight, and blocks need parameters of"
    " their own",
}
"""Models of users whose stages would need more than one block's output."""


@pytest.mark.first
@pytest.mark.parametrize("name", users.MODELS)
def test_a_users_model_goes_through_stages_or_is_refused(name):
    facts = cutting.user(name)
    if name not in CANNOT:
        split.prove(facts, pipeline_of(facts), 1)
        return
    with pytest.raises((UnsupportedError, ConfigError)) as found:
        split.prove(facts, pipeline_of(facts), 1)
    assert CANNOT[name] in str(found.value)


def wrong_exit(patch: Any) -> None:
    """A stage gives its rows in another order."""
    forward = split.AbsentBlock.forward

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        if self._part == "exit":
            self._passage.leaving = self._passage.leaving.flip(0)
        return output

    patch.setattr(split.AbsentBlock, "forward", broken)


def forgotten_weights(patch: Any) -> None:
    """What was put off is never done."""
    patch.setattr(DeferredGradients, "do", lambda self, microbatch: self.waiting.pop(microbatch))


def weights_of_another_dtype(patch: Any) -> None:
    """Tables behind an absent embedding are made in the dtype in which the model was built."""
    made = split.AbsentModule.__init__
    patch.setattr(split.AbsentModule, "__init__", lambda self, original, dtype: made(self, original, torch.float32))


@pytest.mark.kills("stages", "fault")
@pytest.mark.parametrize("fault", [wrong_exit, forgotten_weights, weights_of_another_dtype])
def test_a_fault_in_the_stages_is_caught(fault: Callable, monkeypatch):
    facts = model_facts(as_module(DEBUG))
    sample = facts.measurements.structure(1).sample
    made = pipeline_of(facts, "zbv_zero_bubble")
    stages = tuple(replace(made.stages[0], blocks=(block,)) for block in sample.blocks)
    small = replace(made, stages=stages, dtype="float64")
    fault(monkeypatch)
    errors = split.rehearse(sample, small, Branch(sample.inputs[0]))
    assert not max(errors.values()) <= 1e-10


def test_absent_modules_take_no_memory_and_keep_their_attributes():
    embedding = nn.Embedding(10, 4)
    embedding.attention_type = "sliding"  # type: ignore[assignment]
    stand = split.AbsentModule(embedding, torch.float64)
    output = stand(torch.zeros((2, 3), dtype=torch.int64))
    assert (tuple(output.shape), output.dtype, output.untyped_storage().nbytes()) == ((2, 3, 4), torch.float64, 8)
    assert output.isnan().all()
    assert stand.attention_type == "sliding"
    assert not list(stand.parameters())
    assert not embedding.weight.is_meta, "the model that was given keeps its weights"
