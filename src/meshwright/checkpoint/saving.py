"""Write a checkpoint beside its place, and rename it when it is whole."""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright.core.errors import ConfigError, IntegrityError, MeshwrightError
from meshwright.core.record import recall
from meshwright.distributed.mesh import is_first_of_stage
from meshwright.distributed.nf4 import pack
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.process import agree
from meshwright.distributed.recompute.kept import streams
from meshwright.distributed.torch_private import local_part
from meshwright.distributed.weights.parts_tensor import chunk_of, write_item
from meshwright.distributed.weights.shards import pieces, with_local
from meshwright.introspection.source import ModelOrigin
from meshwright.planning.values import NF4_BLOCK, NF4_BLOCK_BYTES

from .folder import PARTIAL, beside, put_in_place
from .manifest import NAME, FileEntry, Manifest, TensorEntry, describe_file
from .state import group_records, merged_groups, model_tensors, optimizer_tensors, shape_and_dtype

LENGTH = 256
"""Numbers of a parameter that are compared, at most."""


def runs_of(
    tensors: Mapping[str, Tensor], mesh: DeviceMesh | None, in_4_bits: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Map names to a run of each tensor's numbers: where it begins, its length, dtype and checksum. Collective.

    ``in_4_bits`` names weights in 4 bits, and the dtypes in which they were rounded.
    """
    mine, rounded = {}, in_4_bits or {}
    if tensors and (mesh is None or is_first_of_stage(mesh)):
        mine = {name: run for name, tensor in tensors.items() if (run := run_of(tensor, rounded.get(name))) is not None}
    return {name: run for theirs in agree.everybody_says(mine) for name, run in theirs.items()} if tensors else {}


def run_of(tensor: Tensor, rounded_in: str | None = None) -> dict[str, Any] | None:
    """Describe the first numbers that this rank holds, of a tensor in 4 bits with the dtype in which they were rounded;
    None if it holds none, or something other than numbers.
    """
    here = next(iter(pieces(tensor)), None)
    if here is not None and rounded_in is not None:
        row, column = here.offset
        blocks = min(LENGTH // NF4_BLOCK, here.local.shape[1] // NF4_BLOCK_BYTES)
        at, crc32 = [row, column // NF4_BLOCK_BYTES * NF4_BLOCK], _checksum(here.local[0, : blocks * NF4_BLOCK_BYTES])
        return {"at": at, "length": blocks * NF4_BLOCK, "dtype": rounded_in, "crc32": crc32, "in_4_bits": True}
    if here is None or not here.local.is_floating_point() or hasattr(here.local, "__tensor_flatten__"):
        return None
    length = min(LENGTH, here.local.shape[-1]) if here.local.dim() else 1
    local = here.local[(0,) * (here.local.dim() - 1)][:length] if here.local.dim() else here.local.reshape(1)
    dtype = str(here.local.dtype).removeprefix("torch.")
    return {"at": list(here.offset), "length": length, "dtype": dtype, "crc32": _checksum(local)}


def differing(runs: Mapping[str, Any], read: Callable[[str], Tensor]) -> list[str]:
    """List the parameters whose numbers are others than in ``runs``; ``read`` returns a whole tensor by its name."""
    found = []
    for name, run in runs.items():
        tensor, at = read(name), run["at"]
        if tensor.dim() != len(at):
            found.append(name)
            continue
        row = tensor[tuple(at[:-1])][at[-1] : at[-1] + run["length"]] if at else tensor.reshape(1)
        numbers = row.to(getattr(torch, run["dtype"]))
        if _checksum(pack(numbers[None]) if run.get("in_4_bits") else numbers) != run["crc32"]:
            found.append(name)
    return found


def _checksum(numbers: Tensor) -> int:
    return zlib.crc32(numbers.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())


def in_pieces(tensor: Tensor) -> Tensor:
    """Share a tensor's memory in a form that torch's checkpoint can write or read."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    shared: Any = with_local(tensor, local_part(tensor).detach())
    here = {piece.offset: piece for piece in pieces(shared)}
    shared.__create_write_items__ = lambda name, _: [write_item(name, shared, piece) for piece in here.values()]
    shared.__create_chunk_list__ = lambda: [chunk_of(piece) for piece in here.values()]
    shared.__get_tensor_shard__ = lambda index: here[tuple(index.offset)].local
    return shared


class Writer(HuggingFaceStorageWriter):
    """A safetensors writer of a rank's shards; a file holds a name once, so second pieces go to a second file."""

    def __init__(self, path: str):
        super().__init__(path=path, save_distributed=True)

    def _split_by_storage_plan(
        self, storage_plan: dict[str, int] | None, items: list[WriteItem]
    ) -> dict[int, list[WriteItem]]:
        files: dict[int, list[WriteItem]] = {}
        seen: dict[str, int] = {}
        for item in items:
            number = seen[item.index.fqn] = seen.get(item.index.fqn, 0) + 1
            files.setdefault(number, []).append(item)
        return files


Result = TypeVar("Result")


def save(
    parallel_model: ParallelModel,
    path: str | Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    extra: dict[str, Any] | None = None,
    only_trained: bool = False,
) -> None:
    """Write model and optimizer to the folder ``path``, each rank its own shards, as safetensors. Collective.

    Everything is written to ``path`` + ".partial" and renamed when it is whole on disk, so a folder named ``path`` is
    either the old checkpoint or the new one. Of an optimizer that averages its steps (schedule-free AdamW) the model's
    part is the average, and the optimizer's has the point of training.

    Args:
        path: a new folder, an empty one, or a checkpoint that will be replaced.
        extra: JSON values that ``load`` returns (rank 0's).
        only_trained: leave frozen parameters out, such as those beside adapters; ``load`` then leaves them as they are.

    Raises:
        ConfigError: ``path`` exists and is no checkpoint, or ``extra`` holds something that JSON cannot.
        IntegrityError: a rank could not write (then on every rank); an older checkpoint of that name is still there.
    """
    path, plan = Path(os.path.abspath(path)), parallel_model.plan
    partial = beside(path, PARTIAL)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def write() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*(no_dist|torch.distributed).*")  # one process needs no group
            shown = {key: in_pieces(tensor) for key, tensor in tensors.items()}
            dcp.save(shown, storage_writer=Writer(str(partial)), no_dist=agree.alone())

    def describe_own() -> dict[str, FileEntry]:
        names = sorted(file.name for file in partial.iterdir())
        return {name: describe_file(partial / name) for name in names[rank::world]}

    def finish() -> None:
        manifest.write(partial)
        put_in_place(partial, path)

    with parallel_model.averaged():
        tensors = model_tensors(parallel_model)
        tensors |= {f"random.{device}.rank{rank}": state for device, state in streams().items()}
        left_out = sorted(plan.frozen) if only_trained else []
        frozen = {name: tensors.pop(key) for name in left_out if (key := f"model.{name}") in tensors}
        groups: list[dict[str, Any]] = []
        if optimizer is not None:
            tensors |= optimizer_tensors(parallel_model, optimizer)
            groups = group_records(parallel_model, optimizer)
        _together(lambda: _make_room(path, partial, extra), here=rank == 0, what=f"cannot prepare {partial}")
        _together(write, what=f"cannot write {partial}")
        own = _together(describe_own, what=f"cannot read back {partial}")
        files = {name: entry for theirs in agree.everybody_says(own) for name, entry in theirs.items()}
        entries = {key: TensorEntry(*shape_and_dtype(tensor)) for key, tensor in tensors.items()}
        differ = plan.pipeline is not None  # else only the random streams of ranks do
        if differ:
            groups = merged_groups(agree.everybody_says(groups))
        own_entries = {key: entry for key, entry in entries.items() if differ or key.startswith("random.")}
        entries |= {key: entry for theirs in agree.everybody_says(own_entries) for key, entry in theirs.items()}
        origin = recall(parallel_model, ModelOrigin)
        in_4_bits = dict.fromkeys(sorted(plan.quantize.weights), plan.precision.master) if plan.quantize else {}
        manifest = Manifest(
            entries,
            files,
            optimizer=type(optimizer).__name__ if optimizer is not None else "",
            groups=groups,
            extra=extra or {},
            plan=plan.to_json(),
            loss_scale=parallel_model.loss_scale.state() if parallel_model.loss_scale is not None else {},
            left_out=left_out,
            model=origin.to_json() if origin is not None else {},
            base=runs_of(frozen, parallel_model.mesh, in_4_bits),
            in_4_bits=in_4_bits,
        )
        _together(finish, here=rank == 0, what=f"cannot finish {path}")


def _make_room(path: Path, partial: Path, extra: dict[str, Any] | None) -> None:
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"extra cannot be saved: {error}; it takes JSON values (numbers, text, lists, dicts with text keys)"
        ) from None
    if path.exists() and not (path / NAME).is_file() and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(
            f"{path} is there and is no checkpoint: it would be replaced. Give a new folder, or remove it first."
        )
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _together(action: Callable[[], Result], *, what: str, here: bool = True) -> Result:
    """Act on every rank (or where ``here``), and fail on every rank when one fails."""

    def worded() -> Result:
        try:
            return action()
        except MeshwrightError:
            raise
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            raise IntegrityError(f"{what}: {cause(error)}. The last whole checkpoint is untouched.") from error

    return agree.together(worded, here=here)  # type: ignore[return-value]


def cause(error: BaseException) -> str:
    """Say what went wrong, on which rank, without the tracebacks that torch's checkpoint error carries."""
    if isinstance(error, CheckpointException):
        rank, (first, _) = min(error.failures.items())
        return f"rank {rank}: {type(first).__name__}: {first}"
    return f"{type(error).__name__}: {error}"
