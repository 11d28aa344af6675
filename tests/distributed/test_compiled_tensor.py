"""Compiled blocks under tensor parallelism: one graph for all of them, whatever their number, and no more of them
than without it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support import families

from meshwright import Layout, parallelize, plan
from meshwright.distributed.recompute import recompute as compilation
from meshwright.distributed.tensor.functions import TokenSequence
from meshwright.introspection import signature
from meshwright.models.decoder_config import DecoderConfig

pytestmark = pytest.mark.all

SHAPES = [(4, 16), (4, 16), (2, 24), (3, 40)]
"""Rows and tokens of each step: the same twice, then others."""
UNEVEN = [(3, 39), (2, 23)]
COMPILED = {"compile": True, "compile_backend": "aot_eager", "precision": {"master": "float64"}}


def model_of(kind: str, layers: int) -> Any:
    if kind == "decoder":
        return DecoderConfig(families.VOCABULARY, 16, layers, n_heads=4, n_kv_heads=2, hidden_dim=24, max_seq_len=64)
    return families.on_cpu(families.config_of("llama", num_hidden_layers=layers))


def graphs(
    kind: str, layers: int, tp: int, shapes: list[tuple[int, int]], fault: str = "", recompute: str = "none"
) -> list[tuple[int, dict]]:
    """After each step: how many graphs there are, and what broke one.

    On the first of ``tp`` ranks, of which the others are not there.
    """
    import torch._dynamo as dynamo
    import torch.distributed as dist
    from torch._dynamo.utils import counters
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dynamo.reset()
    counters.clear()
    if tp > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",)) if tp > 1 else None
    found = []
    with FAULTS[fault][0]() if fault else nullcontext():
        model = parallelize(
            model_of(kind, layers), mesh, techniques=COMPILED | {"activation_checkpointing": recompute}, audit=False
        )
        for rows, seq in shapes:
            tokens = torch.zeros((rows, seq), dtype=torch.int64)
            model.forward_backward({"tokens": tokens, "labels": tokens})
            found.append((counters["stats"]["unique_graphs"], dict(counters["graph_break"])))
    return found


def test_equal_blocks_share_a_graph_that_nothing_breaks_and_other_shapes_cost_what_they_cost_without(spmd):
    found = spmd(1, graphs, "decoder", 10, 2, SHAPES + UNEVEN, timeout=300.0)[0]
    plain = spmd(1, graphs, "decoder", 1, 1, SHAPES, timeout=300.0)[0]
    assert not any(breaks for _, breaks in found)
    assert [count for count, _ in found[: len(SHAPES)]] == [count for count, _ in plain] == [1, 1, 2, 2]
    assert [count for count, _ in found[len(SHAPES) :]] == [3, 3], (
        "lengths that do not divide are filled up, and have one of their own"
    )


def test_blocks_of_transformers_share_a_graph_too(spmd):
    assert spmd(1, graphs, "llama", 10, 2, SHAPES[:2], timeout=300.0)[0] == [(1, {}), (1, {})]


@pytest.mark.first("selective-3")
@pytest.mark.parametrize(("recompute", "count"), [("full", 0), ("selective", 3)])
def test_what_is_recomputed_is_not_compiled_and_the_plan_says_so(spmd, recompute, count):
    _, (found, breaks) = spmd(1, graphs, "decoder", 2, 2, SHAPES[:2], "", recompute, timeout=300.0)[0]
    assert found == count and breaks
    made = plan(
        model_of("decoder", 2), Layout(dp_shard=1, tp=2), techniques=COMPILED | {"activation_checkpointing": recompute}
    )
    assert any("run uncompiled on the tensor axis" in note for note in made.notes)


compiled_hooks = partial(patch.object, compilation, "keep_hooks_eager", lambda module: None)


def length_as_a_number() -> AbstractContextManager:
    whole = TokenSequence.begin

    def begin(self: Any, rows: int, length: int) -> None:
        whole(self, rows, length)
        self.known = length

    return patch.multiple(TokenSequence, begin=begin, length=lambda self, share: self.known)


caches_kept = partial(patch.object, signature, "SWITCHED_OFF", ())


FAULTS = {
    "compiled_hooks": (compiled_hooks, "decoder", 1, SHAPES[:1]),
    "length_as_a_number": (length_as_a_number, "decoder", 1, SHAPES[1:]),
    "caches_kept": (caches_kept, "llama", 2, SHAPES[:1]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_would_compile_more_is_seen(spmd, name):
    _, kind, layers, shapes = FAULTS[name]
    count, breaks = spmd(1, graphs, kind, layers, 2, shapes, name, timeout=300.0)[0][-1]
    assert breaks if name == "compiled_hooks" else count > min(len(shapes), 2)
