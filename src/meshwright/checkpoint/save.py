"""Writing a checkpoint: beside its place, then renamed when whole."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from meshwright.core.errors import IntegrityError
from meshwright.distributed import agree
from meshwright.distributed.parallel_model import ParallelModel

from .manifest import FileEntry, Manifest, TensorEntry, describe_file
from .state import group_records, model_tensors, optimizer_tensors, shape_and_dtype

PARTIAL = ".partial"


def save(
    parallel_model: ParallelModel,
    path: str | Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    extra: dict[str, Any] | None = None,
) -> None:
    """Write model and optimizer to the folder ``path``, each rank its own shards, as safetensors. Collective.

    Everything is written to ``path`` + ".partial" and renamed when it is whole on disk, so a folder named ``path`` is either
    the old checkpoint or the new one.

    Args:
        extra: JSON values that ``load`` gives back.

    Raises:
        IntegrityError: a rank could not write (then on every rank); an older checkpoint of that name is still there.
    """
    path = Path(path)
    partial = path.with_name(path.name + PARTIAL)
    tensors = model_tensors(parallel_model)
    if optimizer is not None:
        tensors |= optimizer_tensors(parallel_model, optimizer)
    tensors |= _random_state()
    _together(lambda: _make_room(partial), only_rank_zero=True, what=f"cannot prepare {partial}")
    _together(lambda: _write(tensors, partial), what=f"cannot write {partial}")
    files = {name: entry for said in agree.everybody_says(_describe_own(partial)) for name, entry in said.items()}
    groups = group_records(parallel_model, optimizer) if optimizer is not None else []
    entries = {key: entry for said in agree.everybody_says(_entries(tensors)) for key, entry in said.items()}
    manifest = Manifest(entries, files, groups, extra or {}, parallel_model.plan.to_json())
    _together(lambda: _finish(manifest, partial, path), only_rank_zero=True, what=f"cannot finish {path}")


def _random_state() -> dict[str, Tensor]:
    """This rank's random streams."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = {f"random.cpu.rank{rank}": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found[f"random.cuda.rank{rank}"] = torch.cuda.get_rng_state()
    return found


def _entries(tensors: dict[str, Tensor]) -> dict[str, TensorEntry]:
    return {key: TensorEntry(*shape_and_dtype(tensor)) for key, tensor in tensors.items()}


def _make_room(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _write(tensors: dict[str, Tensor], partial: Path) -> None:
    writer = HuggingFaceStorageWriter(path=str(partial), save_distributed=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(no_dist|torch.distributed).*")  # one process needs no process group
        dcp.save(dict(tensors), storage_writer=writer, no_dist=agree.alone())


def _describe_own(partial: Path) -> dict[str, FileEntry]:
    """Sizes and checksums of the files, dealt over the ranks."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    names = sorted(path.name for path in partial.iterdir())
    return {name: describe_file(partial / name) for name in names[rank::world]}


def _finish(manifest: Manifest, partial: Path, path: Path) -> None:
    manifest.write(partial)
    sync_folder(partial)
    if path.exists():
        old = path.with_name(path.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
        os.rename(partial, path)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(partial, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder's own entries to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _together(action: Callable[[], None], *, what: str, only_rank_zero: bool = False) -> None:
    """Do something on every rank (or on rank 0), and fail on every rank when it fails on one."""

    def worded() -> None:
        try:
            action()
        except Exception as error:
            raise IntegrityError(f"{what}: {type(error).__name__}: {error}. The last whole checkpoint is untouched.") from error

    agree.together(worded, here=not only_rank_zero or not dist.is_initialized() or dist.get_rank() == 0)
