"""A rank rehearsed alone does what the same rank does among eight: by operators, by messages, to the byte."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
import torch
from support.rehearsed import beside, beside_training

from meshwright.cli import main as cli
from meshwright.core.config import to_toml
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.simulation.cards import Link, Machines, device
from meshwright.training import rehearsal
from meshwright.training.config import Config
from meshwright.training.rehearsal import Rehearsal, read, rehearse

pytestmark = pytest.mark.all

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MOE = {"n_experts": 8, "hidden_dim": 32}
DEEP = {"size": "debug", "n_layers": 4}

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp_shard": {"layout": {"dp_shard": 8}},
    "dp_replicate, accumulated": {
        "layout": {"dp_replicate": 8, "dp_shard": 1},
        "batch": {"microbatch": 1},
        "techniques": {"sync_grad_accum": True},
    },
    "both, accumulated": {
        "layout": {"dp_replicate": 2, "dp_shard": 4},
        "batch": {"microbatch": 1},
        "techniques": {"sync_grad_accum": "shard"},
    },
    "zero 2, accumulated": {"layout": {"dp_shard": 8}, "batch": {"microbatch": 1}, "techniques": {"zero_stage": 2}},
    "tp, sequences cut unevenly": {"layout": {"dp_shard": 2, "tp": 4}, "data": {"seq_len": 30}},
    "tp, sequences whole": {"layout": {"dp_shard": 4, "tp": 2}, "techniques": {"sequence_parallel": False}},
    "cp, uneven": {"layout": {"dp_shard": 2, "cp": 4}, "data": {"seq_len": 30}},
    "cp by a ring, recomputed": {
        "layout": {"dp_shard": 4, "cp": 2},
        "techniques": {"context_parallel_method": "ring", "activation_checkpointing": "full"},
    },
    "pp": {"layout": {"dp_replicate": 2, "dp_shard": 2, "pp": 2}},
    "pp interleaved, tp": {
        "layout": {"dp_shard": 2, "pp": 2, "tp": 2},
        "techniques": {"pipeline_schedule": "interleaved_1f1b"},
        "model": DEEP,
    },
    "pp without bubbles": {
        "layout": {"dp_shard": 2, "pp": 4},
        "techniques": {"pipeline_schedule": "interleaved_zero_bubble"},
        "model": {"size": "debug", "n_layers": 8},
    },
    "pp in a V, tied": {
        "layout": {"dp_shard": 4, "pp": 2},
        "techniques": {"pipeline_schedule": "zbv_zero_bubble"},
        "model": {**DEEP, "tied_embeddings": True},
    },
    "ep": {"layout": {"dp_shard": 8, "ep": 4}, "model": {"size": "debug", "moe": MOE}},
    "ep, tp": {"layout": {"dp_shard": 4, "tp": 2, "ep": 4}, "model": {"size": "debug", "moe": MOE}},
    "ep, pp": {"layout": {"dp_shard": 4, "pp": 2, "ep": 2}, "model": {"size": "debug", "moe": MOE}},
    "cp, tp, mixed, selective": {
        "layout": {"dp_shard": 2, "cp": 2, "tp": 2},
        "techniques": {"activation_checkpointing": "selective_op", "precision": {"compute": "bfloat16"}},
    },
}
TWO: dict[str, dict[str, Any]] = {
    "dp_shard": {"layout": {"dp_shard": 2}},
    "dp_replicate": {"layout": {"dp_replicate": 2, "dp_shard": 1}},
    "pp": {"layout": {"dp_shard": 1, "pp": 2}},
    "ep": {"layout": {"dp_shard": 2, "ep": 2}, "model": {"size": "debug", "moe": MOE}},
    "recomputed, mixed": {
        "layout": {"dp_shard": 2},
        "techniques": {"activation_checkpointing": "full", "precision": {"compute": "bfloat16"}},
    },
}
MUTANTS = {
    "another_rank": "pp",
    "nothing_sent": "pp",
    "never_clipped": "dp_shard",
    "rows_of_all": "dp_replicate",
    "selfish_peers": "ep",
    "nothing_recomputed": "recomputed, mixed",
    "in_full_precision": "recomputed, mixed",
}
"""Mutant -> a layout of two ranks in which the comparison finds it."""


@pytest.fixture
def config(tmp_path):
    """``config(of)``: a small run with these settings, and data of its own."""
    text = tmp_path / "words.txt"
    text.write_text("a text of some words, read again and again\n" * 400)

    def of(given: dict[str, Any]) -> dict[str, Any]:
        data = {"source": [str(text)], "cache": str(tmp_path / "cache"), "seq_len": 32, "workers": 0}
        return {
            "steps": 4,
            "out": str(tmp_path / "runs"),
            "model": {"size": "debug"},
            **given,
            "data": {**data, **given.get("data", {})},
            "batch": {"global_batch": 16, **given.get("batch", {})},
            "optimizer": {"max_norm": 1e-6},
        }

    return of


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_of_eight_rehearses_what_it_does(eight, config, name):
    found = eight.run(beside, config(LAYOUTS[name]), timeout=300)
    assert [rank.differences for rank in found] == [[]] * 8
    for kind in found[0].kinds:
        assert len({found[rank].work for rank in kind}) == 1, f"ranks {kind} have not the same work"


@pytest.mark.kills("rehearsal", "mutant")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_rehearsal_of_something_else_is_caught(spmd, config, mutant):
    for rank in spmd(2, beside, config(TWO[MUTANTS[mutant]]), mutant):
        assert rank.differences == [] and rank.mutated != []


def test_a_rehearsal_takes_the_steps_of_a_trainer(spmd, config):
    assert spmd(4, beside_training, config({"layout": {"dp_shard": 2, "tp": 2}})) == [[]] * 4


def compiled_anew(config: dict[str, Any]) -> Rehearsal:
    torch.compiler.reset()
    return rehearse(Config.from_dict(config), 1, 2)


def test_compiled_blocks_are_rehearsed_compiled(spmd, config):
    """What they send is seen in operators of their own; the first step is longer by their compilation."""
    techniques = {"compile": True, "compile_backend": "aot_eager"}
    given = config({"layout": {"dp_shard": 1, "tp": 2}, "techniques": techniques})
    assert [rank.differences for rank in spmd(2, beside, given)] == [[], []]
    [found] = spmd(1, compiled_anew, given)
    assert found.is_compiled and found.compile_seconds > found.seconds > 0
    assert {(row.op, row.axis) for row in found.messages} >= {("reduce_scatter", "tp"), ("all_gather", "tp")}


def test_a_model_of_transformers_is_rehearsed(spmd, config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    model = {"hf": str(tmp_path / "config.json")}
    found = spmd(4, beside, config({"model": model, "layout": {"dp_shard": 1, "pp": 2, "tp": 2}}))
    assert [rank.differences for rank in found] == [[]] * 4


def test_one_rank_of_each_kind_is_rehearsed_in_a_process_of_its_own(pool, config, tmp_path, capfd):
    given = config({"layout": {"dp_shard": 4, "pp": 2}})
    file, written = tmp_path / "run.toml", tmp_path / "found.json"
    file.write_text(to_toml(Config.from_dict({**given, "model": {"size": "debug", "vocab_size": 260}})))
    assert cli.main(["rehearse", str(file), "--each-kind", "--steps", "1", f"--json={written}"]) == 0
    first, last = read(written)
    assert (first.rank, first.alike, first.work, first.coordinates) == (0, 4, "pp 0", {"pp": 0, "dp_shard": 0})
    assert (last.rank, last.alike, last.work) == (4, 4, "pp 1") and "logits" in last.memory
    assert all(len(one.step_seconds) == 1 and one.peak_bytes > 1 << 25 and not one.refused for one in (first, last))
    shown, warned = capfd.readouterr()
    assert shown == f"2 kinds of ranks among 8\n\n{first}\n\n{last}\n\n"
    assert "brought the same rows" not in warned, "absent ranks bring none"
    assert not (tmp_path / "runs").exists()


@pytest.mark.first
def test_an_error_of_the_run_is_the_ranks_result(config, monkeypatch):
    def fail(*given, **verdict):
        raise ZeroDivisionError("on this rank\nalone")

    monkeypatch.setattr(ParallelModel, "optimizer_step", fail)
    found = rehearse(Config.from_dict(config({"layout": {"dp_shard": 2}})), 1, 2)
    assert (found.refused, found.exit_status, found.rank) == ("ZeroDivisionError: on this rank", 1, 1)
    monkeypatch.undo()
    found = rehearse(Config.from_dict(config({"layout": {"dp_shard": 3}})), 1, 2)
    assert "does not divide the world size 2" in found.refused and found.exit_status == 2


def die(*given: Any, **named: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.first
def test_the_death_of_a_rank_is_its_result(pool, config, monkeypatch):
    monkeypatch.setattr(rehearsal, "rehearse", die)
    parts = rehearsal.cast(Config.from_dict(config({"layout": {"dp_shard": 2}})), 2)
    found = rehearsal.rehearse_each(parts, rehearsal.one_rank(parts, 1), 1)
    assert [one.refused for one in found] == ["the process was killed by SIGKILL: its host has too little memory"]
    assert (found[0].rank, found[0].exit_status) == (1, 1)


def test_messages_take_the_time_that_is_foreseen(config):
    given = Config.from_dict(config({"layout": {"dp_shard": 2}}))
    slow = Link("slow", 1e6, 1e-3)
    cards = Machines(device("h100"), 2, 2, slow, slow)
    alone, lasting = rehearse(given, 0, 2, steps=2), rehearse(given, 0, 2, steps=2, machines=cards)
    foreseen = sum(row.seconds for row in lasting.messages)
    assert not alone.links and sum(row.seconds for row in alone.messages) == 0
    assert lasting.links == "2 H100, slow" and foreseen > 0.1
    assert min(lasting.step_seconds) >= foreseen
    assert lasting.memory == alone.memory and lasting.operators == alone.operators
