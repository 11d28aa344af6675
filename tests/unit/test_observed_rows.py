"""How attention's masks are counted, and where a rank's tokens lie in one process's rows."""

from __future__ import annotations

import pytest
import torch

from meshwright.observation.patches import keys_by_mask
from meshwright.observation.traces import parts_of_rows

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
