"""Give weights the values of their law, their constructor or their modules' own reset: bitwise equal on all layouts.

By a law, that of meshwright's own decoder, a parameter's values are a function of (seed, global name, position): a rank
draws the blocks that overlap its shard (``draw_rows``), so its peak is its own share plus one block.

Of a model that was built on meta by its modules, initialisation elsewhere in its constructor is lost. Children come
before parents, as in a constructor; torch's generator is seeded by (seed, path of the module) for each, on unsharded
stand-ins on the CPU, so that one module at a time is whole.

A constructor's recorded steps (``introspection/constructor``) are replayed for the parameters of which a rank holds a
shard. Up to ``STREAM_ELEMENTS`` elements, all random steps share one stream, and the weights are those of one process.
In a larger model every rank would draw the whole model for its share, so each random step draws by (seed, name,
position): the same distributions, and the same values on every layout.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.names import clean, owner
from meshwright.core.record import recall
from meshwright.core.torch_private import resetting
from meshwright.distributed.nf4 import Rounded, pack, unpack
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import get_world_info, ranks_per_node
from meshwright.distributed.torch_private import DTensorSpec, TensorMeta, local_part
from meshwright.distributed.weights.shards import apply_to_tensors, draw_rows, pieces, seed_of, whole_everywhere
from meshwright.introspection.adapted_model import base_name, host_of_magnitude, is_adapter
from meshwright.introspection.constructor import (
    STREAM_ELEMENTS,
    ConstructorSteps,
    NotRecordedError,
    Step,
    Values,
    View,
    built,
    pass_over,
    record,
    seeded,
    unwritten,
)
from meshwright.introspection.module_kinds import brings_initialiser, build_again
from meshwright.introspection.source import builder_of
from meshwright.planning.values import plain_shape


class Destinations:
    """The tensors of models as writers of values see them: weights that rest in 4 bits are plain ones.

    Only one of those exists in its plain form at a time, and only this rank's shard of it; more where several
    initialisers write them.
    """

    def __init__(self, *models: nn.Module):
        found = ((module, recall(module, Rounded)) for model in models for module in model.modules())
        self._begun: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._plain = {id(layer._parameters["weight"]): plain.dtype for layer, plain in found if plain is not None}

    def is_packed(self, tensor: Tensor) -> bool:
        return id(tensor) in self._plain

    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of the whole tensor's values."""
        if not self.is_packed(tensor):
            return tuple(tensor.shape)
        return plain_shape(tensor.shape)

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype of the tensor's values."""
        return self._plain.get(id(tensor), tensor.dtype)

    @contextmanager
    def opened(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yield the tensor to write values into, placed as ``tensor`` is; packed on exit, unless the body raises."""
        yield self.begun(tensor)
        self.close([id(tensor)])

    def begun(self, tensor: Tensor) -> Tensor:
        """Return the same tensor at each call until ``close``, for several writers of which each writes some values."""
        if not self.is_packed(tensor):
            return tensor
        if id(tensor) not in self._begun:
            here = local_part(tensor)
            values = torch.empty(plain_shape(here.shape), dtype=self._plain[id(tensor)], device=here.device)
            self._begun[id(tensor)] = here, values, self._placed_as(tensor, values)
        return self._begun[id(tensor)][2]

    def close(self, keys: Iterable[int]) -> None:
        """Pack what was written into the tensors with these ids."""
        for key in keys:
            if key in self._begun:
                here, values, _ = self._begun.pop(key)
                with torch.no_grad():
                    here.copy_(pack(values))

    def values_of(self, tensor: Tensor) -> Tensor:
        """Return a tensor's values, placed as the tensor is; the tensor itself if it does not rest in 4 bits."""
        if not self.is_packed(tensor):
            return tensor
        return self._placed_as(tensor, unpack(local_part(tensor).detach(), self.dtype_of(tensor)))

    def values(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the values of several tensors, by name."""
        return {name: self.values_of(tensor) for name, tensor in tensors.items()}

    def _placed_as(self, tensor: Tensor, values: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return values
        shape = torch.Size(self.shape_of(tensor))
        meta = TensorMeta(shape, (shape[1], 1), values.dtype)
        spec = DTensorSpec(tensor.device_mesh, tensor.placements, tensor_meta=meta)
        return type(tensor)(values, spec, requires_grad=False)


# --- initialise a model built on meta by its modules' ``reset_parameters``


def initialise_by_modules(
    model: nn.Module, seed: int, done: Collection[str] = (), *, buffers_only: bool = False
) -> set[str]:
    """Write every parameter and buffer in place (whole or sharded) that is not in ``done``; return the names written.

    With ``buffers_only``, parameters that modules with buffers of their own write are not reported.
    """
    written: set[str] = set()
    every = model.named_buffers() if buffers_only else (*model.named_parameters(), *model.named_buffers())
    wanted = {id(tensor): name for raw, tensor in every if (name := clean(raw)) not in done}
    asked: list[tuple[str, nn.Module, Callable[[], object]]] = []
    last: dict[int, nn.Module] = {}
    for raw, module in reversed(list(model.named_modules())) if wanted else ():
        held = [
            tensor for inner in module.modules() for tensor in (*inner._parameters.values(), *inner._buffers.values())
        ]
        is_asked = any(id(tensor) in wanted for tensor in held) and (module._buffers or not buffers_only)
        if is_asked and callable(reset := resetting(module)):
            asked.append((clean(raw), module, reset))
            last |= {id(tensor): module for tensor in held}
    destinations = Destinations(model)
    for path, module, reset in asked:
        found = _run(module, reset, seed_of(seed, path), destinations)
        written |= {wanted[key] for key in found if key in wanted}
        destinations.close(key for key, closing in last.items() if closing is module)
    left = [name for name in wanted.values() if name not in written]
    if left:
        path = owner(left[0])
        names = ", ".join(name.rpartition(".")[2] for name in left if owner(name) == path)
        other = (
            ""
            if builder_of(model) is not None
            else ", hand over the function that builds the model instead of the model"
        )
        raise UnsupportedError(
            f"module '{path or 'the model itself'}' ({type(model.get_submodule(path)).__name__}) was built on meta"
            f" and nothing initialises its {names}: give it a reset_parameters() that does{other}, or build the model"
            f" on the CPU with its weights"
        )
    return written


def _run(module: nn.Module, reset: Callable[[], object], seed: int, destinations: Destinations) -> set[int]:
    """Run one initialiser and copy the elements that it set; return the ids of the tensors that it set completely."""
    kept: list[tuple[dict, dict]] = []
    stand_ins: dict[int, Tensor] = {}
    places: list[tuple[Tensor, dict[str, Any], str]] = []  # each tensor, and where its stand-in is then
    for part in module.modules():
        for held in cast("list[dict[str, Any]]", [part._parameters, part._buffers]):
            kept.append((held, dict(held)))
            for name, tensor in list(held.items()):
                if tensor is None:
                    continue
                if id(tensor) not in stand_ins:
                    shape, dtype = destinations.shape_of(tensor), destinations.dtype_of(tensor)
                    blank = torch.full(shape, unwritten(dtype), dtype=dtype, device="cpu")
                    is_trained = held is part._parameters
                    stand_ins[id(tensor)] = nn.Parameter(blank, tensor.requires_grad) if is_trained else blank
                    places.append((tensor, held, name))
                held[name] = stand_ins[id(tensor)]
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(seed)
            reset()
        made = [(tensor, held[name].detach()) for tensor, held, name in places]
    finally:
        for held, before in kept:
            held.update(before)
    whole = set()
    for tensor, value in made:
        if value.is_floating_point() or value.is_complex():
            untouched = torch.isnan(value)
        else:
            untouched = value == unwritten(value.dtype)
        if untouched.all():
            continue
        for piece in pieces(destinations.begun(tensor)):
            local, cut = piece.local, piece.slices
            local.copy_(torch.where(untouched[cut].to(local.device), local, value[cut].to(local)))
        if not untouched.any():
            whole.add(id(tensor))
    return whole


def write_constructed(
    model: nn.Module, seed: int, draw_on: str | None = None, *, only: Collection[str] | None = None
) -> set[str]:
    """Write the constructor's values into a model on real memory; return the names written.

    A constructor is known for a model that a function, a class or a config built, and for each pretrained model of
    transformers inside. Other tensors are not written, nor are those of which a constructor leaves elements unwritten.
    Collective if a constructor cannot be recorded.

    Args:
        only: names of the parameters and buffers to write; adapters among them are then drawn as if nothing else were,
            as in a process that reads the others from files. None: all.
    """
    builders: list[tuple[str, Callable[[], nn.Module]]] = []
    if (build := builder_of(model)) is not None:
        builders.append(("", build))
    found: list[str] = []  # the outermost pretrained models inside
    for raw, module in model.named_modules():
        path = clean(raw)
        if brings_initialiser(module) and not any(outer == "" or path.startswith(f"{outer}.") for outer in found):
            found.append(path)
            kind = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
            builders.append((path, lambda kind=kind, config=module.config: build_again(kind, config)))
    written: set[str] = set()
    for path, build in builders:
        part = _Part(model, path, only)
        if all(part.full_name(name) in written or host_of_magnitude(name) for name in part.tensors):
            continue
        try:
            recording = record(build, seed)[1]
        except NotRecordedError as error:
            (_, local, world), kind = get_world_info(), type(part.modules[""]).__name__
            if world > 1 and local == 0:
                size = sum(tensor.numel() * tensor.element_size() for tensor in part.tensors.values())
                warnings.warn(
                    f"the constructor of {kind} cannot be recorded: {error}. So it runs whole on every rank, one of a"
                    f" node after the other, and takes memory for all weights there ({size / 2**30:.1f} GiB)",
                    stacklevel=2,
                )
            for turn in range(ranks_per_node() or world):  # each then holds a whole model
                action = lambda part=part, build=build: part.take(built(build, seed))  # noqa: E731
                agree.together(action, here=turn == local)
        else:
            part.check(recording)
            _carry_out(part, recording, seed, draw_on)
        written |= part.written
    return written


@dataclass
class _Part:
    """The model, or a module inside, that one constructor built.

    Attributes:
        written: names of the parameters and buffers that have their values.
    """

    model: nn.Module
    path: str
    only: Collection[str] | None
    written: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        module = self.model.get_submodule(self.path) if self.path else self.model
        self.modules = {clean(raw): inner for raw, inner in module.named_modules(remove_duplicate=False)}
        held = {clean(raw): tensor for raw, tensor in (*module.named_parameters(), *module.named_buffers())}
        wanted = held if self.only is None else {name for name in held if self.full_name(name) in self.only}
        self.tensors = {name: tensor for name, tensor in held.items() if name in wanted}
        self.destinations = Destinations(module)

    def check(self, recording: ConstructorSteps) -> None:
        """Raise UnsupportedError for a module with parameters that the constructor did not create."""
        for path, module in self.modules.items():
            if path not in recording.modules and any(tensor is not None for tensor in module._parameters.values()):
                raise UnsupportedError(
                    f"{self.full_name(path)} was put into {type(self.modules['']).__name__} behind its constructor, as"
                    f" adapters are, and is on meta, so its initial values are unknown. Build the model on the CPU"
                    f" with its weights, adapters included"
                )

    def full_name(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path and name else self.path or name

    def write(self, name: str, value: Tensor) -> None:
        with self.destinations.opened(self.tensors[name]) as tensor:
            for piece in pieces(tensor):
                piece.local.copy_(value[piece.slices])
        self.written.add(self.full_name(name))

    def take(self, twin: nn.Module) -> None:
        """Write the values of an equal model."""
        every = (*twin.named_parameters(remove_duplicate=False), *twin.named_buffers(remove_duplicate=False))
        there = {clean(raw): tensor for raw, tensor in every}
        for name in self.tensors.keys() & there.keys():
            self.write(name, there[name].detach())
        for path, inner in twin.named_modules():
            for attribute, value in vars(inner).items():
                if isinstance(value, Tensor):
                    self.keep(clean(path), attribute, value)

    def keep(self, path: str, attribute: str, value: Tensor) -> None:
        """Set a tensor attribute that is neither parameter nor buffer."""
        module = self.modules.get(path)
        if module is not None and isinstance(here := vars(module).get(attribute), Tensor) and here.is_meta:
            device = next((tensor.device for tensor in self.tensors.values()), torch.device("cpu"))
            vars(module)[attribute] = value.detach().to(device)


def _carry_out(part: _Part, recording: ConstructorSteps, seed: int, draw_on: str | None) -> None:
    views = {name: recording.tensors[name] for name in part.tensors if name in recording.tensors}
    names: dict[int, list[str]] = {}
    for name, view in views.items():
        names.setdefault(view.storage, []).append(name)
    attributes: dict[int, list[tuple[tuple[str, str], View]]] = {}
    for place, view in recording.plain.items():
        attributes.setdefault(view.storage, []).append((place, view))

    def give(storage: int, values: Values) -> None:
        for name in names.get(storage, ()):
            if not values.has_unwritten(views[name]):
                part.write(name, values.get(views[name]))
        for (path, attribute), view in attributes.get(storage, ()):
            part.keep(path, attribute, values.get(view).clone())

    storages = names.keys() | attributes.keys()
    if recording.elements <= STREAM_ELEMENTS:
        alone = set[int]()  # whose random numbers are drawn as if no others were, if they are all that is to be drawn
        if part.only is not None:  # all of the model's adapters, with what is drawn for them before it is cast
            adapters = {view.storage for name, view in recording.tensors.items() if is_adapter(name)}
            base = {view.storage for name, view in recording.tensors.items() if not is_adapter(name)}
            made, others = (
                {storage for step, _ in recording.needed(of) for storage in step.writes | step.creates}
                for of in (adapters, base)
            )
            alone = made - others
        # replay all steps in order from one seed; give away each value after the last step that reads it
        program = recording.needed(storages)
        drawn = {storage for step, _ in program if step.draws for storage in step.writes | step.creates}
        if drawn:
            program = recording.needed(storages, stream=alone if drawn <= alone else recording.bytes_of)
        last = {
            storage: number
            for number, (step, is_needed) in enumerate(program)
            if is_needed
            for storage in step.storages
        }
        ends: dict[int, list[int]] = {}
        for storage, number in last.items():
            ends.setdefault(number, []).append(storage)
        values = Values(recording)
        with seeded(seed):
            for number, (step, is_needed) in enumerate(program):
                (values.do if is_needed else pass_over)(step)
                for storage in ends.get(number, ()):
                    give(storage, values)
                    values.forget(storage)
            for storage in storages - last.keys():
                give(storage, values)
        return
    # seeded by the first name of a tied tensor, also on a stage that holds it under the other
    firsts = {view.storage: name for name, view in reversed(recording.tensors.items())}
    for storage in sorted(storages):
        if any(host_of_magnitude(name) for name in names.get(storage, ())):
            continue  # a function of another parameter's values, which a stream of its own would draw anew
        steps = [step for step, _ in recording.needed({storage})]
        first = firsts.get(storage, str(storage))
        held = {name: views[name] for name in names.get(storage, ())}
        if held and _in_blocks(part, steps, held, seed, first, draw_on):
            continue
        values = Values(recording)
        for number, step in enumerate(steps):
            with seeded(seed_of(seed, first, number)):
                values.do(step)
        give(storage, values)


def _in_blocks(
    part: _Part, steps: list[Step], views: Mapping[str, View], seed: int, first: str, draw_on: str | None
) -> bool:
    """Fill a tensor block by block, if one step alone fills it with numbers; return whether that was done."""
    fill = steps[0].fills if len(steps) == 1 else None
    if fill is None or any(view != fill for view in views.values()):
        return False
    for name, view in views.items():
        with part.destinations.opened(part.tensors[name]) as tensor:
            for piece in pieces(tensor):
                if steps[0].draws:
                    draw_rows(piece.local, piece.offset, view.size, steps[0].onto, seed, first, draw_on, view.dtype)
                else:
                    steps[0].onto(piece.local, None)
        part.written.add(part.full_name(name))
    return True


# --- initialise weights: each rank its own shards, bitwise equal on every layout

Weights = Callable[[nn.Module], set[str]]
"""Writes every parameter and persistent buffer of a laid-out model, and returns their names. Collective."""


def materialise(
    model: nn.Module,
    device: torch.device,
    seed: int,
    ties: dict[str, str],
    draw_on: str | None = None,
    weights: Weights | None = None,
) -> set[str]:
    """Allocate and write the weights of a model on meta (only shards, where it is sharded); return the names written.

    Args:
        ties: other name -> first name of each tied parameter.
        draw_on: device type on which values are drawn; by default the parameters' own.
        weights: function that writes the parameters, instead of an initialiser; adapters among them have their
            constructor's values before.

    Raises:
        UnsupportedError: a module has parameters or buffers and no initialiser.
        ConfigError: a ``weight_law`` returns neither "normal" nor "constant", or ``weights`` leaves out a parameter.
    """
    apply_to_tensors(model, lambda tensor: torch.empty_like(tensor, device=device))
    tie(model, ties)
    names = [clean(raw) for raw, _ in model.named_parameters()]
    adapters = {name for name in names if is_adapter(name) and host_of_magnitude(name) is None}
    with torch.no_grad():
        if weights is not None:
            written = write_constructed(
                model, seed, draw_on, only={clean(name) for name, _ in model.named_buffers()} | adapters
            )
            written |= initialise_by_modules(model, seed, written, buffers_only=True) | weights(model)
            written |= write_magnitudes(model, written)
            if left := [name for name in names if name not in written]:
                raise ConfigError(
                    f"weights= wrote no {', '.join(left[:4])} ({len(left)} parameters in all): it must write every one"
                )
            return written
        if hasattr(model, "weight_law"):
            written = write_by_law(model, seed, draw_on) | write_constructed(model, seed, draw_on, only=adapters)
        else:  # known constructors, and the rest by the modules' own initialisers
            written = write_constructed(model, seed, draw_on)
            later = {name for name in names if host_of_magnitude(name) is not None} - written
            written |= initialise_by_modules(model, seed, written | later)
        return written | write_magnitudes(model, written)


def tie(model: nn.Module, ties: dict[str, str]) -> None:
    """Tie parameters again: the allocation gave every name its own tensor."""
    for alias, first in ties.items():
        path, _, name = alias.rpartition(".")
        setattr(model.get_submodule(path), name, model.get_parameter(first))


def write_magnitudes(model: nn.Module, written: set[str]) -> set[str]:
    """Write the magnitudes of DoRA (arXiv 2402.09353) that have no values yet, lengths of rows; return the names.

    peft computes them where it makes an adapter, from the weights that are there; here adapters are made before. So
    they are computed behind, of whole rows, by peft's own function. Adapters begin with a product of zero, so the
    lengths are those of the weights alone. Collective over each weight's mesh; one whole weight is in memory at a time.
    """
    held: dict[str, Tensor] = {clean(raw): parameter for raw, parameter in model.named_parameters()}
    found: set[str] = set()
    for raw, magnitude in model.named_parameters():
        host = host_of_magnitude(name := clean(raw))
        if host is None or name in written:
            continue
        weight = held[host]
        whole = whole_everywhere(weight) if isinstance(weight, DTensor) else weight.detach()
        layer: Any = model.get_submodule(raw.rpartition(".")[0])
        added = torch.zeros_like(whole.T if layer.fan_in_fan_out else whole, memory_format=torch.contiguous_format)
        length = layer.get_weight_norm(whole, added, 1)
        for piece in pieces(magnitude):
            piece.local.copy_(length[piece.slices])
        found.add(name)
    return found


def write_by_law(model: nn.Module, seed: int, draw_on: str | None = None) -> set[str]:
    """Write parameters by a model's ``weight_law``, in place, whole or sharded; return the names written.

    The law knows parameters by their names without adapters, and adapters not at all.
    """
    written = initialise_by_modules(model, seed, buffers_only=True)  # the law covers parameters only
    destinations = Destinations(model)
    for raw, parameter in model.named_parameters():
        if is_adapter(full := clean(raw)):
            continue
        name = base_name(full)
        kind, value = model.weight_law(name)  # type: ignore[operator]
        if kind not in ("constant", "normal"):
            raise ConfigError(
                f"weight_law({name!r}) of {type(model).__name__} says {kind!r}: legal are 'normal' and 'constant'"
            )
        with destinations.opened(parameter) as tensor:
            for piece in pieces(tensor):
                if kind == "constant":
                    piece.local.fill_(value)
                else:
                    draw = lambda block, generator, std=value: block.normal_(0.0, std, generator=generator)  # noqa: E731
                    draw_rows(piece.local, piece.offset, tuple(tensor.shape), draw, seed, name, draw_on)
        written.add(full)
    return written
