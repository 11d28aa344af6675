"""Rows cut over ranks: who has which token, what attention sees, and what cannot be cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.mixing import (
    FromTheEnd,
    Model,
    WithoutAttention,
    added,
    biased,
    causal,
    every_other,
    far_window,
    full,
    packed,
    shifted,
    windowed,
)

from meshwright import ConfigError, Layout, UnsupportedError, plan
from meshwright.distributed.context import methods, proof, runtime
from meshwright.distributed.context.proof import (
    WITHOUT_POSITIONS,
    prove,
    refuse,
    refuse_length,
    rehearse,
    rehearsed,
    small_and_plan,
)
from meshwright.distributed.context.rows import CutRows, Numbers, cut_batch, cut_rows
from meshwright.distributed.loss import first_batch
from meshwright.distributed.rehearsal import LARGEST_ERROR
from meshwright.introspection.facts import model_facts
from meshwright.introspection.mixing import masks
from meshwright.introspection.mixing.masks import RowMask
from meshwright.introspection.mixing.measure import measure_mixing, small_copy
from meshwright.introspection.mixing.values import Sizes
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import SIZES, DecoderConfig, MoEConfig
from meshwright.planning.context.plan import ContextPlan, head_tail, plan_methods
from meshwright.planning.values import Batch

DECODER = DecoderConfig(vocab_size=61, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=24, max_seq_len=64)
CPU = torch.device("cpu")


def decoder() -> Decoder:
    return Decoder(DECODER)


# --- which tokens a rank has


@given(st.integers(1, 16), st.integers(0, 400))
def test_head_and_tail_give_every_token_to_one_rank(ranks, more):
    length = ranks + more
    runs = head_tail(length, ranks)
    taken = sorted(place for mine in runs for start, stop in mine for place in range(start, stop))
    counts = [sum(stop - start for start, stop in mine) for mine in runs]
    assert taken == list(range(length)) and len(runs) == ranks
    assert min(counts) >= 1 and max(counts) - min(counts) <= 1


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_head_and_tail_share_the_work_of_a_causal_mask(ranks):
    work = [sum(place + 1 for run in mine for place in range(*run)) for mine in head_tail(2**14, ranks)]
    assert max(work) <= 1.01 * sum(work) / ranks


def test_rows_shorter_than_the_axis_are_refused():
    with pytest.raises(ConfigError, match="layout.cp = 4 cuts each row over 4 ranks, and the batch has rows of 3"):
        head_tail(3, 4)
    with pytest.raises(ConfigError, match="set layout.cp = 3 or less"):
        plan(DECODER, Layout(dp_shard=1, cp=4), batch=Batch(2, 3))


@given(st.integers(1, 5), st.integers(0, 30))
def test_a_batch_is_cut_and_can_be_put_together_again(ranks, more):
    length = ranks + more
    whole = {
        "tokens": torch.randint(0, 9, (3, length)),
        "attention_mask": torch.ones(3, length),
        "labels": torch.rand(3, length),
    }
    cut = [cut_rows(whole, ranks, rank) for rank in range(ranks)]
    kept = [cut_batch(whole, rows, whole_mask=True) for rows in cut]
    assert all(part["attention_mask"].shape == (3, length) for part in kept), "a padding mask stays whole"
    parts = [cut_batch(whole, rows) for rows in cut]
    for key in whole:
        filled = [
            torch.cat((part[key], part[key].new_zeros(3, rows.most - part[key].shape[1])), 1)
            for part, rows in zip(parts, cut, strict=True)
        ]
        assert torch.equal(torch.cat(filled, dim=1)[:, cut[0].slots[0]], whole[key])


# --- what attention sees

EQUAL = {
    "our decoder": decoder,
    "causal": lambda: Model(causal),
    "full": lambda: Model(full),
    "packed": lambda: Model(packed),
    "window": lambda: Model(windowed),
    "added mask": lambda: Model(added),
}


def planned(model, ranks: int, kind: str = "auto") -> ContextPlan:
    return plan_methods(measure_mixing(model), ranks, 1, kind, "float64")


def errors(build, ranks: int) -> dict[str, float]:
    model = small_copy(build())
    made = planned(model, ranks)
    return {kind: max(rehearse(model, made, batch).values()) for kind, batch in rehearsed(model).items()}


@pytest.mark.first
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", EQUAL)
def test_cut_rows_compute_what_one_process_does(name, ranks):
    found = errors(EQUAL[name], ranks)
    assert set(found) == {"plain", "packed", "without positions"} and max(found.values()) < 1e-12, found


def test_rules_of_masks_are_measured():
    rules = {name: str(measure_mixing(build()).callers[0].rule) for name, build in EQUAL.items()}
    assert rules == {
        "our decoder": "causal per document",
        "causal": "causal",
        "full": "full",
        "packed": "causal per document",
        "window": "causal window 5 per document",
        "added mask": "causal",
    }


WHOLE = {"ALiBi": lambda: Model(biased), "every other": lambda: Model(every_other)}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", WHOLE)
def test_attention_by_no_known_rule_computes_whole_rows(name, ranks):
    facts = model_facts(WHOLE[name]())
    made = plan(facts, Layout(dp_shard=1, cp=ranks)).context
    assert made is not None and not made.mixing.callers
    assert {m.mixer.path: m.kind for m in made.mixers} == {"attentions.0": "whole", "attentions.1": "whole"}
    small, of_small = small_and_plan(facts, made)
    for batch in rehearsed(small).values():
        assert max(rehearse(small, of_small, batch).values()) < 1e-12


REFUSED = {
    "none": (WithoutAttention, "calls attention neither through transformers' interface nor by"),
    "shift": (lambda: Model(causal, shifted), "is wrong"),
    "positions from the end": (lambda: FromTheEnd(causal), r"places \(Embedding\)|is wrong"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_tokens_otherwise_is_refused(name):
    build, words = REFUSED[name]
    with pytest.raises(UnsupportedError, match=words):
        facts = model_facts(build())
        made = plan(facts, Layout(dp_shard=1, cp=2))
        assert made.context is not None
        prove(facts, made.context)


class FloatAlone(Model):
    """A model that cannot run in float64, as small copies do."""

    def forward(self, tokens, positions=None, document_ids=None):
        return super().forward(tokens, positions, document_ids) @ torch.eye(61)


def test_a_model_whose_small_copy_fails_is_refused_in_words():
    with pytest.raises(UnsupportedError, match="cannot be measured: a small copy fails with RuntimeError"):
        measure_mixing(FloatAlone(causal).double())


class Pairs(torch.nn.Module):
    """Mixes tokens by weights that it is given for each pair of them."""

    def forward(self, x, weights):
        return weights @ x


class GivenPairs(Model):
    """The weights of pairs follow from weights of the model, which the model's code would have to compute again."""

    def __init__(self):
        super().__init__(causal, Pairs())

    def forward(self, tokens):
        weights = self.places.weight[: tokens.shape[1]] @ self.places.weight[: tokens.shape[1]].T
        x = self.between(self.tokens(tokens), weights)
        return self.head(x + self.attentions[0](x, None))


def test_a_refusal_names_the_module_that_mixes_tokens():
    facts = model_facts(GivenPairs())
    made = plan(facts, Layout(dp_shard=1, cp=2))
    assert made.context is not None and not made.context.mixers
    with pytest.raises(UnsupportedError, match=r"between \(Pairs\) mixes or counts tokens by a way that is not"):
        prove(facts, made.context)


def test_experts_with_a_capacity_for_whole_sequences_are_refused():
    config = replace(DECODER, moe=MoEConfig(n_experts=4, top_k=2, capacity_factor=1.0))
    with pytest.raises(UnsupportedError, match="model.moe.capacity_factor = 1.0 with layout.cp = 2"):
        plan(config, Layout(dp_shard=1, cp=2))


def test_callers_of_a_large_model_have_its_sizes_and_layers():
    large = replace(DECODER, dim=512, n_layers=5, n_heads=8, n_kv_heads=4)
    made = plan(large, Layout(dp_shard=1, cp=2)).context
    assert made is not None and [caller.path for caller in made.mixing.callers] == [
        f"layers.{layer}.attention.core" for layer in range(5)
    ]
    assert {caller.sizes for caller in made.mixing.callers} == {Sizes(8, 4, 64, 64)}


# --- faults that the rehearsal finds


def local_queries(patch):
    patch.setattr(CutRows, "own", property(lambda rows: torch.arange(rows.counts[rows.rank])[None]))


def window_off_by_one(patch):
    correct = masks.shorter_than
    patch.setattr(masks, "shorter_than", lambda function, window: correct(function, window + 1))


def other_ranks_order(patch):
    correct = methods.Gathered.of

    def rolled(group, rows):
        made = correct(group, rows)
        return replace(made, numbers=tuple(Numbers.of(numbers.index.roll(1, 1)) for numbers in made.numbers))

    patch.setattr(methods.Gathered, "of", rolled)


def never_exchanged(patch):
    def own_alone(exchange, x):
        others = exchange.places.shape[1]
        return lambda: torch.cat([x] * (1 + others // x.shape[2]), dim=2)[:, :, :others]

    patch.setattr(methods.Gathered, "begin_fetch", own_alone)


def documents_lost(patch):
    patch.setattr(runtime.ContextRuntime, "_by_rule", lambda self, rule, rows: RowMask(rule.places))


def gradients_of_own_queries_alone(patch):
    correct = methods.Gathered.begin_return
    patch.setattr(methods.Gathered, "begin_return", lambda exchange, x: correct(exchange, 0 * x))


def keys_in_another_order(patch):
    correct = methods.Gathered.begin_fetch
    patch.setattr(methods.Gathered, "begin_fetch", lambda exchange, x: correct(exchange, x.flip(1)))


def local_positions(patch):
    correct = runtime.ContextRuntime.cut

    def cut(self, batch, signature):
        made = correct(self, batch, signature)
        made["positions"] = torch.arange(made["tokens"].shape[1]).expand(made["tokens"].shape)
        return made

    patch.setattr(runtime.ContextRuntime, "cut", cut)


def labels_cut_otherwise_than_tokens(patch):
    correct = runtime.cut_batch

    def cut(batch, rows, **options):
        made = correct(batch, rows, **options)
        if "labels" in batch:
            start = sum(rows.counts[: rows.rank])
            made["labels"] = batch["labels"][:, start : start + rows.counts[rows.rank]]
        return made

    patch.setattr(runtime, "cut_batch", cut)


def queries_of_the_first_rank(patch):
    first = property(lambda context: context.reach.take(context.rows.of_ranks[0]))
    patch.setattr(methods.Context, "own_reach", first)


FAULTS = (
    labels_cut_otherwise_than_tokens,
    queries_of_the_first_rank,
    local_queries,
    window_off_by_one,
    other_ranks_order,
    never_exchanged,
    documents_lost,
    gradients_of_own_queries_alone,
    keys_in_another_order,
    local_positions,
)


@pytest.mark.kills("context", "fault")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_rehearsal_finds(monkeypatch, fault):
    model = small_copy(Model(windowed) if fault is window_off_by_one else decoder())
    made = planned(model, 2, "all_gather")
    fault(monkeypatch)
    worst = 0.0
    for batch in rehearsed(model).values():
        try:
            worst = max(worst, *rehearse(model, made, batch).values())
        except UnsupportedError:
            worst = torch.inf
    assert not worst <= 1e3 * LARGEST_ERROR


class OwnPositions(Model):
    """A model whose rows begin at 2 where it is given no positions, as RoBERTa's."""

    def forward(self, tokens, positions=None, document_ids=None):
        positions = torch.arange(tokens.shape[1]) + 2 if positions is None else positions
        return super().forward(tokens, positions, document_ids)


class Backwards(Model):
    """A model that counts from the end of a row where it is given no positions."""

    def forward(self, tokens, positions=None, document_ids=None):
        positions = torch.arange(tokens.shape[1]).flip(0) if positions is None else positions
        return super().forward(tokens, positions, document_ids)


def test_positions_that_a_model_makes_otherwise_are_seen_when_a_batch_has_none():
    for build, words in (
        (lambda: Model(causal, longest=70), ""),
        (lambda: OwnPositions(causal), ""),
        (lambda: Backwards(causal), "without positions, and"),
    ):
        facts = model_facts(build())
        made = plan(facts, Layout(dp_shard=1, cp=2)).context
        assert made is not None
        prove(facts, made)
        if not words:
            refuse(facts, made, WITHOUT_POSITIONS)
            continue
        with pytest.raises(UnsupportedError, match=words + ".* Give batches positions, or set layout.cp = 1."):
            refuse(facts, made, WITHOUT_POSITIONS)


class StatedRule(Model):
    """A model whose attention states the rule of its masks."""

    def __init__(self, rule: str):
        super().__init__(far_window, longest=200)
        for module in self.attentions:
            module.mask_rule = rule


def test_a_window_beyond_the_measured_rows_is_seen_in_rows_that_are_longer():
    facts = model_facts(Model(far_window, longest=200))
    made = plan(facts, Layout(dp_shard=1, cp=2)).context
    assert made is not None and str(made.mixing.callers[0].rule) == "causal"
    refuse_length(facts, made, 70)
    with pytest.raises(UnsupportedError, match=r"attentions.0 masks rows of 100 tokens by another rule .*\(causal\)"):
        refuse_length(facts, made, 100)
    with pytest.raises(UnsupportedError, match="rows of 300 tokens cannot be seen: a small copy fails with"):
        refuse_length(facts, made, 300)
    with pytest.raises(
        UnsupportedError, match='up to 8192 are compared. State the rule on the module .mask_rule = "causal"'
    ):
        refuse_length(facts, made, 10_000)


@pytest.mark.all
def test_a_stated_rule_is_taken_where_it_was_measured():
    dense = {rule: measure_mixing(StatedRule(rule)).callers[0].is_dense for rule in ("causal", "causal window 70", "")}
    assert dense == {"causal": False, "causal window 70": True, "": True}
    assert not measure_mixing(decoder()).callers[0].is_dense


def test_rehearsal_is_once(monkeypatch):
    facts = model_facts(decoder())
    made = plan(facts, Layout(dp_shard=1, cp=2)).context
    assert made is not None
    prove(facts, made)
    monkeypatch.setattr(proof, "rehearse", None)
    prove(facts, made)


def neighbours_differ(logits, labels):
    """A loss that looks at two tokens at once."""
    return (logits[:, 1:] - logits[:, :-1]).square().sum()


def summed(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def test_a_loss_of_ones_own_must_add_up_over_tokens_where_rows_are_cut():
    whole, cut = (plan(SIZES["debug"], Layout(dp_shard=1, cp=ranks)) for ranks in (1, 2))
    for loss in (neighbours_differ, summed):
        first_batch.check(loss, 61, CPU, whole)
    first_batch.check(summed, 61, CPU, cut)
    with pytest.raises(ConfigError, match=r"for their tokens in two parts: it does not add up over tokens"):
        first_batch.check(neighbours_differ, 61, CPU, cut)
