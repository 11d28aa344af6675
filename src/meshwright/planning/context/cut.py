"""Decide which tokens of a row each context-parallel rank has."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Literal

from meshwright.core.errors import ConfigError
from meshwright.introspection.mixing.values import MaskRule

Runs = tuple[tuple[int, int], ...]
"""Runs of tokens [start, stop) of a row, in order."""


Cut = Literal["head_tail", "contiguous"]
"""Each rank has a run from either end of a row, or one run."""


def cut_row(cut: Cut, length: int, ranks: int) -> tuple[Runs, ...]:
    """Cut a row; one tuple of runs per rank, whose numbers of tokens differ by at most one.

    Raises:
        ConfigError: the row has fewer tokens than there are ranks.
    """
    return head_tail(length, ranks) if cut == "head_tail" else contiguous(length, ranks)


def contiguous(length: int, ranks: int) -> tuple[Runs, ...]:
    """Give each rank one run: where attention reaches little, no run needs more than what is before its first token.

    Returns, raises: see ``cut_row``.
    """
    refuse_shorter(length, ranks)
    ends = accumulate((length // ranks + (rank < length % ranks) for rank in range(ranks)), initial=0)
    return tuple((run,) for run in pairwise(ends))


def fetched_tokens(cut: Cut, length: int, ranks: int, rule: MaskRule) -> list[list[int]]:
    """Count the tokens of a row that each rank sends to each other, which fetches those that its queries see.

    Returns:
        By sender and receiver.
    """
    runs = cut_row(cut, length, ranks)
    sent = [[0] * ranks for _ in range(ranks)]
    for rank, mine in enumerate(runs):
        for owner in (other for other in range(ranks) if other != rank):
            for first, end in runs[owner]:
                lowest = min((rule.first(start) for start, _ in mine if start >= end or not rule.causal), default=end)
                sent[owner][rank] += max(0, end - max(first, lowest))
    return sent


def head_tail(length: int, ranks: int) -> tuple[Runs, ...]:
    """Cut a row into 2 · ranks runs of nearly equal length, and give rank r the run r from either end.

    With a causal mask a token's work grows with its place; a run near the head and one near the tail together cost the
    same on every rank (Llama 3, arXiv 2407.21783, section 3.3.2).

    Returns:
        One tuple of runs per rank; the numbers of tokens differ by at most one.

    Raises:
        ConfigError: the row has fewer tokens than there are ranks.
    """
    refuse_shorter(length, ranks)
    counts = [length // ranks + (rank < length % ranks) for rank in range(ranks)]
    heads = [-(-count // 2) for count in counts]
    sizes = [*heads, *reversed([count - head for count, head in zip(counts, heads, strict=True)])]
    ends = list(accumulate(sizes, initial=0))
    runs = list(pairwise(ends))
    return tuple(
        tuple(run for run in (runs[rank], runs[2 * ranks - 1 - rank]) if run[0] < run[1]) for rank in range(ranks)
    )


def refuse_shorter(length: int, ranks: int) -> None:
    if length < ranks:
        raise ConfigError(
            f"layout.cp = {ranks} cuts each row over {ranks} ranks, and the batch has rows of {length} tokens: set"
            f" layout.cp = {max(length, 1)} or less, or give longer rows"
        )
