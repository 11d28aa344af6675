"""What a step on pairs of answers holds was estimated, before any process group existed: rows stay in pairs, and the
loss keeps more than a cross entropy of the whole microbatch does.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.laid_out import own_rows
from support.unhurried import Unhurried, least_of
from test_memory_estimate import FULL, MODEL, SEQ, VOCABULARY, family, off

from meshwright import Config, Layout, PreferenceLoss, parallelize
from meshwright.distributed.memory.account import MemoryAccount, dims_of_logits
from meshwright.distributed.memory.dry_run import default_optimizer, estimate_memory
from meshwright.distributed.mesh import get_pp_rank
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import as_module, with_adapters
from meshwright.planning.build import plan
from meshwright.planning.memory import RankMemory
from meshwright.planning.values import Batch
from meshwright.training.preference import expects_pairs

LORA: dict[str, Any] = {"adapters": {"rank": 4}}
STAGES = Layout(dp_shard=1, pp=2)
CASES: dict[str, tuple[Any, Layout, dict[str, Any], int, int]] = {
    "one": (MODEL, Layout(dp_shard=1), {}, 8, 4),
    "one, full": (MODEL, Layout(dp_shard=1), FULL, 4, 0),
    "sharded": (MODEL, Layout(dp_shard=2), {}, 8, 4),
    "tensor": (MODEL, Layout(dp_shard=1, tp=2), {}, 4, 0),
    "pipeline, rows by default": (MODEL, STAGES, {}, 12, 0),
    "adapters, sharded": (family("llama"), Layout(dp_shard=2), LORA, 8, 2),
}


def made(name: str) -> tuple[Any, Any, Batch]:
    model, layout, techniques, rows, microbatch = CASES[name]
    model = model() if callable(model) else model
    batch = Batch(rows, SEQ, microbatch, VOCABULARY, pairs=True)
    return model, plan(model, layout, techniques=techniques, batch=batch), batch


def foreseen(name: str, *, pairs: bool = True):
    model, planned, batch = made(name)
    keys = ("tokens", "labels", "positions", *(("document_ids",) if "adapters" not in name else ()))
    request = CASES[name][2].get("adapters")
    if request is not None:
        from meshwright.introspection.adapter_request import Adapters

        model = with_adapters(model, Adapters(**request))
    estimate = estimate_memory(model_facts(as_module(model)), planned, replace(batch, pairs=pairs), keys=keys)
    assert not estimate.why_not, estimate.why_not
    return estimate


def compared(name: str) -> tuple[RankMemory, RankMemory]:
    """Found in whole steps from the second on, and foreseen."""
    estimate = foreseen(name)
    model, _, batch = made(name)
    _, layout, techniques, _, microbatch = CASES[name]
    options = {"techniques": techniques, "seed": 1, "microbatch_rows": microbatch, "loss_fn": PreferenceLoss()}
    laid = parallelize(model, layout, **options)
    optimizer = default_optimizer(laid)
    g = torch.Generator().manual_seed(0)
    brought = {key: torch.randint(0, VOCABULARY, (batch.global_rows, SEQ), generator=g) for key in ("tokens", "labels")}
    brought["positions"] = torch.arange(SEQ).repeat(batch.global_rows, 1)
    brought["positions"][:, -5:] = 0  # padding, for which transformers makes a mask
    if "adapters" not in name:  # with them the reference is the model without
        brought["document_ids"] = torch.zeros_like(brought["tokens"])
        brought["reference_log_probs"] = torch.zeros(batch.global_rows, dtype=torch.float64)
    rows = own_rows(laid, brought)
    watches = [MemoryAccount(laid.parts, dims_of_logits(VOCABULARY, layout.tp), optimizer=optimizer) for _ in range(2)]
    laid.forward_backward(rows)
    laid.optimizer_step(optimizer)
    for watch in watches:
        with Unhurried(), watch:
            laid.forward_backward(rows)
            watch.look()  # as after a run's first step: all gradients are there
            laid.optimizer_step(optimizer)
    rank = get_pp_rank(laid.mesh) if laid.plan.pipeline is not None else None
    return RankMemory(*least_of(watches)), estimate.of(rank)


@pytest.mark.all
@pytest.mark.parametrize("name", CASES)
def test_a_step_on_pairs_holds_what_was_estimated(spmd, name):
    for found, estimate in spmd(CASES[name][1].world, compared, name):
        assert not off(found, estimate)


@pytest.mark.all
def test_an_estimate_that_parts_the_pairs_is_caught(spmd):
    name = "pipeline, rows by default"
    found, _ = spmd(2, compared, name)[0]
    assert off(found, foreseen(name, pairs=False).of(0))


def test_pairs_are_known_before_the_data_is_read(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\n')
    known = [
        expects_pairs(Config.from_dict({"data": data}))
        for data in (
            {"source": [str(file)]},
            {"source": [str(file)], "task": "completion"},
            {"source": ["elsewhere.jsonl"], "task": "preference"},
            {"source": [str(tmp_path / "text.jsonl")]},
            {"source": ["elsewhere.jsonl"]},
            {},
        )
    ]
    assert known == [True, False, True, False, False, False]
    assert expects_pairs(Config.from_dict({"data": {"source": ["elsewhere.jsonl"]}, "dpo": {"beta": 0.1}}))
