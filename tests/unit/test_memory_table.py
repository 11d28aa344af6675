"""The table of what memory is held for, and what is said when there is not enough."""

from __future__ import annotations

import pytest
import torch

from meshwright import Layout, plan
from meshwright.models.decoder_config import DecoderConfig
from meshwright.planning.memory import MemoryUse
from meshwright.training.memory import MemoryShares, is_out_of_memory, memory_table, out_of_memory, suggestions

MODEL = DecoderConfig(256, 64, 4, 4, 2, 128, 64)
MIB = 1 << 20
SHARDED = plan(MODEL, Layout(dp_shard=4))
REPLICATED = plan(MODEL, Layout(dp_replicate=4, dp_shard=1))


def test_the_table_has_what_was_found_beside_the_plan():
    said = memory_table(
        {MemoryUse.PARAMETERS: 3 * MIB, MemoryUse.LOGITS: 5 * MIB}, SHARDED, MemoryShares(4, 2)
    ).splitlines()
    assert said[0].split() == ["the", "most", "at", "a", "time", "of", "found", "plan"]
    assert said[1].startswith("  parameters, gathered ones too  3 MiB  ") and said[-1].split() == [
        "logits",
        "5",
        "MiB",
        "-",
    ]
    assert [line.split()[1] for line in said[2:4]] == ["-", "-"], (
        "gradients and optimizer are foreseen, and not yet found"
    )
    assert len({len(line) for line in said}) == 1


def test_what_was_estimated_stands_beside_it_and_counts_where_a_step_failed_before_it_was_held():
    kept = {MemoryUse.ACTIVATIONS: 7 * MIB, MemoryUse.LOGITS: 2 * MIB}
    said = memory_table({MemoryUse.ACTIVATIONS: 3 * MIB}, SHARDED, MemoryShares(4, 2), kept)
    assert [line.split()[-5:] for line in said.splitlines()[-2:]] == [
        ["activations", "3", "MiB", "7", "MiB"],
        ["logits", "-", "2", "MiB"],
    ]
    assert suggestions(
        {MemoryUse.ACTIVATIONS: 3 * MIB}, SHARDED, MemoryShares(4, 1), {MemoryUse.ACTIVATIONS: 100 * MIB}
    )[0].endswith("saves about 75 MiB")


CASES = [
    (
        SHARDED,
        {MemoryUse.ACTIVATIONS: 100 * MIB},
        MemoryShares(4, 1),
        ['techniques.activation_checkpointing = "full"', "batch.microbatch = 2"],
    ),
    (SHARDED, {MemoryUse.LOGITS: 100 * MIB}, MemoryShares(1, 1), ["techniques.loss_chunks = 8"]),
    (
        REPLICATED,
        {MemoryUse.OPTIMIZER: 100 * MIB},
        MemoryShares(1, 1),
        ["layout.dp_shard = 4 with layout.dp_replicate = 1"],
    ),
    (SHARDED, {MemoryUse.GRADIENTS: 100 * MIB}, MemoryShares(1, 4), ["techniques.sync_grad_accum = true"]),
    (
        plan(MODEL, Layout(dp_shard=4), techniques={"zero_stage": 1}),
        {MemoryUse.PARAMETERS: 100 * MIB},
        MemoryShares(1, 1),
        ["techniques.zero_stage = 3"],
    ),
]


@pytest.mark.parametrize(("made", "found", "shares", "wanted"), CASES)
def test_what_would_save_most_is_said_first(made, found, shares, wanted):
    said = suggestions(found, made, shares)
    assert [text.partition(" saves about ")[0] for text in said[: len(wanted)]] == wanted and len(said) <= 2


def test_what_is_on_already_is_not_suggested():
    made = plan(MODEL, Layout(dp_shard=4), techniques={"activation_checkpointing": "full", "loss_chunks": 4})
    assert suggestions({MemoryUse.ACTIVATIONS: MIB, MemoryUse.LOGITS: MIB}, made, MemoryShares(1, 1)) == []


def test_every_suggestion_is_a_key_that_exists():
    from meshwright.core.config import public_keys
    from meshwright.training.config import Config

    told = [word for *_, words in CASES for text in words for word in text.split() if "." in word]
    assert told and set(told) <= set(public_keys(Config))


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: 12 bytes"
            ),
            True,
        ),
        (MemoryError(), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_is_out_of_memory(error, is_one):
    assert is_out_of_memory(error) is is_one


def test_out_of_memory_ends_with_the_table_and_two_switches():
    said = out_of_memory(
        torch.OutOfMemoryError("tried 2 GiB\nmore"), {MemoryUse.ACTIVATIONS: 8 * MIB}, SHARDED, MemoryShares(4, 1)
    ).splitlines()
    assert said[0] == "out of memory: tried 2 GiB" and "activations" in said[-2]
    assert said[-1].startswith("What would save most here: ") and said[-1].count("saves about") == 2
