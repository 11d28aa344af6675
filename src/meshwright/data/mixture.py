"""Choose the source of the sample at each index, as a pure function of the index, so that seeking is arithmetic."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.core.errors import ConfigError, UnsupportedError

from .corpus.packing import Rows, Split, gather
from .order import Order
from .row_ends import lengths_at

_BITS = 31
"""Shares are rounded to multiples of 2**-31."""


@dataclass(frozen=True)
class Stage:
    """Weights that apply from a given sample on."""

    first: int
    """Index of its first sample."""
    weights: tuple[float, ...]
    """One per source, each 0 or more, not all 0."""


class Interleave:
    """Assigns indexes to sources: among the first n indexes of a stage, each source has about n times its share.

    Sources are split off one after another: among the remaining places, source k takes place p where floor(p * share +
    1/2) rises (a Bresenham line, or Sturmian sequence). So each batch nearly has the requested weights, unlike with
    random draws, and one multiplication per source counts its samples before an index.

    Raises:
        ConfigError: no stage begins at sample 0, stages are out of order, or weights are invalid.
    """

    def __init__(self, stages: Sequence[Stage]):
        self.stages = tuple(stages)
        if not self.stages or self.stages[0].first != 0:
            raise ConfigError("a mixture needs weights from sample 0 on")
        n = len(self.stages[0].weights)
        for stage in self.stages:
            if (
                len(stage.weights) != n
                or not all(0 <= w < float("inf") for w in stage.weights)
                or not sum(stage.weights) > 0
            ):
                raise ConfigError(
                    f"weights {list(stage.weights)}: there must be one for each of the {n} parts, 0 or more, not all 0"
                )
        self._firsts = np.array([stage.first for stage in self.stages], dtype=np.int64)
        if (np.diff(self._firsts) <= 0).any():
            raise ConfigError(
                f"stages begin at samples {self._firsts.tolist()}: each must begin after the one before it"
            )
        self._shares = [_shares(stage.weights) for stage in self.stages]
        self._given = [np.zeros(n, dtype=np.int64)]  # by each source, before the stage begins
        for i, length in enumerate(np.diff(self._firsts)):
            self._given.append(self._given[i] + self._counts(i, int(length)))

    def take(self, indexes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each index, and the number of earlier samples of that source; int64, shape (m,)."""
        indexes = np.asarray(indexes, dtype=np.int64).reshape(-1)
        if len(indexes) and indexes.min() < 0:
            raise IndexError(f"index {indexes.min()}: a mixture begins at 0")
        stages = np.searchsorted(self._firsts, indexes, side="right") - 1
        source, place = np.empty_like(indexes), np.empty_like(indexes)
        for stage in sorted(set(stages.tolist())):
            todo = np.flatnonzero(stages == stage)
            at = indexes[todo] - self._firsts[stage]
            for k, share in enumerate(self._shares[stage]):
                before = _part(at, share)
                mine = _part(at + 1, share) > before
                source[todo[mine]] = k
                place[todo[mine]] = self._given[stage][k] + before[mine]
                todo, at = todo[~mine], (at - before)[~mine]
        return source, place

    def given(self, index: int) -> np.ndarray:
        """Count the samples of each source before ``index``; int64 of shape (sources,)."""
        stage = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return self._given[stage] + self._counts(stage, index - int(self._firsts[stage]))

    def _counts(self, stage: int, length: int) -> np.ndarray:
        left, counts = np.array([length], dtype=np.int64), []
        for share in self._shares[stage]:
            counts.append(_part(left, share))
            left = left - counts[-1]
        return np.concatenate(counts)


def _shares(weights: tuple[float, ...]) -> list[int]:
    """Return each source's share of the places that earlier sources leave, in multiples of 2**-_BITS.

    The last source with a weight takes all remaining places.
    """
    shares = []
    for k, weight in enumerate(weights):
        rest = sum(weights[k:])
        is_last = weight > 0 and not sum(weights[k + 1 :])
        shares.append(1 << _BITS if is_last else round(weight / rest * (1 << _BITS)) if rest else 0)
    return shares


def _part(places: np.ndarray, share: int) -> np.ndarray:
    """Compute floor(places * share / 2**_BITS + 1/2), without overflow for any place."""
    high, low = places >> _BITS, places & ((1 << _BITS) - 1)
    return high * share + ((low * share + (1 << (_BITS - 1))) >> _BITS)


@dataclass(frozen=True, eq=False)
class Samples:
    """An endless sequence of samples, of one source in its order or of several interleaved sources.

    Args:
        splits: the sources.
        names: names of the sources.
        orders: order of the samples of each source; of pairs, of each pair.
        seq_len: number of tokens per sample.
        interleave: the source at each index.
    """

    splits: tuple[Split, ...]
    names: tuple[str, ...]
    orders: tuple[Order, ...]
    seq_len: int
    interleave: Interleave

    @classmethod
    def of(
        cls,
        splits: Sequence[Split],
        seq_len: int,
        seed: int,
        names: Sequence[str] = (),
        interleave: Interleave | None = None,
    ) -> Samples:
        """Build samples of ``splits``; without ``interleave`` each source has the same weight.

        Args:
            seed: seed of the orders; with several sources, each derives its own from it.

        Raises:
            ConfigError: a source has no sample.
            UnsupportedError: one of several sources holds pairs.
        """
        names = tuple(names) or tuple(split.name for split in splits)
        seeds = [seed] if len(splits) == 1 else [_seed_of(seed, name) for name in names]
        together = [split.rows_together for split in splits]
        if len(splits) > 1 and max(together) > 1:
            raise UnsupportedError(
                f"the part '{names[together.index(max(together))]}' of data.mixture holds pairs of answers, which a"
                f" mixture would part: make it the only source"
            )
        orders = tuple(
            Order(split.n_samples(seq_len) // split.rows_together, own)
            for split, own in zip(splits, seeds, strict=True)
        )
        return cls(tuple(splits), names, orders, seq_len, interleave or Interleave([Stage(0, (1.0,) * len(splits))]))

    def rows(self, indexes: np.ndarray) -> Rows:
        """Return the samples at ``indexes`` (integers, 0 or more, shape (rows,)); see ``Rows``."""
        source, place = self.interleave.take(indexes)
        return gather(
            [
                (self.splits[k], mine, self._samples(k, place[mine]))
                for k in sorted(set(source.tolist()))
                for mine in [source == k]
            ],
            len(source),
            self.seq_len,
        )

    def row_lengths(self, indexes: np.ndarray) -> np.ndarray:
        """Return the most tokens that the samples at ``indexes`` hold before their padding, in no order."""
        source, place = self.interleave.take(indexes)
        found = [
            lengths_at(self.splits[k], self._samples(k, place[source == k]), self.seq_len)
            for k in sorted(set(source.tolist()))
        ]
        return np.concatenate(found)

    def epochs(self, index: int) -> dict[str, float]:
        """Return the number of epochs, as a fraction, of each source before ``index``."""
        given = self.interleave.given(index) / self.rows_together
        return {name: float(n) / order.n for name, n, order in zip(self.names, given, self.orders, strict=True)}

    @property
    def rows_together(self) -> int:
        """The number of successive samples that belong together; an order is over such groups."""
        return self.splits[0].rows_together

    def _samples(self, source: int, places: np.ndarray) -> np.ndarray:
        groups, member = np.divmod(places, self.rows_together)
        return self.orders[source].take(groups) * self.rows_together + member


def _seed_of(seed: int, name: str) -> int:
    """Derive a source's seed from its name, so that its order does not change when another source is added."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")
