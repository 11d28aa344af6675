"""Choose how each attention of a model reaches the tokens of other ranks.

Elements per token that one rank sends, for heads of h_q features in all, keys and values of h_k + h_v, C ranks, and
gradients that are summed in e_g bytes where keys have e:

    all_gather  forward (C - 1) (h_k + h_v) e     backward (C - 1) (h_k + h_v) e_g
    ring        forward (C - 1) (h_k + h_v) e     backward (C - 1) (h_k + h_v) (e + e_g)
    ulysses     forward (C - 1) / C (h_q + h_k + h_v + h_o) e     backward the same
    halo        what the queries reach: by a window of w tokens about w (h_k + h_v) for each run of a rank's tokens

Rows of several documents are cut so that few queries reach beyond their rank; where halo moves less than the method
chosen, such rows go by halo.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from meshwright.core.errors import UnsupportedError
from meshwright.introspection.mixing.values import Caller, Sizes

Kind = Literal["all_gather", "ring", "ulysses", "ulysses_ring", "halo"]
Auto = Literal["auto"]
KINDS: tuple[Kind, ...] = ("all_gather", "ring", "ulysses", "ulysses_ring", "halo")
LARGE = 4
"""Whole rows of keys and values go round a ring where they are this many times larger than a rank's own queries."""


@dataclass(frozen=True)
class Method:
    """How one attention reaches other ranks' tokens.

    Attributes:
        kind: "all_gather": each rank gets keys and values of whole rows; "ring": they pass by, part by part;
            "ulysses": each rank gets some heads of all tokens; "ulysses_ring": so among neighbours, whose parts then
            pass by; "halo": each rank fetches those that its queries reach.
        neighbours: ranks among which tokens are traded for heads; 1: none.
        why: the reason in words.
        asked: the kind was asked for, and is not ours to change.
        bytes: that forward and backward send for each token of a rank; 0: it depends on the mask.
    """

    kind: Kind
    neighbours: int = 1
    why: str = ""
    asked: bool = False
    bytes: int = 0


@dataclass(frozen=True)
class Bytes:
    """Bytes of a number of keys' and values', and of their gradients' in sums."""

    element: int
    summed: int


def summed_dtype(compute: str) -> str:
    """Return the dtype in which gradients are summed, for keys and values in a compute dtype."""
    return "float64" if compute == "float64" else "float32"


def choose(caller: Caller, ranks: int, tensor_ranks: int, size: Bytes) -> Method:
    """Choose the method that moves fewest bytes; a ring where whole keys and values are large beside the rest."""
    own = of_rank(caller.sizes, tensor_ranks)
    gathered = (ranks - 1) * keys_and_values(own) * (size.element + size.summed)
    all_gather = Method("all_gather", bytes=gathered)
    if caller.arithmetic is None:
        return replace(all_gather, why="it computes scores in a way of its own")
    if caller.rule is None:
        return replace(all_gather, why="its mask follows no known rule")
    if caller.rule.reach:
        return Method("halo", why=f"its mask is {caller.rule}")
    if is_divisible(own.heads, own.key_heads, ranks):
        traded = round(2 * (ranks - 1) / ranks * traded_elements(own, ranks) * size.element)
        if traded <= gathered:
            return Method("ulysses", ranks, f"{traded} bytes per token instead of {gathered}", bytes=traded)
    if ranks * keys_and_values(own) > LARGE * own.heads * own.key_features:
        passed = (ranks - 1) * keys_and_values(own) * (2 * size.element + size.summed)
        return Method("ring", why=f"whole keys and values are over {LARGE} times a rank's queries", bytes=passed)
    return replace(all_gather, why="keys and values are small beside the queries")


def given(kind: Kind, caller: Caller, ranks: int, tensor_ranks: int) -> Method:
    """Return the method that was asked for.

    Raises:
        UnsupportedError: this attention cannot be computed by it; the text says why.
    """
    start = f"techniques.context_parallel_method = {kind}: {caller.path}"
    if kind == "all_gather":
        return _asked("all_gather")
    if caller.arithmetic is None:
        raise UnsupportedError(f"{start} computes scores in a way of its own, which goes by all_gather alone")
    own = of_rank(caller.sizes, tensor_ranks)
    if kind in ("ring", "halo"):
        return _asked(kind)
    fitting = [n for n in range(ranks, 1, -1) if ranks % n == 0 and is_divisible(own.heads, own.key_heads, n)]
    heads = f"{own.heads} heads and {own.key_heads} key heads on a rank"
    if kind == "ulysses":
        if ranks not in fitting:
            raise UnsupportedError(f"{start} has {heads}, which {ranks} ranks cannot share out. {_instead(fitting)}")
        return _asked("ulysses", ranks)
    smaller = [n for n in fitting if n < ranks]
    if not smaller:
        raise UnsupportedError(
            f"{start} has {heads}: no number of ranks between 1 and layout.cp = {ranks} divides both that and them."
            f" {_instead(fitting)}"
        )
    return _asked("ulysses_ring", smaller[0])


def _asked(kind: Kind, neighbours: int = 1) -> Method:
    return Method(kind, neighbours, "asked for", asked=True)


def _instead(fitting: list[int]) -> str:
    sizes = f"layout.cp = {' or '.join(map(str, fitting))}, or " if fitting else ""
    return f"Set {sizes}techniques.context_parallel_method = ring"


def of_rank(sizes: Sizes, tensor_ranks: int) -> Sizes:
    """Return the sizes that one of the ranks has that share the heads; fewer key heads than ranks are copied."""
    heads = sizes.heads // tensor_ranks if sizes.heads % tensor_ranks == 0 else sizes.heads
    return Sizes(heads, -(-sizes.key_heads // tensor_ranks), sizes.key_features, sizes.value_features)


def keys_and_values(sizes: Sizes) -> int:
    """Count the numbers of one token's keys and values."""
    return sizes.key_heads * (sizes.key_features + sizes.value_features)


def traded_elements(sizes: Sizes, neighbours: int) -> int:
    """Count the numbers of one token that are traded for heads: queries, keys, values, outputs.

    Where there are fewer key heads than neighbours, each is counted for every neighbour that needs one.
    """
    key_heads = max(sizes.key_heads, neighbours)
    return (sizes.heads + key_heads) * (sizes.key_features + sizes.value_features)


def is_divisible(heads: int, key_heads: int, ranks: int) -> bool:
    """Return whether heads can be shared out with whole groups of heads for each key head."""
    return heads % ranks == 0 and heads % key_heads == 0 and (key_heads % ranks == 0 or ranks % key_heads == 0)


def methods(
    kind: Kind | Auto, callers: tuple[Caller, ...], ranks: int, tensor_ranks: int, size: Bytes
) -> Iterator[Method]:
    """Yield the method of each attention: the one asked for, or with "auto" the one chosen.

    Raises:
        UnsupportedError: see ``given``.
    """
    for caller in callers:
        if kind == "auto":
            yield choose(caller, ranks, tensor_ranks, size)
        else:
            yield given(kind, caller, ranks, tensor_ranks)
