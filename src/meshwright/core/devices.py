"""Name the types of devices, and find the accelerator that this process can compute on; torch is imported on use.

A type is a word of torch's: "cpu", "cuda" (also for ROCm), "xpu", or the name of a backend that plugs into torch. What
any accelerator can do is asked of ``torch.get_device_module(device)``; this file alone calls one of them by its name.
"""

from __future__ import annotations

import glob
import os
from typing import TYPE_CHECKING, Any

from .errors import ConfigError

if TYPE_CHECKING:
    import torch

CPU, CUDA = "cpu", "cuda"
DEFAULT_BACKEND = f"{CPU}:gloo,{CUDA}:nccl"
"""torch's list of device:backend where the user names none; on another accelerator, its own stands for NCCL."""
WITHOUT_MESSAGES = ("mps",)
"""Accelerators between which torch sends no messages; their machines compute on the CPU."""


def local_device() -> str:
    """Return the type of the accelerator that torch can use here, "cpu" where there is none."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return CPU if found is None or found.type in WITHOUT_MESSAGES else found.type


def device_in_use() -> str:
    """Return the type of the accelerator once this process has used it, else "cpu"."""
    import torch

    here = local_device()
    return here if is_accelerator(here) and torch.get_device_module(here).is_initialized() else CPU


def is_accelerator(device: str | torch.device) -> bool:
    """Return whether a device computes beside the host, with memory and streams of its own."""
    return str(device).partition(":")[0] not in (CPU, "meta")


def current_device(device_type: str) -> torch.device:
    """Return the device of a type that this process computes on."""
    import torch

    if not is_accelerator(device_type):
        return torch.device(device_type)
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def device_memory(device_type: str, index: int = 0) -> int | None:
    """Return the total bytes of an accelerator of this machine; None on a CPU, or where its module has no figure.

    Args:
        index: number of the device; those from the number of devices on begin again at 0.
    """
    import torch

    if not is_accelerator(device_type):
        return None
    module = torch.get_device_module(device_type)
    properties = module.get_device_properties(index % max(1, module.device_count()))
    return getattr(properties, "total_memory", None)


def gpu_count() -> int:
    """Count the NVIDIA GPUs of this host that this process may use, without torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(glob.glob("/dev/nvidia[0-9]*"))


def cuda_release() -> str | None:
    """Return the release of CUDA that this torch was built with; None for another build."""
    import torch

    return getattr(torch.version, CUDA, None)


def why_cuda_is_unusable() -> str:
    """Return why torch cannot use the NVIDIA GPUs that this process may use; empty where it can, or has none."""
    import torch

    module = torch.get_device_module(CUDA)
    if not gpu_count() or module.is_available():
        return ""
    if cuda_release() is None:
        return f"torch {torch.__version__} is a build without CUDA: install one with it (pytorch.org/get-started)"
    try:
        module.init()
    except (RuntimeError, AssertionError) as error:  # torch's own words name the driver's version
        return " ".join(str(error).split())
    return ""


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device without waiting; memory of the host is pinned first, which such copies need."""
    if is_accelerator(device) and tensor.device.type == CPU and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def pin_shared(memory: torch.Tensor, device: torch.device) -> None:
    """Pin memory that other processes map too, so that copies from a device need not wait; elsewhere they wait."""
    import torch

    if device.type == CUDA:
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)


def finish_stream(device: torch.device) -> None:
    """Wait until an accelerator has done the work of its current stream; the CPU has done it at once."""
    import torch

    if is_accelerator(device):
        torch.get_device_module(device).current_stream(device).synchronize()


def check_device_type(device_type: str, where: str) -> None:
    """Raise ConfigError for a type that is neither the CPU, nor CUDA, nor this machine's accelerator."""
    known = dict.fromkeys((CPU, CUDA, local_device()))
    if device_type not in known:
        raise ConfigError(f"{where} = {device_type!r} is none of {', '.join(known)}")
