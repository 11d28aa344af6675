"""The answer to a configuration is about that configuration: in text, JSON, page and code, whatever it states."""

from __future__ import annotations

import html
import json
import tomllib
from dataclasses import fields, replace
from random import Random
from typing import Any

import pytest

from meshwright import Batch, Cluster, Layout, MeshwrightError, foresee
from meshwright.core.config import from_dict
from meshwright.models.decoder_config import SIZES
from meshwright.planning.techniques import RunTechniques
from meshwright.training.views.forecast import forecast_page

SETTINGS: dict[str, tuple[Any, ...]] = {
    "activation_checkpointing": ("none", "full", "selective", "every_n", "selective_op", "offload"),
    "loss_chunks": (1, 2, 8),
    "reshard_after_forward": (True, False),
    "sync_grad_accum": (True, False),
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
        answer = foresee(replace(SIZES["debug"], n_layers=4), layout, batch=batch, cluster=cluster, techniques=stated)
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
