"""Reading a checkpoint into any layout."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.distributed import agree
from meshwright.distributed.parallel_model import ParallelModel

from .manifest import Manifest, damage
from .state import empty_optimizer_tensors, group_records, model_tensors, put_optimizer_tensors, shape_and_dtype


def load(
    parallel_model: ParallelModel,
    path: str | Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    restore_options: bool = True,
) -> dict[str, Any]:
    """Read the checkpoint folder ``path`` into a model (and its optimizer), whatever layout wrote it. Collective.

    Args:
        restore_options: also take over the options of the optimizer's groups (learning rate, …); False: keep the present ones.

    Returns:
        The ``extra`` that was given to ``save``.

    Raises:
        IntegrityError: the checkpoint was never finished, or a file is missing, truncated or changed.
        ConfigError: it is whole, but of another model: names, shapes or dtypes differ. Nothing is changed then.
    """
    path = Path(path)
    manifest = Manifest.read(path)
    verify_files(path, manifest)
    wanted = model_tensors(parallel_model)
    _check_model(wanted, manifest, path)
    state: dict[str, Tensor] = {}
    if optimizer is not None:
        if not any(key.startswith("optimizer.") for key in manifest.tensors):
            raise ConfigError(f"{path} holds no optimizer state: load it without optimizer=")
        state = empty_optimizer_tensors(parallel_model, optimizer, manifest.tensors)
        _check_optimizer(parallel_model, optimizer, state, path)
    random_state = _own_random_state(manifest)
    _read({**wanted, **state, **random_state}, path)
    if optimizer is not None:
        put_optimizer_tensors(parallel_model, optimizer, state)
        if restore_options:
            _restore_options(parallel_model, optimizer, manifest, path)
    _put_random_state(random_state)
    return manifest.extra


def verify_files(path: Path, manifest: Manifest) -> None:
    """Compare every file with the manifest, the files dealt over the ranks. Raises IntegrityError on all ranks."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    names = sorted(manifest.files)[rank::world]
    found = [text for name in names if (text := damage(path, name, manifest.files[name]))]
    problems = [text for said in agree.everybody_says(found) for text in said]
    if problems:
        raise IntegrityError(f"the checkpoint is damaged: {'; '.join(problems)}. Nothing was loaded; use an older one, or copy it again.")


def _check_model(wanted: dict[str, Tensor], manifest: Manifest, path: Path) -> None:
    stored = {key: entry for key, entry in manifest.tensors.items() if key.startswith("model.")}
    problems = [f"it lacks {key.removeprefix('model.')}" for key in wanted if key not in stored]
    problems += [f"it has {key.removeprefix('model.')}, which the model lacks" for key in stored if key not in wanted]
    for key in wanted.keys() & stored.keys():
        here, there = shape_and_dtype(wanted[key]), (stored[key].shape, stored[key].dtype)
        if here != there:
            problems.append(f"{key.removeprefix('model.')} is {there[1]}{list(there[0])} there and {here[1]}{list(here[0])} in the model")
    if problems:
        more = f" (and {len(problems) - 4} more)" if len(problems) > 4 else ""
        raise ConfigError(f"{path} is a checkpoint of another model: {'; '.join(sorted(problems)[:4])}{more}. Nothing was loaded.")


def _check_optimizer(model: ParallelModel, optimizer: torch.optim.Optimizer, state: dict[str, Tensor], path: Path) -> None:
    have = {key.split(".", 2)[2] for key in state}
    names = {parameter: name for name, parameter in model.named_parameters()}
    lacking = [names[p] for group in optimizer.param_groups for p in group["params"] if p in names and names[p] not in have]
    if lacking and have:
        raise ConfigError(f"{path} has no optimizer state for {lacking[0]} ({len(lacking)} in all): were other parameters frozen? Nothing was loaded.")


def _own_random_state(manifest: Manifest) -> dict[str, Tensor]:
    """Room for this rank's random streams, where the checkpoint was written by a world of this size; else nothing."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    writers = {int(key.rpartition("rank")[2]) for key in manifest.tensors if key.startswith("random.cpu.")}
    if writers != set(range(world)):
        return {}
    cuda = torch.cuda.is_available()
    keys = [f"random.cpu.rank{rank}", *([f"random.cuda.rank{rank}"] if cuda else [])]
    return {key: torch.zeros(manifest.tensors[key].shape, dtype=torch.uint8) for key in keys if key in manifest.tensors}


def _put_random_state(state: dict[str, Tensor]) -> None:
    for key, value in state.items():
        if key.startswith("random.cpu."):
            torch.set_rng_state(value)
        else:
            torch.cuda.set_rng_state(value)


def _read(tensors: dict[str, Tensor], path: Path) -> None:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message=".*(no_dist|torch.distributed).*")  # one process needs no process group
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(path=str(path)), no_dist=agree.alone())


def _restore_options(model: ParallelModel, optimizer: torch.optim.Optimizer, manifest: Manifest, path: Path) -> None:
    saved = {tuple(record["params"]): record["options"] for record in manifest.groups}
    for group, record in zip(optimizer.param_groups, group_records(model, optimizer), strict=True):
        options = saved.get(tuple(record["params"]))
        if options is None:
            raise ConfigError(
                f"{path} was written with other optimizer groups (none holds just {record['params'][0]} … {record['params'][-1]});"
                f" group the parameters alike, or load with restore_options=False"
            )
        group.update({key: tuple(value) if isinstance(group.get(key), tuple) else value for key, value in options.items() if key in group})
