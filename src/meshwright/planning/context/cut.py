"""Decide which tokens of a row each context-parallel rank has."""

from __future__ import annotations

from itertools import accumulate, pairwise

from meshwright.core.errors import ConfigError

Runs = tuple[tuple[int, int], ...]
"""Runs of tokens [start, stop) of a row, in order."""


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
