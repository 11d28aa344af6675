"""Record what a training script computes, with torch's global hooks, in the script's own process.

The file is loaded by its path into whatever environment the script has, so it imports torch alone. Each process that
steps an optimizer writes one trace: for the first steps, the rows that its models were given, the outputs of modules
and the gradients that came back to them, the gradients that optimizers saw, and parameters and optimizer states after.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import json
import os
import time
import traceback
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwright.observation.collectives import MOST_COLLECTIVES, describe, note_collectives, settle, storage
from meshwright.observation.copies import Copies
from meshwright.observation.patches import (
    ATTENTION,
    after,
    before,
    count_keys,
    keep_identity,
    note_compilation,
    note_draws,
    without_harm,
)
from meshwright.observation.pieces import Piece, is_short, pieces_of, record, walk, wrapped_under
from meshwright.observation.reruns import Reruns
from meshwright.observation.sketches import (
    AT_STEP,
    FORMAT,
    INPUT,
    REST,
    checksum,
    first_tensor,
    hashes,
    ids_of,
    local_of,
    name_of,
    names_in,
    new_step,
    packed,
    sketch,
    tensors_by_name,
)

SAVE = torch.save  # before it notes what is saved
TRACED = "FakeTensor", "FunctionalTensor"  # what the compiler calls graphs with


def makes_states(optimizer: Any) -> bool:
    """Return whether a step has no rate and no gradients: what torch does to have a state to load into."""
    rates = [float(group.get("lr", 1)) for group in optimizer.param_groups]
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return not any(rates) and not any(bool(local_of(g).any()) for g in gradients)


class Recorder:
    """The trace of one process.

    Args:
        settings: ``folder``, ``steps``, ``modules`` (whether outputs are recorded), ``noise`` (None, or a seed:
            outputs of modules are changed by as much as their dtype rounds), ``stop`` (end the script after the steps),
            ``again`` (modules that run again in other ways), ``command`` (the script's).
    """

    def __init__(self, settings: dict[str, Any]):
        self.settings, self.n_steps = settings, settings.get("steps", 3)
        self.n_done = self.returned = self.depth = 0
        self.now = new_step()
        self.stack: list[int] = []
        self.held: dict[int, tuple[Any, list[Piece]]] = {}
        self.named: dict[str, int] = {}
        self.homes: dict[int, int] = {}  # by parameter, the model that holds it
        self.modules: dict[int, str] = {}
        self.buffers: list[tuple[nn.Module, str, str]] = []
        self.roots: dict[int, nn.Module] = {}
        self.copies = Copies()
        self.others: list[str] = []
        self.began = time.time()
        self.stepped: set[int] = set()
        self.met = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.generator = torch.Generator().manual_seed(settings.get("noise") or 0)
        self.sketched: dict[int, tuple[Any, int, dict[str, Any]]] = {}
        self.seen: dict[str, tuple[Any, dict[str, Any]]] = {}
        self.versions: dict[int, int] = {}
        self.by_hand: bool | None = None
        self.closed = self.compiles = self.cuts = self.is_written = False
        self.arrived: dict[int, tuple[Tensor | None, Tensor | None]] = {}

    # --- forward

    def entered(self, module: nn.Module, args: Any) -> None:
        if self.closed or in_backward() or self.depth or in_transform():
            self.now["unseen"] = self.now["unseen"] or in_transform()
            return
        if not self.stack:
            if torch.is_grad_enabled():
                self.find_step(module)
                if self.stepped:
                    self.finish_step()
            self.roots[id(module)] = module
            self.sketched = {}
        self.stack.append(id(module))
        if len(self.stack) > 1 and torch.is_grad_enabled() and self.settings.get("modules", True):
            given = first_tensor(args)
            if given is not None and is_here(given) and given.dim() and given.numel():
                event = {"module": id(module), "call": len(self.now["calls"]) + 1, "keep": module, "is_input": True}
                self.now["forward"].append({**event, "out": self.sketch(given)})

    def sketch(self, tensor: Tensor) -> dict[str, Any]:
        """Describe an output or input, once in an outermost call."""
        seen, version, found = self.sketched.get(id(tensor), (None, -1, {}))
        if seen is None or seen() is not tensor or version != tensor._version:
            found = sketch(tensor)
            self.sketched[id(tensor)] = weakref.ref(tensor), tensor._version, found
        return found

    def ended(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if self.closed or in_backward() or self.depth or in_transform():
            return None
        if id(module) in self.stack:
            while self.stack.pop() != id(module):
                pass
        is_root = not self.stack
        tensor, changed = first_tensor(output), None
        if not torch.is_grad_enabled() or not self.settings.get("modules", True) or type(tensor).__name__ in TRACED:
            return None
        is_empty = tensor is None or tensor.dim() == 0 or tensor.numel() == 0 or tensor.is_meta
        if not is_empty and self.settings.get("noise") is not None and any(True for _ in module.parameters(False)):
            tensor = first_tensor(changed := self._noisy(output))
        if is_root:
            given = tensors_by_name(args, "") | tensors_by_name(kwargs, "")
            inputs = {
                name: {"rows": hashes(t), "shape": list(t.shape), "dtype": str(t.dtype)[6:], "ids": ids_of(t)}
                for name, t in given.items()
                if t.dim() and t.numel() and not t.is_meta
            }
            rows = hashes(tensor) if tensor is not None and tensor.dim() and not tensor.is_meta else []
            self.now["calls"].append({"module": id(module), "inputs": inputs, "gives": rows})
        if is_empty:
            return None
        assert tensor is not None
        self.now["short"] = self.now["short"] or (is_root and is_short(tensor))
        found = self.sketch(tensor)
        event = {"module": id(module), "call": len(self.now["calls"]) + (not is_root), "out": found, "keep": module}
        self.now["forward"].append(event)
        if tensor.requires_grad:
            tensor.register_hook(without_harm(self, partial(self.came_back, event)))
        return changed

    def came_back(self, event: dict[str, Any], gradient: Tensor | None) -> None:
        """Note the gradient that comes back to an output; None comes through DDP's sink to an unused one."""
        if gradient is not None and not self.closed and "back" not in event:
            event["order"] = self.returned
            self.returned += 1
            event["back"] = sketch(gradient)

    def failed(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forget the outermost call that a module's exception ends; of other modules, that they are entered."""
        if id(module) in self.stack:  # else it has ended
            while self.stack.pop() != id(module):
                pass
            n = len(self.now["calls"])
            for key in ("forward", "targets", "sights") if not self.stack else ():
                self.now[key] = [event for event in self.now[key] if event["call"] <= n]

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
        if self.closed or self.depth > 1 or makes_states(optimizer):
            return
        self.by_hand = False
        if id(optimizer) in self.stepped:
            self.finish_step()
        if self.closed:
            return
        self._meet()
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        if self.find_names(stepped) or not self.now["before"]:
            known = self.now["before"] if self.stepped else {}  # before the optimizers that have stepped already
            self.now["before"] = {name: known.get(name, entry) for name, entry in self.parameters().items()}
        if not self.stepped:  # of parameters that no optimizer steps here, too
            own = {id(p) for p in stepped}
            for name, (tensor, piece) in self._by_name().items():
                if tensor.grad is not None and id(tensor) not in own:
                    self.now["gradients"][name] = piece.record(tensor.grad)
        self.find_sent()
        self.stepped.add(id(optimizer))
        self.is_written = False
        for group in optimizer.param_groups:
            rates = {key: float(value) for key, value in group.items() if isinstance(value, (int, float))}
            rates |= {"betas": list(map(float, group["betas"]))} if "betas" in group else {}
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None:
                    self.versions[id(parameter)] = gradient._version
                for piece in self.held.get(id(parameter), (None, []))[1]:
                    self.now["gradients"][piece.name] = None if gradient is None else piece.record(gradient)
                    self.now["rates"][piece.name] = rates

    def _meet(self) -> None:
        if dist.is_available() and dist.is_initialized():  # at exit there may be no group any more
            self.met = dist.get_rank(), dist.get_world_size()

    def find_step(self, module: nn.Module | None = None) -> None:
        """Take changes of parameters since gradients came for a step, where no optimizer is one of torch.optim's."""
        if self.by_hand is None:
            self.by_hand = not any(issubclass(type(found), torch.optim.Optimizer) for found in gc.get_objects())
        if not self.by_hand or self.closed:
            return
        self._meet()
        before, now = self.now["before"], self.parameters()
        if self.arrived and any(name in before and now[name] is not before[name] for name in now):
            for name, (tensor, piece) in self._by_name().items():
                given, copied = self.arrived.get(id(tensor), (None, None))
                gradient = given if tensor.grad is None else tensor.grad
                if gradient is not None and copied is not None and not bool(local_of(gradient).any()):
                    gradient = copied  # it is zeroed for the next step already
                if gradient is not None:
                    self.now["gradients"][name] = piece.record(gradient)
                if gradient is not None or now[name] is not before.get(name):  # else another stage's
                    self.now["rates"][name] = {}
            self.now["after"], self.stepped, self.arrived = now, {id(self)}, {}
            if module is not None:
                self.finish_step()
        else:
            self.now["before"] = now
        known = self.held.keys() | ()
        if module is None or self.closed or not self.find_names([*module.parameters()]):
            return
        self.now["before"] = self.parameters()
        for key, (tensor, _) in self.held.items():
            if tensor.is_leaf and tensor.requires_grad and key not in known:
                tensor.register_post_accumulate_grad_hook(without_harm(self, self._arrive))

    def _arrive(self, parameter: Tensor) -> None:
        gradient = parameter.grad  # None where another hook has moved it elsewhere
        self.arrived[id(parameter)] = gradient, None if gradient is None else gradient.detach().clone()

    def gave(self, found: Any, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> None:
        """Note gradients that torch.autograd.grad returns, added up until a step."""
        if self.closed or self.by_hand is False or in_transform():
            return
        for parameter, gradient in zip([inputs] if isinstance(inputs, Tensor) else inputs, found, strict=False):
            if id(parameter) in self.held and gradient is not None:
                known, _ = self.arrived.get(id(parameter), (None, None))
                total = gradient.detach() + (0 if known is None else known.detach())
                self.arrived[id(parameter)] = total, total

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.depth -= 1
        if self.closed or self.depth or id(optimizer) not in self.stepped:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter) or {}  # ZeRO keeps a None for what other ranks step
                gradient = parameter.grad
                written = gradient is not None and self.versions.get(id(parameter)) != gradient._version
                for piece in self.held.get(id(parameter), (None, []))[1]:
                    if written and (again := piece.record(gradient))["norm"]:  # a hook that ran after ours reduced it
                        self.now["gradients"][piece.name] = again
                    self.now["state"][piece.name] = {
                        key: piece.record(value) if value.shape == parameter.shape else record(value)
                        for key, value in state.items()
                        if isinstance(value, Tensor)
                    }
        self.now["after"] = self.parameters()
        self.write()

    def parameters(self) -> dict[str, dict[str, Any]]:
        """Describe all parameters; one that has the same bits as the last time is not described again."""
        return {name: self._described(name, *held) for name, held in self._by_name().items()}

    def _described(self, name: str, tensor: Any, piece: Piece) -> dict[str, Any]:
        mark = id(tensor), checksum(tensor)
        if name not in self.seen or self.seen[name][0] != mark:
            self.seen[name] = mark, piece.record(tensor)
        return self.seen[name][1]

    def _by_name(self) -> dict[str, tuple[Any, Piece]]:
        every = ((key, tensor, piece) for key, (tensor, pieces) in self.held.items() for piece in pieces)
        return {piece.name: (tensor, piece) for key, tensor, piece in every if self.named.get(piece.name) == key}

    def inside(self) -> bool:
        """Return whether a module's forward runs, for the first time or again in a backward."""
        is_on = not (self.closed or self.depth or in_transform()) and torch.is_grad_enabled()
        return is_on and (in_backward() or bool(self.stack))

    def attends(self, tensor: Any) -> bool:
        """Return whether attention on a tensor is a module's forward, for the first time."""
        is_first = self.inside() and not in_backward() and self.settings.get("modules", True)
        return is_first and isinstance(tensor, Tensor) and is_here(tensor) and not tensor.is_nested

    def sees(self, counts: Tensor, scale: float = 0.0) -> None:
        """Note how many keys each query of the innermost module sees, (rows, queries), and what scales its scores."""
        call = len(self.now["calls"]) + 1
        self.now["sights"].append({"module": self.stack[-1], "call": call, "counts": counts, "scale": scale})

    def sent(self, kind: str, args: tuple[Any, ...]) -> None:
        """Note a collective, and the module whose forward it is in."""
        if not self.closed and len(self.now["sent"]) < MOST_COLLECTIVES:
            phase = "backward" if in_backward() else "step" if self.depth else "forward" if self.stack else ""
            module = self.stack[-1] if phase == "forward" else 0
            event = {"module": module, "call": len(self.now["calls"]) + 1, "phase": phase}
            self.now["sent"].append(event | describe(kind, args))

    def find_sent(self) -> None:
        """Name the parameters that collectives have sent, or their gradients, while both are where they were."""
        if new := [event for event in self.now["sent"] if "of" not in event]:
            homes: dict[Any, list[str]] = {}
            for name, (tensor, _) in self._by_name().items():
                for held in (tensor, *([] if tensor.grad is None else [tensor.grad])):
                    homes.setdefault(storage(held), []).append(name)
            homes.pop(None, None)
            for event in new:
                settle(event, homes)

    def drew(self, generator: torch.Generator | None) -> dict[str, Any]:
        """Note the state of a generator that is about to draw."""
        module = self.stack[-1] if self.stack and not in_backward() else 0
        draw = {"module": module, "state": state_of(generator), "again": in_backward()}
        self.now["draws"].append(draw)
        return draw

    def drew_outside(self, generator: torch.Generator | None, what: str = "drawn") -> None:
        """Note the state of a generator that is about to draw for rows, or for anything else outside of a model."""
        if not self.closed and not self.stack and len(self.now[what]) < MOST_TARGETS:
            self.now[what].append(state_of(generator))

    def kept(self, norms: str, names: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Note the norms of the tensors, and the names, in what is written to a file or taken as a state."""
        if not self.closed and not self.depth and kwargs.get("destination") is None:
            tensors = tensors_by_name(value, "").values()
            found = [float(local_of(t).double().norm()) for t in tensors if not t.is_meta and t.numel()]
            self.now[norms] = [*self.now[norms], *found][-MOST_TARGETS:]
            self.now[names] = sorted({*self.now[names], *names_in(value)})[:MOST_TARGETS]

    def loaded(self, *args: Any, **kwargs: Any) -> None:
        """Note that a file is read, before or after the step's optimizers; a tensor that is unpickled is none."""
        if not any(frame.name == "_load_from_bytes" for frame in traceback.extract_stack(limit=8)):
            self.now["loaded"].append("after" if self.stepped or self.arrived else "before")

    def finish_step(self) -> None:
        """Close the step whose optimizers have all stepped, and note what the next one begins with."""
        left = self.write_left()
        self.n_done += 1
        self.now, self.stepped, self.roots, self.is_written = new_step(), set(), {}, False
        self.now["before"] = left
        if self.n_done >= self.n_steps:
            self.closed = True
            if self.compiles:
                torch.compiler.reset()  # graphs hold what stood in for dropout
            if self.settings.get("stop"):
                raise SystemExit(0)

    def find_names(self, stepped: list[Any]) -> bool:
        """Name all parameters by the outermost modules that hold those which an optimizer steps; say if any is new."""
        wanted = {id(p) for p in stepped if id(p) not in self.held}
        if not wanted:  # perhaps a model that gave its names to a successor, and takes turns with it
            own = {self.named.get(piece.name) for p in stepped for piece in self.held[id(p)][1]}
            homes = {self.homes.get(id(p)) for p in stepped if id(p) not in own} - {None}
            back = {piece.name: key for key, home in self.homes.items() if home in homes for piece in self.held[key][1]}
            self.named |= back
            return bool(back)
        every = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
        children = {id(child) for module in every for child in module._modules.values() if child is not None}
        outer = [module for module in every if id(module) not in children]
        held = {id(top): {id(p) for p in top.parameters()} for top in outer}
        for top in outer:
            held[id(top)] |= {key for m in top.modules() for key in pieces_of(m, "")}
        tops = [top for top in outer if held[id(top)] & wanted]
        if not tops:  # the optimizer steps tensors of its own, of a model that is new
            tops = [top for top in outer if id(top) in self.roots and held[id(top)] - self.held.keys()]
        tops.sort(key=lambda top: next((n for n, p in enumerate(stepped) if id(p) in held[id(top)]), 0))
        tops.sort(key=lambda top: (-len(held[id(top)] & wanted), -len(held[id(top)])))
        for top in tops:
            self._name(top)
        self.copies.find((m for m in outer if not held[id(m)] & self.held.keys()), self._by_name())
        succeeds = bool(tops)
        for number, p in enumerate(stepped):
            if id(p) not in self.held:
                name = name_of(p) or f"parameter {number}"
                while name in self.named and not (succeeds and name not in self.now["rates"]):
                    name += "'"
                self.held[id(p)], self.named[name] = (p, [Piece(name)]), id(p)
        return True

    def _name(self, top: nn.Module) -> None:
        """Name a model; a second one that is in use at the same time gets a prefix, a successor the same names."""
        found: dict[int, tuple[Any, list[Piece]]] = {}
        modules: dict[int, str] = {}
        walk(top, "", found, modules)
        new = {key: value for key, value in found.items() if key not in self.held}
        rivals = {self.named[p.name] for _, pieces in new.values() for p in pieces if p.name in self.named}
        # parameters of models that this step calls; not of one that a file is read in place of
        uses = {key: {id(p) for p in root.parameters()} for key, root in self.roots.items()}
        calls = [uses.get(call["module"], set()) for call in self.now["calls"]]
        begun = next((n for n, used in enumerate(calls) if used & new.keys()), 0) if self.now["loaded"] else 0
        if rivals & set().union(*calls[begun:], *(() if begun else uses.values())):
            inner = top
            while (key := next((k for k in wrapped_under(inner) if k in inner._modules), None)) is not None:
                inner = inner.get_submodule(key)
            prefix = f"{type(inner).__name__}."
            self.others.append(prefix.rstrip("."))
            new = {key: (t, [replace(p, name=prefix + p.name) for p in pieces]) for key, (t, pieces) in new.items()}
            modules = {key: (prefix + name).rstrip(".") for key, name in modules.items()}
        elif rivals:  # what the model before had, and this one has not, is gone
            gone = {self.homes.get(key, 0) for key in rivals}
            self.named = {name: key for name, key in self.named.items() if self.homes.get(key) not in gone}
        for key, name in modules.items():
            self.modules.setdefault(key, name)
        self.buffers = [entry for entry in self.buffers if not modules.keys() or entry[2] not in modules.values()]
        for module in top.modules():
            self.buffers += [(module, key, f"{modules[id(module)]}.{key}".strip(".")) for key in module._buffers]
        for key, (tensor, pieces) in new.items():
            self.held[key], self.homes[key] = (tensor, pieces), id(top)
            self.named |= {piece.name: key for piece in pieces}

    # --- write

    def write(self) -> None:
        """Write the step, or what it has got since its optimizers stepped; modules get their names only now."""
        if not self.now["after"]:
            return
        rank, world = self.met

        def named(event: dict[str, Any]) -> dict[str, Any]:
            name = self.modules.get(event["module"])
            kept = {key: value for key, value in event.items() if key not in ("keep", "is_input")}
            suffix = INPUT * event.get("is_input", False)
            return {"back": None, "order": -1, **kept, "module": (name or "") + suffix, "known": name is not None}

        self.find_sent()
        step = {
            **self.now,
            **{key: [*map(named, self.now[key])] for key in ("sent", "calls", "forward", "draws", "sights")},
        }
        if self.is_written:
            step = {key: value for key, value in step.items() if key not in AT_STEP}
        content = {"format": FORMAT, "rank": rank, "world": world, "process": os.getpid(), "began": self.began}
        content |= {"time": time.time(), "others": self.others, "step": step, "command": self.settings.get("command")}
        content |= {"cut": self.cuts and self.settings.get("modules", True)}
        os.makedirs(self.settings["folder"], exist_ok=True)
        name = f"rank-{rank:05d}-{os.getpid()}-{self.n_done:06d}{REST * self.is_written}.pt"
        path = os.path.join(self.settings["folder"], name)
        SAVE(packed(content), path + ".partial")
        os.replace(path + ".partial", path)
        self.is_written = True

    def write_left(self) -> dict[str, dict[str, Any]]:
        """Note what the step left after its optimizers, write it, and return the parameters."""
        left, after = self.parameters(), self.now["after"]
        self.now["left"] = {name: None if entry is after.get(name) else entry for name, entry in left.items()}
        found = {name: module._buffers.get(key) for module, key, name in self.buffers}
        self.now["buffers"] = {
            name: record(b) for name, b in found.items() if b is not None and b.is_floating_point() and b.numel()
        }
        self.now["copies"] = [  # what the script keeps of the parameters beside them
            {"owner": owner, "held": {name: self._described(f"{name} of copy {n}", *at) for name, at in held.items()}}
            for n, (owner, held) in enumerate(self.copies.now(self._by_name()))
        ]
        self.write()
        return left

    def at_exit(self) -> None:
        """Write what the last step left, and that the process ended as Python ends."""
        if os.path.isdir(self.settings["folder"]):
            open(os.path.join(self.settings["folder"], f"rank-{self.met[0]:05d}-{os.getpid()}-ended"), "w").close()
        if not self.closed and not self.now["after"]:
            self.find_step()
        if not self.closed and self.now["after"]:
            self.write_left()


def state_of(generator: torch.Generator | None) -> str:
    state = (generator or torch.default_generator).get_state()
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()


def is_here(tensor: Tensor) -> bool:
    """Return whether a tensor has numbers."""
    return not tensor.is_meta and type(tensor).__name__ not in TRACED


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def in_transform() -> bool:
    """Return whether a transform of torch.func calls, whose tensors have no storage."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined]


MOST_TARGETS = 4096
"""Targets of a call that are recorded, and draws of a step; of a call with more, rows are not compared."""
LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "binary_cross_entropy_with_logits", "kl_div", "l1_loss")


def install() -> None:
    """Set the hooks; note the targets of torch's losses, draws of random numbers, and what is saved and loaded."""
    recorder = Recorder(json.loads(os.environ["MESHWRIGHT_OBSERVE"]))
    cuts = recorder.settings.get("modules", True)

    def apart(note: Any) -> Any:  # the public way imports the compiler at once
        return getattr(torch, "_disable_dynamo", torch.compiler.disable)(without_harm(recorder, note))

    def quiet(note: Any) -> Any:
        """Keep a note out of compiled graphs: they are cut there, or left whole and unseen inside."""
        outside = apart(note)

        def unless_whole(*args: Any, **kwargs: Any) -> Any:
            return None if torch.compiler.is_compiling() else outside(*args, **kwargs)

        return outside if cuts else unless_whole

    note_compilation(recorder, cuts)
    if dist.is_available():
        note_collectives(apart(recorder.sent))

    watchers = [recorder, Reruns(again, recorder)] if (again := recorder.settings.get("again")) else [recorder]
    for watcher in watchers:
        nn.modules.module.register_module_forward_pre_hook(quiet(watcher.entered))
        nn.modules.module.register_module_forward_hook(quiet(watcher.ended), with_kwargs=True)
    nn.modules.module.register_module_forward_hook(quiet(recorder.failed), always_call=True)
    register_optimizer_step_pre_hook(apart(recorder.before_step))
    register_optimizer_step_post_hook(apart(recorder.after_step))
    functional = torch.nn.functional

    def note_target(input: Any, target: Any = None, *args: Any, **kwargs: Any) -> None:
        is_seen = isinstance(target, Tensor) and is_here(target)
        if is_seen and not (recorder.closed or in_backward() or in_transform()):
            flat = local_of(target).detach().reshape(-1)[:MOST_TARGETS].to("cpu", torch.float64)
            call = len(recorder.now["calls"]) + bool(recorder.stack)
            recorder.now["targets"].append({"call": call, "shape": list(local_of(target).shape), "flat": flat})

    for name in LOSSES:
        before(functional, name, quiet(note_target))
    keep_identity(functional, ATTENTION)
    if cuts:
        count_keys(recorder)
    note_draws(recorder, quiet)
    before(torch, "save", quiet(partial(recorder.kept, "saved", "keys")))
    before(torch, "load", quiet(recorder.loaded))
    after(torch.autograd, "grad", quiet(recorder.gave))
    kinds = [c for c in vars(torch.optim.lr_scheduler).values() if hasattr(c, "load_state_dict")]
    for kind in {nn.Module, torch.optim.Optimizer, *kinds}:  # some schedules have methods of their own
        if "load_state_dict" in vars(kind):
            before(kind, "load_state_dict", quiet(recorder.loaded))
        if "state_dict" in vars(kind):
            after(kind, "state_dict", quiet(partial(recorder.kept, "taken", "names")))
    atexit.register(recorder.at_exit)

    def forked() -> None:  # a child of a process that trains is no rank
        recorder.began = time.time()
        recorder.closed = recorder.closed or recorder.n_done > 0 or bool(recorder.now["after"])

    os.register_at_fork(after_in_child=forked)
