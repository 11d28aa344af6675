"""Write a checkpoint: each rank its pieces, what an older one has by reference, and the manifest when all are there."""

from __future__ import annotations

import json
import math
import secrets
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.core.errors import ConfigError, IntegrityError, MeshwrightError
from meshwright.core.record import recall
from meshwright.distributed.mesh import is_first_of_stage
from meshwright.distributed.nf4 import pack
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.process import agree
from meshwright.distributed.weights.shards import pieces
from meshwright.introspection.source import ModelOrigin
from meshwright.planning.plan import Plan
from meshwright.planning.values import NF4_BLOCK, NF4_BLOCK_BYTES

from .folder import LEFTOVER, Claim, step_folders, unreferenced
from .manifest import NAME, Manifest, TensorEntry, blocks_in, commit, pack_name
from .pieces import PieceEntry, write_pieces
from .snapshot import boxes_of, owners
from .state import StateTensor, dtype_word, group_records, merged_groups, stored_state
from .store import OWN_MEMORY, Buffer, LocalStore, Location, Store, place_of

LENGTH = 256
"""Numbers of a parameter that are compared, at most."""
UNTOUCHED = "No earlier checkpoint was touched."


def runs_of(tensors: Mapping[str, Tensor], model: ParallelModel) -> dict[str, Any]:
    """Map names to a run of each weight's numbers: where it begins, its length, dtype and checksum. Collective."""
    mine, rounded = {}, _in_4_bits(model.plan)
    if model.mesh is None or is_first_of_stage(model.mesh):
        mine = {name: run for name, tensor in tensors.items() if (run := run_of(tensor, rounded.get(name))) is not None}
    return {name: run for theirs in agree.everybody_says(mine) for name, run in theirs.items()}


def _in_4_bits(plan: Plan) -> dict[str, str]:
    """Map the names of weights in 4 bits to the dtype in which they were rounded."""
    return dict.fromkeys(sorted(plan.quantize.weights), plan.precision.master) if plan.quantize else {}


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
    dtype = dtype_word(here.local.dtype)
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


@dataclass(frozen=True)
class StatePiece:
    """A box of the state that this rank writes; its values are computed when they are asked for."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    stored: StateTensor
    number: int

    @property
    def data(self) -> Buffer:
        """The bytes: of a contiguous tensor in host memory its own, else a copy."""
        local = pieces(self.stored.values())[self.number].local
        return local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


class Handle:
    """A save, which may be under way.

    Attributes:
        path: the folder that it becomes.
        problem: why there is no new checkpoint (then ``bytes`` is 0), or why ``then`` failed; "" while all is well. The
            same on every rank.
        skipped: whether an earlier save was under way, so that this one was not begun.
        bytes: of the checkpoint, once it is whole.
        seconds: from its begin to its end.
        given_up: why this process gave it up, "" if it did not.
        has_replaced: whether it took the place of an earlier one, so that the next one waits for it.
    """

    def __init__(self, path: Location):
        self.path, self.problem, self.skipped, self.bytes = path, "", False, 0
        self.begun, self.seconds = time.perf_counter(), 0.0
        self.over, self.given_up, self.has_replaced = threading.Event(), "", False
        self.is_waited_for, self.worked, self.until = False, math.nan, math.inf

    @property
    def done(self) -> bool:
        """Whether the save is over: the checkpoint is whole, or there is a ``problem``."""
        return self.over.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the checkpoint is whole; no other rank need call, and of a lost one nothing is known.

        Raises:
            IntegrityError: it will not be, or is not within ``timeout`` seconds, or ``then`` failed.
        """
        if not self.over.wait(timeout):
            raise IntegrityError(f"{self.path} is not whole after {timeout:g} s: its save goes on")
        if self.problem:
            raise IntegrityError(self.words)

    @property
    def words(self) -> str:
        """The problem in sentences."""
        return f"{self.problem}." if self.bytes else f"{self.problem}. {UNTOUCHED}"

    def end(self, problem: str = "") -> None:
        """Set the outcome."""
        self.problem, self.seconds = problem, time.perf_counter() - self.begun
        self.over.set()


under_way: weakref.WeakSet[Handle] = weakref.WeakSet()
"""Saves that this process has begun to write beside training."""


def finish_saves(any_rank: Callable[[bool], bool] = bool, seconds: float = math.inf) -> None:
    """Return when no save is under way, whatever became of it, or after some seconds.

    Args:
        any_rank: ``bool`` for the saves of this process; ``agree.any_rank``, where all ranks call, for those of all:
            then a lost rank ends the wait.
    """
    end = time.monotonic() + seconds
    while any_rank(any(not handle.over.wait(0.1) for handle in list(under_way)) and time.monotonic() < end):
        pass


def is_beside(location: Location, say: Callable[[str], object]) -> bool:
    """Return whether another process can write a location; say so where none can."""
    if is_own := str(location).startswith(OWN_MEMORY):
        say(f"{location} lies in the memory of this process, where no other can write: saves to it are synchronous")
    return not is_own


Result = TypeVar("Result")


def write(
    parallel_model: ParallelModel,
    location: Location,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    extra: dict[str, Any] | None = None,
    only_trained: bool = False,
    after: Location | None = None,
    claim: Claim | None = None,
) -> int:
    """Write a checkpoint as ``save`` does. Collective.

    Args:
        after: an earlier checkpoint in the folder beside: what that one has is referred to, and no file of an older
            checkpoint is removed, since others may refer to it; None: the folder stands for itself.
        claim: the right to save there, on the first rank.

    Returns:
        Bytes that this checkpoint's files have, those of others that it refers to included.
    """
    plan, rank = parallel_model.plan, (dist.get_rank() if dist.is_initialized() else 0)
    store, folder = place_of(location)
    where = store.where(folder)

    def prepare() -> tuple[str, str | None, bool]:
        make_room(store, folder, extra, alone=after is None, claim=claim)
        is_new = f"{folder}/{NAME}" not in store.files(folder)
        return secrets.token_hex(4), place_of(after)[1] if after else None if is_new else folder, is_new

    def write_own() -> list[PieceEntry]:
        earlier = blocks_in(store, there, folder) if there is not None else ({}, {})
        own = (
            StatePiece(box.key, box.offset, box.shape, box.dtype, state[box.key], box.of[0])
            for number, box in enumerate(boxes)
            if number in mine
        )
        return write_pieces(store, folder, own_pack, own, *earlier)

    def finish() -> int:
        if claim is not None:
            claim.check()
        written = commit(store, folder, manifest, new=is_new, alone=after is None)
        return sum(entry.bytes for entry in written.files.values())

    state = together(lambda: stored_state(parallel_model, optimizer, rank), what=f"cannot write {where}")
    left_out = sorted(plan.frozen) if only_trained else []
    frozen = {name: state.pop(key).like for name in left_out if (key := f"model.{name}") in state}
    boxes = boxes_of(state)
    mine = owners(agree.everybody_says(boxes))[rank]
    token, there, is_new = agree.from_rank_zero(together(prepare, here=rank == 0, what=f"cannot prepare {where}"))
    own_pack = pack_name(token, rank)
    try:
        own = together(write_own, what=f"cannot write {where}")
    except MeshwrightError:  # on every rank, once none writes any more
        with suppress(OSError):
            store.remove([f"{folder}/{own_pack}"])
        raise
    placed: dict[str, list[PieceEntry]] = {}
    for entry in (entry for theirs in agree.everybody_says(own) for entry in theirs):
        placed.setdefault(entry.key, []).append(entry)
    kinds = {key: (tuple(stored.like.shape), dtype_word(stored.dtype)) for key, stored in state.items()}
    fields = manifest_fields(parallel_model, optimizer, extra, left_out)
    fields["base"] = runs_of(frozen, parallel_model) if left_out else {}
    differ = plan.pipeline is not None  # else only the random streams of ranks do
    if differ:
        fields["groups"] = merged_groups(agree.everybody_says(fields["groups"]))
    own_kinds = {key: kind for key, kind in kinds.items() if differ or key.startswith("random.")}
    kinds |= {key: kind for theirs in agree.everybody_says(own_kinds) for key, kind in theirs.items()}
    rows = {key: TensorEntry(*kind, tuple(placed.get(key, ()))) for key, kind in kinds.items()}
    manifest = Manifest(rows, {}, **fields)
    return agree.from_rank_zero(together(finish, here=rank == 0, what=f"cannot finish {where}"))


def manifest_fields(
    model: ParallelModel, optimizer: torch.optim.Optimizer | None, extra: dict[str, Any] | None, left_out: list[str]
) -> dict[str, Any]:
    """Return what a manifest says, as it is now, beside tensors, files and frozen weights; groups are this rank's."""
    plan, origin = model.plan, recall(model, ModelOrigin)
    return {
        "optimizer": type(optimizer).__name__ if optimizer is not None else "",
        "groups": group_records(model, optimizer) if optimizer is not None else [],
        "extra": extra or {},
        "plan": plan.to_json(),
        "loss_scale": model.loss_scale.state() if model.loss_scale is not None else {},
        "left_out": left_out,
        "model": origin.to_json() if origin is not None else {},
        "in_4_bits": _in_4_bits(plan),
    }


def make_room(
    store: Store, folder: str, extra: dict[str, Any] | None, *, alone: bool, claim: Claim | None = None
) -> None:
    """Refuse to replace what is no checkpoint, and remove what an unfinished save left in the folder."""
    if claim is not None:
        claim.check()
    elif isinstance(store, LocalStore):
        store.root.mkdir(parents=True, exist_ok=True)
    try:
        if (key := next(_other_keys(extra), None)) is not None:
            raise TypeError(f"the key {key!r} of a dict would come back as text")
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"extra cannot be saved: {error}; it takes JSON values (numbers, text, lists, dicts with text keys)"
        ) from None
    there = store.files(folder)
    if f"{folder}/{NAME}" not in there and (strange := store.strangers(folder, LEFTOVER)):
        raise ConfigError(
            f"{store.where(folder)} is there and is no checkpoint ({strange} is no part of one): it would be replaced."
            f" Give a new folder, or remove it first."
        )
    store.remove(unreferenced(store, [folder], [folder] if alone else step_folders(store)))


def _other_keys(value: Any) -> Iterator[Any]:
    """Yield the keys of dicts, also inside, that are no text."""
    if isinstance(value, Mapping):
        yield from (key for key in value if not isinstance(key, str))
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return
    for inner in value:
        yield from _other_keys(inner)


def together(action: Callable[[], Result], *, what: str, here: bool = True) -> Result:
    """Act on every rank (or where ``here``), and fail on every rank when one fails."""

    def worded() -> Result:
        try:
            return action()
        except MeshwrightError as error:
            if not isinstance(error, IntegrityError):
                raise
            raise IntegrityError(f"{what}: {error}{'' if str(error).endswith('?') else '.'} {UNTOUCHED}") from error
        except Exception as error:
            raise IntegrityError(f"{what}: {type(error).__name__}: {error}. {UNTOUCHED}") from error

    return agree.together(worded, here=here)  # type: ignore[return-value]
