"""Cut a row of documents so that each rank has as many tokens and as much work, and few keys travel.

A token of a causal document attends to those before it, so that its work is its place in the document. No token is
added, and ranks differ by one token at most.

Documents are ordered by their mean work per token. Each rank takes tokens from both ends of that order, from the tail
of the heaviest and from the head of the lightest, in the numbers that give it the mean of what is left: one document
is then cut at head and tail, and of many short ones few are cut. Afterwards ranks exchange equal numbers of tokens as
long as fewer keys need to travel for it; also by two exchanges, of which the second makes good the work of the first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, product

from meshwright.planning.context.plan import Runs, refuse_shorter

WORK = 1.03
"""Largest work of a rank that an exchange may lead to, as a multiple of the mean."""
PATIENCE, PATIENCE_OF_TWO = 4_500, 1_000
"""Exchanges that are looked at for one row, and of those most for pairs of exchanges, which help short rows."""

Run = tuple[int, int]
Piece = tuple[int, int, int]
"""Tokens [start, stop) of a document: (document, start, stop)."""
Pieces = dict[int, list[Run]]
"""The runs of one rank, by document."""
Exchange = tuple[int, Piece, int, Piece]
"""A rank, its piece, another rank, its piece."""


def work_of(start: int, stop: int) -> int:
    """Count the pairs of queries [start, stop) of a document and keys up to each."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


def cut_documents(sizes: Sequence[int], ranks: int) -> tuple[Runs, ...]:
    """Cut a row of documents that lie one behind the other.

    Args:
        sizes: tokens of each document, in the row's order.

    Returns:
        One tuple of runs [start, stop) of the row per rank; the first ranks have one token more where the row does not
        divide.

    Raises:
        ConfigError: the row has fewer tokens than there are ranks.
    """
    refuse_shorter(sum(sizes), ranks)
    tokens = [sum(sizes) // ranks + (rank < sum(sizes) % ranks) for rank in range(ranks)]
    shared = [_by_document(pieces) for pieces in _share_out(sizes, tokens)]
    search = _Search(shared)
    search.exchange(shared)
    if search.left > 0 and sum(sizes) % ranks:  # a short row: those that have a token more may be the last to choose
        other = [_by_document(pieces) for pieces in _share_out(sizes, tokens[::-1])][::-1]
        search.exchange(other)
        if max(map(_work, other)) <= search.limit and _fetched(other) < _fetched(shared):
            shared = other
    starts = list(accumulate(sizes, initial=0))
    return tuple(
        tuple(_joined((starts[d] + start, starts[d] + stop) for d, runs in pieces.items() for start, stop in runs))
        for pieces in shared
    )


# --- from both ends


class _InOrder:
    """Pieces that are taken one after another, each from its head or from its tail."""

    def __init__(self, pieces: Sequence[Piece], *, from_tail: bool):
        self.pieces, self.from_tail = pieces, from_tail
        self.tokens = list(accumulate((stop - start for _, start, stop in pieces), initial=0))
        self.work = list(accumulate((work_of(start, stop) for _, start, stop in pieces), initial=0))

    def work_of(self, tokens: int) -> int:
        """Count the work of the first tokens."""
        whole, rest = self._split(tokens)
        return self.work[whole] + (work_of(*self._part(whole, rest)[1:]) if rest else 0)

    def take(self, tokens: int) -> list[Piece]:
        """Return the pieces of the first tokens."""
        whole, rest = self._split(tokens)
        return [*self.pieces[:whole], *([self._part(whole, rest)] if rest else [])]

    def _split(self, tokens: int) -> tuple[int, int]:
        whole = bisect_right(self.tokens, tokens) - 1
        return whole, tokens - self.tokens[whole]

    def _part(self, index: int, tokens: int) -> Piece:
        document, start, stop = self.pieces[index]
        return (document, stop - tokens, stop) if self.from_tail else (document, start, start + tokens)


def _share_out(sizes: Sequence[int], counts: Sequence[int]) -> Iterator[list[Piece]]:
    """Yield the pieces of each rank: so many tokens, with the work that is nearest to the mean of what is left."""
    left: list[Piece] = [(document, 0, size) for document, size in enumerate(sizes) if size]
    for rank, tokens in enumerate(counts):
        left.sort(key=lambda piece: piece[1] + piece[2])
        mean = sum(work_of(*piece[1:]) for piece in left) / (len(counts) - rank)
        heavy, light = _InOrder(left[::-1], from_tail=True), _InOrder(left, from_tail=False)

        def excess(at_tail: int) -> float:
            return heavy.work_of(at_tail) + light.work_of(tokens - at_tail) - mean  # noqa: B023 -- called in this round

        at_tail = bisect_right(range(tokens), 0, key=excess)
        if at_tail and abs(excess(at_tail - 1)) <= abs(excess(at_tail)):
            at_tail -= 1
        taken = heavy.take(at_tail) + light.take(tokens - at_tail)
        yield taken
        gone, pieces, left = _by_document(taken), left, []
        for document, start, stop in pieces:
            for run in gone.get(document, ()):
                start, stop = (run[1], stop) if run[0] == start else (start, run[0])
            if start < stop:
                left.append((document, start, stop))


# --- exchanges


def _make(ranks: list[Pieces], work: list[int], exchange: Exchange) -> None:
    one, own, other, its = exchange
    more = work_of(*its[1:]) - work_of(*own[1:])
    work[one] += more
    work[other] -= more
    _replace(ranks[one], own, its)
    _replace(ranks[other], its, own)


def _work(pieces: Pieces) -> int:
    return sum(work_of(*run) for runs in pieces.values() for run in runs)


class _Search:
    """A search for exchanges from the pieces that ranks have, until so many were looked at.

    Attributes:
        limit: the largest work of a rank that an exchange may lead to.
    """

    def __init__(self, ranks: list[Pieces]):
        work = list(map(_work, ranks))
        self.limit, self.left = max(WORK * sum(work) / len(work), max(work)), PATIENCE

    def exchange(self, ranks: list[Pieces]) -> None:
        """Exchange equal numbers of tokens among ranks while that makes fewer keys travel."""
        work = list(map(_work, ranks))
        while (found := self.best(ranks, work, 0) or self.best_of_two(ranks, work)) is not None:
            for exchange in found:
                _make(ranks, work, exchange)

    def best(self, ranks: list[Pieces], work: list[int], least: int) -> list[Exchange] | None:
        """Return the exchange within the limit that saves most keys, and more than ``least``."""
        found = None
        for exchange, is_within in self._looked_at(ranks, work):
            if is_within and (saves := _saves(ranks, exchange)) > least:
                found, least = [exchange], saves
        return found

    def best_of_two(self, ranks: list[Pieces], work: list[int]) -> list[Exchange] | None:
        """Return an exchange that goes beyond the limit, with one by the same ranks that makes that good."""
        self.left = min(self.left, PATIENCE_OF_TWO)
        beyond = [(_saves(ranks, found), found) for found, is_within in self._looked_at(ranks, work) if not is_within]
        best, least = None, 0
        for saves, exchange in sorted(beyond, key=lambda pair: -pair[0]):
            if saves <= least:
                break
            pair = (exchange[0], exchange[2])
            both, of_both = [dict(ranks[rank]) for rank in pair], [work[rank] for rank in pair]
            _make(both, of_both, (0, exchange[1], 1, exchange[3]))
            if (second := self.best(both, of_both, least - saves)) is not None:
                one, own, other, its = second[0]
                best, least = [exchange, (pair[one], own, pair[other], its)], saves + _saves(both, second[0])
        return best

    def _looked_at(self, ranks: list[Pieces], work: list[int]) -> Iterator[tuple[Exchange, bool]]:
        """Yield exchanges, and whether the work behind each is within the limit."""
        for one, own, other, its in islice(_exchanges(ranks), self.left):
            self.left -= 1
            more = work_of(*its[1:]) - work_of(*own[1:])
            yield (one, own, other, its), max(work[one] + more, work[other] - more) <= self.limit


def _saves(ranks: list[Pieces], exchange: Exchange) -> int:
    """Count the keys that need not travel any more behind an exchange."""
    one, own, other, its = exchange
    return _saved(ranks[one], own, its) + _saved(ranks[other], its, own)


def _exchanges(ranks: list[Pieces]) -> Iterator[Exchange]:
    """Yield exchanges, the first piece of a document that several ranks share."""
    numbers = range(len(ranks))
    for one in numbers:
        for document, runs in ranks[one].items():
            if not any(document in ranks[other] for other in numbers if other != one):
                continue
            for run, other in product(runs, (number for number in numbers if number != one)):
                for its, its_runs in ranks[other].items():
                    for its_run in its_runs:
                        tokens = min(run[1] - run[0], its_run[1] - its_run[0])
                        for own_end, its_end in product(_ends(run, tokens), _ends(its_run, tokens)):
                            yield one, (document, *own_end), other, (its, *its_end)


def _ends(run: Run, tokens: int) -> set[Run]:
    return {(run[0], run[0] + tokens), (run[1] - tokens, run[1])}


def _saved(pieces: Pieces, given: Piece, taken: Piece) -> int:
    """Count the keys that a rank need not fetch any more once it has one piece instead of another."""
    documents = {given[0]: pieces[given[0]], taken[0]: pieces.get(taken[0], [])}
    before = sum(map(_lacking, documents.values()))
    documents[given[0]] = list(_less(documents[given[0]], given[1:]))
    documents[taken[0]] = [*documents[taken[0]], taken[1:]]
    return before - sum(map(_lacking, documents.values()))


def _replace(pieces: Pieces, given: Piece, taken: Piece) -> None:
    pieces[given[0]] = list(_less(pieces[given[0]], given[1:]))
    pieces[taken[0]] = list(_joined([*pieces.get(taken[0], []), taken[1:]]))
    if not pieces[given[0]]:
        del pieces[given[0]]


def _less(runs: Sequence[Run], given: Run) -> Iterator[Run]:
    for run in runs:
        if run[0] <= given[0] and given[1] <= run[1]:
            yield from (part for part in ((run[0], given[0]), (given[1], run[1])) if part[0] < part[1])
        else:
            yield run


# --- runs


def _by_document(pieces: Sequence[Piece]) -> Pieces:
    found: Pieces = {}
    for document, *run in pieces:
        found.setdefault(document, []).append((run[0], run[1]))
    return found


def _joined(runs: Iterator[Run] | Sequence[Run]) -> Iterator[Run]:
    """Yield runs in order, adjacent ones as one."""
    last: Run | None = None
    for run in sorted(runs):
        if last is not None and last[1] == run[0]:
            last = (last[0], run[1])
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last


def _lacking(runs: Sequence[Run]) -> int:
    """Count the tokens of a document before the last of some runs that are not in them."""
    return max((stop for _, stop in runs), default=0) - sum(stop - start for start, stop in runs)


def _fetched(ranks: Sequence[Pieces]) -> int:
    return sum(_lacking(runs) for pieces in ranks for runs in pieces.values())
