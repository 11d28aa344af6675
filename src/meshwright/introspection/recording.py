"""What a model's constructor does to its tensors, recorded without memory and carried out where it is needed.

The constructor runs on fake tensors: they have shapes, dtypes and devices, and no values. Every operator that writes or creates a tensor is
noted. A tensor is named by its storage and how it lies there, so views, ``.data`` and parameters made of tensors need no care. Carried
out in order from one seed on real tensors, the steps give to the last bit what the constructor gives in one process.

Rejection sampling looks at what it drew: ``trunc_normal_`` of torch is noted as one step. A number that the constructor reads (``.item()``)
is computed at once, where no random number is in it. A constructor that seeds, brings generators of its own, or decides by what it
drew is not recorded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.core.names import clean

OVERWRITING = (
    *("zero_", "fill_", "copy_", "normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_", "cauchy_"),
    "geometric_",
)
"""Operators that write every element of their first argument, whatever it was."""
BLANK = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
"""Operators whose result holds whatever memory held."""
RESHAPING = ("resize_", "set_", "resize_as_")
"""Operators that give a tensor other memory."""


READING = ("_local_scalar_dense", "equal")
"""Operators that give Python a value."""


class NotRecordedError(Exception):
    """A constructor does what cannot be carried out later; the text says what."""


@dataclass(frozen=True)
class View:
    """How a tensor lies in a storage.

    Attributes:
        storage: its number in the recording.
        offset, stride: in elements.
    """

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        return torch.Size(self.size).numel()


@dataclass(frozen=True)
class Step:
    """One operator. In its arguments and results views stand for tensors.

    Attributes:
        reads: storages whose values it needs.
        creates, writes: storages that it makes, and changes in place.
        overwrites: those of them that hold nothing from before afterwards.
        draws: whether it takes numbers from the random stream.
    """

    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[View, ...]
    reads: frozenset[int]
    creates: frozenset[int]
    writes: frozenset[int]
    overwrites: frozenset[int]
    draws: bool

    @property
    def fills(self) -> View | None:
        """The view that it fills, if it does so by numbers alone: then it can be done to any part."""
        return self.args[0] if self.writes and self.overwrites == self.writes and not self.reads | self.creates else None

    @property
    def storages(self) -> frozenset[int]:
        return self.reads | self.writes | self.creates

    def onto(self, tensor: Tensor, generator: torch.Generator | None = None) -> None:
        """Do to another tensor what it does to the one that it ``fills``; a generator where it draws."""
        more = {"generator": generator} if self.draws else {}
        self.operator(tensor, *self.args[1:], **{**self.kwargs, **more})


@dataclass
class Recording:
    """A constructor's steps.

    Attributes:
        bytes_of: storage -> its size.
        constants: storage -> a tensor that the steps did not make, as a table from a file.
        modules: their paths.
        tensors: name -> each parameter and buffer; a tied one under all of its names.
        plain: (path of a module, attribute) -> tensors that are kept as attributes.
    """

    steps: list[Step] = field(default_factory=list)
    bytes_of: dict[int, int] = field(default_factory=dict)
    constants: dict[int, Tensor] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)
    tensors: dict[str, View] = field(default_factory=dict)
    plain: dict[tuple[str, str], View] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        """Of all parameters and buffers, tied ones once."""
        return sum({view.storage: view.elements for view in self.tensors.values()}.values())

    def needed(self, storages: Collection[int], *, with_stream: bool) -> list[tuple[Step, bool]]:
        """The steps that some storages' values follow from, in order.

        Args:
            with_stream: other steps that draw too, with False beside them, so that the random stream goes on as it did.
        """
        live, found = set(storages), []
        for step in reversed(self.steps):
            is_needed = bool((step.writes | step.creates) & live) or (with_stream and step.draws and bool(step.reads))
            if is_needed:
                live = (live - step.overwrites - step.creates) | step.reads
            if is_needed or (with_stream and step.draws):
                found.append((step, is_needed))
        return found[::-1]


class Values:
    """Real tensors, in which steps are carried out; on the CPU.

    Attributes:
        blank: storages that began as whatever memory held: elements that nothing wrote yet are nan, or the largest integer.
    """

    def __init__(self, recording: Recording) -> None:
        self.blank: set[int] = set()
        self._recording = recording
        self._storages: dict[int, torch.UntypedStorage] = {}

    def get(self, view: View) -> Tensor:
        if view.storage not in self._storages:
            constant = self._recording.constants.get(view.storage)
            made = torch.UntypedStorage(self._recording.bytes_of[view.storage])
            self._storages[view.storage] = made if constant is None else constant.clone().untyped_storage()
        return torch.empty(0, dtype=view.dtype).set_(self._storages[view.storage], view.offset, view.size, view.stride)

    def do(self, step: Step) -> None:
        args, kwargs = tree_map_only(View, self.get, (step.args, step.kwargs))
        made = [leaf for leaf in tree_leaves(step.operator(*args, **kwargs)) if isinstance(leaf, Tensor)]
        for view, tensor in zip(step.results, made, strict=True):
            if view.storage in step.creates:
                self._keep(view, tensor)
                if _name(step.operator) in BLANK and tensor.dtype != torch.bool:
                    self.get(view).fill_(_unwritten(tensor.dtype))
                    self.blank.add(view.storage)

    def has_unwritten(self, view: View) -> bool:
        """Whether elements are left that nothing wrote."""
        if view.storage not in self.blank:
            return False
        value, mark = self.get(view), _unwritten(view.dtype)
        return bool((value.isnan() if mark != mark else value == mark).any())

    def _keep(self, view: View, tensor: Tensor) -> None:
        storage, size = tensor.untyped_storage(), self._recording.bytes_of[view.storage]
        lies_alike = tensor.stride() == view.stride and tensor.storage_offset() == view.offset and storage.nbytes() == size
        if lies_alike and all(storage._cdata != other._cdata for other in self._storages.values()):
            self._storages[view.storage] = storage
        else:
            self._storages[view.storage] = torch.UntypedStorage(size)
            self.get(view).copy_(tensor)

    def forget(self, storage: int) -> None:
        self._storages.pop(storage, None)


def _unwritten(dtype: torch.dtype) -> float | int:
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def pass_over(step: Step) -> None:
    """Take from the random stream what a step draws, and keep nothing."""
    args, kwargs = tree_map_only(View, lambda view: torch.empty_strided(view.size, view.stride, dtype=view.dtype), (step.args, step.kwargs))
    step.operator(*args, **kwargs)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch's stream on the CPU, numpy's and Python's begin at a seed, and go on afterwards where they were."""
    numpys, pythons = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
            yield
    finally:
        np.random.set_state(numpys)
        random.setstate(pythons)


def built(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The model with its weights, on the CPU, as plain torch makes it in one process under a seed."""
    with seeded(seed), torch.device("cpu"):
        return build()


STREAM_ELEMENTS = 2**30
"""Elements of all parameters and buffers up to which every layout has the very weights of ``built``: a rank draws those of others too, to
reach its own, and this takes some ten seconds."""


def record(build: Callable[[], nn.Module], seed: int = 0) -> tuple[nn.Module, Recording]:
    """A model on meta, and the steps by which ``build`` makes it.

    Args:
        seed: of numpy's and Python's random numbers, which are noted as constants.

    Raises:
        NotRecordedError: it does what cannot be carried out later, or fails on tensors without values.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)  # it imports much of torch, which must not see what is put in place below
    with seeded(seed), _without_seeds_and_swaps(), fake, _Recorder() as recorder, recorder.sampling():
        before = torch.get_rng_state()
        try:
            model = build()
        except NotRecordedError:
            raise
        except Exception as error:  # whatever it is, it also comes where the constructor runs on real tensors, or not at all
            raise NotRecordedError(f"it fails on tensors without values ({type(error).__name__}: {str(error).splitlines()[0]})") from error
        if not torch.equal(before, torch.get_rng_state()):
            raise NotRecordedError("it sets the random stream")
        recording, inner = recorder.recording_of(model), set(vars(torch.empty(0)))
    _to_meta(model, inner)
    return model, recording


def _to_meta(model: nn.Module, inner: set[str]) -> None:
    """``inner``: attributes that fake tensors have for themselves; others are people's."""
    made: dict[int, Any] = {}

    def of(tensor: Tensor) -> Any:
        if id(tensor) not in made:
            blank = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            made[id(tensor)] = nn.Parameter(blank, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else blank
            for name, value in vars(tensor).items():
                if name not in inner:
                    setattr(made[id(tensor)], name, value)
        return made[id(tensor)]

    for module in model.modules():
        places: Any = (module._parameters, module._buffers, vars(module))
        for held in places:
            held.update({name: of(tensor) for name, tensor in held.items() if isinstance(tensor, FakeTensor)})


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._recording = Recording()
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.UntypedStorage] = []
        """A storage that is gone would give its address to another."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.device(kwargs.get("device") or "cpu").type == "meta":
            kwargs["device"] = torch.device("cpu")  # a constructor that asks for no values is asked what they would be
        name = _name(func)
        if name in RESHAPING:
            raise NotRecordedError(f"it gives a tensor other memory ({name})")
        if any(isinstance(leaf, torch.Generator) for leaf in tree_leaves((args, kwargs))):
            raise NotRecordedError("it draws from a generator of its own")
        said = tree_map_only(Tensor, self.view, (args, kwargs))
        if name in READING:
            return self._computed(func, said[0], said[1])
        known = len(self._numbers)
        result = func(*args, **kwargs)
        results = tuple(self.view(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        writes = {
            leaf.storage
            for argument in _written(func._schema, said[0], said[1])
            for leaf in tree_leaves(argument)
            if isinstance(leaf, View)
        }
        created = {view.storage for view in results if view.storage >= known}
        draws = torch.Tag.nondeterministic_seeded in func.tags
        self._note(func, said[0], said[1], results, writes, created, name in OVERWRITING, draws)
        return result

    def _note(
        self,
        operator: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: tuple[View, ...],
        writes: set[int],
        created: set[int],
        overwrites: bool,
        draws: bool,
    ) -> None:
        if not writes | created:
            return  # a view
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, View)]
        filled = {args[0].storage} if overwrites and self._is_whole(args[0]) else set()
        reads = {view.storage for view in (given[1:] if filled else given)}
        step = Step(operator, args, kwargs, results, frozenset(reads), frozenset(created), frozenset(writes), frozenset(filled), draws)
        self._recording.steps.append(step)

    def _is_whole(self, view: View) -> bool:
        elements = torch.Size(view.size).numel()
        return elements * view.dtype.itemsize == self._recording.bytes_of[view.storage] and 0 not in view.stride and not view.offset

    def view(self, tensor: Tensor) -> View:
        storage = tensor.untyped_storage()
        number = self._numbers.setdefault(storage._cdata, len(self._numbers))
        if number == len(self._kept):
            self._kept.append(storage)
            self._recording.bytes_of[number] = storage.nbytes()
            if not isinstance(tensor, FakeTensor):
                with _disable_current_modes():
                    flat = torch.empty(0, dtype=tensor.dtype).set_(storage)
                    self._recording.constants[number] = flat.clone()
        return View(number, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype)

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A number that the constructor asks for."""
        asked = {leaf.storage for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, View)}
        steps = [step for step, _ in self._recording.needed(asked, with_stream=False)]
        if any(step.draws for step in steps):
            raise NotRecordedError("it decides by numbers that it drew")
        with _disable_current_modes(), torch.no_grad():
            values = Values(self._recording)
            for step in steps:
                values.do(step)
            real_args, real_kwargs = tree_map_only(View, values.get, (args, kwargs))
            return func(*real_args, **real_kwargs)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """torch's own draws again until all are within bounds: one step."""
        init: Any = nn.init
        sample = init._no_grad_trunc_normal_

        def note(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None) -> Tensor:
            if generator is not None:
                raise NotRecordedError("it draws from a generator of its own")
            view = self.view(tensor)
            self._note(sample, (view, mean, std, a, b), {}, (view,), {view.storage}, set(), True, True)
            return tensor

        init._no_grad_trunc_normal_ = note
        try:
            yield
        finally:
            init._no_grad_trunc_normal_ = sample

    def recording_of(self, model: nn.Module) -> Recording:
        found = self._recording
        for raw, module in model.named_modules(remove_duplicate=False):
            path = clean(raw)
            found.modules.add(path)
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    found.tensors[f"{path}.{name}" if path else name] = self.view(tensor)
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    found.plain[path, name] = self.view(value)
        return found


def _name(operator: Any) -> str:
    """Without its namespace and overload."""
    return operator._schema.name.partition("::")[2] if hasattr(operator, "_schema") else operator.__name__


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that an operator writes into."""
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[place] if place < len(args) else kwargs.get(argument.name)


@contextmanager
def _without_seeds_and_swaps() -> Iterator[None]:
    """A constructor that seeds, and puts the stream back afterwards, would leave no trace. And fake parameters cannot be swapped, which
    ``module.to(dtype)`` would do."""
    names = ("manual_seed", "seed", "set_rng_state")
    kept = [(place, name, getattr(place, name)) for place in (torch, torch.random) for name in names]
    kept.append((torch.utils, "swap_tensors", torch.utils.swap_tensors))

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotRecordedError("it sets the random stream")

    def swap(parameter: Tensor, other: Tensor) -> None:
        parameter.data = other.data

    try:
        for place, name, _ in kept:
            setattr(place, name, swap if name == "swap_tensors" else refuse)
        yield
    finally:
        for place, name, function in kept:
            setattr(place, name, function)
