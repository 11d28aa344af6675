"""Decide for each argument of another tool whether it stays the tool's, becomes ours, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from meshwright.core.errors import ConfigError


@dataclass(frozen=True)
class Handling:
    """The handling of one argument.

    Attributes:
        kind: "carried": the tool acts on it as ever; "mapped": it becomes a request of ours; "refused": nothing would
            act on it here, so that a value other than the legal ones is an error.
        words: of "mapped", what it becomes; of "refused", the change to make.
        legal: of "refused", the values that stay legal; None: those that switch the argument off (false, 0, empty).
    """

    kind: Literal["carried", "mapped", "refused"]
    words: str = ""
    legal: Callable[[Any], bool] | None = None


CARRIED = Handling("carried")


def mapped(words: str) -> Handling:
    return Handling("mapped", words)


def refused(words: str, legal: Callable[[Any], bool] | None = None) -> Handling:
    return Handling("refused", words, legal)


def refuse(arguments: Any, table: Mapping[str, Handling], tool: str) -> None:
    """Raise ConfigError for the first field of a tool's dataclass that nothing would act on.

    A field that the table lacks, of a newer release of the tool, may keep its default.
    """
    for field in fields(arguments):
        value, handling = getattr(arguments, field.name), table.get(field.name)
        if handling is None:
            if value != _default(field) and value:
                raise ConfigError(
                    f"{tool}: {field.name} = {value!r} is an argument that this meshwright does not know, of a newer"
                    f" release: leave it at its default, {_default(field)!r}"
                )
        elif handling.kind == "refused" and not (handling.legal(value) if handling.legal else not value):
            raise ConfigError(f"{tool}: {field.name} = {value!r} would be ignored here. {handling.words}")


def _default(field: Any) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default
