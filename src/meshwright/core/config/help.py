"""Write the help of keys from the dataclasses themselves: spelling, values, default and doc of each."""

from __future__ import annotations

import dataclasses
import enum
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from meshwright.core.errors import ConfigError, nearest

from .read import plain
from .schema import default_of, field_doc, field_types, join, row_of, section_of, sections, union_arms
from .words import toml_value

ABSENT = object()


@dataclass(frozen=True)
class KeyHelp:
    """A key as help shows it.

    Attributes:
        key: dotted, as ``public_keys`` spells it.
        kind: the values that may follow it, such as ``N``, ``TEXT …`` or ``true|false``.
        text: its doc, on one line.
        value: its value in the config that the flags change; ABSENT where there is none.
        default: its value where nothing sets it; ABSENT for keys of tables.
    """

    key: str
    kind: str
    text: str
    value: Any
    default: Any

    @property
    def is_of_tables(self) -> bool:
        """Whether the key belongs to the tables of an array, and so is no flag."""
        return "[]" in self.key

    def lines(self, width: int) -> list[str]:
        """Return the key and its values, then its doc and default, folded at ``width`` between words."""
        name = f"  {self.key} = {self.kind}" if self.is_of_tables else f"  --{self.key} {self.kind}"
        room = max(width - 6, 20)
        text = " ".join(filter(None, [self.text, self._values()]))
        return [name, *(f"      {line}" for line in textwrap.wrap(text, room, **_WHOLE_WORDS))]

    def _values(self) -> str:
        if self.default is ABSENT:
            return ""
        if self.value is ABSENT or self.value == self.default:
            return f"(default: {_spelt(self.default)})"
        return f"(here: {_spelt(self.value)}; default: {_spelt(self.default)})"


_WHOLE_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}


def legal_words(annotation: Any) -> tuple[str, ...]:
    """Return every word that a value of this type may be; empty where they cannot be listed."""
    found: list[str] = []
    for arm in union_arms(annotation):
        if get_origin(arm) is Literal:
            found += [str(choice) for choice in get_args(arm)]
        elif isinstance(arm, type) and issubclass(arm, enum.Enum):
            found += [str(member.value) for member in arm]
        elif arm is bool:
            found += ["true", "false"]
        elif arm is type(None):
            found.append("none")
    return tuple(found)


def key_kind(annotation: Any) -> str:
    """Return how help writes the values of a type: ``N``, ``NUMBER|none``, ``cosine|linear``, ``TEXT …``."""
    return "|".join(_kind(arm) for arm in union_arms(annotation))


def _kind(arm: Any) -> str:
    words = legal_words(arm)
    if words:
        return "|".join(words)
    if row_of(arm):
        return "TOML"
    if get_origin(arm) in (tuple, list):
        return f"{_kind(get_args(arm)[0])} …"
    return {int: "N", float: "NUMBER", str: "TEXT"}.get(arm, "VALUE")


def key_helps(cls: type, instance: Any = None) -> Iterator[tuple[str, type, list[KeyHelp]]]:
    """Yield (section, its class, the keys in it) of a tree of dataclasses, the root first.

    Args:
        cls: a dataclass.
        instance: the config whose values are shown beside the defaults; ``cls()`` when None.
    """
    given, usual = cls() if instance is None else instance, cls()
    for path, section in sections(cls):
        fields = {field.name: field for field in dataclasses.fields(section)}
        here = []
        for name, annotation in field_types(section).items():
            if section_of(annotation):
                continue
            key = join(path, name)
            default = ABSENT if "[]" in key else _at(usual, key, default_of(fields[name]))
            value = ABSENT if "[]" in key else _at(given, key, default)
            here.append(KeyHelp(key, key_kind(annotation), field_doc(section, name).replace("``", ""), value, default))
        if here:
            yield path, section, here


def _at(instance: Any, key: str, missing: Any) -> Any:
    """Return the value at a dotted key; ``missing`` where a section on the way is absent."""
    for name in key.split("."):
        if instance is None:
            return missing
        instance = getattr(instance, name)
    return instance


def _spelt(value: Any) -> str:
    value = plain(value)
    if value is None:
        return "none"
    if isinstance(value, str) and value.isprintable() and value.strip() == value != "":
        return value
    try:
        return toml_value(value)
    except TypeError:  # an array of tables, some of whose keys are none
        return repr(value)


def keys_text(cls: type, instance: Any = None, *, wanted: str = "", width: int = 80) -> str:
    """Return the help of all keys, or of those that ``wanted`` names.

    Args:
        cls: a dataclass.
        instance: as ``key_helps`` has it.
        wanted: a section (``layout``), a key (``layout.tp``), how some keys begin (``schedule.warm``), or a key's last
            part (``lr``).
        width: characters of a line.

    Raises:
        ConfigError: nothing is called so.
    """
    wanted = wanted.removeprefix("--").rstrip(".=").replace("-", "_").removesuffix("[]")
    tree = list(key_helps(cls, instance))
    chosen = _chosen(tree, wanted)
    blocks = []
    for path, section, keys in tree:
        shown = [key for key in keys if key.key in chosen]
        if shown:
            blocks.append(
                "\n".join([*_heading(path, section, width), *(line for k in shown for line in k.lines(width))])
            )
    return "\n\n".join(blocks)


def _chosen(tree: list[tuple[str, type, list[KeyHelp]]], wanted: str) -> set[str]:
    keys = [key.key for _, _, here in tree for key in here]
    plainly = {key: key.replace("[]", "") for key in keys}
    for test in (
        lambda key: key == wanted or key.startswith(f"{wanted}."),
        lambda key: key.startswith(wanted),
        lambda key: key.rpartition(".")[2] == wanted,
    ):
        if found := {key for key in keys if test(plainly[key])}:
            return found
    sections_here = [path.replace("[]", "") for path, _, _ in tree if path]
    leaves = {key.rpartition(".")[2]: key for key in plainly.values()}
    close = nearest(wanted, [*sections_here, *plainly.values()]) or nearest(wanted, leaves)
    listed = ", ".join(path for path in sections_here if "." not in path)
    raise ConfigError(f"--help {wanted}: no section and no key begins so.{close} Sections: {listed}.")


def _heading(path: str, section: type, width: int) -> list[str]:
    if not path:
        return ["keys of the run"]
    doc = section.__doc__ or ""
    about = "" if doc.startswith(f"{section.__name__}(") else " ".join(doc.split("\n\n")[0].split())
    title = f"[[{path[:-2]}]], a table for each" if path.endswith("[]") else f"[{path}]"
    text = f"{title}  {about}".strip()
    return textwrap.wrap(text, width, subsequent_indent="  ", **_WHOLE_WORDS)
