"""State at a field which values are legal (``lr: Annotated[float, ABOVE_0]``), and check a tree of dataclasses."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Protocol, get_args, get_origin, get_type_hints, runtime_checkable

from meshwright.core.dtypes import canonical_dtype
from meshwright.core.errors import ConfigError
from meshwright.core.names import under

from .schema import field_types, is_section, union_arms


@runtime_checkable
class Limit(Protocol):
    """What a field's values must be; stands in the ``Annotated`` type of the field, or of its items."""

    def check(self, key: str, value: Any) -> None:
        """Raise ConfigError, which names the key, the value and the legal values, for an illegal value."""
        ...


@dataclass(frozen=True)
class Range:
    """The values for which ``holds`` is true, described by ``words``."""

    words: str
    holds: Callable[[Any], bool]

    def check(self, key: str, value: Any) -> None:
        """See ``Limit``."""
        if not self.holds(value):
            raise ConfigError(f"{key} = {value!r} is out of range: it must be {self.words}.")


@dataclass(frozen=True)
class DtypeName:
    """The name of a dtype, or one of ``words``."""

    words: tuple[str, ...] = ()

    def check(self, key: str, value: Any) -> None:
        """See ``Limit``."""
        if value not in self.words:
            canonical_dtype(value, where=key)


class RegularExpression:
    """A text that ``re`` compiles."""

    def check(self, key: str, value: Any) -> None:
        """See ``Limit``."""
        try:
            re.compile(value)
        except re.error as error:
            raise ConfigError(f"{key} = {value!r} is no regular expression: {error}") from None


# Written so that a nan, which compares false with everything, is out of every range.
ABOVE_0 = Range("a finite number above 0", lambda value: 0 < value < math.inf)
FROM_0 = Range("a finite number, 0 or more", lambda value: 0 <= value < math.inf)
FROM_1 = Range("1 or more", lambda value: value >= 1)
BELOW_1 = Range("0 or more and below 1", lambda value: 0 <= value < 1)
BETWEEN_0_AND_1 = Range("above 0 and below 1", lambda value: 0 < value < 1)
SHARE = Range("from 0 to 1", lambda value: 0 <= value <= 1)
NOT_EMPTY = Range("not empty", lambda value: len(value) > 0)
SEED = Range("from 0 to 2**63 - 1", lambda value: 0 <= value < 2**63)
PATTERN = RegularExpression()


@cache
def limits(cls: type) -> dict[str, Limit]:
    """Map the dotted keys of a tree of dataclasses to the limits of their values; ``[]`` stands for each item."""
    found: dict[str, Limit] = {}
    hints = get_type_hints(cls, include_extras=True)
    for name in field_types(cls):
        _collect(hints[name], name, found)
    return found


def _collect(annotation: Any, key: str, found: dict[str, Limit]) -> None:
    if get_origin(annotation) is Annotated:
        annotation, *rest = get_args(annotation)
        found.update((key, limit) for limit in rest if isinstance(limit, Limit))
    for arm in union_arms(annotation):
        if is_section(arm):
            found.update((under(key, inner), limit) for inner, limit in limits(arm).items())
        elif get_origin(arm) in (tuple, list):
            _collect(get_args(arm)[0], f"{key}[]", found)


def check_ranges(config: Any, where: str = "") -> None:
    """Check all values of a tree of dataclasses against the limits of their fields.

    Args:
        where: the dotted key of ``config`` itself.

    Raises:
        ConfigError: names the key, the value and the legal values.
    """
    for pattern, limit in limits(type(config)).items():
        for key, value in _values(config, pattern, where):
            limit.check(key, value)


def _values(node: Any, pattern: str, path: str) -> Iterator[tuple[str, Any]]:
    """Yield each (dotted key, value) that matches a pattern like ``optimizer.overrides[].lr_scale``, but no None."""
    if node is None:
        return
    if not pattern:
        yield path, node
    elif pattern.startswith("[]"):
        for i, item in enumerate(node):
            yield from _values(item, pattern[2:].removeprefix("."), f"{path}[{i}]")
    else:
        end = next((i for i, char in enumerate(pattern) if char in ".["), len(pattern))
        name, rest = pattern[:end], pattern[end:].removeprefix(".")
        yield from _values(getattr(node, name), rest, under(path, name))
