"""Collect the tensors of a model and its optimizer by global name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.core.errors import UnsupportedError
from meshwright.distributed.averaging.schedule_free import ScheduleFreeAdamW
from meshwright.distributed.data import fully_sharded
from meshwright.distributed.optimizer.state_offload import at_rest
from meshwright.distributed.optimizer.torchao_adamw import TorchaoAdamW
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.torch_private import local_part
from meshwright.distributed.weights.shards import with_local

from .low_bit import Rounding, as_values, is_low_bit
from .manifest import TensorEntry

IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Options of torch's optimizers that choose how, not what, is computed: they belong to the machine, not the run."""


def model_tensors(model: ParallelModel) -> dict[str, Tensor]:
    """Map "model.<name>" to parameters and persistent buffers; tied parameters are listed once.

    Parameters that a user's own loop keeps gathered between two microbatches are freed first: those are copies.
    """
    for part in model.parts:
        fully_sharded.reshard(part)
    found: dict[str, Tensor] = {f"model.{name}": copies[0] for name, copies in _by_name(model).items()}
    return found | {f"model.{name}": buffer for name, buffer in model.named_buffers()}


def optimizer_tensors(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Map "optimizer.<state>.<parameter>" to the state, sharded like its parameter.

    Raises:
        UnsupportedError: the optimizer keeps a parameter's state in something other than tensors.
    """
    found = {}
    for name, (parameter, *_) in _by_name(model).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.dim() and is_low_bit(optimizer):
                found[f"optimizer.{key}.{name}"] = as_values(value, parameter)
            elif isinstance(value, Tensor):
                found[f"optimizer.{key}.{name}"] = value
            elif value is not None:
                kind = f"{type(optimizer).__name__} keeps '{key}' of {name} as {type(value).__name__}"
                raise UnsupportedError(
                    f"{kind}: only tensors can be saved. Keep it as a 0-dim tensor, or save without optimizer=."
                )
    return found


def empty_optimizer_tensors(
    model: ParallelModel, optimizer: torch.optim.Optimizer, entries: Mapping[str, TensorEntry]
) -> dict[str, Tensor]:
    """Allocate a manifest's optimizer state: like the parameter where the shape is the same, else plain.

    Step counts (0-dim) lie on the CPU, or beside the parameter where a fused or capturable optimizer needs them.
    """
    group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    parameters = {name: copies[0] for name, copies in _by_name(model).items() if copies[0] in group_of}
    found = {}
    for key, entry in entries.items():
        kind, _, rest = key.partition(".")
        name = rest.partition(".")[2]
        if kind != "optimizer" or name not in parameters:
            continue
        like, dtype = parameters[name], getattr(torch, entry.dtype)
        if entry.shape and tuple(like.shape) == entry.shape:
            in_host_memory = model.plan.optimizer.in_host_memory or is_low_bit(optimizer)
            found[key] = _zeros_like(like, dtype, torch.device("cpu") if in_host_memory else like.device)
        else:
            beside = bool(entry.shape) or any(group_of[like].get(option) for option in ("fused", "capturable"))
            found[key] = torch.zeros(entry.shape, dtype=dtype, device=like.device if beside else "cpu")
    return found


def _zeros_like(parameter: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(parameter, DTensor):
        return with_local(
            parameter, torch.zeros_like(local_part(parameter), dtype=dtype, device=device, requires_grad=False)
        )
    return torch.zeros_like(parameter, dtype=dtype, device=device, requires_grad=False)


def put_optimizer_tensors(
    model: ParallelModel, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], path: Path
) -> None:
    """Make the loaded state the optimizer's own; a parameter without loaded state has none afterwards. Collective."""
    parameters, rounding = _by_name(model), Rounding()
    rests = model.plan.optimizer.in_host_memory
    for copies in parameters.values():
        for parameter in copies:
            optimizer.state.pop(parameter, None)
    for key, value in tensors.items():
        _, state, name = key.split(".", 2)
        first, *others = parameters[name]
        for parameter in (first, *others):
            mine = value if parameter is first else _copied(value, parameter)
            if value.dim() and isinstance(optimizer, TorchaoAdamW):
                mine = rounding.take(optimizer, parameter, state, value)
            optimizer.state[parameter][state] = at_rest(mine, model.device) if rests and value.dim() else mine

    if isinstance(optimizer, ScheduleFreeAdamW):
        optimizer.train()  # the model's part of the checkpoint is the average
    if isinstance(optimizer, TorchaoAdamW):
        rounding.tell(path)


def _copied(value: Tensor, like: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return value.clone()
    assert isinstance(like, DTensor)
    return with_local(like, local_part(value).clone())


def _by_name(model: ParallelModel) -> dict[str, list[nn.Parameter]]:
    """Map names to parameters: several where a rank has both ends of a pipeline, the first end's copy first."""
    found: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        found.setdefault(name, []).append(parameter)
    return found


def group_records(model: ParallelModel, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the optimizer's groups as JSON: parameter names and plain options (a 0-dim tensor as its number).

    Raises:
        UnsupportedError: the optimizer holds a parameter that is not the model's.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    records = []
    for number, group in enumerate(optimizer.param_groups):
        if any(parameter not in names for parameter in group["params"]):
            raise UnsupportedError(
                f"group {number} of the optimizer holds a parameter that is not the model's (or the optimizer was made"
                f" before the model was laid out). Make the optimizer from this ParallelModel's parameters."
            )
        plain = {
            key: value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
            for key, value in group.items()
        }
        options = {
            key: value
            for key, value in plain.items()
            if isinstance(value, (int, float, str, bool, list, tuple)) and key not in ("params", *IMPLEMENTATION)
        }
        records.append({"params": list(dict.fromkeys(names[p] for p in group["params"])), "options": options})
    return records


def merged_groups(by_rank: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge the groups of ranks that hold different parameters: those with the same options are one."""
    merged: list[dict[str, Any]] = []
    for record in (record for records in by_rank for record in records):
        same = next((other for other in merged if other["options"] == record["options"]), None)
        if same is None:
            merged.append({"params": list(record["params"]), "options": record["options"]})
        else:
            same["params"] += [name for name in record["params"] if name not in set(same["params"])]
    return merged


def put_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Restore a group's options, each in the type that the group has it in; skip options that the group lacks."""
    for key, value in options.items():
        have = group.get(key)
        if isinstance(have, Tensor):
            have.fill_(value)
        elif key in group:
            group[key] = tuple(value) if isinstance(have, tuple) else value


def shape_and_dtype(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
