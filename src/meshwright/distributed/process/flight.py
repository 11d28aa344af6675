"""Read the collective that this rank waits in from torch's flight recorder (on by ``setup``), in any thread."""

from __future__ import annotations

import gc
import pickle
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PendingCollective:
    """A collective that has begun on this rank and has not ended."""

    name: str
    """The name of the collective in torch: all_gather, reduce_scatter, all_reduce, and so on."""
    group: str
    """The mesh axis, or "world"."""
    number: int
    """Count of the group's collectives on this rank, up to this one."""
    ranks: tuple[int, ...]
    """Members of the group."""
    since: float
    """Unix time at which it began."""


class Flight:
    """A detector of collectives that do not end.

    Asking for the groups' progress costs microseconds, but a whole record some tens of milliseconds: it is read only
    once two looks find a group at the same collective.
    """

    def __init__(self) -> None:
        self._before: dict[str, int] = {}
        self._known: tuple[dict[str, int], PendingCollective | None] = ({}, None)

    def look(self) -> PendingCollective | None:
        """Return the collective that was under way at the previous look and still is; the oldest of several."""
        try:
            # by the recorder's id of each group with open collectives, the number of its last one
            statuses = [dump.get("pg_status", {}) for dump in _dump(includeCollectives=False, onlyActive=False)]
            open_now = {
                f"{recorder}/{group}": int(at["last_enqueued_collective"])
                for recorder, groups in enumerate(statuses)
                for group, at in groups.items()
                if int(at["last_enqueued_collective"]) > int(at["last_completed_collective"])
            }
            stuck = {group: number for group, number in open_now.items() if self._before.get(group) == number}
            self._before = open_now
            if not stuck:
                return None
            if self._known[0] == stuck and self._known[1] is not None:
                return self._known[1]
            self._known = stuck, None
            waiting = [one for one in _entries() if not one["retired"] and not one.get("time_discovered_completed_ns")]
            if waiting:
                import torch.distributed as dist

                from meshwright.distributed.torch_private import group_of_recorder

                first = min(waiting, key=lambda entry: entry["time_created_ns"])
                name, words = first["process_group"]
                number = int(first["p2p_seq_id"] if first["is_p2p"] else first["collective_seq_id"])
                kind, group = str(first["profiling_name"]).rpartition(":")[2], group_of_recorder(name)
                ranks = () if group is None else tuple(dist.get_process_group_ranks(group))
                began = first["time_created_ns"] / 1e9
                self._known = stuck, PendingCollective(kind, axis_of(words), number, ranks, began)
            return self._known[1]
        except Exception:  # noqa: BLE001  (private to torch: another version may lack it, and no run may stop for it)
            return None


def _entries() -> list[dict[str, Any]]:
    return [entry for dump in _dump(includeCollectives=True, onlyActive=False) for entry in dump.get("entries", [])]


def _dump(**options: bool) -> list[dict[str, Any]]:
    """Read each recorder of this torch; nothing before torch.distributed is imported."""
    if "torch.distributed" not in sys.modules:
        return []
    from meshwright.distributed.torch_private import recorder_dumps

    return [pickle.loads(dump(includeStackTraces=False, **options)) for dump in recorder_dumps()]


def axis_of(description: str) -> str:
    """Translate a group's description to its name in messages: "mesh_dp_shard" is dp_shard, "default_pg" is world."""
    return "world" if description == "default_pg" else description.removeprefix("mesh_") or "unnamed"


@dataclass(frozen=True)
class Issued:
    """A collective that this rank took part in. ``created_ns``: when it was issued, in Unix time."""

    axis: str
    created_ns: int


def issued(since_ns: int) -> list[Issued]:
    """List the collectives since a moment, in order, as far as the recorder reaches; costs some 10 µs per record."""
    collects = gc.isenabled()
    # a record is thousands of small objects: the collector would start, and scan all of torch for 0.2 s
    gc.disable()
    try:
        recent = [entry for entry in _entries() if entry["time_created_ns"] >= since_ns and not entry["is_p2p"]]
        recent.sort(key=lambda entry: entry["time_created_ns"])
        return [Issued(axis_of(entry["process_group"][1]), int(entry["time_created_ns"])) for entry in recent]
    except Exception:  # noqa: BLE001  (as above: another torch may lack the recorder, and no run may stop for it)
        return []
    finally:
        if collects:
            gc.enable()
