"""The answer to a configuration is about that configuration: in text, JSON, page and code, whatever it states."""

from __future__ import annotations

import html
import json
import re
import tomllib
from dataclasses import fields, replace
from random import Random
from typing import Any

import pytest

from meshwright import Batch, Cluster, ConfigError, Layout, MeshwrightError, foresee
from meshwright.core.config import from_dict
from meshwright.models.decoder_config import SIZES
from meshwright.planning.techniques import RunTechniques
from meshwright.training.views.forecast import forecast_page

MODEL = replace(SIZES["debug"], n_layers=4)
SETTINGS: dict[str, tuple[Any, ...]] = {
    "activation_checkpointing": ("none", "full", "selective", "every_n", "selective_op", "offload"),
    "loss_chunks": (1, 2, 8),
    "reshard_after_forward": (True, False, 2),
    "sync_grad_accum": (True, False, "shard"),
    "layers_per_stage": (1, 2),
    "pipeline_cuts": ([1], [3]),
    "pipeline_schedule": ("1f1b", "gpipe", "zbv_zero_bubble", "interleaved_1f1b", "dualpipe_v"),
    "optimizer_state": ("full", "8bit"),
    "cpu_offload": (False, True, "optimizer"),
    "precision": ({"master": "bfloat16"}, {"compute": "float32"}, {"reduce": "bfloat16"}),
    "freeze": (["embed"],),
    "compile": (True,),
    "zero_stage": (1, 2, 3),
}
FIGURES = {"activation_checkpointing": "recompute"} | {
    key: key for key in ("loss_chunks", "reshard_after_forward", "sync_grad_accum")
}
"""Settings that the documented figures have, and their keys there."""


def drawn(seed: int) -> tuple[Layout, Batch, Cluster, dict[str, Any]]:
    """Draw a layout, open or stated, a batch, GPUs, and up to four settings."""
    random = Random(seed)
    gpus, card = random.choice((1, 2, 4, 8, 16)), random.choice(("a100", "h100", "h200", "b200", "l40s", "rtx4090"))
    layout, left = {}, gpus
    for axis in random.sample(("pp", "dp_replicate", "cp", "tp"), 2):
        layout[axis] = random.choice([n for n in (1, 2, 4) if left % n == 0])
        left //= layout[axis]
    stated = Layout(**layout, dp_shard=left) if random.random() < 0.5 else Layout()
    keys = random.sample(sorted(SETTINGS), random.randint(1, 4))
    settings = {key: random.choice(SETTINGS[key]) for key in keys}
    return stated, Batch(32, 64, random.choice((0, 1, 2))), Cluster(gpus, gpu=card), settings


@pytest.mark.first
@pytest.mark.parametrize("seed", range(30))
def test_the_first_answer_has_all_that_was_stated_or_a_refusal_names_it(seed):
    layout, batch, cluster, stated = drawn(seed)
    try:
        answer = foresee(MODEL, layout, batch=batch, cluster=cluster, techniques=stated)
    except MeshwrightError as error:
        named = [*stated, *(f"{key} = {value}" for key, value in stated.items()), "recompute=", "schedule="]
        named += ["microbatch"] * (batch.microbatch_rows > 0) + ["layout", "pp", "cp"] * (layout != Layout())
        assert any(name in str(error) for name in named), f"{drawn(seed)}: {error}"
        return
    first = answer.candidates[0]
    request = from_dict(RunTechniques, stated)
    for key in stated:
        assert getattr(first.techniques, key) == getattr(request, key), drawn(seed)
    found = json.loads(answer.to_json())["candidates"][0]
    figures = {FIGURES[key]: value for key, value in stated.items() if key in FIGURES}
    figures |= {"microbatch": batch.microbatch_rows} if batch.microbatch_rows else {}
    if found["layout"]["dp_shard"] * found["layout"]["cp"] == 1:  # nothing is gathered
        figures.pop("reshard_after_forward", None)
    if figures.get("sync_grad_accum") == "shard":
        figures["sync_grad_accum"] = True
    assert {key: found[key] for key in figures} == figures, drawn(seed)
    if found["schedule"] and "pipeline_schedule" in stated:
        assert found["schedule"] == stated["pipeline_schedule"]
    if layout != Layout():
        assert {axis: found["layout"][axis] for axis in vars(layout)} == vars(layout)
    line = next(line for line in str(answer).splitlines() if str(first.layout) in line)
    assert f"microbatch {found['microbatch']}, recompute {found['recompute']}" in line
    written = tomllib.loads(first.toml())
    again = from_dict(RunTechniques, written.get("techniques", {}))
    assert all(getattr(again, one.name) == getattr(first.techniques, one.name) for one in fields(again)), drawn(seed)
    page = html.unescape(forecast_page([first.candidate], [first.candidate], first.toml()))
    assert f"recompute {found['recompute']}" in page and str(first.layout) in page
    assert_says_the_same_of_its_toml(first, batch, cluster)


def assert_says_the_same_of_its_toml(one, batch, cluster, model=MODEL):
    written = tomllib.loads(one.toml())
    assert written["batch"]["global_batch"] == batch.global_rows
    again = foresee(
        model,
        Layout(**written["layout"]),
        batch=replace(batch, microbatch_rows=written["batch"]["microbatch"]),
        cluster=cluster,
        techniques=written.get("techniques", {}),
    ).candidates[0]
    assert (again.mem_gb, again.step_s) == pytest.approx((one.mem_gb, one.step_s)), one.toml()


REQUESTS: list[dict[str, Any]] = [
    {},
    {"data_parallel": "ddp", "precision": {"compute": "float32"}},
    {"precision": {"compute": "float32"}},
    {"zero_stage": 2},
    {"reshard_after_forward": 4},
    {"sync_grad_accum": "shard"},
    {"layers_per_stage": 1},
    {"pipeline_cuts": [3]},
    {"pipeline_cuts": [2, 3, 4], "pipeline_schedule": "interleaved_1f1b"},
]


@pytest.mark.first
@pytest.mark.parametrize("stated", REQUESTS, ids=str)
def test_every_layout_shown_is_foreseen_as_its_own_toml_is(stated):
    batch, cluster = Batch(16, 64, 2 * ("pipeline_schedule" not in stated)), Cluster(8, gpu="h100")
    model = replace(MODEL, n_layers=6)
    answer = foresee(model, batch=batch, cluster=cluster, techniques=stated)
    request = from_dict(RunTechniques, stated)
    for one in (*answer.candidates, *answer.front):
        assert {key: getattr(one.techniques, key) for key in stated} == {key: getattr(request, key) for key in stated}
        assert_says_the_same_of_its_toml(one, batch, cluster, model)


@pytest.mark.parametrize("axis", [axis for axis in vars(Layout()) if axis != "dp_shard"])
def test_an_axis_of_size_one_is_a_stated_layout(axis):
    judged = foresee(MODEL, Layout(**{axis: 1}), batch=Batch(32, 64, 1), cluster=Cluster(8, gpu="h100"))
    assert not judged.searched and judged.candidates[0].layout == Layout(dp_shard=8)
    assert Layout().is_open and not Layout(dp_shard=-1).is_open


def test_stages_that_are_cut_unevenly_are_foreseen_so():
    batch, cluster, uneven = Batch(32, 64, 1), Cluster(2, gpu="h100"), {"pipeline_cuts": [3]}
    pins = ("pp=2", "recompute=none", "loss_chunks=1", "schedule=1f1b")
    stated, even = (
        foresee(MODEL, batch=batch, cluster=cluster, techniques=one, pins=pins).candidates[0] for one in (uneven, {})
    )
    assert stated.candidate.job.stage_bounds == ((0, 3), (3, 4)) != even.candidate.job.stage_bounds


@pytest.mark.parametrize(
    ("pin", "rows", "stated", "named"),
    [
        ("microbatch=4", 2, {}, "batch.microbatch = 2"),
        ("microbatch>=4", 2, {}, "batch.microbatch = 2"),
        ("recompute=full", 0, {"activation_checkpointing": "every_n"}, "techniques.activation_checkpointing = every_n"),
        ("reshard=false", 0, {"reshard_after_forward": 4}, "techniques.reshard_after_forward = 4"),
        ("sync_grad_accum=true", 0, {"sync_grad_accum": "shard"}, "techniques.sync_grad_accum = shard"),
    ],
)
def test_a_pin_against_what_is_stated_is_refused_with_both(pin, rows, stated, named):
    with pytest.raises(ConfigError, match=re.escape(f"pin {pin} and {named} contradict each other: leave one out")):
        foresee(MODEL, batch=Batch(32, 64, rows), cluster=Cluster(8, gpu="h100"), techniques=stated, pins=[pin])


def test_gradients_summed_over_replicas_once_cost_less_time_than_each_time():
    batch, cluster, layout = Batch(64, 64, 2), Cluster(16, gpu="h100"), Layout(dp_replicate=4, dp_shard=4)
    once, each, whole = (
        foresee(MODEL, layout, batch=batch, cluster=cluster, techniques={"sync_grad_accum": one}).candidates[0]
        for one in ("shard", True, False)
    )
    assert once.step_s < each.step_s and once.mem_gb == each.mem_gb < whole.mem_gb


def test_parameters_shared_among_fewer_ranks_take_memory_between_the_two():
    batch, cluster, layout = Batch(64, 64, 4), Cluster(16, gpu="h100"), Layout(dp_shard=16)
    freed, shared, held = (
        foresee(SIZES["1B"], layout, batch=batch, cluster=cluster, techniques={"reshard_after_forward": one})
        for one in (True, 8, False)
    )
    sizes = [one.candidates[0].mem_gb for one in (freed, shared, held)]
    assert sizes == sorted(set(sizes)) and shared.candidates[0].step_s < freed.candidates[0].step_s
