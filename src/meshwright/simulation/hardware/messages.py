"""Price one message by its operation, its ranks and its bytes."""

from __future__ import annotations

from .links import Group, Machines, gather_s, reduce_s, send_s


def message_s(op: str, ranks: tuple[int, ...], tensor_bytes: float, machines: Machines) -> float:
    """Return the seconds of a message from its call to its last byte, with nothing else on its links.

    An all-to-all of equal parts moves as many bytes over each link as an all-gather to the same bytes does; so does a
    broadcast or a scatter in a ring.

    Args:
        op: all_gather, reduce_scatter, all_reduce, all_to_all, send, or torch's name of another operation.
        ranks: ranks of the process group, in order, with equal distances.
        tensor_bytes: bytes of the message's larger side.
    """
    if len(ranks) < 2:
        return 0.0
    stride = abs(ranks[1] - ranks[0])
    if op == "send":
        return send_s(tensor_bytes, stride, machines)
    group = Group(len(ranks), stride)
    return reduce_s(tensor_bytes, group, machines) if op == "all_reduce" else gather_s(tensor_bytes, group, machines)
