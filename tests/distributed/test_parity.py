"""Every layout computes what one process computes.

The oracle is plain torch (support/oracle); CONTRIBUTING says what "equal" means.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support import foreign
from support.oracle import bf16_gradients, differences, excesses, faults, relative_errors, worst
from support.problems import DDP2, FSDP2, FSDP4, HSDP, LAYOUTS, ONE, PARTLY_FROZEN, TIED, UNTIED, Data, Problem, Way
from support.train import compare, gradients_of_first_step, train

from meshwright import Layout
from meshwright.models.decoder_config import DecoderConfig

EXACT = 1e-10
"""Bound in fp64."""
UPCASTS = 1e-6
"""Bound for models that cast to fp32 inside, and the least bound in fp32."""

PLAIN = {
    "layout": "",
    "microbatches": "one",
    "tied": False,
    "freeze": (),
    "activation_checkpointing": "none",
    "reshard_after_forward": True,
    "sync_grad_accum": False,
    "cpu_offload": False,
    "max_norm": 0.3,
}


def chosen(layout: str, **values) -> dict:
    """The layout, and of each switch the value given or its first."""
    return PLAIN | {"layout": layout} | values


IN_FP64 = [
    *(chosen(layout) for layout in LAYOUTS),
    *(chosen(layout, microbatches="list", tied=True) for layout in ("ddp2", "fsdp2", "hsdp2x2")),
    chosen("ddp4", microbatches="list", activation_checkpointing="full", max_norm=None),
    chosen("ddp4", microbatches="rows", tied=True, freeze=PARTLY_FROZEN, sync_grad_accum=True),
    chosen("fsdp4", microbatches="rows", activation_checkpointing="selective", reshard_after_forward=False),
    chosen("fsdp4", tied=True, freeze=PARTLY_FROZEN, reshard_after_forward=2),
    chosen("fsdp4", microbatches="rows", activation_checkpointing="full", reshard_after_forward=2),
    chosen(
        "fsdp4", microbatches="list", sync_grad_accum=True, reshard_after_forward=2, cpu_offload=True, max_norm=None
    ),
    chosen("hsdp2x2", microbatches="list", freeze=PARTLY_FROZEN, sync_grad_accum="shard", reshard_after_forward=False),
]
"""What no way of the array has (test_ways): four ranks of one axis, lists of microbatches, resharding to a part of
the ranks.
"""
IN_FP32 = [
    chosen("ddp2", microbatches="list", tied=True),
    chosen("ddp4", microbatches="rows", sync_grad_accum=True, max_norm=None),
    chosen("fsdp2", microbatches="rows", activation_checkpointing="full", max_norm=None),
    chosen("fsdp4", freeze=PARTLY_FROZEN, reshard_after_forward=2),
    chosen("fsdp4", microbatches="list", cpu_offload=True, max_norm=None),
    chosen("hsdp2x2", microbatches="list", tied=True, sync_grad_accum="shard"),
]


def problem_and_way(c: dict, **options) -> tuple[Problem, Way]:
    problem = Problem(TIED if c["tied"] else UNTIED, freeze=c["freeze"], max_norm=c["max_norm"], **options)
    names = ("activation_checkpointing", "reshard_after_forward", "sync_grad_accum", "cpu_offload")
    techniques = tuple((name, c[name]) for name in names if c[name] != PLAIN[name])
    return problem, Way(LAYOUTS[c["layout"]], techniques, c["microbatches"])


def label(c: dict) -> str:
    """The layout, and every switch that is not at its first value."""
    said = {"tied": "tied", "freeze": "frozen", "cpu_offload": "offload"}
    words = [c["layout"], c["microbatches"]]
    words += [said.get(name, f"{name.split('_')[0]}={c[name]}") for name in list(PLAIN)[2:] if c[name] != PLAIN[name]]
    return "-".join(words)


def assert_equal(runs, reference, bound, floors=None):
    found = faults(runs, reference, bound, floors)
    assert not found, "\n".join(found[:8])
    return worst(differences(runs[0], reference))


@pytest.mark.parametrize("c", IN_FP64, ids=label)
def test_fp64_equals_one_process(spmd, reference, measured, c):
    problem, way = problem_and_way(c)
    runs = spmd(way.layout.world, train, problem, way)
    measured(c["layout"], "fp64", assert_equal(runs, reference(problem), EXACT))


@pytest.mark.all
@pytest.mark.parametrize("c", IN_FP32, ids=label)
def test_fp32_stays_within_the_noise_of_one_process(spmd, reference, floor, measured, c):
    problem, way = problem_and_way(c, dtype="float32", optimizer="sgd")
    runs = spmd(way.layout.world, train, problem, way)
    measured(c["layout"], "fp32", assert_equal(runs, reference(problem), UPCASTS, floor(problem)))
    measured("one process", "fp32 floor", worst(floor(problem)))


BF16 = (("precision", {"compute": "bfloat16", "reduce": "float32"}),)


@pytest.mark.parametrize("microbatches", ["one", "rows"])
@pytest.mark.parametrize(
    "layout",
    [ONE, FSDP2, FSDP4, HSDP, Layout(dp_replicate=2, dp_shard=1)],
    ids=["one rank", "fsdp2", "fsdp4", "hsdp2x2", "replicas of one shard"],
)
def test_bf16_costs_no_more_than_the_dtype_itself(spmd, reference, measured, layout, microbatches):
    problem = Problem(dtype="float32")
    one_32 = reference(problem).gradients
    way = Way(layout, BF16, microbatches)
    one_16 = spmd(1, bf16_gradients, problem, way)[0]
    layout_16 = spmd(layout.world, gradients_of_first_step, problem, way)[0]
    assert layout_16.keys() == one_16.keys() == one_32.keys()
    ratios = {
        name: ((layout_16[name] - one_16[name]).norm() / (one_16[name] - one_32[name]).norm()).item() for name in one_32
    }
    # the rule allows 2; in equal microbatches nothing but the order of the fp32 sums over ranks is left
    assert max(ratios.values()) <= 1e-3, max(ratios.items(), key=lambda item: item[1])
    cost = max(relative_errors(one_16, one_32).values())
    assert cost > 1e-3, "the oracle did not compute in bf16"
    assert max(relative_errors(layout_16, one_32).values()) > cost / 10, "the layout did not compute in bf16"
    measured(f"{layout}", "bf16, of what the dtype costs", {"gradients": max(ratios.values())})


# --- any shape


@st.composite
def shapes(draw):
    head, heads = 2 * draw(st.integers(1, 4)), draw(st.integers(1, 6))
    kv_heads = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    vocab, seq = draw(st.integers(2, 130)), draw(st.integers(2, 24))
    model = DecoderConfig(
        vocab,
        head * heads,
        draw(st.integers(1, 4)),
        heads,
        kv_heads,
        hidden_dim=draw(st.integers(1, 40)),
        max_seq_len=seq,
        qk_norm=draw(st.booleans()),
        tied_embeddings=draw(st.booleans()),
    )
    return Problem(
        model, data=Data(rows=4 * draw(st.integers(1, 3)), seq=seq, vocab=vocab, seed=draw(st.integers(0, 99))), steps=2
    )


@pytest.mark.all
@given(problem=shapes(), layout=st.sampled_from([FSDP2, HSDP]), microbatches=st.sampled_from(["one", "rows"]))
@settings(
    max_examples=10,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_any_shape_equals_one_process(pool, problem, layout, microbatches):
    errors = pool.run(compare, problem, Way(layout, (), microbatches), world=layout.world, timeout=120)[0]
    assert not excesses(errors, EXACT), excesses(errors, EXACT)[:8]


# --- models of other people

FOREIGN = {
    "built on meta": (foreign.on_meta, EXACT),
    "built on meta, tied": (foreign.on_meta_tied, EXACT),
    "built on the CPU, returns an object": (foreign.on_cpu, EXACT),
    "without blocks, returns an object": (foreign.without_blocks, EXACT),
    "Llama": (foreign.tiny_llama, UPCASTS),
    "GPT-2": (foreign.tiny_gpt2, UPCASTS),
}


@pytest.mark.first("without blocks, returns an object-ddp2")
@pytest.mark.parametrize("layout", [DDP2, FSDP2], ids=["ddp2", "fsdp2"])
@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_models_equal_one_process(spmd, reference, measured, name, layout):
    factory, bound = FOREIGN[name]
    arguments = ()
    if name in ("Llama", "GPT-2"):
        pytest.importorskip("transformers")
        os.environ["HF_HUB_OFFLINE"] = "1"
        arguments = (("positions", "position_ids"),)
    problem = Problem(factory, data=Data(arguments=arguments))
    runs = spmd(2, train, problem, Way(layout, (), "list"))
    measured(f"{name}, {layout}", "fp64", assert_equal(runs, reference(problem), bound))
