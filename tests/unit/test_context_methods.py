"""Attention over cut rows by every method: what one process computes, from keys that lie elsewhere."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from support.mixing import Model, causal, windowed
from torch import Tensor

from meshwright import Layout, UnsupportedError, plan
from meshwright.distributed.context import kernels, methods
from meshwright.distributed.context.kernels import KeysAtHand, Scores, attention
from meshwright.distributed.context.methods import Context, attend, attend_to_whole_rows
from meshwright.distributed.context.rows import CutRows, Reaches, cut_rows, select
from meshwright.distributed.exchange import Thread, on_threads
from meshwright.introspection.facts import model_facts
from meshwright.introspection.mixing import masks
from meshwright.introspection.mixing.arithmetic import Arithmetic, formula
from meshwright.introspection.mixing.interception import AttentionCall
from meshwright.introspection.mixing.masks import KeyRanges, MaskRule, RowMask, fingerprint, is_reach, rule_of, search
from meshwright.introspection.mixing.values import Caller, Sizes
from meshwright.planning.context.plan import KINDS, Method, choose, cut_row, fetched_tokens, given

ROWS, LENGTH, WHOLE = 2, 29, Arithmetic()


@pytest.fixture(autouse=True, params=["segments", "blocks"])
def small_parts(monkeypatch, request):
    """Rows are short: let attention be computed in several parts all the same."""
    monkeypatch.setattr(kernels, "QUERIES", 5)
    monkeypatch.setattr(kernels, "KEYS", 3)
    monkeypatch.setattr(kernels, "SHORTEST", 1 if request.param == "segments" else 1000)


# --- calls of attention, each by one process and by several


def documents(*sizes: int) -> Tensor:
    ends = torch.tensor(sizes).cumsum(0)
    row = torch.searchsorted(ends, torch.arange(LENGTH), right=True)
    return torch.stack((row, (torch.arange(LENGTH) >= 11).long()))


def padding(behind: bool) -> Tensor:
    kept = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    kept[1, -4:] = False
    return kept if behind else kept.flip(1)


POSITIONS = torch.stack([torch.cat((torch.arange(7), torch.arange(LENGTH - 7))), torch.arange(LENGTH)])
SEGMENTS = masks.segments_of(POSITIONS)
MASKS = {
    "causal": RowMask(masks.causal),
    "full": RowMask(masks.everything),
    "window": RowMask(masks.shorter_than(masks.causal, 4)),
    "window of one": RowMask(masks.shorter_than(masks.causal, 1)),
    "chunks": RowMask(masks.in_chunks(masks.causal, 6)),
    "documents": RowMask(masks.causal, segments=documents(1, 2, 3, 7, 13, 3)),
    "full documents": RowMask(masks.everything, segments=documents(1, 1, 1, 23, 3)),
    "windows by position": RowMask(masks.shorter_than(masks.causal, 4), positions=POSITIONS, segments=SEGMENTS),
    "positions with gaps": RowMask(masks.causal, positions=(GAPS := POSITIONS * 3), segments=masks.segments_of(GAPS)),
    "documents that end before others": RowMask(masks.causal, segments=-documents(3, 2, 20, 4)),
    "padding behind": RowMask(masks.causal, padding=padding(True)),
    "padding before": RowMask(masks.causal, padding=padding(False)),
}
SIZES = {
    "alike": Sizes(4, 4, 4, 4),
    "shared": Sizes(4, 2, 4, 4),
    "one key head": Sizes(8, 1, 4, 4),
    "other values": Sizes(4, 4, 6, 3),
}


@dataclass
class Case:
    mask: str = "causal"
    sizes: str = "shared"
    arithmetic: Arithmetic = WHOLE
    extras: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64

    def tensors(self) -> dict[str, Tensor]:
        generator, s = torch.Generator().manual_seed(0), SIZES[self.sizes]
        shapes = {
            "q": (s.heads, s.key_features),
            "k": (s.key_heads, s.key_features),
            "v": (s.key_heads, s.value_features),
        }
        made = {
            name: torch.randn((ROWS, n, LENGTH, d), generator=generator, dtype=torch.float64).to(self.dtype)
            for name, (n, d) in shapes.items()
        }
        return made | {"sinks": torch.linspace(-1, 1, s.heads, dtype=self.dtype)}

    def call(self, given: dict[str, Tensor]) -> AttentionCall:
        extras = self.extras | ({"sinks": given["sinks"]} if self.arithmetic.sinks else {})

        def compute(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, is_causal: bool) -> Tensor:
            return formula(self.arithmetic, replace(call, query=q, key=k, value=v), mask)

        call = AttentionCall(given["q"], given["k"], given["v"], None, True, compute, scale=0.4, extras=extras)
        return call


def of_one_process(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    whole = {name: x.requires_grad_() for name, x in case.tensors().items()}
    call = case.call(whole)
    allowed = MASKS[case.mask].dense(torch.arange(LENGTH)[None], LENGTH, ROWS)
    output = formula(case.arithmetic, call, allowed)
    output.backward(weights(output))
    return output.detach(), {name: x.grad for name, x in whole.items() if x.grad is not None}


def weights(output: Tensor) -> Tensor:
    return torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)


def of_several(
    case: Case, ranks: int, method: Method | None, cut: str = "head_tail", apart: str = ""
) -> tuple[Tensor, dict[str, Tensor]]:
    whole = case.tensors()
    mask = MASKS[case.mask]
    expected = weights(of_one_process(case)[0])
    batch = {"tokens": torch.zeros(ROWS, LENGTH)}
    if mask.segments is not None:
        batch["document_ids"] = mask.segments

    def job(group: Thread) -> tuple[CutRows, Tensor, dict[str, Tensor]]:
        rows = cut_rows(batch, ranks, group.rank, cut=cut, apart=apart)
        own = {name: x if x.dim() == 1 else select(x, rows.own, 2) for name, x in whole.items()}
        own = {name: x.clone().requires_grad_() for name, x in own.items()}
        reach = Reaches(group).of(mask, rows, ROWS)
        assert reach is not None
        if method is None:
            output = attend_to_whole_rows(case.call(own), mask, rows, group)
        else:
            output = attend(case.call(own), Context(group, rows, reach), case.arithmetic, method)
        output.backward(select(expected, rows.own, 2))
        return rows, output.detach(), {name: x.grad for name, x in own.items() if x.grad is not None}

    found = on_threads(ranks, job)
    rows = found[0][0]
    gradients = {}
    for name in found[0][2]:
        parts = [g[name] for *_, g in found]
        gradients[name] = sum(parts) if name == "sinks" else in_rows_order(parts, rows)
    return in_rows_order([output for _, output, _ in found], rows), gradients


def error(case: Case, ranks: int, method: Method | None, cut: str = "head_tail", apart: str = "") -> float:
    output, gradients = of_one_process(case)
    found, theirs = of_several(case, ranks, method, cut, apart)
    assert set(gradients) == set(theirs)
    pairs = [(output, found), *((gradients[name], theirs[name]) for name in gradients)]
    # a gradient that is zero (each token attends to itself alone) has the rounding of what cancels in it
    return max(float((one - other).norm() / (one.norm() or output.norm())) for one, other in pairs)


def in_rows_order(parts: list[Tensor], rows: CutRows) -> Tensor:
    order = torch.cat([rows.of_ranks[rank] for rank in range(len(parts))], dim=1).argsort(dim=1)
    return select(torch.cat(parts, dim=2), order, 2)


METHODS = {
    "all_gather": Method("all_gather"),
    "ring": Method("ring"),
    "halo": Method("halo"),
    "ulysses": Method("ulysses", 4),
    "ulysses_ring": Method("ulysses_ring", 2),
}
CASES = {
    **{f"{mask}, {sizes}": Case(mask, sizes) for mask, sizes in zip(MASKS, itertools.cycle(SIZES), strict=False)},
    "cap": Case("window", "shared", Arithmetic(cap="softcap"), {"softcap": 1.5}),
    "sinks": Case("documents", "shared", Arithmetic(sinks="sinks")),
    "cap and sinks": Case("padding behind", "one key head", Arithmetic("softcap", "sinks"), {"softcap": 1.5}),
    "sinks, window of one": Case("window of one", "alike", Arithmetic(sinks="sinks")),
}


@pytest.mark.first
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES)
def test_four_ranks_compute_what_one_does(case, method):
    assert error(CASES[case], 4, METHODS[method]) < 1e-13


@pytest.mark.first
@pytest.mark.parametrize("cut", ["head_tail", "contiguous"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("kind", ["all_gather", "ring", "halo"])
@pytest.mark.parametrize("mask", ["causal", "window", "documents"])
def test_other_numbers_of_ranks_compute_what_one_does(mask, kind, ranks, cut):
    assert error(Case(mask, "alike"), ranks, Method(kind), cut) < 1e-13


@pytest.mark.first
@pytest.mark.parametrize("method", [*METHODS, "all_gather, halo for documents"])
@pytest.mark.parametrize("mask", ["documents", "full documents", "windows by position"])
def test_rows_that_are_cut_by_their_documents_compute_what_one_process_does(mask, method):
    chosen = METHODS.get(method) or Method("all_gather", bytes=10**6)
    assert error(Case(mask, "shared"), 4, chosen, apart="ids") < 1e-13


def test_rows_of_documents_go_by_halo_where_that_is_less(monkeypatch):
    used = []
    correct = methods.Halo.begin_fetch
    monkeypatch.setattr(methods.Halo, "begin_fetch", lambda *given: used.append(1) or correct(*given))
    for of_method, asked, halos in ((10**6, False, 4), (1, False, 0), (10**6, True, 0)):
        used.clear()
        of_several(Case("documents"), 4, Method("all_gather", bytes=of_method, asked=asked), apart="ids")
        assert len(used) == halos


@pytest.mark.parametrize(("ranks", "neighbours"), [(2, 2), (8, 8), (8, 2), (8, 4)])
def test_heads_are_shared_out_among_other_numbers_of_ranks(ranks, neighbours):
    kind = "ulysses" if ranks == neighbours else "ulysses_ring"
    assert error(Case("documents", "one key head"), ranks, Method(kind, neighbours)) < 1e-13


@pytest.mark.parametrize("mask", MASKS)
def test_a_call_of_its_own_kind_gets_whole_rows(mask):
    assert error(Case(mask), 2, None) < 1e-13


@pytest.mark.parametrize("method", METHODS)
def test_narrow_dtypes_are_summed_in_float32(method):
    case = Case("causal", "shared", dtype=torch.bfloat16)
    exact, gradients = of_one_process(Case("causal", "shared"))
    output, found = of_several(case, 4, METHODS[method])
    assert output.dtype is torch.bfloat16
    for one, other in [(exact, output), *((gradients[name], found[name]) for name in gradients)]:
        assert float((one - other.double()).norm() / one.norm()) < 0.01


# --- intervals of keys


@pytest.mark.parametrize("mask", MASKS)
def test_reach_is_every_value_of_the_mask(mask):
    rows = cut_rows({"tokens": torch.zeros(ROWS, LENGTH)}, 1, 0)
    (reach,) = on_threads(1, lambda group: Reaches(group).of(MASKS[mask], rows, ROWS))
    assert reach is not None
    keys = torch.arange(LENGTH)
    found = (keys >= reach.lower[..., None]) & (keys < reach.upper[..., None])
    expected = MASKS[mask].dense(keys[None], LENGTH, ROWS)[:, 0]
    assert torch.equal(found.expand(ROWS, -1, -1), expected.expand(ROWS, -1, -1))


def every_other(row: Any, head: Any, query: Any, key: Any) -> Tensor:
    return (key <= query) & ((query - key) % 2 == 0)


def others_alone(row: Any, head: Any, query: Any, key: Any) -> Tensor:
    return key < query


@pytest.mark.parametrize("function", [every_other, others_alone])
def test_a_mask_with_gaps_has_no_reach_and_is_computed_whole(function):
    def job(group: Thread) -> KeyRanges | None:
        rows = cut_rows({"tokens": torch.zeros(ROWS, LENGTH)}, 2, group.rank)
        return Reaches(group).of(RowMask(function), rows, ROWS)

    assert on_threads(2, job) == [None, None]


def test_documents_that_come_again_have_no_reach():
    again = RowMask(masks.causal, segments=torch.tensor([[0, 1, 0]]), is_known=True)
    assert again.reach(3, lambda function, length: search(function, length, 1)) is None


def test_a_wrong_end_is_seen():
    found = search(masks.causal, LENGTH, 1)
    assert found is not None and is_reach(masks.causal, found, torch.arange(LENGTH)[None], LENGTH, 1)
    assert not is_reach(masks.shorter_than(masks.causal, 5), found, torch.arange(LENGTH)[None], LENGTH, 1)


@pytest.mark.parametrize(
    ("function", "rule"),
    [
        (masks.causal, MaskRule()),
        (masks.everything, MaskRule(causal=False)),
        (masks.shorter_than(masks.causal, 1024), MaskRule(window=1024)),
        (masks.shorter_than(masks.causal, 1), MaskRule(window=1)),
        (masks.in_chunks(masks.causal, 8192), MaskRule(chunk=8192)),
        (every_other, None),
    ],
)
def test_the_rule_of_a_function_is_read_far_from_its_first_tokens(function, rule):
    found = rule_of(function)
    assert found == rule or (rule is None and found is not None), "of a mask with gaps, how far it reaches"


def test_functions_of_the_same_code_and_numbers_are_one():
    same = fingerprint(masks.shorter_than(masks.causal, 5))
    assert same == fingerprint(masks.shorter_than(masks.causal, 5))
    assert same != fingerprint(masks.shorter_than(masks.causal, 6))
    assert fingerprint(masks.within(masks.causal, torch.zeros(1, 3))) is None


# --- blocks


def test_queries_without_keys_give_zeros_and_no_gradient():
    q, k, v = (torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    reach = KeyRanges(torch.tensor([[0, 2, 1, 4]]), torch.tensor([[1, 2, 1, 4]]))
    output, logarithm = attention(q, k, v, KeysAtHand(reach), Scores(0.5, 2.0))
    output.sum().backward()
    assert torch.equal(output[:, :, 1:], torch.zeros(1, 2, 3, 3)) and bool(torch.isinf(logarithm[:, :, 1:]).all())
    assert all(bool(torch.isfinite(x.grad).all()) for x in (q, k, v)) and not q.grad[:, :, 1:].any()


def test_blocks_that_no_query_reaches_are_passed_over(monkeypatch):
    monkeypatch.setattr(kernels, "SHORTEST", 1000)
    computed = []
    correct = kernels._scores
    monkeypatch.setattr(kernels, "_scores", lambda *given: computed.append(given[2]) or correct(*given))
    x = torch.randn(1, 1, 20, 4)
    for function, reached in ((masks.causal, 18), (masks.shorter_than(masks.causal, 2), 8)):
        computed.clear()
        reach = search(function, 20, 1)
        attention(x, x, x, KeysAtHand(reach), Scores(1.0))
        assert len(computed) == reached, "of 28 blocks of 5 queries by 3 keys"


# --- which method


CAUSAL = MaskRule()


def caller(
    rule: MaskRule | None = CAUSAL, arithmetic: Arithmetic | None = WHOLE, sizes: Sizes = SIZES["alike"]
) -> Caller:
    return Caller("layers.0.attention", sizes, True, rule, arithmetic=arithmetic)


@pytest.mark.parametrize(
    ("which", "ranks", "kind"),
    [
        (caller(), 2, "ulysses"),
        (caller(), 3, "ring"),
        (caller(sizes=Sizes(32, 8, 128, 128)), 2, "all_gather"),
        (caller(sizes=Sizes(32, 8, 128, 128)), 8, "ulysses"),
        (caller(sizes=Sizes(12, 1, 64, 64)), 8, "all_gather"),
        (caller(sizes=Sizes(36, 12, 64, 64)), 16, "ring"),
        (caller(MaskRule(window=1024)), 8, "halo"),
        (caller(MaskRule(chunk=8192)), 8, "halo"),
        (caller(None), 8, "all_gather"),
        (caller(arithmetic=None), 8, "all_gather"),
    ],
)
def test_a_method_is_chosen_by_sizes_and_mask(which, ranks, kind):
    assert choose(which, ranks, 1, "bfloat16").kind == kind


def test_tensor_ranks_share_the_heads_that_are_traded():
    eight = caller(sizes=Sizes(8, 8, 64, 64))
    assert choose(eight, 8, 1, "bfloat16").kind == "ulysses" and choose(eight, 8, 2, "bfloat16").kind == "ring"


REFUSED = {
    "heads": (
        "ulysses",
        caller(sizes=Sizes(6, 6, 4, 4)),
        "has 6 heads and 6 key heads on a rank, which 4 ranks cannot",
    ),
    "no divisor": ("ulysses_ring", caller(sizes=Sizes(5, 5, 4, 4)), "no number of ranks between 1 and layout.cp = 4"),
    "own way": ("ring", caller(arithmetic=None), "computes scores in a way of its own, which goes by all_gather alone"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_method_that_an_attention_cannot_go_by_is_refused(name):
    kind, which, words = REFUSED[name]
    with pytest.raises(UnsupportedError, match=f"context_parallel_method = {kind}: layers.0.attention .*{words}"):
        given(kind, which, 4, 1)


def test_the_plan_says_method_and_reason():
    text = str(plan(Model(windowed), Layout(dp_shard=1, cp=2)))
    assert "rows cut in runs" in text and "halo for 2 attentions attentions.*: its mask is causal window 5" in text
    text = str(plan(Model(causal), Layout(dp_shard=1, cp=2), techniques={"context_parallel_method": "ring"}))
    assert "rows cut at head and tail" in text and "ring for 2 attentions attentions.*: asked for" in text


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_window_is_fetched_once(ranks):
    length, window = 2**12, 64
    rule = MaskRule(window=window)
    assert max(map(sum, fetched_tokens("contiguous", length, ranks, rule))) == window - 1
    assert max(map(sum, fetched_tokens("head_tail", length, ranks, rule))) <= 2 * (window - 1)
    for rank in range(ranks):
        (run,) = cut_row("contiguous", length, ranks)[rank]
        assert run[1] - run[0] == length // ranks


# --- faults that the comparison above finds


def never_passed_on(patch):
    patch.setattr(Thread, "pass_on", lambda group, x, elements, shift=1: lambda: x.new_zeros(elements) + x.mean())


def key_heads_in_another_order(patch):
    correct = methods.shares_of_heads
    patch.setattr(methods, "shares_of_heads", lambda *sizes: (correct(*sizes)[0], correct(*sizes)[1][::-1]))


def sinks_counted_twice(patch):
    correct = methods._finished
    patch.setattr(methods, "_finished", lambda *given: correct(given[0], given[1], correct(*given), *given[3:]))


def window_of_halo_off_by_one(patch):
    correct = methods._needed
    patch.setattr(methods, "_needed", lambda reach, length: correct(KeyRanges(reach.lower + 1, reach.upper), length))


def gradients_stay_where_they_are_computed(patch):
    correct = methods.Halo.begin_return

    def nothing_returned(self, gradients):
        wait = correct(self, gradients)
        return lambda: wait() * 0

    patch.setattr(methods.Halo, "begin_return", nothing_returned)


def shared_key_heads_not_summed(patch):
    correct = methods._joined

    def last_wins(parts, shares):
        made = correct(parts, shares)
        return made / len(shares) if len({share.start for share in shares}) < len(shares) else made

    patch.setattr(methods, "_joined", last_wins)


def logarithms_forgotten(patch):
    correct = kernels.Given
    patch.setattr(kernels, "Given", lambda for_output, output, logarithm, _: correct(for_output, output, logarithm))


def blocked_queries_divided_by_zero(patch):
    correct = kernels.Attended.finish

    def finish(self):
        output, logarithm = correct(self)
        return output / (logarithm > float("-inf"))[..., None], logarithm

    patch.setattr(kernels.Attended, "finish", finish)


def sinks_counted_by_each_rank(patch):
    correct = methods._finished

    def finish(call, arithmetic, output, logarithm, heads):
        return correct(call, arithmetic, output, logarithm - math.log(4) * bool(arithmetic.sinks), heads)

    patch.setattr(methods, "_finished", finish)


def last_segment_lost(patch):
    correct = kernels.segments
    patch.setattr(kernels, "segments", lambda reach: (correct(reach) or [])[:-1])
    patch.setattr(kernels, "SHORTEST", 1)


def last_block_lost(patch):
    patch.setattr(kernels, "SHORTEST", 1000)
    correct = kernels.blocks
    patch.setattr(kernels, "blocks", lambda reach: ([b for b in run if b.keys.start < 9] for run in correct(reach)))


FAULTS = (
    (never_passed_on, "ring", Case()),
    (key_heads_in_another_order, "ulysses", Case()),
    (sinks_counted_twice, "halo", CASES["sinks"]),
    (window_of_halo_off_by_one, "halo", Case("window", "alike")),
    (gradients_stay_where_they_are_computed, "halo", Case("causal", "alike")),
    (shared_key_heads_not_summed, "ulysses", Case("causal", "one key head")),
    (logarithms_forgotten, "ring", CASES["sinks"]),
    (last_block_lost, "all_gather", Case()),
    (last_segment_lost, "all_gather", Case()),
    (blocked_queries_divided_by_zero, "ring", Case("padding before")),
    (sinks_counted_by_each_rank, "ring", CASES["sinks"]),
)


@pytest.mark.kills("context", "fault")
@pytest.mark.parametrize(("fault", "method", "case"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_comparison_finds(monkeypatch, fault, method, case):
    fault(monkeypatch)
    assert not error(case, 4, METHODS[method]) < 1e-6


def test_every_kind_of_method_is_compared():
    assert set(METHODS) == set(KINDS)
    assert model_facts(Model(causal)).module is not None


@pytest.mark.parametrize("method", METHODS)
def test_ranks_may_have_a_token_each(monkeypatch, method):
    monkeypatch.setattr("test_context_methods.LENGTH", 4)
    case = Case("causal", "alike")
    assert error(case, 4, METHODS[method]) < 1e-13
