"""Record a few steps: a Chrome trace that names modules and mesh axes, or the memory history."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.utils.hooks import RemovableHandle

from meshwright.core.devices import CUDA, is_accelerator
from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean
from meshwright.core.torch_private import compiled_call
from meshwright.distributed.process.flight import Issued, issued
from meshwright.training.config import read_window

# --- name a profiler trace's events

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
    modules: dict[int, tuple[str, ...]] = {}  # by sequence number, those that its operation ran in, outermost first
    inside: dict[Any, list[tuple[float, str]]] = {}  # by thread, the ends and modules of forwards under way
    nodes: list[Event] = []
    for event in whole:
        if str(event["name"]).startswith(NODE):
            nodes.append(event)
            continue
        stack = inside.setdefault((event.get("pid"), event.get("tid")), [])
        while stack and stack[-1][0] <= event["ts"]:
            stack.pop()
        if str(event["name"]).startswith(FORWARD):
            stack.append((event["ts"] + event["dur"], event["name"].removeprefix(FORWARD)))
        number = _number(event)
        # the last of several operations with one number is the innermost: it made the node
        if stack and number is not None and event["args"].get("Fwd thread id", 0) == 0:
            modules[number] = tuple(name for _, name in stack)
    threads: dict[Any, list[tuple[tuple[str, ...], Event]]] = {}
    for event in nodes:
        if (number := _number(event)) is not None:
            threads.setdefault((event.get("pid"), event.get("tid")), []).append((modules.get(number, ()), event))
    for of_thread in threads.values():
        for depth in range(1, max(len(path) for path, _ in of_thread) + 1):
            for path, neighbours in groupby(of_thread, lambda node, depth=depth: node[0][:depth]):
                alike = [event for _, event in neighbours]
                if len(path) == depth:
                    place = {key: alike[0][key] for key in ("pid", "tid", "ts")}
                    end = max(event["ts"] + event["dur"] for event in alike)
                    name = {"ph": "X", "cat": "user_annotation", "name": BACKWARD + path[-1], "args": {}}
                    events.append({**name, **place, "dur": end - place["ts"]})


def _number(event: Event) -> int | None:
    number = event.get("args", {}).get("Sequence number")
    return number if isinstance(number, int) and number >= 0 else None


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


# --- profile a few steps as a Chrome trace that names modules and mesh axes


class Profile:
    """The recording (see ``recording``) of torch.profiler on this rank.

    While it records, every module that is not compiled has hooks that mark its forward; torch marks a compiled module
    as one range. ``name_ranges`` adds backward ranges and names of collectives when the trace is written.

    Args:
        path: file of the trace.
        parts: the local modules.
        world_axis: the mesh axis that spans all ranks, whose group is torch's default one; "world" where none does.
    """

    def __init__(self, path: Path, parts: Iterable[nn.Module], device: torch.device, world_axis: str):
        self.path, self._parts, self._device, self._world_axis = path, list(parts), device, world_axis
        self._profiler: torch.profiler.profile | None = None
        self._hooks: list[RemovableHandle] = []
        self._since = 0

    def start(self) -> None:
        activities = torch.profiler.supported_activities()
        if not is_accelerator(self._device):
            activities = [torch.profiler.ProfilerActivity.CPU]
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise it logs start and end to stderr
        self._since = time.time_ns()
        for part in self._parts:
            self._mark(part, "")
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        raw = self.path.with_suffix(".raw.json")
        profiler.export_chrome_trace(str(raw))
        trace = json.loads(raw.read_text(encoding="utf-8", errors="replace"))
        name_ranges(trace, issued(self._since), self._world_axis)
        whole = self.path.with_suffix(".new.json")
        whole.write_text(json.dumps(trace), encoding="utf-8")
        os.replace(whole, self.path)
        raw.unlink()

    def _mark(self, module: nn.Module, name: str) -> None:
        if compiled_call(module) is not None:
            return
        label = FORWARD + (clean(name) or "model")
        running: list[record_function] = []

        def enter(*_: object) -> None:
            running.append(record_function(label))
            running[-1].__enter__()

        def leave(*_: object) -> None:
            if running:
                running.pop().__exit__(None, None, None)

        self._hooks.append(module.register_forward_pre_hook(enter, prepend=True))
        self._hooks.append(module.register_forward_hook(leave, always_call=True))
        for child, below in module.named_children():
            self._mark(below, f"{name}.{child}" if name else child)


# --- record a few steps and write the recording


class Recording(Protocol):
    """A recording that starts and stops between two steps, on every rank alike.

    Attributes:
        path: file that it writes.
    """

    path: Path

    def start(self) -> None:
        """Start recording."""
        ...

    def stop(self) -> None:
        """Stop recording and write the file. Raises OSError if the disk does."""
        ...


class Recordings:
    """The recordings of a run, each with its config key, that key's text, and the steps. May be empty at no cost."""

    def __init__(self, wanted: Sequence[tuple[str, str, range, Recording]] = ()):
        self._wanted = list(wanted)
        self._open: list[tuple[range, Recording]] = []

    def announce(self, step: int, say: Callable[[str], None]) -> None:
        """Report the recordings that are skipped because the run continues from ``step``, after their window."""
        for key, text, window, recording in self._wanted:
            if window[-1] <= step and not recording.path.exists():
                say(f"{key} = {text} lies behind step {step}, from which the run goes on: nothing is recorded")

    def before(self, step: int) -> None:
        """Start the recordings that begin with this step."""
        for _, _, window, recording in self._wanted:
            if step in window and (window, recording) not in self._open:
                recording.start()
                self._open.append((window, recording))

    def ends_after(self, step: int) -> bool:
        """Return whether a recording stops after this step."""
        return any(step + 1 not in window for window, _ in self._open)

    def after(self, step: int) -> None:
        """Stop the recordings that end with this step. Raises OSError if the disk does."""
        self._stop([pair for pair in self._open if step + 1 not in pair[0]])

    def close(self) -> None:
        """Stop and write the recordings that are still open: the run ends within their window.

        Raises OSError if the disk does.
        """
        self._stop(list(self._open))

    def _stop(self, over: list[tuple[range, Recording]]) -> None:
        self._open = [pair for pair in self._open if pair not in over]
        for _, recording in over:
            recording.stop()


class MemorySnapshot:
    """Records every allocation and free of CUDA memory on this rank, with stacks, for https://pytorch.org/memory_viz."""

    def __init__(self, path: Path):
        self.path = path

    def start(self) -> None:
        from meshwright.core.torch_private import record_memory_history

        record_memory_history(200_000)

    def stop(self) -> None:
        from meshwright.core.torch_private import dump_memory_history, record_memory_history

        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            dump_memory_history(str(self.path))
        finally:
            record_memory_history(None)


def check_recordings(logging: Any, device: str) -> None:
    """Refuse recordings that this device does not support, before the start.

    Raises:
        UnsupportedError: a memory snapshot on a CPU.
    """
    if logging.memory_snapshot and device != CUDA:
        raise UnsupportedError(
            f"logging.memory_snapshot = {logging.memory_snapshot!r}: torch keeps a history of CUDA memory only, and"
            f" this run is on {device}. Leave it empty; memory_bytes in the metrics is the memory of each step."
        )


def open_recordings(
    logging: Any, steps: int, folder: Path, rank: int, make_profile: Callable[[Path], Recording]
) -> Recordings:
    """Return the recordings that a config asks for.

    Args:
        logging: the config's logging section.
        steps: number of steps of the whole run.
        folder: folder of the run.
        make_profile: builds the recording of a profile, given its path.
    """
    wanted: list[tuple[str, str, range, Recording]] = []
    if window := read_window("logging.profile", logging.profile, steps):
        wanted.append(
            ("logging.profile", logging.profile, window, make_profile(folder / "profile" / f"rank{rank}.json"))
        )
    if window := read_window("logging.memory_snapshot", logging.memory_snapshot, steps):
        snapshot = MemorySnapshot(folder / "memory" / f"rank{rank}.pickle")
        wanted.append(("logging.memory_snapshot", logging.memory_snapshot, window, snapshot))
    return Recordings(wanted)
