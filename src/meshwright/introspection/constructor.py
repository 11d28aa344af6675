"""Record what a model's constructor does to its tensors, without memory, to repeat it where the tensors are needed.

A tensor is named by its storage and its layout in it, so views, ``.data`` and parameters of tensors need no care.

The constructor runs on fake tensors: they have shapes, dtypes and devices, and no values. Every operator that creates
or writes a tensor is recorded as a step. Carried out in order from one seed on real tensors, the steps
give bitwise the same tensors as the constructor in one process.

Rejection sampling looks at its own draws: torch's ``trunc_normal_`` is recorded as one step. A number that the
constructor reads (``.item()``) is computed at once, unless it depends on a random number. A constructor that seeds,
brings generators of its own, or decides by its draws is not recorded.
"""

from __future__ import annotations

import functools
import random
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.core.names import clean
from meshwright.core.torch_private import (
    SAMPLES_NORMAL,
    EagerDispatchMode,
    fake_mode,
    has_no_values,
    schema_of,
    tree_leaves,
    tree_map_only,
    without_modes,
)

# --- define the steps by which a model's constructor makes its tensors, and carry them out on real tensors

BLANK = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
"""Operators whose result is uninitialised memory."""


@dataclass(frozen=True)
class View:
    """The geometry of a tensor in a storage, by its number in the recording; stride and offset count elements."""

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
    """One operator, with views in place of the tensors among its arguments and results.

    Attributes:
        reads: storages whose values the operator needs.
        creates, writes: storages that the operator makes, and those that it changes in place.
        overwrites: storages among these that hold none of their old values afterwards.
        draws: whether the operator takes numbers from the random stream.
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
        """The view that the step fills by numbers alone, so that it can be done to any part; else None."""
        return (
            self.args[0] if self.writes and self.overwrites == self.writes and not self.reads | self.creates else None
        )

    @property
    def storages(self) -> frozenset[int]:
        return self.reads | self.writes | self.creates

    def onto(self, tensor: Tensor, generator: torch.Generator | None = None) -> None:
        """Fill another tensor as the step fills its view; pass a generator if the step draws."""
        more = {"generator": generator} if self.draws else {}
        self.operator(tensor, *self.args[1:], **{**self.kwargs, **more})


@dataclass
class ConstructorSteps:
    """The steps of a constructor.

    Attributes:
        bytes_of: storage -> its size in bytes.
        constants: storage -> a tensor that the steps did not make, such as a table from a file.
        modules: paths of the model's modules.
        tensors: name -> each parameter and buffer; a tied one under all of its names.
        plain: (path of a module, attribute) -> tensors that are plain attributes.
    """

    steps: list[Step] = field(default_factory=list)
    bytes_of: dict[int, int] = field(default_factory=dict)
    constants: dict[int, Tensor] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)
    tensors: dict[str, View] = field(default_factory=dict)
    plain: dict[tuple[str, str], View] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        """The number of elements of all parameters and buffers, tied ones once."""
        return sum({view.storage: view.elements for view in self.tensors.values()}.values())

    def needed(self, storages: Collection[int], *, stream: Collection[int] = ()) -> list[tuple[Step, bool]]:
        """List the steps on which some storages' values depend, in order.

        Args:
            stream: include other steps that draw numbers for these storages, paired with False, so that the random
                stream stays the same.
        """
        live, passed, found = set(storages), frozenset(stream), []
        for step in reversed(self.steps):
            is_passed = step.draws and bool((step.writes | step.creates) & passed)
            is_needed = bool((step.writes | step.creates) & live) or (is_passed and bool(step.reads))
            if is_needed:
                live = (live - step.overwrites - step.creates) | step.reads
            if is_needed or is_passed:
                found.append((step, is_needed))
        return found[::-1]


class Values:
    """Real tensors on the CPU, on which steps are carried out.

    Attributes:
        blank: storages that began uninitialised: elements that no step wrote yet are nan, or the largest integer.
    """

    def __init__(self, recording: ConstructorSteps) -> None:
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
                storage, size = tensor.untyped_storage(), self._recording.bytes_of[view.storage]
                place = tensor.stride(), tensor.storage_offset(), storage.nbytes()
                is_new = all(id(storage) != id(other) for other in self._storages.values())
                if place == (view.stride, view.offset, size) and is_new:
                    self._storages[view.storage] = storage
                else:
                    self._storages[view.storage] = torch.UntypedStorage(size)
                    self.get(view).copy_(tensor)
                if name_of(step.operator) in BLANK and tensor.dtype != torch.bool:
                    self.get(view).fill_(unwritten(tensor.dtype))
                    self.blank.add(view.storage)

    def has_unwritten(self, view: View) -> bool:
        """Return whether a view has elements that no step wrote."""
        if view.storage not in self.blank:
            return False
        value, mark = self.get(view), unwritten(view.dtype)
        return bool((value.isnan() if mark != mark else value == mark).any())

    def forget(self, storage: int) -> None:
        self._storages.pop(storage, None)


def unwritten(dtype: torch.dtype) -> float | int | bool:
    """Return the number that marks an element that nothing has written yet."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).max


def pass_over(step: Step) -> None:
    """Advance the random stream by a step's draws, and discard the result."""
    args, kwargs = tree_map_only(
        View, lambda view: torch.empty_strided(view.size, view.stride, dtype=view.dtype), (step.args, step.kwargs)
    )
    step.operator(*args, **kwargs)


def name_of(operator: Any) -> str:
    """Return an operator's name without its namespace and overload."""
    return schema.name.partition("::")[2] if (schema := schema_of(operator)) is not None else operator.__name__


# --- record what a model's constructor does to its tensors, without memory

OVERWRITING = (
    *("zero_", "fill_", "copy_", "normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_"),
    *("cauchy_", "geometric_"),
)
"""Operators that write every element of their first argument, whatever its old values."""
RESHAPING = ("resize_", "set_", "resize_as_")
"""Operators that give a tensor other memory."""
READING = ("_local_scalar_dense", "equal")
"""Operators that give Python a value."""


class NotRecordedError(Exception):
    """A constructor does something that cannot be repeated later; the text names it."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU stream, numpy's and Python's, and restore all three afterwards."""
    numpys, pythons = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed seeds other devices too, whose streams are not kept
            torch.default_generator.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
            yield
    finally:
        np.random.set_state(numpys)
        random.setstate(pythons)


def built(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build the model with its weights, on the CPU, as plain torch does in one process under a seed."""
    with seeded(seed), torch.device("cpu"):
        return build()


STREAM_ELEMENTS = 2**30
"""Elements of all parameters and buffers up to which every layout has exactly the weights of ``built``.

A rank draws the numbers of the others too, to reach its own; at this size that takes some ten seconds.
"""


def record(build: Callable[[], nn.Module], seed: int = 0) -> tuple[nn.Module, ConstructorSteps]:
    """Call ``build`` on tensors without values, and return its model, on meta, with the steps by which it is made.

    ``seed`` is of numpy's and Python's random numbers, which are recorded as constants. Raises NotRecordedError.
    """
    # created first: it imports much of torch, which must not see the replacements below
    fake = fake_mode()
    with seeded(seed):
        before = torch.get_rng_state()
        with _replaced_in_torch(), fake, _ConstructorRecorder() as recorder, recorder.sampling():
            try:
                model = build()
            except NotRecordedError:
                raise
            # an error of any kind occurs again when the constructor runs on real tensors, unless fake ones caused it
            except Exception as error:
                why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                raise NotRecordedError(f"it fails on tensors without values ({why})") from error
            recording = recorder.recording
            for raw, module in model.named_modules(remove_duplicate=False):
                path = clean(raw)
                recording.modules.add(path)
                for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                    if tensor is not None:
                        recording.tensors[f"{path}.{name}" if path else name] = recorder.view(tensor)
                for name, value in vars(module).items():
                    if isinstance(value, Tensor):
                        recording.plain[path, name] = recorder.view(value)
            inner = set(vars(torch.empty(0)))
        if not torch.equal(before, torch.get_rng_state()):
            raise NotRecordedError("it sets the random stream")

    # to meta, with all attributes but those of fake tensors themselves
    made: dict[int, Any] = {}

    def of(tensor: Tensor) -> Any:
        if id(tensor) not in made:
            blank = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            made[id(tensor)] = nn.Parameter(blank, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else blank
            vars(made[id(tensor)]).update({name: value for name, value in vars(tensor).items() if name not in inner})
        return made[id(tensor)]

    for module in model.modules():
        places: Any = (module._parameters, module._buffers, vars(module))
        for held in places:
            held.update({name: of(tensor) for name, tensor in held.items() if has_no_values(tensor)})
    return model, recording


class _ConstructorRecorder(EagerDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.recording = ConstructorSteps()
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.UntypedStorage] = []
        """Storages are held: a freed one would give its address to another."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            # meta: the tensors get the values that they would have; a GPU: they are moved there afterwards
            kwargs["device"] = torch.device("cpu")
        name = name_of(func)
        if name in RESHAPING:
            raise NotRecordedError(f"it gives a tensor other memory ({name})")
        if any(isinstance(leaf, torch.Generator) for leaf in tree_leaves((args, kwargs))):
            raise NotRecordedError("it draws from a generator of its own")
        viewed = tree_map_only(Tensor, self.view, (args, kwargs))
        if name in READING:  # a number that the constructor reads is computed now
            asked = {leaf.storage for leaf in tree_leaves(viewed) if isinstance(leaf, View)}
            steps = [step for step, _ in self.recording.needed(asked)]
            if any(step.draws for step in steps):
                raise NotRecordedError("it decides by numbers that it drew")
            with without_modes(), torch.no_grad():
                values = Values(self.recording)
                for step in steps:
                    values.do(step)
                real_args, real_kwargs = tree_map_only(View, values.get, viewed)
                return func(*real_args, **real_kwargs)
        known = len(self._numbers)
        result = func(*args, **kwargs)
        results = tuple(self.view(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        takes_dtype = "dtype" in {argument.name for argument in schema_of(func).arguments}
        if results and takes_dtype and kwargs.get("dtype") is None:
            viewed[1]["dtype"] = results[0].dtype  # the default dtype may have changed at the replay
        writes = {leaf.storage for leaf in written(func, *viewed) if isinstance(leaf, View)}
        created = {view.storage for view in results if view.storage >= known}
        draws = torch.Tag.nondeterministic_seeded in func.tags
        self._note(func, viewed[0], viewed[1], results, writes, created, name in OVERWRITING, draws)
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
        view: Any = args[0] if overwrites else None
        is_whole = (
            overwrites
            and view.elements * view.dtype.itemsize == self.recording.bytes_of[view.storage]
            and 0 not in view.stride
            and not view.offset
        )
        filled = {view.storage} if is_whole else set()
        reads = {view.storage for view in (given[1:] if filled else given)}
        effects = frozenset(reads), frozenset(created), frozenset(writes), frozenset(filled)
        self.recording.steps.append(Step(operator, args, kwargs, results, *effects, draws))

    def view(self, tensor: Tensor) -> View:
        if tensor.is_conj() or tensor.is_neg():
            raise NotRecordedError("it has a conjugate that is not computed yet")
        storage = tensor.untyped_storage()
        number = self._numbers.setdefault(id(storage), len(self._numbers))
        if number == len(self._kept):
            self._kept.append(storage)
            self.recording.bytes_of[number] = storage.nbytes()
            if not has_no_values(tensor):
                with without_modes():
                    flat = torch.empty(0, dtype=tensor.dtype).set_(storage)
                    self.recording.constants[number] = flat.clone()
        return View(number, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Record torch's rejection sampling, which draws again until all values are within bounds, as one step."""
        init: Any = nn.init
        sample = getattr(init, SAMPLES_NORMAL)

        def note(
            tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
        ) -> Tensor:
            if generator is not None:
                raise NotRecordedError("it draws from a generator of its own")
            view = self.view(tensor)
            self._note(sample, (view, mean, std, a, b), {}, (view,), {view.storage}, set(), True, True)
            return tensor

        with _in_this_thread(init, SAMPLES_NORMAL, note):
            yield


def written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """List what the arguments hold that an operator writes into, tensors and numbers among them."""
    found: list[Any] = []
    for place, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tree_leaves(args[place] if place < len(args) else kwargs.get(argument.name))
    return found


@contextmanager
def _replaced_in_torch() -> Iterator[None]:
    """Refuse seeding, and replace the swapping of tensors, while a constructor is recorded.

    A constructor that seeds and then restores the stream would leave no trace. ``module.to(dtype)`` would swap
    parameters, which fake ones do not allow. ``copy.deepcopy`` of a module would warn of torch's own look at addresses.
    """

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotRecordedError("it sets the random stream")

    def swap(parameter: Tensor, other: Tensor) -> None:
        parameter.data = other.data

    with ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        for place in (torch, torch.random):
            for name in ("manual_seed", "seed", "set_rng_state"):
                stack.enter_context(_in_this_thread(place, name, refuse))
        stack.enter_context(_in_this_thread(torch.utils, "swap_tensors", swap))
        yield


@contextmanager
def _in_this_thread(place: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace ``place.name`` by another function, for this thread alone."""
    original, thread = getattr(place, name), threading.get_ident()

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if threading.get_ident() == thread else original)(*args, **kwargs)

    setattr(place, name, call)
    try:
        yield
    finally:
        setattr(place, name, original)


# --- build modules on the meta device without drawing random numbers, which have no values there

DRAWING = {
    *(Tensor.normal_, Tensor.uniform_, Tensor.bernoulli_, Tensor.exponential_, Tensor.cauchy_, Tensor.log_normal_),
    *(Tensor.geometric_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, nn.init.kaiming_normal_),
}
"""Functions that fill their first argument. On meta, torch decomposes them in Python and imports its compiler."""


class _WithoutDraws(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in DRAWING:
            filled = args[0] if args else kwargs.get("tensor")
            if isinstance(filled, Tensor) and filled.is_meta:
                return filled
        return function(*args, **kwargs)


@contextmanager
def on_meta() -> Iterator[None]:
    """Create tensors on the meta device, without memory; filling them with random numbers does nothing."""
    with torch.device("meta"), _WithoutDraws():
        yield
