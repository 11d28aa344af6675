"""Profile a few steps as a Chrome trace that names modules and mesh axes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.utils.hooks import RemovableHandle

from meshwright.core.devices import is_accelerator
from meshwright.core.names import clean
from meshwright.core.torch_private import compiled_call
from meshwright.distributed.process.flight import issued

from .trace import FORWARD, name_ranges


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
