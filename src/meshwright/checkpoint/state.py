"""The tensors of a model and its optimizer, by global name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.core.names import clean
from meshwright.distributed.parallel_model import ParallelModel


def model_tensors(model: ParallelModel) -> dict[str, Tensor]:
    """"model.<name>" -> parameter or persistent buffer. Tied parameters once."""
    found = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    return found | {f"model.{name}": buffer for name, buffer in model.named_buffers()}


def optimizer_tensors(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """"optimizer.<state>.<parameter>" -> state, sharded like its parameter; 0-dim state as shape (1,)."""
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"optimizer.{key}.{name}"] = value.detach().reshape(1) if value.dim() == 0 else value.detach()
    return found


def empty_optimizer_tensors(model: ParallelModel, optimizer: torch.optim.Optimizer, entries: dict[str, Any]) -> dict[str, Tensor]:
    """Room for the optimizer state that a manifest lists: like the parameter where the shape is the same, else plain."""
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    parameters = {name: p for name, p in model.named_parameters() if p in held}
    found = {}
    for key, entry in entries.items():
        kind, _, rest = key.partition(".")
        name = rest.partition(".")[2]
        if kind != "optimizer" or name not in parameters:
            continue
        like = parameters[name]
        dtype = getattr(torch, entry.dtype)
        if tuple(like.shape) == entry.shape and entry.shape != (1,):
            found[key] = torch.zeros_like(like, dtype=dtype, requires_grad=False).detach()
        else:
            found[key] = torch.zeros(entry.shape, dtype=dtype)
    return found


def put_optimizer_tensors(model: ParallelModel, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Hand loaded state to the optimizer."""
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        _, state, name = key.split(".", 2)
        parameter = parameters[name]
        scalar = tuple(value.shape) == (1,) and tuple(parameter.shape) != (1,)
        optimizer.state[parameter][state] = value.reshape(()) if scalar else value


def group_records(model: ParallelModel, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The optimizer's groups as JSON: names of their parameters, and their plain options."""
    names = {parameter: clean(name) for name, parameter in model.named_parameters()}
    records = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if isinstance(value, (int, float, str, bool, list, tuple)) and key != "params"}
        records.append({"params": [names[p] for p in group["params"]], "options": options})
    return records


def shape_and_dtype(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
