"""float8, planned: which layers are converted, what is said of the others, and what must be there."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from meshwright import ConfigError, Layout, Plan, UnsupportedError, parallelize, plan
from meshwright.cli.verify import _dtypes
from meshwright.core.errors import MissingExtraError
from meshwright.distributed.float8 import refuse_absent
from meshwright.distributed.memory.dry_run import estimate_memory
from meshwright.introspection.cluster import Cluster
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import as_module
from meshwright.models.decoder_config import DecoderConfig, MoEConfig
from meshwright.planning.memory import plan_memory
from meshwright.planning.plan import Plan as MadePlan
from meshwright.planning.values import Batch
from meshwright.training.build import refuse_early
from meshwright.training.config import Config
from meshwright.verification.problem import Problem, RandomBatches
from meshwright.verification.routes import refuse_unseen

DENSE = DecoderConfig(61, 32, 2, n_heads=4, n_kv_heads=2, hidden_dim=48, max_seq_len=20)
SPARSE = replace(DENSE, moe=MoEConfig(n_experts=16, hidden_dim=16, n_shared=1))
ONE = Layout(dp_shard=1)
ATTENTION = {f"layers.{i}.attention.{name}" for i in (0, 1) for name in ("wq", "wk", "wv", "wo")}
FEED_FORWARD = {f"layers.{i}.feed_forward.{name}" for i in (0, 1) for name in ("w_gate", "w_up", "w_down")}


def planned(model, device: str = "cpu", layout: Layout = ONE, **techniques) -> Plan:
    return plan(
        model, layout, cluster=Cluster(layout.world, device=device), techniques={"float8": "rowwise", **techniques}
    )


def converted(made: MadePlan) -> set[str]:
    assert made.float8 is not None
    return set(made.float8.modules)


def test_the_linear_layers_of_the_blocks_are_converted_and_named():
    made = planned(DENSE)
    assert converted(made) == ATTENTION | FEED_FORWARD
    assert (
        "  float8          rowwise, emulated, 14 linear layers: layers.*.attention.wq, layers.*.attention.wk,"
        in str(made)
    )
    assert "float8: the head, embeddings and norms stay in high precision" in made.notes
    assert "emulated" not in str(planned(DENSE, "cuda")) and MadePlan.from_json(made.to_json()) == made


def test_weights_that_are_gathered_in_float8_travel_as_bytes():
    half = {"precision": {"master": "float32", "compute": "bfloat16"}}
    made = {
        gathers: planned(DENSE, layout=Layout(dp_shard=2), float8="tensorwise", float8_all_gather=gathers, **half)
        for gathers in (False, True)
    }
    sent = {g: {(c.op, c.unit): c for c in p.collectives if c.axis == "dp_shard"} for g, p in made.items()}
    weights = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48
    before, after = (sent[gathers]["all_gather", "layers.0"] for gathers in (False, True))
    assert (before.dtype, after.dtype) == ("bfloat16", "uint8")
    assert before.elements * 2 - after.elements == weights
    scales = sent[True]["all_reduce", "float8 scales of weights"]
    assert (scales.elements, scales.dtype, scales.per) == (14, "float32", "microbatch") and len(sent[True]) == len(
        sent[False]
    ) + 1
    assert plan_memory(made[False]).gathered - plan_memory(made[True]).gathered == 2 * weights
    assert "tensorwise, emulated, gathered in float8, 14 linear layers" in str(made[True])


def test_a_filter_leaves_layers_out():
    made = planned(DENSE, float8_filter=["w_down", r"layers\.0\.attention"])
    assert converted(made) == {
        name for name in ATTENTION | FEED_FORWARD if "w_down" not in name and "layers.0.attention" not in name
    }
    assert (
        "float8: layers.*.feed_forward.w_down stays in high precision (2 of them): by techniques.float8_filter"
        in made.notes
    )
    with pytest.raises(ConfigError, match=r"float8_filter: 'w_dwn' matches no linear layer of its blocks of the model"):
        planned(DENSE, float8_filter=["w_dwn"])


def test_layers_that_do_not_divide_stay_and_are_named():
    made = planned(replace(DENSE, hidden_dim=40))
    assert converted(made) == ATTENTION
    assert (
        "float8: layers.*.feed_forward.w_up stays in high precision (2 of them): 40×32 does not divide by 16"
        in made.notes
    )
    with pytest.raises(
        ConfigError, match=r"no linear layer in the blocks of Decoder can be converted: layers.\*.attention.wq stays in"
    ):
        planned(replace(DENSE, dim=24, hidden_dim=40))


def test_experts_and_routers_stay():
    made = planned(SPARSE)
    shared = {name for name in converted(made) if name not in ATTENTION}
    assert len(shared) == 6 and all("shared" in name for name in shared)
    assert any(
        note.startswith("float8: the experts of layers.*") and "stay in high precision" in note for note in made.notes
    )


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.empty(16, 16, 16))

    def forward(self, tokens, numbers, weights):
        raise NotImplementedError


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Sequential(nn.Linear(16, 16)), Experts()
        self.shared = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))


def test_a_router_that_is_a_linear_layer_stays():
    model = nn.Module()
    model.blocks = nn.ModuleList(Sparse() for _ in range(2))
    made = planned(model)
    assert converted(made) == {f"blocks.{i}.shared.{j}" for i in (0, 1) for j in (0, 1)}
    assert "float8: blocks.*.router.* stays in high precision (2 of them): a router" in made.notes


class Special(nn.Linear):
    """Computes something else."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.special = nn.Linear(16, 16), Special(16, 16)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 16)


def test_a_class_of_its_own_is_no_linear_layer():
    made = planned(Model)
    assert converted(made) == {"blocks.0.attention", "blocks.1.attention"}
    assert any(
        "blocks.*.special stays in high precision (2 of them): its class Special may" in note for note in made.notes
    )


@pytest.mark.all
def test_parts_on_the_tensor_axis_must_divide_too():
    wide = replace(DENSE, dim=64, hidden_dim=96)
    assert len(converted(planned(wide, layout=Layout(dp_shard=1, tp=2)))) == 14
    words = (
        r"layout.tp = 2 has a part that does not divide by 16: layers.\*.attention.wk 8×32,"
        r" layers.\*.attention.wv 8×32,"
    )
    with pytest.raises(ConfigError, match=words + r'.*float8_filter = \["wk", "wv", "w_gate", "w_up", "w_down"\]'):
        planned(DENSE, layout=Layout(dp_shard=1, tp=2))


@pytest.mark.all
def test_a_pipeline_stage_has_its_own():
    from meshwright.planning.pipeline.stages import plan_of_stage

    made = planned(DENSE, layout=Layout(pp=2, dp_shard=1))
    assert converted(plan_of_stage(made, 1)) == {name for name in ATTENTION | FEED_FORWARD if ".1." in name}


def test_without_torchao_its_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name == "torchao" or name.startswith("torchao.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(
        MissingExtraError, match=r"techniques.float8 = 'rowwise' needs the package 'torchao'.*pip install .*torchao"
    ):
        parallelize(DENSE, Layout(dp_shard=1), techniques={"float8": "rowwise"})


def test_an_old_gpu_is_refused_by_name(monkeypatch):
    pytest.importorskip("torchao", reason="float8 is torchao's: make setup")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an old one")
    with pytest.raises(
        UnsupportedError, match=r"needs a GPU of compute capability 8.9 or newer, and an old one has 8.0"
    ):
        refuse_absent(planned(DENSE, "cuda"))


def test_a_run_in_float8_is_not_checked_against_a_trace():
    config = Config.from_dict({"check_trace": "some.trace", "techniques": {"float8": "rowwise"}})
    with pytest.raises(
        UnsupportedError, match=r"techniques.float8 = rowwise rounds further than a trace \(check_trace\) allows"
    ):
        refuse_early(config)


@pytest.mark.parametrize(
    ("techniques", "dtypes"),
    [
        ({}, ("float64", "float32")),
        ({"float8": "rowwise"}, ("float32",)),
        ({"float8": "rowwise", "precision": {"compute": "bf16"}}, ("bfloat16",)),
    ],
)
def test_verify_computes_around_float8_in_what_the_config_does(techniques, dtypes):
    assert _dtypes(None, Config.from_dict({"techniques": techniques})) == dtypes


def test_verify_refuses_what_it_cannot_see():
    """Rounding with the scales of other rows moves tokens to other experts, inside compiled blocks."""
    hidden = Problem(SPARSE, RandomBatches(61), techniques={"float8": "tensorwise", "compile": True})
    with pytest.raises(
        UnsupportedError, match=r"routing inside compiled blocks is not seen. Verify it with techniques.compile = false"
    ):
        refuse_unseen(hidden)
    for seen in (replace(hidden, model=DENSE), replace(hidden, techniques={"float8": "tensorwise"})):
        refuse_unseen(seen)


@pytest.mark.all
def test_activations_of_a_plan_for_gpus_are_estimated_where_there_are_none():
    pytest.importorskip("torchao", reason="float8 is torchao's: make setup")
    made = planned(DENSE, "cuda", float8="tensorwise")
    estimate = estimate_memory(model_facts(as_module(DENSE)), made, Batch(2, 16))
    assert not made.float8.emulated and estimate.why_not == "" and estimate.of().total > 0
