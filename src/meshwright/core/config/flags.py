"""Override a config by flags, ``--any.key=value`` or ``--any.key value``, and write the help of its keys."""

from __future__ import annotations

import dataclasses
import enum
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin

from meshwright.core.errors import ConfigError, nearest

from .read import plain, read_value, toml_value, type_words
from .schema import default_of, field_doc, field_types, is_section, join, row_of, section_of, sections, union_arms

# --- write the help of keys from the dataclasses themselves

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


# --- override a config by flags, ``--any.key=value`` or ``--any.key value``, with the fields' names and docs

T = TypeVar("T")


def parse_flags(cls: type[T], args: Sequence[str], *, default: T | None = None, prog: str, description: str) -> T:
    """Read command-line flags over ``default``.

    Every key of ``public_keys(cls)`` is a flag of that name; hyphens serve for underscores. ``true``, ``false`` and
    ``none`` are written in lower case; a list takes all its items after one flag (``--data.ignore prompt answer``) or
    one TOML array (``--data.ignore='["prompt", "answer"]'``); a list of tables takes one TOML value
    (``--optimizer.overrides='[{pattern = "norm"}]'``).

    Args:
        cls: a dataclass.
        args: the arguments after the program's name.
        default: the instance that the flags change; ``cls()`` when None.
        prog: the program's name in help and errors.
        description: the first lines of the help.

    Raises:
        ConfigError: a list's flag is given twice, or a value is of the wrong type or no TOML where it looks like it.
        SystemExit: 0 after ``--help``; 2 for an unknown flag, named on standard error.
    """
    if any(arg in ("-h", "--help") for arg in args):
        print(f"usage: {prog} [--key=value …]\n\n{description}\n\n{keys_text(cls, default)}")
        raise SystemExit(0)
    import tyro

    flags = [_spelling(arg) for arg in args]
    _refuse_repeated_lists(cls, flags, "")
    _refuse_other_values(cls, args)
    args = _with_arrays_spread(cls, args)
    start = _with_sections(cls() if default is None else default, flags, "")
    return tyro.cli(
        cls,
        args=args,
        default=start,
        prog=prog,
        description=description,
        use_underscores=True,
        config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
        registry=_registry(cls),
    )


def _spelling(arg: str) -> str:
    return arg.partition("=")[0].replace("-", "_").replace("__", "--", 1) if arg.startswith("--") else arg


def _refuse_repeated_lists(cls: type, flags: list[str], prefix: str) -> None:
    """Refuse a list's flag given twice: the last flag counts, so the first one's items would be lost silently."""
    for name, annotation in field_types(cls).items():
        flag = f"--{join(prefix, name)}"
        if section := section_of(annotation):
            _refuse_repeated_lists(section, flags, join(prefix, name))
        elif get_origin(annotation) is tuple and flags.count(flag) > 1:
            raise ConfigError(
                f"{flag} is given {flags.count(flag)} times; give all items after one: {flag} first second"
            )


def _refuse_other_values(cls: type, args: Sequence[str]) -> None:
    """Refuse a value that is not of its key's type, in the words that a file's value is refused in."""
    words = [*args, ""]
    for place, word in enumerate(args):
        flag, given, value = word.partition("=")
        name = _spelling(flag).removeprefix("--")
        annotation = _annotation(cls, name) if flag.startswith("--") else None
        arms = () if annotation is None else union_arms(annotation)
        is_rows = _is_rows(annotation)
        if not arms or not (is_rows or all(arm in SCALARS or get_origin(arm) is Literal for arm in arms)):
            continue
        text = value if given else words[place + 1]
        if not text or (not given and text.startswith("--")):
            raise ConfigError(f"{flag} needs a value: {type_words(annotation)}")
        if is_rows:
            _rows(cls, annotation, text, flag)
        elif text.lower() != "none" or type(None) not in arms:
            read_value(cls, annotation, _as_written(text, arms), name, where=flag)


def _with_arrays_spread(cls: type, args: Sequence[str]) -> list[str]:
    """Return the arguments with a TOML array of a list's flag spread into the words that follow the flag."""
    spread: list[str] = []
    flag = ""
    for arg in args:
        if arg.startswith("--"):
            flag, given, text = arg.partition("=")
        else:
            given, text = "", arg
        annotation = _annotation(cls, _spelling(flag).removeprefix("--"))
        is_list = get_origin(annotation) is tuple and not _is_rows(annotation)
        if is_list and text.startswith("[") and text.endswith("]"):
            spread += [flag] if given else []
            spread += [item if isinstance(item, str) else toml_value(item) for item in _toml(text, flag, "['a', 'b']")]
        else:
            spread.append(arg)
    return spread


SCALARS = (int, float, bool, type(None))


def _annotation(cls: type, name: str) -> Any:
    """Return the type of a dotted key; None of one that a table has not, or that is a table."""
    first, _, rest = name.partition(".")
    annotation = field_types(cls).get(first)
    section = None if annotation is None else section_of(annotation)
    if section is None:
        return None if rest else annotation
    return _annotation(section, rest) if rest else None


def _as_written(text: str, arms: Sequence[Any]) -> Any:
    """Return the value that a flag's text stands for: a word that is a choice, true or false, a number, else text."""
    if any(text in get_args(arm) for arm in arms):
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _with_sections(config: Any, flags: list[str], prefix: str) -> Any:
    """Build from its defaults each absent optional section that a flag names.

    tyro would offer an ``X | None`` that is None as a subcommand; given a value, its keys are flags like any other.
    """
    changes = {}
    for name, annotation in field_types(type(config)).items():
        section, value, key = section_of(annotation), getattr(config, name), join(prefix, name)
        if section is None:
            continue
        if value is None and any(flag.startswith(f"--{key}.") for flag in flags):
            value = section()
        if value is not None:
            changes[name] = _with_sections(value, flags, key)
    return dataclasses.replace(config, **changes)


def _registry(cls: type):
    """Register the spellings of the values that TOML and Python write differently."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def bool_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        if info.type is not bool:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="{true,false}",
            choices=("true", "false", "True", "False"),
            instance_from_str=lambda args: args[0].lower() == "true",
            is_instance=lambda value: isinstance(value, bool),
            str_from_instance=lambda value: [toml_value(value)],
        )

    @registry.primitive_rule
    def none_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        if info.type is not type(None):
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="{none}",
            choices=("none", "None"),
            instance_from_str=lambda args: None,
            is_instance=lambda value: value is None,
            str_from_instance=lambda value: ["none"],
        )

    @registry.primitive_rule
    def rows_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        if not _is_rows(info.type):
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="TOML",
            instance_from_str=lambda args: _rows(cls, info.type, args[0], "flag"),
            is_instance=lambda value: isinstance(value, tuple),
            str_from_instance=lambda value: [_inline(value)],
        )

    return registry


def _is_rows(annotation: Any) -> bool:
    return get_origin(annotation) is tuple and is_section(get_args(annotation)[0])


def _rows(cls: type, annotation: Any, text: str, flag: str) -> Any:
    """Read an array of tables from TOML text; ConfigError for text that is not TOML, or not such tables."""
    return read_value(cls, annotation, _toml(text, flag, "[{key = value}]"), flag.removeprefix("--"), where=flag)


def _toml(text: str, flag: str, example: str) -> Any:
    import tomllib

    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{flag}: {text} is not TOML ({error}); write {example}") from error


def _inline(rows: tuple) -> str:
    return toml_value([{key: value for key, value in plain(row).items() if value is not None} for row in rows])
