"""Override a config by flags, ``--any.key=value`` or ``--any.key value``, with the fields' names and docs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin

from meshwright.core.errors import ConfigError

from .help import keys_text
from .read import plain, read_value
from .schema import field_types, is_section, join, section_of, union_arms
from .words import toml_value, type_words

T = TypeVar("T")


def parse_flags(cls: type[T], args: Sequence[str], *, default: T | None = None, prog: str, description: str) -> T:
    """Read command-line flags over ``default``.

    Every key of ``public_keys(cls)`` is a flag of that name; hyphens serve for underscores. ``true``, ``false`` and
    ``none`` are written in lower case; a list of text takes all its items after one flag; a list of tables takes one
    TOML value (``--optimizer.overrides='[{pattern = "norm"}]'``).

    Args:
        cls: a dataclass.
        args: the arguments after the program's name.
        default: the instance that the flags change; ``cls()`` when None.
        prog: the program's name in help and errors.
        description: the first lines of the help.

    Raises:
        ConfigError: a list's flag is given twice, or a value is of the wrong type.
        SystemExit: 0 after ``--help``; 2 for an unknown flag, named on standard error.
    """
    if any(arg in ("-h", "--help") for arg in args):
        print(f"usage: {prog} [--key=value …]\n\n{description}\n\n{keys_text(cls, default)}")
        raise SystemExit(0)
    import tyro

    flags = [_spelling(arg) for arg in args]
    _refuse_repeated_lists(cls, flags, "")
    _refuse_other_values(cls, args)
    start = _with_sections(cls() if default is None else default, flags, "")
    return tyro.cli(
        cls,
        args=list(args),
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
    import tomllib

    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{flag}: {text} is not TOML ({error}); write [{{key = value}}]") from error
    return read_value(cls, annotation, value, flag.removeprefix("--"), where=flag)


def _inline(rows: tuple) -> str:
    return toml_value([{key: value for key, value in plain(row).items() if value is not None} for row in rows])
