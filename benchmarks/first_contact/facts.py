"""Facts of the machine: versions, device, memory, packages."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import date
from importlib import metadata
from typing import Any

from .child import Outcome
from .machine import has, machine

PACKAGES = ("numpy", "psutil", "rich", "safetensors", "torchao", "transformers", "triton", "pytest")


def facts() -> Outcome:
    """Collect what figures depend on."""
    import torch

    here = machine()
    found: dict[str, Any] = {
        "date": date.today().isoformat(),
        "device": here.name,
        "devices": here.module.device_count(),
        "memory": here.memory,
        "capability": ".".join(map(str, here.module.get_device_capability(0))),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "nccl": nccl_version(),
        "driver": driver_version(),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "commit": commit(),
        "packages": {name: version(name) for name in PACKAGES},
    }
    missing = [name for name, number in found["packages"].items() if number == "absent"]
    return found, [
        f"{found['devices']} × {found['device']}, {found['memory'] / 1e9:.1f} GB, capability {found['capability']}",
        f"torch {found['torch']}, CUDA {found['cuda']}, NCCL {found['nccl']}, driver {found['driver']}",
        f"Python {found['python']}, {found['cores']} cores of {found['cpu']};"
        f" absent: {', '.join(missing) or 'nothing'}",
    ]


def name() -> Outcome:
    """Return the device's name, which the folder of results carries."""
    return {"name": machine().name}, []


def version(package: str) -> str:
    if not has(package):
        return "absent"
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "present"


def nccl_version() -> str:
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))


def asked(*command: str) -> str:
    """Return the first line that a command says, "" where it cannot be run."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return (done.stdout.strip().splitlines() or [""])[0] if done.returncode == 0 else ""


def driver_version() -> str:
    return asked("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "none"


def commit() -> str:
    return asked("git", "rev-parse", "--short", "HEAD") or "no checkout of git"


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
