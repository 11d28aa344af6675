"""Define the steps by which a model's constructor makes its tensors, and carry them out on real tensors.

A tensor is named by its storage and its layout in it, so views, ``.data`` and parameters of tensors need no care.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.core.torch_private import schema_of, tree_leaves, tree_map_only

BLANK = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
"""Operators whose result is uninitialised memory."""


@dataclass(frozen=True)
class View:
    """The geometry of a tensor in a storage.

    Attributes:
        storage: number of the storage in the recording.
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
                self._keep(view, tensor)
                if name_of(step.operator) in BLANK and tensor.dtype != torch.bool:
                    self.get(view).fill_(_unwritten(tensor.dtype))
                    self.blank.add(view.storage)

    def has_unwritten(self, view: View) -> bool:
        """Return whether a view has elements that no step wrote."""
        if view.storage not in self.blank:
            return False
        value, mark = self.get(view), _unwritten(view.dtype)
        return bool((value.isnan() if mark != mark else value == mark).any())

    def _keep(self, view: View, tensor: Tensor) -> None:
        storage, size = tensor.untyped_storage(), self._recording.bytes_of[view.storage]
        lies_alike = (
            tensor.stride() == view.stride and tensor.storage_offset() == view.offset and storage.nbytes() == size
        )
        if lies_alike and all(id(storage) != id(other) for other in self._storages.values()):
            self._storages[view.storage] = storage
        else:
            self._storages[view.storage] = torch.UntypedStorage(size)
            self.get(view).copy_(tensor)

    def forget(self, storage: int) -> None:
        self._storages.pop(storage, None)


def _unwritten(dtype: torch.dtype) -> float | int:
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def pass_over(step: Step) -> None:
    """Advance the random stream by a step's draws, and discard the result."""
    args, kwargs = tree_map_only(
        View, lambda view: torch.empty_strided(view.size, view.stride, dtype=view.dtype), (step.args, step.kwargs)
    )
    step.operator(*args, **kwargs)


def name_of(operator: Any) -> str:
    """Return an operator's name without its namespace and overload."""
    return schema.name.partition("::")[2] if (schema := schema_of(operator)) is not None else operator.__name__
