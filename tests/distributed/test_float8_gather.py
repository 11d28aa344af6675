"""Weights that FSDP gathers in float8: bit by bit what rounding a gathered weight gives, at one byte for each
element.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import test_pipeline
import torch
from support.laid_out import own_rows
from support.ranks import ranks, refusal
from test_float8 import BATCHES, DENSE, SHARDED, SPARSE, WIDE, verified
from test_tensor_parallel import Way, assert_all_estimated, one_warm_step
from torch import Tensor

from meshwright import ConfigError, IntegrityError
from meshwright.checkpoint import load, save
from meshwright.distributed import apply_float8, apply_fsdp2, order
from meshwright.distributed import products as float8_gather
from meshwright.distributed.parallelize import parallelize
from meshwright.distributed.setup import init_distributed
from meshwright.distributed.transforms import apply_model_transforms, build_model_transform
from meshwright.distributed.weights.shards import whole_on_first
from meshwright.introspection.module_kinds import is_rounded
from meshwright.introspection.source import as_module
from meshwright.planning.build import plan
from meshwright.planning.layout import Layout

pytestmark = pytest.mark.skipif(
    find_spec("torchao") is None, reason="float8 is torchao's: pip install 'meshwright[float8]'"
)

ONE_SCALE = {"float8": "tensorwise"}
GATHERED = ONE_SCALE | {"float8_all_gather": True}
MIXED = {"precision": {"master": "float32", "compute": "bfloat16"}}
BOTH, HYBRID, STAGED = Layout(dp_shard=2, tp=2), Layout(dp_replicate=2, dp_shard=2), Layout(pp=2, dp_shard=2)
DEEP = replace(DENSE, n_layers=4)

WAYS: dict[str, tuple[Any, Layout, dict[str, Any], int]] = {
    "sharded": (DENSE, SHARDED, {}, 0),
    "mixed, microbatches": (DENSE, SHARDED, MIXED, 1),
    "uneven shards": (DENSE, Layout(dp_shard=3), MIXED, 0),
    "hybrid, all-reduce postponed": (DENSE, HYBRID, {"sync_grad_accum": "shard"}, 1),
    "kept gathered": (DENSE, SHARDED, {"reshard_after_forward": False}, 1),
    "recomputed": (DENSE, SHARDED, MIXED | {"activation_checkpointing": "full"}, 0),
    "offloaded": (DENSE, SHARDED, {"cpu_offload": True}, 0),
    "frozen, filtered": (DENSE, SHARDED, {"freeze": [r"layers\.0", "w_up"], "float8_filter": ["wq"]}, 0),
    "tensor": (WIDE, BOTH, MIXED, 2),
    "tensor, whole sequences, recomputed": (
        WIDE,
        BOTH,
        {"sequence_parallel": False, "activation_checkpointing": "full"},
        0,
    ),
    "pipeline": (DEEP, STAGED, MIXED, 2),
    "split backward": (DEEP, STAGED, {"pipeline_schedule": "zbv_zero_bubble"}, 2),
    "experts": (SPARSE, Layout(dp_shard=2, ep=2), {}, 0),
    "compiled": (DENSE, SHARDED, {"compile": True, "compile_backend": "aot_eager"}, 0),
}


def batch(number: int) -> dict[str, Tensor]:
    return dict(replace(BATCHES, rows=12)(number))


def trained(
    model: Any, layout: Layout, techniques: dict[str, Any], rows: int, fault: str = ""
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps, and the weights behind them."""
    laid = parallelize(model, layout, techniques=techniques, microbatch_rows=rows, seed=3)
    optimizer = torch.optim.AdamW([p for p in laid.parameters() if p.requires_grad], lr=0.01)
    losses = []
    with patch.object(float8_gather, "agree", partial(stale, fault) if fault else float8_gather.agree):
        for number in range(3):
            losses.append(laid.forward_backward(own_rows(laid, batch(number))).loss)
            laid.optimizer_step(optimizer, 1.0)
    return losses, whole_on_first(dict(laid.named_parameters()), differ=layout.pp > 1)


def stale(fault: str, shards: Any) -> None:
    """The mutant: scales are agreed on once; those of weights before the first optimizer step stay."""
    if shards[0].scale is None:
        agree(shards)
    for shard in shards if fault == "hidden" else ():
        shard.version = shard.parameter.sharded_param._version


agree = float8_gather.agree


def assert_equal(found: tuple[list[float], dict[str, Tensor]], expected: tuple[list[float], dict[str, Tensor]]) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][name], tensor) for name, tensor in expected[1].items())


@pytest.mark.all
@pytest.mark.parametrize("name", WAYS)
def test_gathering_in_float8_changes_nothing_at_all(spmd, name):
    model, layout, techniques, rows = WAYS[name]
    found, expected = (
        spmd(layout.world, trained, model, layout, chosen | techniques, rows)[0] for chosen in (GATHERED, ONE_SCALE)
    )
    assert_equal(found, expected)


VERIFIED: dict[str, tuple[Any, Layout, dict[str, Any], str, int]] = {
    "sharded": (DENSE, SHARDED, {}, "bfloat16", 1),
    "hybrid, recomputed": (DENSE, HYBRID, {"activation_checkpointing": "full"}, "float32", 0),
    "tensor": (WIDE, BOTH, {}, "bfloat16", 0),
    "pipeline": (DEEP, STAGED, {}, "float32", 2),
}


@pytest.mark.all
@pytest.mark.parametrize("name", VERIFIED)
def test_it_costs_no_more_than_float8_does_in_one_process(pool, name):
    model, layout, techniques, dtype, rows = VERIFIED[name]
    report = verified(pool, model, layout, GATHERED | techniques, dtype, rows)
    assert report, str(report)


# --- scales of other values


@pytest.mark.kills("float8", mutant="stale scales")
def test_scales_of_weights_before_the_step_are_caught(spmd):
    with pytest.raises(Exception, match="its scale is not that of its values now"):
        spmd(2, trained, DENSE, SHARDED, GATHERED, 0, "seen")
    expected, found = (
        spmd(2, trained, DENSE, SHARDED, chosen, 0, fault)[0]
        for chosen, fault in ((ONE_SCALE, ""), (GATHERED, "hidden"))
    )
    assert expected[0][0] == found[0][0] and expected[0][1] != found[0][1]


@pytest.mark.first("{'fused': True}")
@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@ranks(2)
def test_a_part_of_a_model_is_not_gathered_with_a_stale_scale(options):
    laid = parallelize(DENSE, SHARDED, techniques=GATHERED)
    optimizer = torch.optim.AdamW(laid.parameters(), lr=0.01, **options)
    laid.forward_backward(own_rows(laid, batch(0)))
    laid.optimizer_step(optimizer, 1.0)
    block: Any = laid.module.get_submodule("layers.0")
    said = refusal(lambda: block.unshard(), IntegrityError)
    assert "Call the whole model." in said and "layers.0" in said


# --- what is gathered, and what rests


@pytest.mark.all
@pytest.mark.parametrize("layout", [SHARDED, BOTH], ids=str)
@ranks(lambda layout: layout.world)
def test_what_is_gathered_is_the_whole_weight_rounded(layout):
    laid = parallelize(WIDE, layout, techniques=GATHERED | MIXED | {"reshard_after_forward": False}, seed=3)
    laid.forward_backward(own_rows(laid, dict(BATCHES(0))))
    model, wrong = laid.module, []
    whole = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    resting = {name: type(parameter._local_tensor) for name, parameter in model.named_parameters()}
    wrong += [name for name, kind in resting.items() if kind is not Tensor]
    wrong += [name for name, p in model.named_parameters() if p.grad is not None and p.grad.dtype != torch.float32]
    with torch.no_grad():
        model(torch.zeros(2, 8, dtype=torch.int64))
    for name, parameter in model.named_parameters():
        if "layers" not in name or "norm" in name:
            continue
        local = getattr(parameter, "_local_tensor", parameter)
        if not is_rounded(local):
            wrong.append(name)
            continue
        value = whole[name].bfloat16()
        scale = (torch.finfo(torch.float8_e4m3fn).max / value.abs().max().double()).float()
        expected = (value.float() * scale).to(torch.float8_e4m3fn)
        if layout.tp > 1:
            rank, dim = parameter.device_mesh.get_local_rank(), parameter.placements[0].dim
            expected = expected.view(torch.uint8).chunk(layout.tp, dim)[rank].view(torch.float8_e4m3fn)
        if not (
            torch.equal(local._scale, scale) and torch.equal(local._data.view(torch.uint8), expected.view(torch.uint8))
        ):
            wrong.append(name)
    assert wrong == []


def kept(folder: str) -> dict[str, Tensor]:
    laid = parallelize(DENSE, SHARDED, techniques=GATHERED, seed=3)
    optimizer = torch.optim.AdamW(laid.parameters(), lr=0.01)
    laid.forward_backward(own_rows(laid, BATCHES(0)))
    laid.optimizer_step(optimizer, 1.0)
    save(laid, folder, optimizer=optimizer)
    return whole_on_first(dict(laid.named_parameters()))


def resumed(folder: str, techniques: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    laid = parallelize(DENSE, SHARDED, techniques=techniques, seed=4)
    optimizer = torch.optim.AdamW(laid.parameters(), lr=0.01)
    laid.forward_backward(own_rows(laid, BATCHES(2)))  # a scale of weights that are replaced
    optimizer.zero_grad()
    load(laid, folder, optimizer=optimizer)
    loss = laid.forward_backward(own_rows(laid, BATCHES(1))).loss
    laid.optimizer_step(optimizer, 1.0)
    return [loss], whole_on_first(dict(laid.named_parameters()))


@pytest.mark.all
def test_a_checkpoint_does_not_know_of_it(spmd, tmp_path):
    folder = str(tmp_path / "checkpoint")
    spmd(2, kept, folder)
    assert_equal(*(spmd(2, resumed, folder, techniques)[0] for techniques in (GATHERED, ONE_SCALE)))


# --- what travels

COUNTED = {
    "sharded": Way(SHARDED, model=DENSE),
    "mixed, microbatches": Way(SHARDED, (("precision", MIXED["precision"]),), 1, DENSE),
    "hybrid": Way(HYBRID, model=DENSE),
    "frozen": Way(SHARDED, (("freeze", [r"layers\.0", "embedding"]),), model=DENSE),
    "tensor, recomputed": Way(BOTH, (("activation_checkpointing", "full"),), 1, WIDE),
}


@pytest.mark.all
@pytest.mark.parametrize("name", COUNTED)
def test_the_plan_estimates_every_byte(spmd, name):
    way = COUNTED[name]
    way = replace(way, techniques=(*GATHERED.items(), *way.techniques))
    ranks = spmd(way.layout.world, one_warm_step, way.model, way, 61)
    assert_all_estimated(ranks, way.layout.tp)


STAGES = {
    "gathered": (test_pipeline.SHARDED, GATHERED),
    "gathered for every microbatch, split backward": (
        test_pipeline.SHARDED,
        GATHERED | {"reshard_after_forward": True, "pipeline_schedule": "zbv_zero_bubble"},
    ),
    "gathered, frozen": (test_pipeline.SHARDED, GATHERED | {"freeze": ("embedding", r"layers\.0")}),
    "tensor, recomputed": (
        test_pipeline.TENSOR,
        ONE_SCALE | {"pipeline_schedule": "zbv_zero_bubble", "activation_checkpointing": "full"},
    ),
}


@pytest.mark.all
@pytest.mark.parametrize("name", STAGES)
def test_the_plan_estimates_every_byte_of_a_stage(spmd, name):
    layout, techniques = STAGES[name]
    model = replace(test_pipeline.UNTIED, dim=64, n_heads=4, n_kv_heads=2, hidden_dim=96)
    for planned, sent, *_ in spmd(layout.world, test_pipeline.one_step, model, layout, techniques, 9):
        assert sent == planned


# --- the doors


@pytest.mark.all
@ranks(2)
def test_every_door_gathers_in_float8():
    expected = [f"layers.{number}.feed_forward.w_up" for number in range(2)]
    mesh = init_distributed(SHARDED)
    made = apply_fsdp2(apply_float8(as_module(DENSE)), mesh)
    laid = parallelize(apply_float8(as_module(DENSE)), SHARDED).module
    chained = apply_model_transforms(
        as_module(DENSE), {"fully_shard": {}, "float8": {"enable_fsdp_float8_all_gather": True}}, device_mesh=mesh
    )
    order.materialise(made, torch.device("cpu"), 0, {})
    gathered: list[list[str]] = []
    for model in (made, chained, laid):
        seen: list[str] = []
        for name, module in model.named_modules():
            if name.endswith("w_up"):
                module.register_forward_pre_hook(
                    lambda module, args, name=name, seen=seen: seen.append(name) if is_rounded(module.weight) else None
                )
        model(torch.zeros(1, 8, dtype=torch.int64))
        gathered.append(seen)
    assert gathered == [expected] * 3


def test_what_cannot_be_gathered_in_float8_is_refused():
    with pytest.raises(NotImplementedError, match="has one for each row"):
        build_model_transform("float8", {"enable_fsdp_float8_all_gather": True, "recipe": "rowwise"}).apply(
            as_module(DENSE)
        )
    done = apply_float8(as_module(DENSE))
    with pytest.raises(ConfigError, match="layers of this Decoder multiply in float8 already, by tensorwise"):
        plan(done, SHARDED, techniques=ONE_SCALE)
    with pytest.raises(
        NotImplementedError,
        match="enable_fsdp_float8_all_gather = true does not go with techniques.reshard_after_forward = 2",
    ):
        plan(done, Layout(dp_shard=4), techniques={"reshard_after_forward": 2})
    with pytest.raises(ConfigError, match="about weights that FSDP gathers, and here none are"):
        parallelize(DENSE, Layout(dp_shard=1), techniques=GATHERED)
