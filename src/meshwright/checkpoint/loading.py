"""Load a checkpoint into any layout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.core.devices import CPU
from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.core.host import usable_cores
from meshwright.core.names import clean
from meshwright.distributed.averaging import begin_anew
from meshwright.distributed.optimizer.low_bit import TorchaoAdamW
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import is_rank_zero
from meshwright.distributed.weights.constructed import Destinations
from meshwright.distributed.weights.shards import pieces
from meshwright.planning.values import NF4_STORED

from .folder import PARTIAL, CheckpointFolder, step_of
from .manifest import DamagedCheckpoint, Manifest, TensorEntry, describe_file, lacking, locate, with_pieces
from .pieces import PieceEntry, new_hash
from .saving import finish_saves
from .state import (
    empty_optimizer_tensors,
    group_records,
    model_tensors,
    put_optimizer_tensors,
    put_options,
    random_keys,
    refuse_lent,
    restore_random,
    shape_and_dtype,
)
from .store import Buffer, Location, ReadInto, RemoteStore, place_of

log = logging.getLogger("meshwright")
Result = TypeVar("Result")

READERS = 8
"""Threads that read and hash at most; of a folder on disk one more than the cores."""
NOTHING = "Nothing was loaded; use an older one, or copy it again."


@dataclass(frozen=True)
class Reading:
    """A box that a stored block has of a piece of a wanted tensor.

    Attributes:
        entry: the block, or of a checkpoint of version 1 the rows of a file that are needed.
        source, target: the box in the block and in the piece.
    """

    entry: PieceEntry
    source: tuple[slice, ...]
    target: tuple[slice, ...]
    into: Tensor


def readings(key: str, entry: TensorEntry, offset: tuple[int, ...], into: Tensor) -> list[Reading]:
    """List the blocks that hold a piece of a tensor.

    Args:
        into: memory of the piece's shape.

    Raises:
        IntegrityError: they hold only a part of it, or nothing.
    """
    found, boxes = [], []
    for block in entry.pieces:
        spans = [
            (max(low, begin), min(low + rows, begin + size))
            for low, rows, begin, size in zip(offset, into.shape, block.offset, block.shape, strict=True)
        ]
        if any(low >= high for low, high in spans):
            continue
        if not block.hash and spans and into.shape[0]:  # version 1: whole files have checksums, so rows can be read
            (low, high), row = spans[0], (block.end - block.begin) // block.shape[0]
            begin = block.begin + (low - block.offset[0]) * row
            block = replace(
                block,
                offset=(low, *block.offset[1:]),
                shape=(high - low, *block.shape[1:]),
                begin=begin,
                end=begin + (high - low) * row,
            )
        source = tuple(slice(low - at, high - at) for (low, high), at in zip(spans, block.offset, strict=True))
        target = tuple(slice(low - at, high - at) for (low, high), at in zip(spans, offset, strict=True))
        boxes.append(tuple((cut.start, cut.stop) for cut in target))
        found.append(Reading(block, source, target, into))
    if not covers(boxes, tuple(into.shape)):
        raise IntegrityError(f"its files hold {'only a part' if boxes else 'nothing'} of {key}")
    return found


def covers(boxes: Iterable[tuple[tuple[int, int], ...]], shape: tuple[int, ...]) -> bool:
    """Return whether boxes, (begin, end) for every dim, hold every element of a tensor of that shape."""
    boxes = list(boxes)
    cuts = [sorted({0, size, *(edge for box in boxes for edge in box[dim])}) for dim, size in enumerate(shape)]
    places = [{edge: place for place, edge in enumerate(edges)} for edges in cuts]
    held = np.zeros([len(edges) - 1 for edges in cuts], dtype=bool)
    for box in boxes:
        held[tuple(slice(at[begin], at[end]) for at, (begin, end) in zip(places, box, strict=True))] = True
    return bool(held.all())


def load(
    parallel_model: ParallelModel,
    path: str | Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    restore_options: bool = True,
) -> dict[str, Any]:
    """Read the checkpoint folder ``path`` into a model (and its optimizer), whatever layout wrote it. Collective.

    Frozen parameters that the writer left out (``only_trained``) stay as they are. The random streams of torch, Python
    and NumPy become those of the save, where as many ranks wrote it.

    Args:
        optimizer: takes over the saved state; what it held before is dropped, and so are gradients. Without it, a
            schedule-free optimizer of this model begins anew at the loaded weights.
        restore_options: also take over the options of the optimizer's groups (learning rate, …); False: keep the
            present ones.

    Returns:
        The ``extra`` that was given to ``save``.

    Raises:
        IntegrityError: the checkpoint was never finished, or a file is missing, truncated or changed.
        ConfigError: the checkpoint is whole, but of another model or optimizer: names, shapes, dtypes or groups
            differ, or it comes along inside ``lent``. Then nothing is changed.
    """
    finish_saves(agree.any_rank)
    agree.together(lambda: refuse_lent(parallel_model, optimizer))
    manifest = open_manifest(path)
    verify_files(path, manifest)
    facts, plan = parallel_model.facts, parallel_model.plan
    left_out = {f"model.{name}" for name in set(manifest.left_out) & set(plan.frozen)}
    wanted = {key: tensor for key, tensor in model_tensors(parallel_model).items() if key not in left_out}
    every = {f"model.{fact.name}" for fact in (*facts.parameters, *facts.buffers)}  # a pipeline's rank has some of them
    agree.together(lambda: _check_model(wanted, manifest, path, elsewhere=every))
    agree.together(lambda: _check_rounding(parallel_model, manifest, path))
    state: dict[str, Tensor] = {}
    options: list[dict[str, Any]] = []
    if optimizer is not None:
        agree.together(lambda: _check_optimizer(parallel_model, optimizer, manifest, path))
        state = empty_optimizer_tensors(parallel_model, optimizer, manifest.tensors)
        if restore_options:
            options = agree.together(lambda: _options(parallel_model, optimizer, manifest, path)) or []
    random_state: dict[str, Tensor] = {}
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    written = {key: entry for key, entry in manifest.tensors.items() if key.startswith("random.")}
    if {int(key.rpartition("rank")[2]) for key in written if key.startswith("random.cpu.")} == set(range(world)):
        mine = written.keys() & random_keys(rank)
        random_state = {key: torch.zeros(written[key].shape, dtype=torch.uint8) for key in sorted(mine)}
    read_tensors({**wanted, **state, **random_state}, path, manifest, fresh={*state, *random_state})
    if optimizer is None and not parallel_model.is_lent:
        begin_anew(parallel_model.parts)
    if optimizer is not None:
        put_optimizer_tensors(parallel_model, optimizer, state, path)
        parallel_model.drop_gradients()
        for group, saved in zip(optimizer.param_groups, options, strict=False):
            put_options(group, saved)
    if parallel_model.loss_scale is not None:
        parallel_model.loss_scale.restore(manifest.loss_scale)
    parallel_model.copy_shared()
    agree.together(lambda: restore_random(random_state))
    return manifest.extra


def load_newest(
    folder: CheckpointFolder,
    use: Callable[[Location], Result],
    say: Callable[[str], object] = log.warning,
    *,
    set_aside: bool = False,
) -> tuple[Location, Result] | None:
    """Use a run's newest checkpoint; where it turns out to be damaged, the newest that is whole. Collective.

    Args:
        use: reads a checkpoint on every rank, and raises DamagedCheckpoint on all if one of them finds it damaged.
        say: told, on the first rank, of each newer one that is damaged.
        set_aside: take damaged ones out of use once an older one was read (``CheckpointFolder.set_aside``).

    Returns:
        The checkpoint that was used, and what ``use`` returned; None where there is none.

    Raises:
        IntegrityError: none is whole, a newer release wrote the newest, or the store fails.
    """
    damaged: dict[int, str] = {}
    while True:
        look = agree.together(lambda: folder.newest(damaged), here=is_rank_zero())
        location, problems = agree.from_rank_zero(look)
        if location is None:
            return None
        try:
            result = use(location)
        except DamagedCheckpoint as error:
            damaged[step_of(location)] = str(error).removesuffix(f". {NOTHING}")
            continue
        for problem in problems if is_rank_zero() else ():
            say(f"{problem}: this checkpoint is not used, and {location} is read instead")
        if set_aside:
            agree.together(lambda: [folder.set_aside(step) for step in damaged], here=is_rank_zero())
        return location, result


def open_manifest(path: Location) -> Manifest:
    """Read a checkpoint's manifest on every rank; IntegrityError on all ranks where one cannot."""
    if str(path).endswith(PARTIAL):
        raise IntegrityError(
            f"{path} is what an unfinished save left, and is never read; use the last whole checkpoint"
        )
    manifest = agree.together(lambda: Manifest.read(path))
    assert manifest is not None
    return manifest


def verify_files(path: Location, manifest: Manifest) -> None:
    """Compare every file's size with the manifest, and in version 1 its checksum, distributed over ranks.

    The blocks of version 2 are compared with their hashes when they are read.

    Raises:
        IntegrityError: on all ranks, if a file differs.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    store, folder = place_of(path)

    def look() -> list[str]:
        found = lacking(store, folder, manifest) if rank == 0 else []
        for name in sorted(manifest.files)[rank::world] if not found else ():
            place, entry = locate(folder, name), manifest.files[name]
            if entry.crc32 is not None and describe_file(store, place) != entry:
                where = store.where(place)
                found.append(f"{where} has the right size, but its content changed since it was written (checksum)")
        return found

    problems = [text for texts in agree.everybody_says(agree.together(look)) for text in texts]
    if problems:
        raise DamagedCheckpoint(f"the checkpoint is damaged: {'; '.join(problems)}. {NOTHING}")


def _check_model(
    wanted: dict[str, Tensor], manifest: Manifest, path: Location, elsewhere: Collection[str] = ()
) -> None:
    stored = {key: entry for key, entry in manifest.tensors.items() if key.startswith("model.")}
    problems = [f"it lacks {key.removeprefix('model.')}" for key in wanted if key not in stored]
    problems += [
        f"it has {key.removeprefix('model.')}, which the model lacks"
        for key in stored
        if key not in wanted and key not in elsewhere
    ]
    for key in wanted.keys() & stored.keys():
        here, there = shape_and_dtype(wanted[key]), (stored[key].shape, stored[key].dtype)
        if here != there:
            name = key.removeprefix("model.")
            in_4_bits = " (in 4 bits, by techniques.quantize_frozen = nf4 and what was frozen)"
            was, now = (in_4_bits * is_so for is_so in (name in manifest.in_4_bits, here[1] == NF4_STORED))
            text = f"{name} is {there[1]}{list(there[0])} there{was} and {here[1]}{list(here[0])} in the model{now}"
            problems.append(text)
    if problems:
        if any(".lora_" in key for key in stored.keys() - wanted.keys() - set(elsewhere)):
            raise ConfigError(
                f"{path} holds tensors of adapters, and the model here has no adapters. Nothing was loaded:"
                " continue the run by its folder alone (meshwright train FOLDER), or ask for its [adapters]"
            )
        more = f" (and {len(problems) - 4} more)" if len(problems) > 4 else ""
        raise ConfigError(
            f"{path} is a checkpoint of another model: {'; '.join(sorted(problems)[:4])}{more}. Nothing was loaded."
        )


def _check_rounding(model: ParallelModel, manifest: Manifest, path: Location) -> None:
    """Raise ConfigError if weights that were left out were in 4 bits and are plain here, or the other way round."""
    frozen = set(manifest.left_out) & set(model.plan.frozen)
    there = frozen & set(manifest.in_4_bits)
    here = frozen & (model.plan.quantize.weights if model.plan.quantize is not None else frozenset())
    if others := sorted(there ^ here):
        was, now, key = ("in 4 bits", "plain", "nf4") if others[0] in there else ("plain", "in 4 bits", "none")
        raise ConfigError(
            f"{path}: {others[0]} was {was} in training and is {now} in this model ({len(others)} weights in all): what"
            f" was trained belongs beside the same values. Set techniques.quantize_frozen = {key}. Nothing"
            f" was loaded."
        )


def _check_optimizer(
    model: ParallelModel, optimizer: torch.optim.Optimizer, manifest: Manifest, path: Location
) -> None:
    if not manifest.optimizer:
        raise ConfigError(f"{path} holds no optimizer state: load it without optimizer=")
    if manifest.optimizer != (kind := type(optimizer).__name__):
        keys = "set techniques.optimizer_state and techniques.stochastic_rounding as they were"
        use = keys if TorchaoAdamW.__name__ in (kind, manifest.optimizer) else f"use {manifest.optimizer}"
        raise ConfigError(
            f"{path} holds the state of {manifest.optimizer}, which {kind} cannot continue: {use}, or load it without"
            f" optimizer=. Nothing was loaded."
        )
    saved = {name for record in manifest.groups for name in record["params"]}
    held = {name for record in group_records(model, optimizer) for name in record["params"]}
    left = [n for n, parameter in model.named_parameters() if parameter.requires_grad and n in saved and n not in held]
    if left:
        raise ConfigError(
            f"{path} has optimizer state for {left[0]} ({len(left)} in all), which is trained here and is in no group"
            f" of this optimizer: add its group before load, or freeze it. Nothing was loaded."
        )
    if lacking := sorted(held - saved):
        raise ConfigError(
            f"{path} has no optimizer state for {lacking[0]} ({len(lacking)} in all): were other parameters frozen?"
            f" Nothing was loaded."
        )


def _options(
    model: ParallelModel, optimizer: torch.optim.Optimizer, manifest: Manifest, path: Location
) -> list[dict[str, Any]]:
    """Match the saved options to the optimizer's groups, however the saved groups were cut."""
    saved = {name: record["options"] for record in manifest.groups for name in record["params"]}
    found = []
    for record in group_records(model, optimizer):
        first, *others = record["params"] or [None]
        options = saved.get(first, {})
        different = next((name for name in others if saved[name] != options), None)
        if different is not None:
            raise ConfigError(
                f"{path} was written with other optimizer groups: {first} and {different} had different options there,"
                f" and are in one group here. Group the parameters alike, or load with restore_options=False. Nothing"
                f" was loaded."
            )
        found.append(options)
    return found


def to_be_loaded(model: nn.Module) -> set[str]:
    """Fill parameters with nan, as ``weights=`` of a model whose checkpoint is loaded next.

    Drawing weights would take longer, and nan makes a forgotten load visible.
    """
    destinations = Destinations(model)
    for parameter in model.parameters():
        with destinations.opened(parameter) as tensor:
            for piece in pieces(tensor):
                piece.local.fill_(torch.nan)
    return {clean(name) for name, _ in model.named_parameters()}


def load_model_tensors(tensors: dict[str, Tensor], path: Location) -> None:
    """Read only a checkpoint's model, into "model.<name>" -> parameter or persistent buffer. Collective.

    Raises:
        IntegrityError, ConfigError: as ``load`` does.
    """
    manifest = open_manifest(path)
    verify_files(path, manifest)
    _check_model(tensors, manifest, path)
    read_tensors(tensors, path, manifest)


def read_tensors(tensors: dict[str, Tensor], path: Location, manifest: Manifest, fresh: Collection[str] = ()) -> None:
    """Read tensors by key from a checkpoint, each rank the blocks that it needs. Collective, or alone without a group.

    Every block is proven by its hash before any tensor in use changes: what is read waits in host memory, or, where
    that has no room for it, is read twice.

    Args:
        fresh: keys of tensors that nobody uses yet, and that take what is read at once.

    Raises:
        IntegrityError: the checkpoint is damaged, or reading fails in the middle.
    """
    store, folder = place_of(path)
    places: list[tuple[Tensor, Tensor]] = []  # of a piece: in use, and where it waits
    first: list[Reading] = []

    def plan() -> list[Reading]:
        placed, found = with_pieces(store, folder, manifest), []
        have = psutil.virtual_memory().available // 2
        for key, tensor in tensors.items():
            if key not in placed.tensors:
                raise IntegrityError(f"its files hold nothing of {key}")
            for piece in pieces(tensor):
                into = piece.local
                mine = readings(key, placed.tensors[key], piece.offset, into)
                if key not in fresh and all(reading.entry.hash for reading in mine):
                    if (have := have - into.nbytes) > 0:
                        into = torch.empty(into.shape, dtype=into.dtype)
                        places.append((piece.local, into))
                        mine = [replace(reading, into=into) for reading in mine]
                    else:
                        first.extend(mine)
                found += mine
        return found

    def read(found: list[Reading], *, keep: bool) -> None:
        by_pack: dict[str, list[Reading]] = {}
        for reading in sorted(found, key=lambda reading: reading.entry.begin):
            by_pack.setdefault(reading.entry.pack, []).append(reading)
        readers = READERS if isinstance(store, RemoteStore) else min(READERS, 1 + usable_cores())
        with ThreadPoolExecutor(readers) as pool, torch.no_grad():
            for pack, rows in by_pack.items():
                where = store.where(locate(folder, pack))
                with store.opened(locate(folder, pack)) as read_into:
                    taking = [pool.submit(_take, row, read_into, store.portion, where, keep) for row in rows]
                    for one in taking:
                        one.result()

    def worded(action: Callable[[], Result], then: str) -> Result:
        try:
            return action()
        except (IntegrityError, ConfigError) as error:
            raise DamagedCheckpoint(f"the checkpoint {path} is damaged: {error}. {then}") from error
        except OSError as error:
            raise IntegrityError(f"the checkpoint {path} could not be read: {error}. {then}") from error

    nothing, half = NOTHING, "The model now holds a part of it: load one before using it."
    found = agree.together(lambda: worded(plan, nothing)) or []
    agree.together(lambda: worded(lambda: read(first, keep=False), nothing))
    twice = {id(reading.into) for reading in first}
    agree.together(lambda: worded(lambda: read([r for r in found if id(r.into) not in twice], keep=True), nothing))
    agree.together(lambda: worded(lambda: read([r for r in found if id(r.into) in twice], keep=True), half))
    with torch.no_grad():
        for local, into in places:
            local.copy_(into)


def _take(reading: Reading, read_into: ReadInto, portion: int, where: str, keep: bool) -> None:
    """Read a block, prove it, and copy what is wanted of it. Raises IntegrityError, OSError.

    Each portion is hashed while the processor's cache still has it.
    """
    entry, part = reading.entry, reading.into[reading.target]
    # where the block's bytes are the target's, they are read into it
    in_place = keep and part.is_contiguous() and part.device.type == CPU and tuple(part.shape) == entry.shape
    whole = part.reshape(-1).view(torch.uint8) if in_place else torch.empty(entry.end - entry.begin, dtype=torch.uint8)
    buffer: Buffer = whole.numpy()
    digest = new_hash()
    for at in range(0, len(buffer), portion):
        read_into(entry.begin + at, buffer[at : at + portion])
        digest.update(buffer[at : at + portion])
    if entry.hash and digest.hexdigest() != entry.hash:
        raise IntegrityError(
            f"{where} has the right size, but its content changed since it was written (hash of {entry.key})"
        )
    if keep and not in_place:
        part.copy_(whole.view(part.dtype).reshape(entry.shape)[reading.source])
