"""A recorded step has the messages and the products of the real one, on every rank of two, three and four."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from meshwright.core.errors import UnsupportedError
from meshwright.distributed.parallelize import parallelize
from meshwright.distributed.process.operators import OperatorRecorder
from meshwright.distributed.recording.steps import CLIPPED, record_steps
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import as_module
from meshwright.models.decoder_config import DecoderConfig, MoEConfig
from meshwright.planning.build import plan
from meshwright.planning.layout import Layout
from meshwright.planning.plan import Plan
from meshwright.planning.step.operators import MessageBegin, MessageWait, OperatorKind, OperatorWork, Phase, StepOfRank
from meshwright.planning.step.places import places_like
from meshwright.planning.values import Batch

SEQ, VOCABULARY = 16, 67
DENSE = DecoderConfig(VOCABULARY, 32, 2, n_heads=4, n_kv_heads=2, hidden_dim=48, max_seq_len=SEQ)
MIXTURE = DecoderConfig(
    VOCABULARY,
    32,
    2,
    n_heads=4,
    n_kv_heads=2,
    hidden_dim=48,
    max_seq_len=SEQ,
    moe=MoEConfig(n_experts=4, hidden_dim=32),
)
KEYS = ("tokens", "labels")
LAYOUTS: dict[str, tuple[DecoderConfig, Layout, dict[str, Any]]] = {
    "sharded, accumulated": (DENSE, Layout(dp_shard=2), {}),
    "sharded over replicas": (DENSE, Layout(dp_replicate=2, dp_shard=2), {"activation_checkpointing": "full"}),
    "replicated": (DENSE, Layout(dp_replicate=2, dp_shard=1), {}),
    "tensor": (DENSE, Layout(dp_shard=2, tp=2), {}),
    "context": (DENSE, Layout(dp_shard=1, cp=2), {"context_parallel_method": "ring"}),
    "pipeline, tensor": (DENSE, Layout(dp_shard=1, pp=2, tp=2), {}),
    "experts": (MIXTURE, Layout(dp_shard=2, ep=2), {}),
}


def problem(name: str) -> tuple[DecoderConfig, Plan, Batch]:
    config, layout, techniques = LAYOUTS[name]
    data = layout.dp_replicate * layout.dp_shard
    batch = Batch(4 * data, SEQ, 2)
    return config, plan(model_facts(as_module(config)), layout, techniques=techniques, batch=batch), batch


def real_step(name: str) -> tuple[list[tuple[str, tuple[int, ...], int]], Counter[tuple[tuple[int, ...], ...]]]:
    """Take steps among peers, and return the third one's messages and the shapes of its products."""
    config, planned, _ = problem(name)
    laid = parallelize(config, LAYOUTS[name][1], plan=planned, microbatch_rows=2)
    optimizer = torch.optim.AdamW(laid.parameters(), lr=1e-3)
    tokens = torch.arange(4 * SEQ).view(4, SEQ) % VOCABULARY
    batch = {"tokens": tokens, "labels": tokens.roll(-1, 1)}
    for _ in range(2):  # DDP's buckets are in their order then
        laid.forward_backward(batch)
        laid.optimizer_step(optimizer, CLIPPED)
    with OperatorRecorder() as seen:
        laid.forward_backward(batch)
        laid.optimizer_step(optimizer, CLIPPED)
    messages = [(op, tuple(sorted(ranks)), size) for op, ranks, size, _ in seen.messages if len(ranks) > 1]
    products = Counter(
        tuple(shape for shape, _ in tensors[:2]) for op, tensors in seen.recorded if op == "aten.mm.default"
    )
    return messages, products


def messages_of(step: StepOfRank, pipeline: tuple[int, ...]) -> list[tuple[str, tuple[int, ...], int]]:
    """List messages as the real recorder does: a receiver sends nothing, and a send names all ranks of its group."""
    begun = [event for event in step.events if isinstance(event, MessageBegin) and event.kind != "receive"]
    return [
        (event.kind, pipeline if event.kind == "send" else event.ranks, int(event.moved))
        for event in begun
        if len(event.ranks) > 1
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_messages_are_those_of_the_real_step(pool, name):
    config, planned, batch = problem(name)
    steps = record_steps(model_facts(as_module(config)), planned, batch, max_norm=1.0, keys=KEYS)
    assert [step.rank for step in steps] == list(range(planned.world))
    for step, (messages, products) in zip(steps, pool.run(real_step, name, world=planned.world), strict=True):
        groups = {ranks for op, ranks, _ in messages if op == "send"}
        found = messages_of(step, groups.pop() if groups else ())
        if name == "experts":  # routers choose by values: only how many tokens travel differs
            found, messages = ([one[:2] for one in listed] for listed in (found, messages))
        if name == "replicated":  # DDP's begin while gradients come
            found, messages = sorted(found), sorted(messages)
        assert found == messages
        works = [event for event in step.events if isinstance(event, OperatorWork) and event.name == "aten.mm"]
        shapes = Counter(((r, d), (d, c)) for r, c, d, _ in (work.dims for work in works))
        if name != "experts":
            assert shapes == products


def test_every_message_is_awaited_after_its_begin():
    config, planned, batch = problem("pipeline, tensor")
    for step in record_steps(model_facts(as_module(config)), planned, batch, keys=KEYS):
        begun: set[int] = set()
        for event in step.events:
            if isinstance(event, MessageBegin):
                begun.add(event.number)
            elif isinstance(event, MessageWait):
                assert event.number in begun
        awaited = {event.number for event in step.events if isinstance(event, MessageWait)}
        assert begun == awaited


def test_a_ddp_message_is_awaited_at_the_end_of_the_backward():
    """Gradients of other parameters come between its begin and its end, so that it may hide."""
    wide = DecoderConfig(VOCABULARY, 256, 3, n_heads=4, n_kv_heads=4, hidden_dim=512, max_seq_len=SEQ)
    batch = Batch(4, SEQ, 2)
    planned = plan(model_facts(as_module(wide)), Layout(dp_replicate=2, dp_shard=1), techniques={}, batch=batch)
    step = record_steps(model_facts(as_module(wide)), planned, batch, keys=KEYS)[0]
    buckets = [e for e in step.events if isinstance(e, MessageBegin) and e.moved > 1000]
    assert len(buckets) == 2 and buckets[0].moved >= 2**20
    first = step.events.index(buckets[0])
    awaited = step.events.index(MessageWait(buckets[0].number))
    between = step.events[first:awaited]
    assert sum(isinstance(e, OperatorWork) and e.kind is OperatorKind.PRODUCT for e in between) > 5


def test_recomputed_blocks_and_layouts_of_operands_are_recorded():
    config, planned, batch = problem("sharded over replicas")
    step = record_steps(model_facts(as_module(config)), planned, batch, keys=KEYS)[0]
    products = [e for e in step.events if isinstance(e, OperatorWork) and e.kind is OperatorKind.PRODUCT]
    layouts = Counter(work.layout for work in products)
    linear, again = 2 * 7, 2 * 6  # recomputation ends before a block's last product, which no gradient needs
    microbatches = 2
    assert layouts == {
        "nt": microbatches * (linear + again + 1),  # blocks and head
        "nn": microbatches * (linear + 1),
        "tn": microbatches * (linear + 1),
    }
    attention = [e for e in step.events if isinstance(e, OperatorWork) and e.kind is OperatorKind.ATTENTION]
    assert Counter(work.layout for work in attention) == {"forward": 2 * 2 * microbatches, "backward": 2 * microbatches}
    assert all(work.causal and work.dims == (SEQ, SEQ, 8, 2 * 4) for work in attention)
    assert {work.phase for work in products} == {Phase.FORWARD, Phase.BACKWARD}


def test_groups_of_like_ranks_are_translated():
    _, planned, _ = problem("pipeline, tensor")  # rank = 2 * pp + tp
    place_of = places_like(planned, 0, 1)
    assert place_of((0, 2)) == (1, 3) and place_of((2, 0)) == (3, 1)
    assert place_of((0, 1)) == (0, 1)
    assert place_of((0, 3)) == ()


def test_a_model_that_reads_values_is_refused_with_the_reason():
    _, planned, batch = problem("sharded, accumulated")
    facts = model_facts(as_module(DENSE))
    assert facts.module is not None
    facts.module.register_forward_hook(lambda model, given, logits: logits[logits > 0])
    with pytest.raises(UnsupportedError, match="the operators of Decoder cannot be recorded: "):
        record_steps(facts, planned, batch, keys=KEYS)
