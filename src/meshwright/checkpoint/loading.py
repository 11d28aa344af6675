"""Load a checkpoint into any layout."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.planner import LoadPlan

from meshwright.core.devices import CPU, local_device
from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.core.names import clean
from meshwright.distributed.averaging import begin_anew
from meshwright.distributed.optimizer.low_bit import TorchaoAdamW
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.process import agree
from meshwright.distributed.recompute.kept import restore_streams
from meshwright.distributed.weights.constructed import Destinations
from meshwright.distributed.weights.shards import pieces
from meshwright.planning.values import NF4_STORED

from .folder import PARTIAL, settle
from .manifest import Manifest, damage, strangers
from .saving import cause, in_pieces
from .state import (
    empty_optimizer_tensors,
    group_records,
    model_tensors,
    put_optimizer_tensors,
    put_options,
    shape_and_dtype,
)


class WholePlanner(DefaultLoadPlanner):
    """A planner that refuses what torch's passes over: elements that no file holds, or holds in another dtype.

    Args:
        tensors: the tensors to read, by key.
    """

    def __init__(self, tensors: dict[str, Tensor]):
        super().__init__()
        self.tensors = tensors

    def create_local_plan(self) -> LoadPlan:
        """Plan this rank's reads; IntegrityError where they leave a part of a tensor unread."""
        stored: dict[str, Any] = self.metadata.state_dict_metadata if self.metadata else {}
        if lacking := [key for key in self.tensors if key not in stored]:
            raise IntegrityError(f"its files hold nothing of {lacking[0]} ({len(lacking)} in all)")
        plan = super().create_local_plan()
        found: dict[tuple[str, tuple[int, ...]], list[tuple[tuple[int, int], ...]]] = {}
        for item in plan.items:
            box = tuple((begin, begin + size) for begin, size in zip(item.dest_offsets, item.lengths, strict=True))
            found.setdefault((item.dest_index.fqn, tuple(item.dest_index.offset or ())), []).append(box)
        for key, tensor in self.tensors.items():
            if (dtype := stored[key].properties.dtype) != tensor.dtype:
                raise IntegrityError(f"its files hold {key} in {dtype}, and its manifest says {tensor.dtype}")
            for piece in pieces(tensor):
                if not covers(found.get((key, tuple(piece.offset)), ()), tuple(piece.local.shape)):
                    raise IntegrityError(f"its files hold only a part of {key} of shape {list(tensor.shape)}")
        return plan


def covers(boxes: Iterable[tuple[tuple[int, int], ...]], shape: tuple[int, ...]) -> bool:
    """Return whether boxes, (begin, end) for every dim, hold every element of a tensor of that shape."""
    boxes = list(boxes)
    cuts = [sorted({0, size, *(edge for box in boxes for edge in box[dim])}) for dim, size in enumerate(shape)]
    held = np.zeros([len(edges) - 1 for edges in cuts], dtype=bool)
    for box in boxes:
        held[
            tuple(slice(edges.index(begin), edges.index(end)) for edges, (begin, end) in zip(cuts, box, strict=True))
        ] = True
    return bool(held.all())


def load(
    parallel_model: ParallelModel,
    path: str | Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    restore_options: bool = True,
) -> dict[str, Any]:
    """Read the checkpoint folder ``path`` into a model (and its optimizer), whatever layout wrote it. Collective.

    Frozen parameters that the writer left out (``only_trained``) stay as they are.

    Args:
        optimizer: takes over the saved state; what it held before is dropped. Without it, a schedule-free optimizer of
            this model begins anew at the loaded weights.
        restore_options: also take over the options of the optimizer's groups (learning rate, …); False: keep the
            present ones.

    Returns:
        The ``extra`` that was given to ``save``.

    Raises:
        IntegrityError: the checkpoint was never finished, or a file is missing, truncated or changed.
        ConfigError: the checkpoint is whole, but of another model or optimizer: names, shapes, dtypes or groups
            differ. Then nothing is changed.
    """
    path = Path(os.path.abspath(path))
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
        own = {f"random.{device}.rank{rank}" for device in (CPU, local_device())}
        random_state = {key: torch.zeros(row.shape, dtype=torch.uint8) for key, row in written.items() if key in own}
    read_tensors({**wanted, **state, **random_state}, path)
    if optimizer is None and not parallel_model.is_lent:
        begin_anew(parallel_model.parts)
    if optimizer is not None:
        put_optimizer_tensors(parallel_model, optimizer, state, path)
        for group, saved in zip(optimizer.param_groups, options, strict=False):
            put_options(group, saved)
    if parallel_model.loss_scale is not None:
        parallel_model.loss_scale.restore(manifest.loss_scale)
    parallel_model.copy_shared()
    restore_streams({key.split(".")[1]: state for key, state in random_state.items()})
    return manifest.extra


def open_manifest(path: Path) -> Manifest:
    """Read a checkpoint's manifest on every rank; IntegrityError on all ranks where one cannot."""
    if path.name.endswith(PARTIAL):
        raise IntegrityError(
            f"{path} is what an unfinished save left, and is never read; use the last whole checkpoint"
        )
    agree.together(lambda: settle(path), here=not dist.is_initialized() or dist.get_rank() == 0)
    manifest = agree.together(lambda: Manifest.read(path))
    assert manifest is not None
    return manifest


def verify_files(path: Path, manifest: Manifest) -> None:
    """Compare every file with the manifest, distributed over ranks. Raises IntegrityError on all ranks."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def look() -> list[str]:
        found = [
            text for name in sorted(manifest.files)[rank::world] if (text := damage(path, name, manifest.files[name]))
        ]
        return found + (strangers(path, manifest.files) if rank == 0 else [])

    problems = [text for texts in agree.everybody_says(agree.together(look)) for text in texts]
    if problems:
        raise IntegrityError(
            f"the checkpoint is damaged: {'; '.join(problems)}. Nothing was loaded; use an older one, or copy it again."
        )


def _check_model(wanted: dict[str, Tensor], manifest: Manifest, path: Path, elsewhere: Collection[str] = ()) -> None:
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
        more = f" (and {len(problems) - 4} more)" if len(problems) > 4 else ""
        raise ConfigError(
            f"{path} is a checkpoint of another model: {'; '.join(sorted(problems)[:4])}{more}. Nothing was loaded."
        )


def _check_rounding(model: ParallelModel, manifest: Manifest, path: Path) -> None:
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


def _check_optimizer(model: ParallelModel, optimizer: torch.optim.Optimizer, manifest: Manifest, path: Path) -> None:
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
    lacking = [name for record in group_records(model, optimizer) for name in record["params"] if name not in saved]
    if lacking:
        raise ConfigError(
            f"{path} has no optimizer state for {lacking[0]} ({len(lacking)} in all): were other parameters frozen?"
            f" Nothing was loaded."
        )


def _options(
    model: ParallelModel, optimizer: torch.optim.Optimizer, manifest: Manifest, path: Path
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


def load_model_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Read only a checkpoint's model, into "model.<name>" -> parameter or persistent buffer. Collective.

    Raises:
        IntegrityError, ConfigError: as ``load`` does.
    """
    path = Path(os.path.abspath(path))
    manifest = open_manifest(path)
    verify_files(path, manifest)
    _check_model(tensors, manifest, path)
    read_tensors(tensors, path)


def read_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Read tensors by key from a verified checkpoint. Collective, or alone without a process group.

    Raises:
        IntegrityError: reading fails in the middle.
    """
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings("ignore", message=".*(no_dist|torch.distributed).*")  # one process needs no group
            shown = {key: in_pieces(tensor) for key, tensor in tensors.items()}
            dcp.load(
                shown,
                storage_reader=HuggingFaceStorageReader(path=str(path)),
                planner=WholePlanner(tensors),
                no_dist=agree.alone(),
            )
    except CheckpointException as error:
        lacking = next((found for found, _ in error.failures.values() if isinstance(found, IntegrityError)), None)
        if lacking is not None:
            raise IntegrityError(
                f"the checkpoint {path} is damaged: {lacking}. Nothing was loaded; use an older one."
            ) from error
        problem = f"{path} could not be read ({cause(error)}), although its files were whole a moment ago"
        raise IntegrityError(
            f"{problem}: the model now holds a part of it. Load a checkpoint again before you use it."
        ) from error
