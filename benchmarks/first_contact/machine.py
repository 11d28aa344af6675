"""The device that a step runs on: a GPU, or the pretend device in a dry run."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))  # support

DRY, WITHOUT = "FIRST_CONTACT_DRY", "FIRST_CONTACT_WITHOUT"
"""Environment variables: steps run on the pretend device; packages that steps find missing, separated by commas."""
PRETEND = "pretend"


class NotHereError(Exception):
    """The step needs CUDA or NCCL, which the pretend device lacks."""


class SkippedError(Exception):
    """The step cannot run on this machine: a package is missing, or the card is too small."""


@dataclass(frozen=True)
class Machine:
    """Where steps run.

    Attributes:
        device: torch's type of device.
        is_dry: on the pretend device, with tiny sizes.
    """

    device: str
    is_dry: bool

    @property
    def module(self) -> Any:
        import torch

        return torch.get_device_module(self.device)

    @property
    def name(self) -> str:
        return self.module.get_device_name()

    @property
    def memory(self) -> int:
        """Bytes of the device."""
        return int(self.module.get_device_properties(0).total_memory)

    @property
    def backend(self) -> str:
        """The backend of ranks that share one device: gloo, which NCCL would refuse."""
        return f"cpu:gloo,{self.device}:{PRETEND if self.is_dry else 'gloo'}"

    def patience(self, seconds: float) -> float:
        """Return a time limit; a dry run may share its cores with others."""
        return 5 * seconds if self.is_dry else seconds

    def needs_cuda(self, why: str) -> None:
        """Say by name that a step needs what the pretend device lacks."""
        if self.is_dry:
            raise NotHereError(why)

    def finish(self) -> None:
        """Wait until the device is done."""
        self.module.synchronize()


@cache
def machine() -> Machine:
    """Find the device, or give torch the pretend one; call it first in every process."""
    import torch

    if os.environ.get(DRY):
        from support import pretend_gpu

        pretend_gpu.install()
        return Machine(PRETEND, True)
    if not torch.cuda.is_available():
        raise SkippedError("torch finds no NVIDIA GPU here; --dry runs all steps on the pretend device")
    local = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
    torch.cuda.set_device(local % torch.cuda.device_count())
    torch.empty(1, device="cuda")  # now, so that torch.cuda counts as initialised wherever somebody asks
    return Machine("cuda", False)


class _Absent:
    """Hides packages, as if they were not installed."""

    def __init__(self, names: Sequence[str]):
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r} (hidden by {WITHOUT})", name=name)


def hide_packages() -> None:
    """Hide the packages that the environment names, to try what a bare machine does."""
    if names := [name for name in os.environ.get(WITHOUT, "").split(",") if name]:
        sys.meta_path.insert(0, _Absent(names))  # type: ignore[arg-type]


def has(package: str) -> bool:
    """Return whether a package can be imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def need(package: str, what: str) -> None:
    """Skip a step whose package is missing."""
    if not has(package):
        raise SkippedError(f"{what} needs {package}, which is not installed")
