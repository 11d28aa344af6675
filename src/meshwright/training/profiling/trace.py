"""Name a profiler trace's events: backward by module, collectives by kind and mesh axis.

Works on the parsed file; torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.distributed.process.flight import Issued

FORWARD, BACKWARD = "forward ", "backward "
NODE = "autograd::engine::evaluate_function"
KINDS = (
    "reduce_scatter",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "barrier",
    "gather",
    "scatter",
    "reduce",
    "send",
    "recv",
)

Event = dict[str, Any]


def name_ranges(trace: dict[str, Any], collectives: Sequence[Issued], world_axis: str) -> None:
    """Add backward ranges and rename collectives, in place.

    * Every node of the backward pass has the sequence number of the operation that made it, and is named after the
      module whose forward range holds that operation. Neighbours of one module become one range "backward <module>",
      nested as in the forward.
    * A collective is renamed like "all_gather dp_shard". NCCL's events name their group. gloo's do not: an operation
      is the one that torch's flight recorder saw while it was issued; gloo's threads run them in the order of issue.

    Args:
        collectives: entries of the flight recorder since before the trace began, in order.
        world_axis: name for "world", the group of all ranks.
    """
    events: list[Event] = trace["traceEvents"]
    whole = [event for event in events if event.get("ph") == "X" and "dur" in event]
    whole.sort(key=lambda event: (event["ts"], -event["dur"]))
    _name_collectives(whole, collectives, float(trace.get("baseTimeNanoseconds", 0)), world_axis)
    events += list(_backward(whole, _modules_of_operations(whole)))


def _modules_of_operations(whole: Sequence[Event]) -> dict[int, tuple[str, ...]]:
    """Map each sequence number to the modules that its operation ran in, outermost first."""
    inside: dict[Any, list[tuple[float, str]]] = {}
    found: dict[int, tuple[str, ...]] = {}
    for event in whole:
        if str(event["name"]).startswith(NODE):
            continue
        stack = inside.setdefault((event.get("pid"), event.get("tid")), [])
        while stack and stack[-1][0] <= event["ts"]:
            stack.pop()
        if str(event["name"]).startswith(FORWARD):
            stack.append((event["ts"] + event["dur"], event["name"].removeprefix(FORWARD)))
        number = _number(event)
        # the last of several operations with one number is the innermost: it made the node
        if stack and number is not None and event["args"].get("Fwd thread id", 0) == 0:
            found[number] = tuple(name for _, name in stack)
    return found


def _number(event: Event) -> int | None:
    number = event.get("args", {}).get("Sequence number")
    return number if isinstance(number, int) and number >= 0 else None


def _backward(whole: Sequence[Event], modules: dict[int, tuple[str, ...]]) -> Iterator[Event]:
    threads: dict[Any, list[tuple[tuple[str, ...], Event]]] = {}
    for event in whole:
        number = _number(event) if str(event["name"]).startswith(NODE) else None
        if number is not None:
            threads.setdefault((event.get("pid"), event.get("tid")), []).append((modules.get(number, ()), event))
    for nodes in threads.values():
        for depth in range(max(len(path) for path, _ in nodes)):
            yield from _merged(nodes, depth)


def _merged(nodes: Sequence[tuple[tuple[str, ...], Event]], depth: int) -> Iterator[Event]:
    """Yield one range per run of neighbours that share their modules down to ``depth``."""
    run: Event | None = None
    before: tuple[str, ...] = ()
    for path, event in nodes:
        here = path[: depth + 1]
        if run is not None and here == before:
            run["dur"] = max(run["dur"], event["ts"] + event["dur"] - run["ts"])
            continue
        if run is not None:
            yield run
        before, run = here, None
        if len(here) == depth + 1:
            place = {key: event[key] for key in ("pid", "tid", "ts", "dur")}
            run = {"ph": "X", "cat": "user_annotation", "name": BACKWARD + here[depth], **place, "args": {}}
    if run is not None:
        yield run


def _name_collectives(whole: Sequence[Event], collectives: Sequence[Issued], base_ns: float, world_axis: str) -> None:
    remembered = list(collectives)
    named: list[tuple[int, str]] = []
    for event in whole:
        args = event.get("args", {})
        if "Process Group Description" in args and "Collective name" in args:
            axis = str(args["Process Group Description"]).removeprefix("mesh_")
            _rename(event, str(args["Collective name"]), "world" if axis == "default_pg" else axis, world_axis)
        elif str(event["name"]).startswith("c10d::"):
            begins, ends = (base_ns + 1000 * at for at in (event["ts"], event["ts"] + event["dur"]))
            seen = next(
                (i for i, one in enumerate(remembered) if begins - 50_000 <= one.created_ns <= ends + 50_000), None
            )
            if seen is not None:
                one = remembered.pop(seen)
                named.append(
                    (one.created_ns, _rename(event, event["name"].removeprefix("c10d::"), one.axis, world_axis))
                )
    threads = [
        event
        for event in whole
        if str(event["name"]).startswith("gloo:") and "Collective name" not in event.get("args", {})
    ]
    if len(threads) == len(named):
        for event, (_, name) in zip(threads, sorted(named), strict=True):
            event["args"] = {**event.get("args", {}), "torch's name": event["name"]}
            event["name"] = f"{name} (gloo)"


def _rename(event: Event, reported: str, axis: str, world_axis: str) -> str:
    """Rename ``"_allgather_base_"`` in dp_shard's group to ``"all_gather dp_shard"``; torch's name stays in args."""
    plain = reported.lower().replace("_", "")
    kind = next((kind for kind in KINDS if kind.replace("_", "") in plain), reported)
    event["args"] = {**event.get("args", {}), "torch's name": event["name"]}
    event["name"] = f"{kind} {world_axis if axis == 'world' else axis}"
    return event["name"]
