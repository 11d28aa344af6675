"""Order samples as a pure function of (seed, index), so that seeking is arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshwright.core.errors import ConfigError

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

    def epoch(self, index: int) -> int:
        """Return the epoch, from 0, that ``index`` lies in."""
        return index // self.n

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

    def _permute(self, places: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        """Return the permutation of each place's epoch; uint64 arrays of shape (m,)."""
        seed = _mix(np.array([self.seed & _U64], dtype=np.uint64))
        keys = _mix(seed ^ _mix(epochs + np.uint64(_GOLDEN)))  # (m,)
        out = places.copy()
        todo = np.arange(len(out))
        while len(todo):
            out[todo] = self._encipher(out[todo], keys[todo])
            todo = todo[out[todo] >= self.n]
        return out

    def _encipher(self, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return a bijection of [0, 4**half_bits) onto itself for each key."""
        half_bits = max(1, ((self.n - 1).bit_length() + 1) // 2)
        shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
        left, right = values >> shift, values & mask
        for round_key in _ROUND_KEYS:
            left, right = right, left ^ (_mix(right ^ (keys + round_key)) & mask)
        return (left << shift) | right


@lru_cache(maxsize=64)
def _block(order: Order, number: int) -> np.ndarray:
    """Return the samples at the indexes [number * _BLOCK, (number + 1) * _BLOCK)."""
    epochs, places = np.divmod(np.uint64(number * _BLOCK) + np.arange(_BLOCK, dtype=np.uint64), np.uint64(order.n))
    return order._permute(places, epochs).astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finaliser, a bijection of uint64; arithmetic wraps around."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
