"""Choose the source and the sample at each index as pure functions, so that seeking is arithmetic."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshwright.core.errors import ConfigError, UnsupportedError

from .packing import Rows, Split, gather, lengths_at

# --- order samples as a pure function of

_U64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUND_KEYS = tuple(np.uint64(number * _GOLDEN & _U64) for number in range(1, 9))
"""Added to an epoch's key, one per round. Four rounds suffice for large domains; in small ones, a round mixes only a
few bits."""

_BLOCK = 512
"""Number of indexes enciphered at once: callers read neighbours one after another, and a few cost as much as many."""


@dataclass(frozen=True)
class Order:
    """An endless order of ``n`` samples: index i is epoch i // n, and each epoch is its own permutation of all samples.

    The permutation is a balanced Feistel network (Luby and Rackoff 1988) keyed by (seed, epoch), over the smallest
    domain of an even number of bits that holds n; a value of n or more is enciphered again until it is below n
    ("cycle walking": Black and Rogaway 2002, "Ciphers with arbitrary finite domains"), which keeps it a bijection.
    Nothing is stored, so any index costs the same. The mixer is that of SplitMix64 (Steele, Lea and Flood 2014).

    Raises:
        ConfigError: ``n`` is below 1.
    """

    n: int
    """Number of samples in an epoch."""
    seed: int
    """Any integer (its low 64 bits are used)."""
    shuffle: bool = True
    """If False, every epoch has the order of the corpus."""

    def __post_init__(self):
        if self.n < 1:
            raise ConfigError(
                f"an order over {self.n} samples: there must be at least 1; add to data.source or lower data.seq_len"
            )

    def __getitem__(self, index: int) -> int:
        """Return the sample at ``index``; see ``take``."""
        return int(self.take(np.array([index], dtype=np.int64))[0])

    def take(self, indexes: np.ndarray) -> np.ndarray:
        """Return the samples at ``indexes`` (int64, any shape, 0 to 2**63 - 1): int64 of this shape, in [0, n).

        Raises:
            IndexError: an index is below 0.
        """
        indexes = np.asarray(indexes, dtype=np.int64)
        if indexes.size and indexes.min() < 0:
            raise IndexError(f"index {indexes.min()}: the order begins at 0")
        if not self.shuffle or self.n == 1:
            return indexes % self.n
        blocks, offsets = np.divmod(indexes.reshape(-1), _BLOCK)
        samples = np.empty_like(offsets)
        for block in set(blocks.tolist()):
            mine = blocks == block
            samples[mine] = _block(self, block)[offsets[mine]]
        return samples.reshape(indexes.shape)


@lru_cache(maxsize=64)
def _block(order: Order, number: int) -> np.ndarray:
    """Return the samples at the indexes [number * _BLOCK, (number + 1) * _BLOCK)."""
    epochs, out = np.divmod(np.uint64(number * _BLOCK) + np.arange(_BLOCK, dtype=np.uint64), np.uint64(order.n))
    seed = _mix(np.array([order.seed & _U64], dtype=np.uint64))
    keys = _mix(seed ^ _mix(epochs + np.uint64(_GOLDEN)))
    half_bits = max(1, ((order.n - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    todo = np.arange(len(out))
    while len(todo):  # a bijection of [0, 4**half_bits) onto itself for each key, until a value is below n
        left, right = out[todo] >> shift, out[todo] & mask
        for round_key in _ROUND_KEYS:
            left, right = right, left ^ (_mix(right ^ (keys[todo] + round_key)) & mask)
        out[todo] = (left << shift) | right
        todo = todo[out[todo] >= order.n]
    return out.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finaliser, a bijection of uint64; arithmetic wraps around."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# --- choose the source of the sample at each index, as a pure function of the index

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
        seeds = [seed]
        if len(splits) > 1:  # by the names, so that an order does not change when another source is added
            hashes = [hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest() for name in names]
            seeds = [int.from_bytes(one, "little") for one in hashes]
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
        return gather(self.splits, *self._found(indexes), self.seq_len)

    def row_lengths(self, indexes: np.ndarray) -> np.ndarray:
        """Return the most tokens that the samples at ``indexes`` hold before their padding, in no order."""
        source, sample = self._found(indexes)
        used = sorted(set(source.tolist()))
        return np.concatenate([lengths_at(self.splits[k], sample[source == k], self.seq_len) for k in used])

    def epochs(self, index: int) -> dict[str, float]:
        """Return the number of epochs, as a fraction, of each source before ``index``."""
        given = self.interleave.given(index) / self.rows_together
        return {name: float(n) / order.n for name, n, order in zip(self.names, given, self.orders, strict=True)}

    @property
    def rows_together(self) -> int:
        """The number of successive samples that belong together; an order is over such groups."""
        return self.splits[0].rows_together

    def _found(self, indexes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each index, and the sample of that source."""
        source, place = self.interleave.take(indexes)
        groups, member = np.divmod(place, self.rows_together)
        for k in set(source.tolist()):
            mine = source == k
            groups[mine] = self.orders[k].take(groups[mine])
        return source, groups * self.rows_together + member
