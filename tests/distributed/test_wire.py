"""What travels is what the plan said, to the byte, before any process group existed.

Counted below our code, at torch's dispatcher.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.laid_out import Figures, assert_estimated, counted, estimated
from support.problems import (
    DDP2,
    DDP4,
    FSDP2,
    FSDP4,
    HSDP,
    TIED,
    UNTIED,
    Data,
    Problem,
    Way,
    as_brought,
    make_optimizer,
    share,
)
from support.train import lay_out

from meshwright import Layout
from meshwright.core.losses import cross_entropy_sum
from meshwright.distributed.parallel_model import LossFunction
from meshwright.distributed.process.absent_peers import WireCounter
from meshwright.distributed.process.world import get_world_info
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import as_module
from meshwright.models.decoder_config import DecoderConfig
from meshwright.planning.values import Batch

pytestmark = pytest.mark.all


def one_warm_step(problem: Problem, way: Way, loss_fn: LossFunction | None = None) -> tuple[Figures, Figures]:
    """What the plan foresees for a step, and what the third step does (DDP settles its buckets in the first two)."""
    rank, _, world = get_world_info()
    model = lay_out(problem, way, loss_fn=loss_fn)
    optimizer = make_optimizer("sgd", model.parameters())
    for number, batch in enumerate(problem.data.steps(3)):
        with WireCounter() if number == 2 else nullcontext() as wire:
            model.forward_backward(as_brought(share(batch, rank, world), way))
            model.optimizer_step(optimizer, 1.0)
    rows = {"one": 0, "list": -(-problem.data.rows // world // 3), "rows": way.microbatch_rows}[way.microbatches]
    return estimated(model.plan, Batch(problem.data.rows, problem.data.seq, rows)), counted(wire)


BF16 = ("precision", {"master": "float32", "compute": "bfloat16", "reduce": "float32"})

WAYS = {
    "ddp4, accumulated": (TIED, Way(DDP4, (), "list")),
    "fsdp2, accumulated": (UNTIED, Way(FSDP2, (), "list")),
    "fsdp4, resharded to 2": (UNTIED, Way(FSDP4, (("reshard_after_forward", 2),), "rows")),
    "fsdp2, middle frozen": (UNTIED, Way(FSDP2, (("freeze", (r"layers\.1",)),), "rows")),
    "fsdp2, all but the head frozen": (UNTIED, Way(FSDP2, (("freeze", ("embedding", "layers", "^norm")),), "rows")),
    "fsdp2, half a block frozen": (UNTIED, Way(FSDP2, (("freeze", ("attention", "^norm")),), "rows")),
    "fsdp2, bf16": (UNTIED, Way(FSDP2, (BF16,), "rows")),
    "hsdp, accumulated": (UNTIED, Way(HSDP, (), "list")),
    "replicas of one shard, bf16": (UNTIED, Way(Layout(dp_replicate=2, dp_shard=1), (BF16,), "rows")),
}
"""Not in the array (test_ways): lists of microbatches, bfloat16, other parts frozen, a part of the ranks."""


@pytest.mark.first("fsdp2, accumulated")
@pytest.mark.parametrize("name", WAYS)
def test_the_plan_estimates_every_byte(spmd, name):
    model, way = WAYS[name]
    for planned, sent in spmd(way.layout.world, one_warm_step, Problem(model, dtype="float32"), way):
        assert_estimated(planned, sent)


@st.composite
def drawn(draw):
    heads, head = draw(st.integers(1, 5)), 2 * draw(st.integers(1, 4))
    model = DecoderConfig(
        draw(st.integers(2, 99)),
        heads * head,
        draw(st.integers(1, 4)),
        heads,
        heads,
        draw(st.integers(1, 40)),
        8,
        tied_embeddings=draw(st.booleans()),
    )
    layout = draw(st.sampled_from([DDP2, FSDP2, FSDP4, HSDP]))
    techniques = {"sync_grad_accum": draw(st.booleans())}
    if layout.dp_shard > 1:
        techniques["reshard_after_forward"] = draw(
            st.sampled_from([True, False, 2] if layout == FSDP4 else [True, False])
        )
    frozen = draw(st.sampled_from([(), ("embedding",), (r"layers\.0",), ("^norm",)]))
    data = Data(rows=4 * draw(st.integers(1, 2)), seq=6, vocab=model.vocab_size)
    techniques = tuple({**techniques, "freeze": frozen}.items())
    return Problem(model, dtype="float32", data=data), Way(layout, techniques, draw(st.sampled_from(["one", "rows"])))


@given(drawn())
@settings(
    max_examples=10,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_the_plan_estimates_every_byte_of_any_shape(pool, case):
    problem, way = case
    assert_estimated(*pool.run(one_warm_step, problem, way, world=way.layout.world, timeout=120)[0])


# --- the closed formulas, from nothing but parameter counts

EVEN = DecoderConfig(256, 64, 3, 4, 2, 128, 64)
SCALARS = 156
"""Bytes per rank of the words that open and close a step: eight counts and the loss over both data axes, a norm, and
the norm of copies.
"""


def even_sizes() -> tuple[int, int, int]:
    """Bytes of all parameters, of those outside the blocks, and of those of the last block, in fp32."""
    facts = model_facts(as_module(EVEN))
    return tuple(
        4 * sum(p.numel for p in part) for part in (facts.parameters, facts.of_unit(""), facts.of_unit("layers.2"))
    )


@pytest.mark.parametrize(
    ("layout", "microbatches"),
    [(DDP2, "rows"), (DDP4, "one"), (FSDP2, "one"), (FSDP2, "rows"), (FSDP4, "one"), (HSDP, "one"), (HSDP, "rows")],
    ids=lambda value: str(value),
)
def test_even_shapes_move_no_more_than_the_formulas_say(spmd, measured, layout, microbatches):
    every, root, last = even_sizes()
    shards, replicas = layout.dp_shard, layout.dp_replicate
    times = 3 if microbatches == "rows" else 1
    formulas = {}
    if shards > 1:
        formulas["all_gather"] = (2 * every - root - last) * (shards - 1) / shards * times
        formulas["reduce_scatter"] = every * (shards - 1) / shards
    if replicas > 1:
        formulas["all_reduce"] = 2 * (every / shards) * (replicas - 1) / replicas
    problem = Problem(EVEN, dtype="float32", data=Data(vocab=256))
    _, counted = spmd(layout.world, one_warm_step, problem, Way(layout, (), microbatches))[0]
    for op, formula in formulas.items():
        moved = sum(figures[1] for key, figures in counted.items() if key[0] == op) - (
            SCALARS if op == "all_reduce" else 0
        )
        assert 0.99 * formula <= moved <= formula, op
        measured(f"{layout}, {times} microbatches", "bytes, of the formula", {op: moved / formula})
    extra = {key[0] for key in counted} - set(formulas)
    assert extra <= {"all_reduce"}
    assert all(figures[1] <= SCALARS for key, figures in counted.items() if key[0] in extra)


def loss_that_talks(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    torch.distributed.all_reduce(torch.zeros(()))
    return cross_entropy_sum(logits, labels)


def test_a_collective_that_no_plan_lists_is_seen(spmd):
    planned, sent = spmd(2, one_warm_step, Problem(dtype="float32"), Way(FSDP2), loss_that_talks)[0]
    with pytest.raises(AssertionError, match="all_reduce"):
        assert_estimated(planned, sent)
