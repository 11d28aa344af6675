"""What cannot be cut over ranks is refused in a sentence, on all ranks, and what can be is right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.mixing import Model, WithoutAttention, packed
from support.own_loops import batch_of, step, whole_gradients, worst
from support.ranks import ranks, refusal
from test_context_doors import DECODER, decoder, fsdp2

from meshwright import ConfigError, Layout, UnsupportedError, parallelize, plan
from meshwright.distributed import DistributedConfig, context_parallel_rows, init_distributed
from meshwright.models.decoder_config import MoEConfig
from meshwright.planning.values import Batch

CP2 = Layout(dp_shard=1, cp=2)
MOE = MoEConfig(n_experts=4, top_k=2)

# --- before any process group


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=61, **sizes))


def with_moe(**options: Any) -> Any:
    from dataclasses import replace

    return replace(DECODER, moe=replace(MOE, **options))


def loss_of_pairs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return (each[:, 1:] * each[:, :-1]).sum()


PLANS: dict[str, tuple[Callable[[], Any], Layout, dict, type, str]] = {
    "no mixing": (WithoutAttention, CP2, {}, UnsupportedError, "calls attention neither through transformers'"),
    "an encoder and a decoder": (
        t5,
        CP2,
        {},
        UnsupportedError,
        "T5ForConditionalGeneration has an encoder and a decoder, whose rows are two, and one of them is cut",
    ),
    "a capacity": (lambda: with_moe(capacity_factor=1.0), CP2, {}, UnsupportedError, "Set model.moe.capacity_factor"),
    "ddp and experts": (
        lambda: with_moe(),
        Layout(dp_shard=1, cp=2, ep=2),
        {"data_parallel": "ddp"},
        UnsupportedError,
        "techniques.data_parallel = ddp does not go with layout.ep = 2",
    ),
    "ddp and a tensor axis": (
        lambda: DECODER,
        Layout(dp_shard=1, cp=2, tp=2),
        {"data_parallel": "ddp"},
        UnsupportedError,
        "techniques.data_parallel = ddp does not go with layout.tp = 2",
    ),
    "ddp and a pipeline": (
        lambda: DECODER,
        Layout(dp_shard=1, cp=2, pp=2),
        {"data_parallel": "ddp"},
        UnsupportedError,
        "techniques.data_parallel = ddp does not go with layout.pp = 2",
    ),
    "ddp and a stage of ZeRO": (
        lambda: DECODER,
        CP2,
        {"data_parallel": "ddp", "zero_stage": 1},
        ConfigError,
        "techniques.zero_stage = 1 shards optimizer state, and techniques.data_parallel = ddp keeps all of it whole",
    ),
    "stage 0 and shards": (
        lambda: DECODER,
        Layout(dp_shard=2, cp=2),
        {"zero_stage": 0},
        ConfigError,
        "techniques.zero_stage = 0 keeps everything whole on every rank, but layout.dp_shard = 2 cuts it",
    ),
    "shards of no divisor": (
        lambda: DECODER,
        Layout(dp_shard=2, cp=2),
        {"reshard_after_forward": 3},
        ConfigError,
        "it must divide layout.dp_shard × cp = 4 and be neither 1 nor 4; legal here: 2, or true / false.",
    ),
    "a method without rows to cut": (
        lambda: DECODER,
        Layout(dp_shard=2),
        {"context_parallel_method": "ring"},
        ConfigError,
        "techniques.context_parallel_method = ring is about rows that are cut over ranks, and layout.cp = 1",
    ),
    "an unknown method": (
        lambda: DECODER,
        CP2,
        {"context_parallel_method": "rings"},
        ConfigError,
        'context_parallel_method = "rings" is text; expected one of "auto", "all_gather", "ring"',
    ),
    "heads that do not divide": (
        lambda: DECODER,
        Layout(dp_shard=1, cp=8),
        {"context_parallel_method": "ulysses"},
        UnsupportedError,
        "techniques.context_parallel_method = ulysses",
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_refused_in_a_sentence(name):
    model, layout, techniques, kind, words = PLANS[name]
    with pytest.raises(kind) as refused:
        plan(model(), layout, techniques=techniques)
    assert words in str(refused.value) and len(str(refused.value).splitlines()) == 1, str(refused.value)


def test_rows_shorter_than_the_axis_are_refused_before_they_are_there():
    with pytest.raises(ConfigError, match="layout.cp = 4 cuts each row over 4 ranks, and the batch has rows of 3"):
        plan(DECODER, Layout(dp_shard=1, cp=4), batch=Batch(4, 3))


# --- batches


def changed(change: str) -> dict[str, Any]:
    made: dict[str, Any] = batch_of(61, rows=2, length=12)
    if change == "short rows":
        return {key: value[:, :1] for key, value in made.items()}
    if change == "documents of another length":
        return made | {"document_ids": torch.zeros(2, 11, dtype=torch.int64)}
    if change == "positions of one row":
        return made | {"positions": torch.arange(12)[None]}
    if change == "labels of another length":
        return made | {"labels": made["labels"][:, :-1]}
    return made


BATCHES = {
    "short rows": "layout.cp = 2 cuts each row over 2 ranks, and the batch has rows of 1 tokens: set layout.cp = 1",
    "documents of another length": "batch['document_ids'] has shape (2, 11), but tokens have (2, 12)",
    "positions of one row": "batch['positions'] has shape (1, 12), but tokens have (2, 12)",
    "labels of another length": "batch['labels'] has shape (2, 11), but tokens have (2, 12)",
}


def entered(model: Any, batch: dict[str, Any]) -> None:
    with context_parallel_rows(model, batch):
        pass


def said(call: Callable[[], Any]) -> str:
    return refusal(lambda: call())


@ranks(2)
def test_a_steps_batch_that_does_not_fit_is_refused_on_all_ranks():
    model = parallelize(DECODER, CP2)
    found = {change: said(lambda change=change: model.forward_backward(changed(change))) for change in BATCHES}
    for change, words in BATCHES.items():
        assert words in found[change], change


@ranks(2)
def test_a_loops_batch_that_does_not_fit_is_refused_on_all_ranks():
    mesh = init_distributed(DistributedConfig(**vars(CP2)))
    model = fsdp2(decoder(), mesh)
    found = {change: said(lambda change=change: entered(model, changed(change))) for change in BATCHES}
    for change, words in BATCHES.items():
        if change == "positions of one row":  # spread over the rows
            assert found[change] == ""
        else:
            assert words in found[change], change


class Masked(Model):
    """A model that takes a mask for pairs of tokens, or a padding mask."""

    def forward(self, tokens, positions=None, document_ids=None, attention_mask=None, bias=None):
        return super().forward(tokens, positions, document_ids)


MASKS = {
    "for each pair": ({"attention_mask": (2, 1, 12, 12)}, "batch['attention_mask'] has shape (2, 1, 12, 12), but"),
    "of another length": ({"attention_mask": (2, 11)}, "batch['attention_mask'] has shape (2, 11), but tokens have"),
    "of one row": ({"bias": (12, 12)}, "batch['bias'] has shape (12, 12), in which the 12 tokens of a row lie"),
    "by rows": ({"bias": (2, 12, 12)}, "batch['bias'] has shape (2, 12, 12), in which the 12 tokens of a row lie"),
}


@ranks(2)
def test_masks_whose_tokens_lie_elsewhere_are_refused():
    torch.manual_seed(0)
    model = parallelize(Masked(packed), CP2)

    def attempt(shapes: dict[str, tuple[int, ...]]) -> None:
        masks = {key: torch.ones(shape, dtype=torch.bool) for key, shape in shapes.items()}
        model.forward_backward(batch_of(61, rows=2, length=12) | masks)

    found = {name: said(lambda shapes=shapes: attempt(shapes)) for name, (shapes, _) in MASKS.items()}
    for name, (_, words) in MASKS.items():
        assert words in found[name], name


# --- what is carried


def again(method: str) -> tuple[float, str]:
    """Documents that come again behind others."""
    ids = torch.tensor([0] * 5 + [1] * 4 + [0] * 6 + [2] * 3 + [1] * 6)
    batch = batch_of(61, rows=2) | {"document_ids": ids.expand(2, -1)}
    model = decoder()
    expected = whole_gradients(copy.deepcopy(model), batch)
    made = parallelize(model, CP2, techniques={"zero_stage": 0, "context_parallel_method": method})
    words = said(lambda: made.forward_backward(batch))
    return (0.0, words) if words else (worst(made.parts[0], expected), "")


@pytest.mark.all
def test_documents_that_come_again_are_carried_or_refused(spmd):
    for error, words in spmd(2, again, "auto"):
        assert words == "" and error < 1e-10
    for _, words in spmd(2, again, "ring"):
        assert (
            "techniques.context_parallel_method = ring: layers.0.attention.core has a mask in which a query's" in words
        )


def bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = BertConfig(
        vocab_size=61, max_position_embeddings=64, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **sizes
    )
    return BertForMaskedLM(config).double()


@pytest.mark.all
@pytest.mark.parametrize("padded", [False, True])
@ranks(3)
def test_an_encoder_that_sees_both_ways_is_equal(padded):
    mesh = init_distributed(DistributedConfig(dp_shard=1, cp=3))
    batch = batch_of(61, rows=2, length=23, key="input_ids")
    if padded:
        batch["attention_mask"] = (torch.arange(23) < torch.tensor([[23], [17]])).long()
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    model = bert()
    expected = whole_gradients(copy.deepcopy(model), batch)
    step(fsdp2(model, mesh), mesh, batch, inside=False)
    assert worst(model, expected) < 1e-6, "transformers computes in fp32 inside"


@ranks(2)
def test_a_loss_of_neighbouring_tokens_is_refused():
    words = said(lambda: parallelize(DECODER, CP2, loss_fn=loss_of_pairs))
    assert "loss" in words and "cp" in words


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("rows", [1, 3])
@ranks(2)
def test_a_loss_that_takes_no_made_up_rows_is_tried_on_cut_rows(rows, reduction):
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert labels.shape[1] in (10, 20), "this rank's tokens, or whole rows"
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)

    batch = batch_of(61, rows=rows, length=20)
    losses = []
    for layout in (Layout(dp_shard=2), CP2):  # of data ranks, both bring the same rows
        torch.manual_seed(0)
        model = parallelize(DECODER, layout, loss_fn=loss)
        if reduction == "mean":
            assert "a mean over its count, not a sum" in refusal(lambda: model.forward_backward(batch))  # noqa: B023
            continue
        losses.append(float(model.forward_backward(batch).loss))
    assert losses[1:] == pytest.approx(losses[:1], rel=1e-6)
