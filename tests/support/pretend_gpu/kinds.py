"""Know operators by their schemas, and host memory by its mark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from meshwright.core.torch_private import schema_of


@dataclass(frozen=True)
class Kind:
    """The facts about an operator that running it takes.

    Attributes:
        name: its name without overload.
        writes: positions and names of the arguments that it writes.
        tensors: positions of the arguments that are one tensor each.
        is_out: whether it writes into ``out``.
    """

    name: str
    writes: tuple[tuple[int, str], ...]
    tensors: tuple[int, ...]
    is_out: bool


@cache
def kind_of(operator: Any) -> Kind:
    schema = schema_of(operator)
    written = [
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    tensors = tuple(n for n, argument in enumerate(schema.arguments) if str(argument.type) == "Tensor")
    return Kind(
        schema.name.split("::")[1], tuple(written), tensors, any(argument.is_out for argument in schema.arguments)
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an argument: itself, or members of a list."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from tensors_in(member)


def is_pinned(tensor: Tensor) -> bool:
    """Return whether host memory is page-locked."""
    return tensor.untyped_storage().__dict__.get("is_pinned", False)
