"""Recompute activations (arXiv 1604.06174, 2205.05198), keep them in host memory (2104.07857), and compile blocks.

On an accelerator the copies run on a stream of their own, from and to pinned memory: a block's activations leave while
the next block computes, and the previous block's are fetched while this block's backward runs. On the CPU they are
plain copies.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from meshwright.core.devices import is_accelerator
from meshwright.core.errors import ConfigError, UnsupportedError, nearest
from meshwright.core.record import note, wrap
from meshwright.core.torch_private import (
    compiled_call,
    forward_hooks,
    graph_break_counts,
    has_no_values,
    set_compiled_call,
    version_of,
    with_activation_budget,
)
from meshwright.distributed.memory.live import addresses, storage_of, tensors_in
from meshwright.planning.plan import Plan

from .kept import OperatorPolicy, contexts, leaving, streams

# --- name the modes of activation checkpointing


class ActivationCheckpointing(StrEnum):
    """The modes: which activations are recomputed in backward, or offloaded."""

    NONE = "none"
    FULL = "full"
    """Recompute every repeated block."""
    SELECTIVE = "selective"
    """Recompute attention only."""
    EVERY_N = "every_n"
    """Recompute each second block."""
    MODULES = "modules"
    """Recompute the named modules."""
    SELECTIVE_OP = "selective_op"
    """Recompute every block, but save attention products, each second matrix product, exchanges, and routing."""
    OFFLOAD = "offload"
    """Recompute nothing; store in host memory what blocks save for backward."""
    MEMORY_BUDGET = "memory_budget"
    """Recompute what the compiler chooses."""
    # KempnerForge spells its three members like their values.
    none = "none"
    full = "full"
    selective = "selective"


def checkpointing_mode(mode: ActivationCheckpointing | str) -> ActivationCheckpointing:
    """Return the mode with this name. Raises ConfigError for an unknown name."""
    try:
        return ActivationCheckpointing(mode)
    except ValueError:
        legal = [m.value for m in ActivationCheckpointing]
        raise ConfigError(
            f"activation checkpointing '{mode}' is not a mode.{nearest(str(mode), legal)} Legal: {', '.join(legal)}."
        ) from None


# --- store activations in host memory

OFFLOADED = "activations in host memory"
"""The change that is noted on a module."""
LEAST_BYTES = 1024
"""Smallest size of an offloaded tensor; smaller ones stay on the device."""

notice: ContextVar[Callable[[Tensor], None] | None] = ContextVar("notice", default=None)
"""Called with each copy in host memory: a dry run has one memory for both."""

Key = tuple[Any, ...]


class Copies:
    """Copies tensors to host memory and back: on an accelerator concurrently with the computation, else at once."""

    def __init__(self) -> None:
        self._stream: torch.Stream | None = None

    def leave(self, tensor: Tensor) -> Tensor:
        """Return a copy in host memory, complete after ``mark``'s event."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=is_accelerator(tensor.device))
        if (call := notice.get()) is not None:
            call(host)
        with self._beside(tensor):
            host.copy_(tensor, non_blocking=True)
        return host

    def come(self, host: Tensor, device: torch.device) -> Tensor:
        """Return a copy on the device, complete after ``mark``'s event."""
        back = torch.empty_like(host, device=device)
        with self._beside(back):
            back.copy_(host, non_blocking=True)
        if self._stream is not None:
            back.record_stream(self._stream)  # the tensor may be dropped before the copy ends
        return back

    def mark(self) -> torch.Event | None:
        """Record an event after all copies begun so far."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, event: torch.Event | None) -> None:
        """Make later computation wait for ``event``: it may then read the copies, and overwrite their sources."""
        if self._stream is not None and event is not None:
            torch.get_device_module(self._stream.device).current_stream().wait_event(event)

    def _beside(self, tensor: Tensor) -> AbstractContextManager[Any]:
        if not is_accelerator(tensor.device):
            return nullcontext()
        module = torch.get_device_module(tensor.device)
        stream = self._stream = self._stream or module.Stream(tensor.device)
        stream.wait_stream(module.current_stream())
        return module.stream(stream)


@dataclass
class Slot:
    """A saved tensor: its copy in host memory, and the original while that is needed."""

    host: Tensor
    place: torch.device
    version: int
    here: Tensor | None


@dataclass(eq=False)
class BlockForward:
    """The tensors saved by one forward of one block; ``before``: those of the block before, in the same forward.

    ``left`` and ``came`` are events after the copies to host memory, and back.
    """

    number: int
    before: BlockForward | None
    copies: Copies
    slots: dict[Key, Slot] = field(default_factory=dict)
    left: torch.Event | None = None
    came: torch.Event | None = None
    is_here: bool = True

    def keep(self, tensor: Tensor) -> Key:
        """Copy the tensor to its slot and return the slot's key; the same tensor has one slot."""
        version = version_of(tensor)
        layout = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        key = (id(storage_of(tensor)), version, *layout)
        if key not in self.slots:  # the slot holds its tensor until the block ends, so no other tensor gets its address
            self.slots[key] = Slot(self.copies.leave(tensor), tensor.device, version, tensor)
        return key

    def release(self) -> None:
        """Drop the tensors on the device, after the copies ended: the next block's forward has ended too."""
        self.copies.wait(self.left)
        for slot in self.slots.values():
            slot.here = None
        self.is_here = False

    def fetch(self) -> None:
        """Begin to copy the tensors back to the device; those still there may be freed once their copies ended."""
        if self.is_here:
            self.copies.wait(self.left)
            self.left = None
        else:
            self.is_here = True
            for slot in self.slots.values():
                self._bring(slot)
            self.came = self.copies.mark()

    def _bring(self, slot: Slot) -> None:
        slot.here = self.copies.come(slot.host, slot.place)
        slot.version = version_of(slot.here)

    def take(self, key: Key) -> Tensor:
        """Return a tensor for the block's backward, and begin to fetch those of the previous block."""
        self.fetch()
        self.copies.wait(self.came)
        if self.before is not None:
            self.before.fetch()
            self.before = None
        slot = self.slots[key]
        assert slot.here is not None
        if version_of(slot.here) != slot.version:  # code has written into the tensor since
            self._bring(slot)
            self.copies.wait(self.copies.mark())
        return slot.here


class HostActivations:
    """The host memory of one model part, whose blocks are numbered in the order of their forwards."""

    def __init__(self) -> None:
        self._copies = Copies()
        self._last: weakref.ref[BlockForward] | None = None

    def begin(self, number: int) -> BlockForward:
        last = self._last and self._last()
        before = last if last is not None and last.number == number - 1 else None
        return BlockForward(number, before, self._copies)

    def end(self, passage: BlockForward) -> None:
        """End a block's forward: from now on the tensors of the previous block are in host memory only."""
        passage.left = self._copies.mark()
        if (last := self._last and self._last()) is not None:
            last.release()
        self._last = weakref.ref(passage)


def offload(module: nn.Module, number: int, store: HostActivations) -> None:
    """Make one block store the tensors that it saves for backward in host memory.

    Tensors that stay in memory anyway are not offloaded: parameters and their views, buffers, arguments without
    gradient (masks, tables). Nor are small tensors, or tensors of other types than plain ones.
    """
    forward = module.forward

    def offloaded_forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        given = addresses(t for t in tensors_in((args, kwargs)) if not t.requires_grad)
        passage = store.begin(number)

        def pack(tensor: Tensor) -> Tensor | tuple[BlockForward, Key]:
            stays = (
                not (type(tensor) is Tensor or has_no_values(tensor))
                or tensor.numel() * tensor.element_size() < LEAST_BYTES
            )
            if stays or (address := id(storage_of(tensor))) in given:
                return tensor
            # parameters, those gathered by a sharded unit inside among them, and buffers
            if address in addresses(chain(module.parameters(), module.buffers())):
                return tensor
            return passage, passage.keep(tensor.detach())

        def unpack(saved: Tensor | tuple[BlockForward, Key]) -> Tensor:
            return saved if isinstance(saved, Tensor) else saved[0].take(saved[1])

        with saved_tensors_hooks(pack, unpack):
            output = forward(*args, **kwargs)
        store.end(passage)
        return output

    wrap(module, offloaded_forward, OFFLOADED)


# --- recompute activations in backward

RECOMPUTED = "recomputed"
"""The change that is noted on a module."""


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Recompute the planned modules in place, or offload the tensors that they save to host memory.

    Names do not change, and random states are preserved.
    """
    if plan.activation_checkpointing == "offload":
        store = HostActivations()
        for number, name in enumerate(plan.checkpointed):
            offload(model.get_submodule(name), number, store)
        return model
    policy = OperatorPolicy(plan.checkpoint_keep, plan.checkpoint_keep_every) if plan.checkpoint_keep else None
    for name in plan.checkpointed:
        recompute(model.get_submodule(name), policy)
    return model


def recompute(module: nn.Module, policy: OperatorPolicy | None = None) -> None:
    """Make a module recompute its activations in backward.

    A call through which no gradient flows (a frozen module on frozen inputs) is not checkpointed: it saves nothing
    anyway. A policy chooses results that are saved.
    """
    options = {} if policy is None else {"context_fn": functools.partial(contexts, policy)}

    forward = module.forward

    region = forward
    if policy is not None:
        region = functools.wraps(forward)(lambda *args, **kwargs: leaving(forward(*args, **kwargs)))

    def recomputed_forward(*args: Any, **kwargs: Any) -> Any:
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        flows = any(t.requires_grad for t in tensors) or any(p.requires_grad for p in module.parameters())
        if not (torch.is_grad_enabled() and flows):
            return forward(*args, **kwargs)
        return checkpoint(region, *args, use_reentrant=False, **options, **kwargs)

    wrap(module, recomputed_forward, RECOMPUTED)


# --- compile repeated blocks one at a time and in place: names stay, equal blocks share a graph


def compile_blocks(model: nn.Module, plan: Plan) -> nn.Module:
    """Compile the planned modules in place; torch compiles each at its first call.

    A plan may limit the activations that a module's compiled calls save for backward to a fraction. The partitioner
    chooses them (min cut, arXiv 2302.05442, and a knapsack over the costs). It would recompute random operators with
    other numbers (torch 2.13 on the CPU), so a block that draws random numbers is refused in its first forward.
    """

    def within(budget: float, compiled: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        @functools.wraps(compiled)
        def call_within(*args: Any, **kwargs: Any) -> Any:
            before = streams()
            with with_activation_budget(budget):
                output = compiled(*args, **kwargs)
            after = streams() if torch.is_grad_enabled() else {}
            if any(not torch.equal(state, before[device]) for device, state in after.items() if device in before):
                raise UnsupportedError(
                    f"techniques.activation_checkpointing = memory_budget: {type(module).__name__} draws random"
                    f" numbers, and the compiler could draw others when it recomputes. Use selective_op or full, or"
                    f" switch dropout off."
                )
            return output

        return call_within

    for name in plan.compiled:
        module = model.get_submodule(name)
        keep_hooks_eager(module)
        module.compile(**dict(plan.compile_options))
        note(module, "compiled")
        if (budget := plan.activation_memory_budget) is not None:
            compiled = compiled_call(module)
            assert compiled is not None
            set_compiled_call(module, within(budget, compiled, module))
    return model


def keep_hooks_eager(module: nn.Module) -> None:
    """Exclude the hooks of earlier techniques on the module itself from compilation.

    torch would compile each of them alone, and anew for every number that it holds (a seed, a length).
    """
    for hooks in forward_hooks(module):
        for key, hook in hooks.items():
            hooks[key] = torch.compiler.disable(hook)


def graph_breaks_text() -> str:
    """Return the graph breaks of all modules compiled in this process, for people; empty if there are none."""
    found: dict[str, int] = {}  # by reason, in torch's words
    for reason, times in graph_break_counts().items():
        what, *more = [line.strip() for line in reason.splitlines() if line.strip()]
        why = next((line.removeprefix("Explanation: ") for line in more if line.startswith("Explanation: ")), "")
        text = f"{what} ({why})" if why else what
        found[text] = found.get(text, 0) + times
    lines = [f"  {times} × {reason}" for reason, times in sorted(found.items(), key=lambda one: -one[1])]
    title = "compiled blocks fall apart into several graphs (what is between them runs uncompiled):"
    return "\n".join([title, *lines]) if lines else ""
