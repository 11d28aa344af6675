"""Collect the tensors of a model and its optimizer by global name, low-bit moments as float32 values.

So any layout reads the checkpoint. Moments that torchao rounded come back bit for bit where they are cut into the
same blocks again. torchao's own rounding would not do that: a block's largest element gives the scale, but no code
means −1, so a block whose largest element is negative would shrink each time. This module finds the scale by which
every value of the block is a code's. Where blocks lie otherwise, values are rounded once more, and a warning says so.
"""

from __future__ import annotations

import json
import logging
import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.core.devices import CPU, local_device
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.names import clean
from meshwright.core.torch_private import is_persistent
from meshwright.distributed.averaging import TRAINED, ScheduleFreeAdamW, optimizers_of
from meshwright.distributed.data import fully_sharded
from meshwright.distributed.optimizer.low_bit import SIGNED, TorchaoAdamW, at_rest, is_rounded
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import is_rank_zero
from meshwright.distributed.products import quantize
from meshwright.distributed.recompute.kept import restore_streams, streams
from meshwright.distributed.torch_private import local_part
from meshwright.distributed.weights.shards import memory_of, with_local

from .manifest import DamagedCheckpoint, TensorEntry

# --- save low-bit moments as the float32 values that they stand for, and round them again when read

log = logging.getLogger("meshwright")

LEAST_SCALE = 1e-12
"""The least scale, as in torchao."""
ULPS = 2
"""Bound, in float32 steps, on the error of a scale recovered from its product with a code by division."""


def is_low_bit(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, TorchaoAdamW) and optimizer.state_word != "full"


def as_values(moment: Tensor, parameter: Tensor) -> Tensor:
    """Return a moment as float32 in host memory, placed like the parameter, whether it is low-bit or not.

    With another layout, another rank may have a small moment in low bits.
    """
    local = local_part(moment)
    values = (local.dequantize() if is_rounded(moment) else local).detach().to("cpu", torch.float32)
    return with_local(parameter, values) if isinstance(parameter, DTensor) else values


class Rounding:
    """A loader of values into an optimizer's moments that counts what rounding changed."""

    def __init__(self) -> None:
        self.changed = self.values = 0

    @torch.no_grad()
    def take(self, optimizer: TorchaoAdamW, parameter: nn.Parameter, key: str, values: Tensor) -> Tensor:
        """Convert values to a moment of the parameter, in the form that the optimizer keeps."""
        moment = optimizer.new_moment(parameter, key)
        local, given = (local_part(t) for t in (moment, values))
        given = given.to(local.device)
        if is_rounded(moment):
            back = _round(local, given.float(), signed=SIGNED[key])
        else:
            back = local.copy_(given)
        self.changed += int((back.to(given.dtype) != given).sum())
        self.values += given.numel()
        return moment

    def tell(self, folder: object) -> None:
        """Log on the first rank what rounding changed. Collective."""
        counted = agree.everybody_says((self.changed, self.values))
        changed, values = (sum(counts) for counts in zip(*counted, strict=True))
        if changed and is_rank_zero():
            log.warning(
                f"{folder}: {changed / values:.3%} of the optimizer's state was rounded once more, since its blocks lie"
                f" otherwise in this layout (or have other bits) than in the one that wrote it"
            )


def _round(moment: Tensor, values: Tensor, *, signed: bool) -> Tensor:
    """Fill a torchao moment in place, and return the values that it then stands for."""
    made: torch.Tensor = moment
    table: Tensor = made.qmap  # type: ignore[attr-defined]
    blocks = values.reshape(-1, made.block_size)  # type: ignore[attr-defined]
    scale = blocks.abs().amax(-1).clip(LEAST_SCALE)
    found = torch.zeros_like(scale, dtype=torch.bool)
    for tried in _scales(blocks, table, signed=signed):
        codes = quantize(blocks / tried.unsqueeze(1), table)
        fits = ((table[codes.int()] * tried.unsqueeze(1)) == blocks).all(1) & ~found
        scale, found = torch.where(fits, tried, scale), found | fits
    codes = quantize(blocks / scale.unsqueeze(1), table)
    packed = codes if len(table) == 256 else (codes.view(-1)[::2] << 4) | codes.view(-1)[1::2]
    made.codes.copy_(packed.view(made.codes.shape))  # type: ignore[attr-defined]
    made.scale.copy_(scale)  # type: ignore[attr-defined]
    return made.dequantize()


def _scales(blocks: Tensor, table: Tensor, *, signed: bool) -> Iterator[Tensor]:
    """Yield candidate scales: the largest magnitude, or (negative, lowest code) that over the code's magnitude."""
    largest = blocks.abs().amax(-1)
    yield largest.clip(LEAST_SCALE)
    if signed:
        middle = largest / table.abs()[0]
        yield middle
        for towards in (torch.inf, 0.0):
            tried = middle
            for _ in range(ULPS):
                tried = torch.nextafter(tried, torch.full_like(tried, towards))
                yield tried


# --- collect the tensors of a model and its optimizer by global name

IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Options of torch's optimizers that choose how, not what, is computed: they belong to the machine, not the run."""


@dataclass(frozen=True)
class StateTensor:
    """A tensor of the state as a checkpoint has it.

    Attributes:
        like: a tensor of its global shape, placed as its values are.
        dtype: of its values.
        memory: tensors from which the values are made: while torch counts no write to them, the values are the same.
        made: computes the values; None: ``like`` holds them.
        at_once: whether a forward or a backward may change them.
    """

    like: Tensor
    dtype: torch.dtype
    memory: tuple[Tensor, ...]
    made: Callable[[], Tensor] | None = None
    at_once: bool = False

    @classmethod
    def of(cls, tensor: Tensor, *, at_once: bool = False) -> StateTensor:
        return cls(tensor, tensor.dtype, _written_to(tensor), at_once=at_once)

    @property
    def form(self) -> tuple[object, ...]:
        """What decides which boxes of the whole this rank holds."""
        placed = (self.like.placements, self.like.device_mesh) if isinstance(self.like, DTensor) else ()
        return self.dtype, self.like.shape, *placed

    def values(self) -> Tensor:
        return self.like if self.made is None else self.made()


def _written_to(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in which torch counts the writes: a DTensor counts those of its operators itself."""
    return (tensor, *memory_of(tensor)) if isinstance(tensor, DTensor) else tuple(memory_of(tensor))


def stored_state(
    model: ParallelModel, optimizer: torch.optim.Optimizer | None = None, rank: int = 0
) -> dict[str, StateTensor]:
    """Map global names to what a checkpoint holds of them; nothing is computed or copied yet.

    A parameter with an average (schedule-free AdamW) is stored as the average, and its point of training as
    ``optimizer.y``.

    Raises:
        UnsupportedError: the optimizer keeps state of no parameter, or a parameter's state in something other than
            tensors, in plain tensors of this rank's shard, or in DTensors of another shape; the model has a buffer
            that the layout does not know.
        ConfigError: an optimizer comes along while the model has a copy's weights.
    """
    kind = type(optimizer).__name__
    refuse_lent(model, optimizer)
    if optimizer is not None and (keys := [key for key in optimizer.state if not isinstance(key, Tensor)]):
        raise UnsupportedError(
            f"{kind} keeps state['{keys[0]}'], which is of no parameter: only parameters' state can be saved. Keep a"
            f" number as an option of a group, and give save the rest as extra=, outside the optimizer."
        )
    known, saved = {fact.name for fact in model.facts.buffers}, {id(buffer) for _, buffer in model.named_buffers()}
    for path, module in (place for part in model.parts for place in part.named_modules()):
        for name, buffer in module._buffers.items():
            full = clean(f"{path}.{name}".lstrip("."))
            if buffer is not None and full not in known and id(buffer) not in saved and is_persistent(module, name):
                raise UnsupportedError(
                    f"{full} came behind parallelize, and no state dict would have it. Register it, filled, in the"
                    f" model that parallelize is given, or with persistent=False."
                )
    found = {key: StateTensor.of(tensor, at_once=True) for key, tensor in model_tensors(model).items()}
    parameters = {name: copies[0] for name, copies in _by_name(model).items()}
    averaging = optimizers_of(parameters.values())
    for name, parameter in parameters.items():
        found[f"model.{name}"] = held = StateTensor.of(parameter)
        for made in (made for made in averaging if made.averages(parameter)):
            memory = (*held.memory, *_written_to(made.state[parameter]["z"]))
            found[f"model.{name}"] = StateTensor(
                parameter, parameter.dtype, memory, partial(made.average_of, parameter)
            )
        if optimizer is None:
            continue
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.dim() and is_low_bit(optimizer):
                memory, made_by = _written_to(value), partial(as_values, value, parameter)
                found[f"optimizer.{key}.{name}"] = StateTensor(parameter, torch.float32, memory, made_by)
            elif isinstance(value, Tensor):
                is_cut = isinstance(parameter, DTensor) and not isinstance(value, DTensor)
                is_other = value.dim() and value.shape != parameter.shape
                if is_other and is_cut and value.shape == local_part(parameter).shape:
                    raise UnsupportedError(
                        f"{kind} keeps '{key}' of {name} as a plain tensor of {list(value.shape)}, this rank's shard of"
                        f" {list(parameter.shape)}: a checkpoint would have one rank's for all. Keep"
                        f" torch.zeros_like(parameter) and step on its .to_local(), or save without optimizer=."
                    )
                if is_other and isinstance(value, DTensor):
                    raise UnsupportedError(
                        f"{kind} keeps '{key}' of {name} as a DTensor of {list(value.shape)}, and the parameter has"
                        f" {list(parameter.shape)}: a load could not cut it as it was. Keep a tensor of the"
                        f" parameter's shape, or save without optimizer=."
                    )
                found[f"optimizer.{key}.{name}"] = StateTensor.of(value)
            elif value is not None:
                raise UnsupportedError(
                    f"{kind} keeps '{key}' of {name} as {type(value).__name__}: only tensors can be saved. Keep a"
                    f" number as a 0-dim tensor, or save without optimizer=."
                )
        if isinstance(optimizer, ScheduleFreeAdamW) and optimizer.averages(parameter):
            found[f"optimizer.{TRAINED}.{name}"] = held
    for name, stream in {**streams(), **python_streams()}.items():
        found[f"random.{name}.rank{rank}"] = StateTensor.of(stream, at_once=True)
    return found


def refuse_lent(model: ParallelModel, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise ConfigError if an optimizer comes along while the model has the weights of a copy."""
    if model.is_lent and optimizer is not None:
        raise ConfigError(
            "inside lent() the model has the weights of a copy, which the optimizer's state does not belong to: leave"
            " the block first, or leave optimizer= out"
        )


# --- the streams of Python and NumPy, from which models and data may draw too

PYTHON, NUMPY = "<625I?d", "<624IIId"
"""Words of Mersenne Twisters, with the place in them, and whether there is another normal number, and that."""


def python_streams() -> dict[str, Tensor]:
    """Return the states of ``random`` and of NumPy's own stream, while that is a Mersenne Twister, as bytes."""
    _, words, normal = random.getstate()
    found = {"python": struct.pack(PYTHON, *words, normal is not None, normal or 0.0)}
    if (state := _numpy_state()) is not None:
        twister = state["state"]
        found["numpy"] = struct.pack(NUMPY, *twister["key"], twister["pos"], state["has_gauss"], state["gauss"])
    return {name: torch.frombuffer(bytearray(state), dtype=torch.uint8) for name, state in found.items()}


def _numpy_state() -> dict[str, Any] | None:
    state = cast("dict[str, Any]", np.random.get_state(legacy=False))
    return state if state["bit_generator"] == "MT19937" else None


def random_keys(rank: int) -> set[str]:
    """Return the names under which the random streams of a rank are stored."""
    return {f"random.{name}.rank{rank}" for name in (CPU, local_device(), "python", "numpy")}


def restore_random(states: Mapping[str, Tensor]) -> None:
    """Set the random streams that are stored under ``random_keys``. Raises DamagedCheckpoint: one is none."""
    by_name = {key.split(".")[1]: state for key, state in states.items()}
    python, numpy = by_name.pop("python", None), by_name.pop("numpy", None)
    try:
        restore_streams(by_name)
        if python is not None:
            *words, is_there, normal = struct.unpack(PYTHON, python.numpy().tobytes())
            random.setstate((3, tuple(words), normal if is_there else None))
        if numpy is not None and _numpy_state() is not None:
            *words, place, has_normal, normal = struct.unpack(NUMPY, numpy.numpy().tobytes())
            if place > len(words):  # NumPy would read on
                raise ValueError(f"place {place} of {len(words)}")
            np.random.set_state(("MT19937", np.array(words, np.uint32), place, has_normal, normal))
    except (ValueError, RuntimeError, struct.error) as error:
        raise DamagedCheckpoint(f"the checkpoint's random streams are none: {error}") from error


def model_tensors(model: ParallelModel) -> dict[str, Tensor]:
    """Map "model.<name>" to parameters and persistent buffers; tied parameters are listed once.

    Parameters that a user's own loop keeps gathered between two microbatches are freed first: those are copies.
    """
    for part in model.parts:
        fully_sharded.reshard(part)
    found: dict[str, Tensor] = {f"model.{name}": copies[0] for name, copies in _by_name(model).items()}
    return found | {f"model.{name}": buffer for name, buffer in model.named_buffers()}


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
            own = local_part(like) if isinstance(like, DTensor) else like
            device = torch.device("cpu") if in_host_memory else like.device
            zeros = torch.zeros_like(own, dtype=dtype, device=device, requires_grad=False)
            found[key] = with_local(like, zeros) if isinstance(like, DTensor) else zeros
        else:
            beside = bool(entry.shape) or any(group_of[like].get(option) for option in ("fused", "capturable"))
            found[key] = torch.zeros(entry.shape, dtype=dtype, device=like.device if beside else "cpu")
    return found


def put_optimizer_tensors(
    model: ParallelModel, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], path: object
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
            mine = value
            if parameter is not first:
                if isinstance(value, DTensor):
                    assert isinstance(parameter, DTensor)
                    mine = with_local(parameter, local_part(value).clone())
                else:
                    mine = value.clone()
            if value.dim() and isinstance(optimizer, TorchaoAdamW):
                mine = rounding.take(optimizer, parameter, state, value)
            optimizer.state[parameter][state] = at_rest(mine, model.device) if rests and value.dim() else mine

    if isinstance(optimizer, ScheduleFreeAdamW):
        optimizer.train()  # the model's part of the checkpoint is the average
    if isinstance(optimizer, TorchaoAdamW):
        rounding.tell(path)


def _by_name(model: ParallelModel) -> dict[str, list[nn.Parameter]]:
    """Map names to parameters: several where a rank has both ends of a pipeline, the first end's copy first."""
    found: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        found.setdefault(name, []).append(parameter)
    return found


def group_records(model: ParallelModel, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the optimizer's groups as JSON: parameter names and plain options (a 0-dim tensor as its number).

    Raises:
        UnsupportedError: the optimizer holds a parameter that is not the model's; an option is a dict, or a tensor
            with dims.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    records = []
    for number, group in enumerate(optimizer.param_groups):
        if any(parameter not in names for parameter in group["params"]):
            raise UnsupportedError(
                f"group {number} of the optimizer holds a parameter that is not the model's (or the optimizer was made"
                f" before the model was laid out). Make the optimizer from this ParallelModel's parameters."
            )
        plain = {key: _as_number(value) for key, value in group.items() if key not in ("params", *IMPLEMENTATION)}
        if strange := [key for key, value in plain.items() if isinstance(value, (dict, Tensor))]:
            raise UnsupportedError(
                f"group {number} of the optimizer has '{strange[0]}', a {type(plain[strange[0]]).__name__}: only"
                f" numbers, text and lists of them are saved. Keep numbers as options of their own, and give save the"
                f" rest as extra=, outside the optimizer."
            )
        kept = (int, float, str, bool, list, tuple)
        try:
            options = json.loads(json.dumps({key: value for key, value in plain.items() if isinstance(value, kept)}))
        except TypeError as error:
            raise UnsupportedError(
                f"group {number} of the optimizer cannot be saved: {error}; its lists may hold numbers and text"
            ) from None
        records.append({"params": list(dict.fromkeys(names[p] for p in group["params"])), "options": options})
    return records


def _as_number(value: Any) -> Any:
    """Return a 0-dim tensor, and those in a list or tuple, as numbers."""
    if isinstance(value, (list, tuple)):
        return [_as_number(each) for each in value]
    return value.item() if isinstance(value, Tensor) and value.dim() == 0 else value


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
    """Restore a group's options, each in the type that the group has it in."""
    for key, value in options.items():
        group[key] = _in_type(group.get(key), value)


def _in_type(have: Any, value: Any) -> Any:
    if isinstance(have, Tensor):
        return have.fill_(value)
    if isinstance(have, (list, tuple)) and isinstance(value, (list, tuple)) and len(have) == len(value):
        return type(have)(_in_type(*pair) for pair in zip(have, value, strict=True))
    return tuple(value) if isinstance(have, tuple) else value


def dtype_word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shape_and_dtype(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), dtype_word(tensor.dtype)
