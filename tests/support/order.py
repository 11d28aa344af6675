"""Is there an order in which all ranks can run the messages that they issued, as NCCL runs them?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter

from .pretend_gpu import CollectiveCall

POINT_TO_POINT = ("send", "recv_")


def order_faults(messages: Sequence[Sequence[CollectiveCall]]) -> list[str]:
    """Say where ranks issue other collectives over a group, or none that could run behind each other.

    NCCL runs a group's collectives as each rank issues them, and matches the n-th of one rank with the n-th of every
    other. Where ranks issue those of two groups in different orders, each may hold the device that the other waits for.
    """
    found = []
    by_group: dict[tuple[int, ...], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    edges: dict[tuple[object, ...], set[tuple[object, ...]]] = defaultdict(set)
    for rank, calls in enumerate(messages):
        before: tuple[object, ...] | None = None
        for call in calls:
            if call.operator in POINT_TO_POINT:
                continue
            mine = by_group[call.ranks][rank]
            mine.append(call.operator)
            this = (call.ranks, len(mine))
            if before is not None:
                edges[this].add(before)
            before = this
    for ranks, of_rank in by_group.items():
        sequences = {rank: of_rank.get(rank, []) for rank in ranks if rank < len(messages)}
        if len({tuple(sequence) for sequence in sequences.values()}) > 1:
            found.append(f"the ranks {ranks} issue other collectives: {sequences}")
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        found.append(f"no order runs these collectives on all ranks: {error.args[1]}")
    return found + pair_faults(messages)


def pair_faults(messages: Sequence[Sequence[CollectiveCall]]) -> list[str]:
    """Say where two ranks send and receive in orders that do not fit, so that each may wait for the other's receive.

    NCCL runs what two ranks send each other outside of a batch on one stream, in the order of each rank's calls.
    """
    found = []
    for one in range(len(messages)):
        for other in range(one + 1, len(messages)):
            mine, theirs = _steps(messages[one], other, {}), _steps(messages[other], one, MIRRORED)
            if mine != theirs:
                first = next((n for n, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), 0)
                found.append(
                    f"ranks {one} and {other}: message {first} of {len(mine)} and {len(theirs)} does not fit: rank"
                    f" {one} issues {mine[first : first + 3]}, which needs rank {other} to issue the opposite, and"
                    f" mirrored that issues {theirs[first : first + 3]}"
                )
    return found


MIRRORED = {"send": "recv_", "recv_": "send"}


def _steps(calls: Sequence[CollectiveCall], peer: int, mirrored: dict[str, str]) -> list[tuple[str, ...]]:
    """List what is issued with a peer, in order; what one batch issues comes together."""
    found: list[tuple[int, list[str]]] = []
    for call in calls:
        if call.peer == peer:
            operator = mirrored.get(call.operator, call.operator)
            if call.batch and found and found[-1][0] == call.batch:
                found[-1][1].append(operator)
            else:
                found.append((call.batch, [operator]))
    return [tuple(sorted(operators)) for _, operators in found]
