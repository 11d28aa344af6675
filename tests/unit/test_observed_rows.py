"""How attention's masks are counted, and where a rank's tokens lie in one process's rows."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from meshwright.observation.blame import Blame
from meshwright.observation.passes import Pair, Passes
from meshwright.observation.patches import count_keys, keys_by_mask
from meshwright.observation.traces import Place, parts_of_rows

ROWS, HEADS, QUERIES, KEYS = 2, 3, 4, 6
VISIBLE = torch.arange(KEYS) <= torch.arange(QUERIES)[:, None] + 1  # 2 keys for the first query, 5 for the last


@pytest.mark.parametrize(
    ("mask", "is_causal", "counts"),
    [
        (None, False, [6, 6, 6, 6]),
        (None, True, [1, 2, 3, 4]),
        (VISIBLE, False, [2, 3, 4, 5]),
        (torch.zeros(QUERIES, KEYS).masked_fill(~VISIBLE, torch.finfo(torch.float32).min), False, [2, 3, 4, 5]),
        (VISIBLE.expand(ROWS, 1, QUERIES, KEYS), False, [2, 3, 4, 5]),
        (-8.0 * torch.arange(KEYS).expand(QUERIES, KEYS), False, [6, 6, 6, 6]),  # ALiBi hides nothing
        (torch.ones(ROWS, HEADS, QUERIES, 1, dtype=torch.bool), False, [6, 6, 6, 6]),
    ],
)
@pytest.mark.parametrize("heads", [(ROWS, HEADS), (ROWS,)], ids=["heads", "no heads"])
def test_keys_in_sight_of_each_query(mask, is_causal, counts, heads):
    if mask is not None and mask.dim() - 2 > len(heads):
        mask = mask[:, 0]
    query, key = torch.zeros(*heads, QUERIES, 8), torch.zeros(*heads, KEYS, 8)
    assert keys_by_mask(query, key, mask, is_causal).tolist() == [counts] * ROWS


def step(**rows: list[int]) -> dict:
    given = {"rows": [*rows], "ids": [*rows.values()]}
    return {"calls": [{"inputs": {"ids": given}}]}


@pytest.mark.parametrize(
    ("whole", "part", "at"),
    [
        ([5, 7, 5, 9, 7, 5], [5, 9, 7], [2, 3, 4]),
        ([1, 2, 1, 2, 8, 9, 3, 3], [1, 2, 3, 3], [0, 1, 6, 7]),
        ([1, 2, 1, 4, 1, 6], [2, 4, 6], [1, 3, 5]),
        ([10, 11, 12, 13, 14, 15], [14, 10, 15], [4, 0, 5]),
        ([1, 2, 1, 4, 1, 6], [4, 2, 6], None),
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [2], None),
    ],
    ids=["a run", "two runs", "dealt in turn", "each once", "another order", "the whole", "a token"],
)
def test_a_ranks_tokens_are_found_in_a_row(whole, part, at):
    found = parts_of_rows(step(whole=whole), step(part=part))
    assert {key: (other, places.tolist()) for key, (other, places) in found.items()} == (
        {"part": ("whole", at)} if at else {}
    )


def test_scores_that_a_module_returns_are_a_routers(monkeypatch):
    for home, name in ((torch, "softmax"), (torch.Tensor, "softmax"), (functional, "scaled_dot_product_attention")):
        monkeypatch.setattr(home, name, getattr(home, name))  # put back afterwards
    scores, seen = torch.zeros(2, 3, 5), []
    recorder = SimpleNamespace(sketched={}, attends=lambda tensor: True, sees=lambda counts: seen.append(counts.shape))
    count_keys(recorder)
    recorder.sketched[id(scores)] = weakref.ref(scores), 0, {}
    scores.softmax(-1)
    torch.softmax(scores, -1)
    assert seen == []
    (scores * 2).softmax(-1)
    assert seen == [(2, 3)]


BEFORE, INNER = torch.tensor([3.0, -1.0, 2.0]), torch.tensor([1.0, 4.0, -2.0])


@pytest.mark.parametrize(("times", "is_found"), [(1, True), (2, False), (0.5, False)])
def test_a_modules_output_that_counts_again_in_the_one_around_it(times, is_found):
    keys = {("h.1.attn input", 1): BEFORE, ("h.1.attn", 1): INNER, ("h.2.attn", 1): INNER * 3}
    pairs = {key: [Pair(0, "row", whole, whole, ("float32",) * 2)] for key, whole in keys.items()}
    steps = SimpleNamespace(in_order=lambda: [*keys], pairs=pairs.get, own=[{}, {}], whole={"short": False})
    off = [Pair(rank, "row", BEFORE + times * INNER, BEFORE, ("float32",) * 2) for rank in (0, 1)]
    assert Passes.added_again(steps, "h.1", off) == ("h.1.attn" if is_found else "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "even"),
    [
        ([1.0, 1.01, -1e-3], [True, True, False]),  # the last one's sign is rounding
        ([1.0, 1.0, 1e-3], [True, True, True]),
        ([1.0, 2.0, 1e-3], None),  # no rounding
    ],
)
def test_where_adam_makes_a_step_of_rounding_is_left_out(found, even):
    def step(values: list[float]) -> dict:
        entry = {"m": [torch.tensor(values)], "shape": [3], "dtype": "bfloat16", "whole": None, "placements": []}
        return {"gradients": {"bias": entry}}

    place = Place("bias")
    blame = SimpleNamespace(
        places=[{"bias": place}],
        many=SimpleNamespace(step=lambda rank, number: step(found)),
        base={"steps": [step([1.0, 1.0, 1e-3])]},
        _bound=lambda *of: 6e-2,
    )
    where = Blame._even(blame, 0, 0, place)  # type: ignore[arg-type]
    assert (where is None) == (even is None) and (where is None or where.tolist() == even)
