"""Record what a training script computes, with torch's global hooks, in the script's own process.

The file is loaded by its path into whatever environment the script has, so it imports torch alone. Each process that
steps an optimizer writes one trace: for the first steps, the rows that its models were given, the outputs of modules
and the gradients that came back to them, the gradients that optimizers saw, and parameters and optimizer states after.

A tensor is recorded as its marginals: for each dim, the tensor's projection on products of signs along all the other
dims. A shard that is cut along one dim has a slice of the whole's marginal there, so shards find their place by value;
the marginals of shards whose offsets are known add up to the whole's.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import json
import os
import weakref
from functools import lru_cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

FORMAT = "meshwright trace 2"
WRAPPERS = {
    "DistributedDataParallel": ("module",),
    "DataParallel": ("module",),
    "FullyShardedDataParallel": ("_fsdp_wrapped_module", "module"),
    "OptimizedModule": ("_orig_mod",),
    "CheckpointWrapper": ("_checkpoint_wrapped_module",),
    "ActivationWrapper": ("_checkpoint_wrapped_module",),
    "_FabricModule": ("_forward_module", "_original_module"),
    "DeepSpeedEngine": ("module",),
    "PeftModel": ("base_model",),
    "PeftModelForCausalLM": ("base_model",),
    "LoraModel": ("model",),
}
"""Class name of a wrapper -> the attributes under which it holds what it wraps."""
TOKENS = 1 << 14
"""Numbers of an output that are recorded, at most; beyond that, neighbours are added up."""


@lru_cache(maxsize=512)
def signs(n: int, role: int = 0) -> Tensor:
    """Draw a vector of ±1 that depends on its length and role alone, (n,) float64."""
    generator = torch.Generator().manual_seed(7919 * n + role)
    return torch.randint(0, 2, (n,), generator=generator, device="cpu").double() * 2 - 1


def marginals(
    tensor: Tensor, offset: tuple[int, ...] | None = None, whole: tuple[int, ...] | None = None
) -> list[Tensor]:
    """Project a tensor on signs along all dims but one, for each dim: a list of (size,) float32.

    Args:
        offset, whole: the place of a shard in a tensor of shape ``whole``.
    """
    values = tensor.detach().to("cpu", torch.float64)
    if values.dim() == 0:
        return [values.reshape(1).float()]
    at = offset or (0,) * values.dim()
    along = [signs(whole[d] if whole else size, d)[at[d] : at[d] + size] for d, size in enumerate(values.shape)]
    found = []
    for kept in range(values.dim()):
        part = values
        for dim in range(values.dim() - 1, -1, -1):
            if dim != kept:
                part = part.movedim(dim, -1) @ along[dim]
        found.append(part.float())
    return found


def record(tensor: Any) -> dict[str, Any]:
    """Describe a parameter, its gradient or its state."""
    local, offset, whole, kind = tensor.detach(), None, None, []
    if hasattr(local, "placements"):
        whole, kind = tuple(local.shape), [str(p) for p in local.placements]
        offset = _offset(local)
        local = local_of(local)
    plain = local.detach()
    if plain.is_quantized or not (plain.is_floating_point() or plain.dtype in (torch.int64, torch.int32, torch.bool)):
        plain = plain.view(torch.uint8) if plain.dim() else plain.double()
    return {
        "shape": list(plain.shape),
        "whole": list(whole) if whole else None,
        "offset": list(offset) if offset is not None else None,
        "placements": kind,
        "dtype": str(plain.dtype)[6:],
        "norm": float(plain.double().norm()) if plain.numel() else 0.0,
        "m": marginals(plain, offset, whole if offset is not None else None),
    }


@torch.no_grad()
def local_of(tensor: Any) -> Tensor:
    """Return what this rank holds of a tensor."""
    found = tensor.to_local() if hasattr(tensor, "placements") else tensor
    return found.wait() if hasattr(found, "wait") else found


def _offset(tensor: Any) -> tuple[int, ...] | None:
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return tuple(offset)
    except Exception:  # noqa: BLE001 - a private name of torch; its shard is placed by value then
        return None


def sketch(output: Any) -> dict[str, Any]:
    """Describe an output: (rows, tokens, …) -> its numbers by row and token, and by row and feature."""
    kind = []
    if hasattr(output, "placements"):
        kind = [str(p) for p in output.placements]
        output = local_of(output)
    values = output.detach().to("cpu", torch.float64)
    shape = list(values.shape)
    if values.dim() == 1:
        values = values.unsqueeze(1)
    if values.dim() == 2:
        values = values.unsqueeze(1)
    values = values.flatten(2)
    by_token = values @ signs(values.shape[2], 1)
    by_feature = torch.einsum("btd,t->bd", values, signs(values.shape[1], 2))
    return {
        "shape": shape,
        "placements": kind,
        "dtype": str(output.dtype)[6:],
        "t": _pooled(by_token),
        "f": _pooled(by_feature),
    }


def _pooled(numbers: Tensor) -> Tensor:
    rows, n = numbers.shape
    group = 1
    while rows * (n // group) > TOKENS and n % (2 * group) == 0:
        group *= 2
    return numbers.view(rows, n // group, group).sum(2).float()


def hashes(tensor: Any) -> list[str]:
    """Hash each row of a tensor."""
    rows = local_of(tensor).detach().cpu()
    rows = rows.to(torch.int64) if not rows.is_floating_point() else rows.float()
    rows = rows.reshape(rows.shape[0], -1).contiguous() if rows.dim() else rows.reshape(1, 1)
    return [hashlib.blake2b(row.numpy().tobytes(), digest_size=8).hexdigest() for row in rows]


def ids_of(tensor: Tensor) -> list[list[int]] | None:
    """List the numbers of an integer tensor of (rows, tokens); None for any other, or a large one."""
    if tensor.dtype not in (torch.int64, torch.int32) or tensor.dim() != 2 or tensor.numel() > TOKENS * 4:
        return None
    return local_of(tensor).tolist()


def first_tensor(value: Any) -> Tensor | None:
    """Find the floating-point tensor that a module's output is, or holds first."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if hasattr(value, "logits") and isinstance(value.logits, Tensor):
        return value.logits
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            if (found := first_tensor(item)) is not None:
                return found
    return None


def tensors_by_name(value: Any, name: str) -> dict[str, Tensor]:
    """Collect the tensors that a call was given, with names for their places."""
    if isinstance(value, Tensor):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (tuple, list)) else ()
    return {
        k: t for key, item in items for k, t in tensors_by_name(item, f"{name}.{key}" if name else str(key)).items()
    }


class Recorder:
    """The trace of one process.

    Args:
        settings: ``folder``, ``steps``, ``noise`` (None, or a seed: outputs of modules are
            changed by as much as their dtype rounds), ``stop`` (end the script after the steps).
    """

    def __init__(self, settings: dict[str, Any]):
        self.settings, self.n_steps = settings, settings.get("steps", 3)
        self.done: list[dict[str, Any]] = []
        self.now = self._new()
        self.stack: list[int] = []
        self.returned = 0
        self.names: dict[int, str] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.modules: dict[int, str] = {}
        self.stepped: set[int] = set()
        self.depth = 0
        self.met = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.closed = False
        self.generator = torch.Generator().manual_seed(settings.get("noise") or 0)
        self.last: tuple[Any, int, dict[str, Any] | None] = (lambda: None, -1, None)

    def _new(self) -> dict[str, Any]:
        lists, maps = ("calls", "forward", "targets"), ("gradients", "before", "after", "state")
        return {key: [] for key in lists} | {key: {} for key in maps}

    # --- forward

    def entered(self, module: nn.Module, args: Any) -> None:
        if self.closed or in_backward() or self.depth:
            return
        if not self.stack and self.stepped and torch.is_grad_enabled():
            self.finish_step()
        self.stack.append(id(module))

    def ended(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if self.closed or in_backward() or self.depth:
            return None
        if id(module) in self.stack:
            while self.stack.pop() != id(module):
                pass
        is_root = not self.stack
        if not torch.is_grad_enabled():
            return None
        if is_root:
            given = tensors_by_name(args, "") | tensors_by_name(kwargs, "")
            self.now["calls"].append(
                {
                    "module": id(module),
                    "inputs": {
                        name: {"rows": hashes(t), "shape": list(t.shape), "ids": ids_of(t)}
                        for name, t in given.items()
                        if t.dim() and t.numel() and not t.is_meta
                    },
                }
            )
        tensor = first_tensor(output)
        if tensor is None or tensor.dim() == 0 or tensor.numel() == 0 or tensor.is_meta:
            return None
        changed = None
        if self.settings.get("noise") is not None and any(True for _ in module.parameters(recurse=False)):
            changed = self._noisy(output)
            tensor = first_tensor(changed)
            assert tensor is not None
        seen, version, found = self.last
        if found is None or seen() is not tensor or version != tensor._version:
            found = sketch(tensor)
            self.last = (weakref.ref(tensor), tensor._version, found)
        event = {"module": id(module), "call": len(self.now["calls"]) + (not is_root), "out": found, "keep": module}
        self.now["forward"].append(event)
        if tensor.requires_grad:
            tensor.register_hook(_Returned(self, event))
        return changed

    def _noisy(self, output: Any) -> Any:
        if isinstance(output, Tensor):
            if not output.is_floating_point() or hasattr(output, "placements"):
                return output
            sign = torch.randint(0, 2, output.shape, generator=self.generator).to(output.device, output.dtype) * 2 - 1
            return output + output.detach() * sign * (torch.finfo(output.dtype).eps / 2)
        if isinstance(output, tuple) and type(output) is tuple:
            return tuple(self._noisy(item) for item in output)
        return output

    # --- optimizers

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.depth += 1
        if self.closed or self.depth > 1:
            return
        if id(optimizer) in self.stepped:
            self.finish_step()
        if self.closed:
            return
        self.stepped.add(id(optimizer))
        if dist.is_available() and dist.is_initialized():  # at exit there may be no group any more
            self.met = dist.get_rank(), dist.get_world_size()
        self.find_names([p for group in optimizer.param_groups for p in group["params"]])
        if not self.now["before"]:
            self.now["before"] = {name: record(p) for name, p in self.parameters.items()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self.names.get(id(parameter))
                if name is not None:
                    gradient = parameter.grad
                    self.now["gradients"][name] = None if gradient is None else record(gradient)

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.depth -= 1
        if self.closed or self.depth:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self.names.get(id(parameter))
                if name is None:
                    continue
                state = optimizer.state.get(parameter, {})
                self.now["state"][name] = {
                    key: record(value) for key, value in state.items() if isinstance(value, Tensor)
                }
        self.now["after"] = {name: record(p) for name, p in self.parameters.items()}
        self.write()

    def finish_step(self) -> None:
        """Close the step whose optimizers have all stepped."""
        self.done.append(self.now)
        self.now, self.stepped = self._new(), set()
        if len(self.done) >= self.n_steps:
            self.closed = True
            self.write()
            if self.settings.get("stop"):
                raise SystemExit(0)

    def find_names(self, stepped: list[nn.Parameter]) -> None:
        """Name all parameters by the outermost modules that hold those which an optimizer steps."""
        if all(id(p) in self.names for p in stepped):
            return
        every = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
        children = {id(child) for module in every for child in module._modules.values() if child is not None}
        wanted, tops = {id(p) for p in stepped}, []
        for module in every:
            if id(module) not in children and any(id(p) in wanted for p in module.parameters()):
                tops.append(module)
        tops.sort(key=lambda top: -sum(id(p) in wanted for p in top.parameters()))
        for number, top in enumerate(tops):
            other = any(self.parameters.get(name, p) is not p for name, p in top.named_parameters())
            self._walk(top, f"{type(top).__name__}{number}." if other else "")

    def _walk(self, module: nn.Module, path: str) -> None:
        self.modules.setdefault(id(module), path.rstrip("."))
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in self.names:
                self.names[id(parameter)] = path + key
                self.parameters[path + key] = parameter
        hidden = next((WRAPPERS[c.__name__] for c in type(module).__mro__ if c.__name__ in WRAPPERS), ())
        for key, child in module._modules.items():
            if child is not None:
                self._walk(child, path if key in hidden else f"{path}{key}.")

    # --- write

    def write(self) -> None:
        """Write the trace; modules get their names only now."""
        steps = [*self.done, *([self.now] if self.now["after"] and not self.closed else [])]
        if not self.parameters and not self.now["calls"]:
            return
        rank, world = self.met
        content = {"format": FORMAT, "rank": rank, "world": world, "steps": [self._plain(step) for step in steps]}
        os.makedirs(self.settings["folder"], exist_ok=True)
        path = os.path.join(self.settings["folder"], f"rank-{rank:05d}.pt")
        torch.save(content, path + ".partial")
        os.replace(path + ".partial", path)

    def _plain(self, step: dict[str, Any]) -> dict[str, Any]:
        def named(event: dict[str, Any]) -> dict[str, Any]:
            return {
                "name": self.modules.get(event["module"], ""),
                "known": event["module"] in self.modules,
                "call": event["call"],
                "out": event["out"],
                "back": event.get("back"),
                "order": event.get("order", -1),
            }

        calls = [
            {**call, "module": self.modules.get(call["module"], ""), "known": call["module"] in self.modules}
            for call in step["calls"]
        ]
        return {
            **{k: v for k, v in step.items() if k not in ("calls", "forward")},
            "calls": calls,
            "forward": [named(event) for event in step["forward"]],
        }


class _Returned:
    """Notes the gradient that comes back to an output."""

    def __init__(self, recorder: Recorder, event: dict[str, Any]):
        self.recorder, self.event = recorder, event

    def __call__(self, gradient: Tensor) -> None:
        if not self.recorder.closed and "back" not in self.event:
            self.event["order"] = self.recorder.returned
            self.recorder.returned += 1
            self.event["back"] = sketch(gradient)


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


MOST_TARGETS = 4096
"""Targets of a call that are recorded; of a call with more, rows are not compared."""
LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "binary_cross_entropy_with_logits", "kl_div", "l1_loss")


def install() -> None:
    """Set the hooks, and note the targets of torch's losses."""
    recorder = Recorder(json.loads(os.environ["MESHWRIGHT_OBSERVE"]))
    quiet: Any = torch.compiler.disable
    nn.modules.module.register_module_forward_pre_hook(quiet(recorder.entered))
    nn.modules.module.register_module_forward_hook(quiet(recorder.ended), with_kwargs=True)
    register_optimizer_step_pre_hook(recorder.before_step)
    register_optimizer_step_post_hook(recorder.after_step)
    functional = torch.nn.functional

    def noted_loss(name: str) -> None:
        plain = getattr(functional, name)

        @wraps(plain)
        def loss(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.closed and not in_backward() and isinstance(target, Tensor) and not target.is_meta:
                flat = local_of(target).detach().reshape(-1)[:MOST_TARGETS].to("cpu", torch.float64)
                recorder.now["targets"].append({"shape": list(local_of(target).shape), "flat": flat.tolist()})
            return plain(input, target, *args, **kwargs)

        setattr(functional, name, loss)

    for name in LOSSES:
        noted_loss(name)

    @atexit.register
    def finish() -> None:
        if not recorder.closed and (recorder.now["after"] or recorder.done):
            recorder.write()
