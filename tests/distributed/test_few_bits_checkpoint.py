"""Checkpoints of moments in few bits: bit for bit where blocks lie alike, rounded once more and said so where they do
not.
"""

from __future__ import annotations

import itertools
from functools import partial
from unittest.mock import patch

import pytest
import torch
from support.ranks import ranks, refusal
from support.states import DEEP, LAYOUTS, SPARSE, THREE, Held, adamw, held, laid_out, train, uncompiled

from meshwright import Layout, load, parallelize, save
from meshwright.checkpoint import state as low_bit
from meshwright.checkpoint.manifest import Manifest
from meshwright.core.errors import ConfigError
from meshwright.distributed.optimizer.low_bit import SIGNED, is_rounded
from meshwright.distributed.products import kind_of_state
from meshwright.distributed.weights.shards import whole_on_first

BLOCK = {"8bit": 256, "4bit": 128}
FURTHEST = {"8bit": 0.00704, "4bit": 0.11251}
"""Of a number from -1 to 1 from the next code: -1 itself, which is none."""


# --- the same blocks


def blocks(word: str, signed: bool) -> torch.Tensor:
    """(rows, block) of all sorts: largest elements of both signs, tiny, huge and empty ones, and what training
    leaves.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4000, BLOCK[word], generator=generator)
    rows = (
        rows
        * 10.0 ** torch.randint(-11, 6, (len(rows), 1), generator=generator)
        * torch.rand(rows.shape, generator=generator) ** 8
    )
    rows[:3] = 0.0
    rows[3:6, 5] = -7.0
    rows[6:9] *= 1e-12
    return rows if signed else rows.abs()


def as_torchao_rounds(word: str, values: torch.Tensor, signed: bool) -> torch.Tensor:
    made = kind_of_state(word).zeros(values.shape, signed, BLOCK[word])
    return made.copy_(values)


@pytest.mark.first("4bit-False")
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("word", BLOCK)
def test_what_was_rounded_is_found_again_to_the_last_bit(word, signed):
    values = as_torchao_rounds(word, blocks(word, signed), signed).dequantize()
    again = low_bit._round(kind_of_state(word).zeros(values.shape, signed, BLOCK[word]), values, signed=signed)
    assert torch.equal(again, values)
    once_more = as_torchao_rounds(word, values, signed).dequantize()
    assert torch.equal(once_more, values) is not signed, (
        "torchao's own rounding would shrink blocks whose largest element is negative"
    )


@pytest.mark.first("4bit")
@pytest.mark.parametrize("word", BLOCK)
def test_new_values_are_rounded_as_torchao_rounds_them(word):
    for signed in (True, False):
        values = blocks(word, signed)
        made = low_bit._round(kind_of_state(word).zeros(values.shape, signed, BLOCK[word]), values, signed=signed)
        assert torch.equal(made, as_torchao_rounds(word, values, signed).dequantize())


def moments(model, optimizer) -> dict[str, torch.Tensor]:
    """What a checkpoint keeps of them, whole, on rank 0."""
    found = {
        f"{name}/{key}": low_bit.as_values(optimizer.state[p][key], p)
        for name, p in model.named_parameters()
        for key in SIGNED
    }
    return whole_on_first(found, differ=model.plan.pipeline is not None)


def write_and_resume(layout: str, word: str, folder: str) -> tuple[list[str], dict, Held, list[str]]:
    """What differs from four steps in a row after two, saved, loaded and two more; the moments; the log."""
    said: list[str] = []
    with uncompiled(), patch.object(low_bit.log, "warning", said.append):
        model = laid_out(layout, {"optimizer_state": word})
        optimizer = adamw(model)
        losses = train(model, optimizer, range(2))
        save(model, folder, optimizer=optimizer)
        kept = moments(model, optimizer)
        undisturbed = held(model, optimizer, losses + train(model, optimizer, range(2, 4)))
        model = laid_out(layout, {"optimizer_state": word}, seed=99)
        optimizer = adamw(model)
        load(model, folder, optimizer=optimizer)
        assert any(is_rounded(state["exp_avg"]) for state in optimizer.state.values())
        resumed = held(model, optimizer, losses + train(model, optimizer, range(2, 4)))
        return (
            resumed.differs_from(undisturbed) + ["losses"] * (resumed.losses != undisturbed.losses),
            kept,
            resumed,
            said,
        )


@pytest.mark.first("4bit-one")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("word", BLOCK)
def test_a_resumed_run_is_the_undisturbed_one(spmd, tmp_path, layout, word):
    found = spmd(LAYOUTS[layout][0], write_and_resume, layout, word, str(tmp_path / "c"))
    assert all(differ == [] and said == [] for differ, _, _, said in found)
    tensors = Manifest.read(tmp_path / "c").tensors
    model = LAYOUTS[layout][2]
    assert tensors["optimizer.exp_avg.embedding.weight"].shape == (model.vocab_size, model.dim)
    assert {tensors[key].dtype for key in tensors if key.startswith("optimizer.exp")} == {"float32"}


def by_torchaos_own_rule(folder: str) -> tuple[list[str], list[str]]:
    """A mutant: what differs after a resume, and the log, where scales are the largest elements."""
    with patch.object(low_bit, "_scales", lambda blocks, table, *, signed: iter([blocks.abs().amax(-1).clip(1e-12)])):
        differ, _, _, said = write_and_resume("one", "8bit", folder)
        return differ, said


def test_a_scale_that_is_not_found_again_shows(spmd, tmp_path):
    ((differ, said),) = spmd(1, by_torchaos_own_rule, str(tmp_path / "c"))
    assert differ and len(said) == 1 and "was rounded once more" in said[0]


# --- other blocks


def write(layout: str, word: str, folder: str) -> dict:
    with uncompiled():
        model = laid_out(layout, {"optimizer_state": word})
        optimizer = adamw(model)
        train(model, optimizer, range(2))
        save(model, folder, optimizer=optimizer)
        return moments(model, optimizer)


def read(layout: str, word: str, folder: str) -> tuple[dict, list[str], list[float]]:
    said: list[str] = []
    with uncompiled(), patch.object(low_bit.log, "warning", said.append):
        model = laid_out(layout, {"optimizer_state": word}, seed=99)
        optimizer = adamw(model)
        load(model, folder, optimizer=optimizer)
        return moments(model, optimizer), said, train(model, optimizer, range(2, 4))


@pytest.mark.follows("techniques.optimizer_state", "techniques.stochastic_rounding")
@ranks(1)
def test_state_in_few_bits_is_not_taken_for_another_optimizers(tmp_path):
    folder = str(tmp_path / "c")
    write("one", "8bit", folder)
    model, alike = laid_out("one", {}), laid_out("one", {"optimizer_state": "8bit"})
    said = refusal(lambda: load(model, folder, optimizer=adamw(model)), ConfigError)
    assert "holds the state of TorchaoAdamW, which AdamW cannot continue: set techniques.optimizer_state and" in said
    assert "techniques.stochastic_rounding as they were, or load it without optimizer=" in said
    load(model, folder)
    load(alike, folder, optimizer=adamw(alike))
    save(model, folder, optimizer=adamw(model))
    said = refusal(lambda: load(alike, folder, optimizer=adamw(alike)), ConfigError)
    load(model, folder, optimizer=adamw(model))
    assert "holds the state of AdamW, which TorchaoAdamW cannot continue: set techniques.optimizer_state" in said


def test_other_bits_are_read_and_said(spmd, tmp_path):
    kept = spmd(1, write, "one", "8bit", str(tmp_path / "c"))[0]
    ((got, said, _),) = spmd(1, read, "one", "4bit", str(tmp_path / "c"))
    assert len(said) == 1 and any((got[name] != kept[name]).any() for name in kept)


@pytest.mark.all
@pytest.mark.parametrize(
    ("writer", "reader", "changes"),
    [
        ("HSDP", "FSDP2", False),  # the same shards
        ("DDP", "FSDP2", False),  # the same blocks, and some that are too small now, and kept as they are
        ("FSDP2", "DDP", True),  # some that were too small
        ("DDP", "TP", True),  # blocks of other columns
        ("FSDP2 + TP", "HSDP", True),
    ],
)
@pytest.mark.parametrize("word", BLOCK)
def test_another_layout_reads_what_it_can_keep_and_says_what_it_cannot(spmd, tmp_path, word, writer, reader, changes):
    kept = spmd(LAYOUTS[writer][0], write, writer, word, str(tmp_path / "c"))[0]
    found = spmd(LAYOUTS[reader][0], read, reader, word, str(tmp_path / "c"))
    got, said, losses = found[0]
    assert all(here == losses for _, _, here in found)
    assert all(told == [] for _, told, _ in found[1:]), "it is said once"
    differ = sum(int((got[name] != kept[name]).sum()) for name in kept)
    if not changes:
        assert differ == 0 and said == []
        return
    (line,) = said
    share = float(line.rpartition("c: ")[2].partition("%")[0]) / 100
    assert "was rounded once more" in line and differ
    assert share == pytest.approx(differ / sum(moment.numel() for moment in kept.values()), rel=0.03), (
        "norms count on every rank of tp"
    )
    for name, moment in kept.items():
        assert (got[name] - moment).abs().max() <= moment.abs().max() * FURTHEST[word], name


# --- stages and experts

OF_STAGES = {"pp": (DEEP, Layout(pp=2, dp_shard=1)), "whole": (DEEP, Layout(dp_replicate=2, dp_shard=1))}
OF_EXPERTS = {"ep": (SPARSE, Layout(dp_shard=2, ep=2)), "whole": (SPARSE, Layout(dp_replicate=2, dp_shard=1))}
OF_THREE = {"inside": (THREE, Layout(dp_shard=2)), "whole": (THREE, Layout(dp_replicate=2, dp_shard=1))}


def go_on(place: tuple, word: str, folder: str, *, writes: bool) -> tuple[dict, list[str], list[float]]:
    """Moments as written or read, the log, and the losses of the next two steps."""
    said: list[str] = []
    with uncompiled(), patch.object(low_bit.log, "warning", said.append):
        model = parallelize(*place, techniques={"optimizer_state": word}, seed=3 if writes else 99)
        optimizer = adamw(model)
        if writes:
            train(model, optimizer, range(2))
            save(model, folder, optimizer=optimizer)
        else:
            load(model, folder, optimizer=optimizer)
        return moments(model, optimizer), said, train(model, optimizer, range(2, 4))


@pytest.mark.all
@pytest.mark.parametrize(
    ("word", "places"),
    [*itertools.product(BLOCK, (OF_STAGES, OF_EXPERTS)), ("8bit", OF_THREE)],  # whose moments lie in other blocks
    ids=("8bit-pp", "8bit-ep", "4bit-pp", "4bit-ep", "8bit-inside"),
)
def test_stages_and_experts_go_on_where_they_are_whole_and_back(spmd, tmp_path, word, places):
    cut, whole = places.values()
    for number, (writer, reader) in enumerate(((cut, whole), (whole, cut))):
        folder = str(tmp_path / str(number))
        kept, _, losses = spmd(2, partial(go_on, writes=True), writer, word, folder)[0]
        found = spmd(2, partial(go_on, writes=False), reader, word, folder)
        got = found[0][0]
        assert got.keys() == kept.keys()
        differ = sum(int((got[name] != kept[name]).sum()) for name in kept)
        assert bool(differ) == bool(found[0][1]) and all(told == [] for _, told, _ in found[1:])
        for name, moment in kept.items():
            assert (got[name] - moment).abs().max() <= moment.abs().max() * FURTHEST[word], name
        assert all(here == found[0][2] for _, _, here in found)
        assert found[0][2] == pytest.approx(losses, rel=1e-4)
