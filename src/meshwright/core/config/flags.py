"""Override a config by flags, ``--any.key=value`` or ``--any.key value``, and write the help of its keys."""

from __future__ import annotations

import dataclasses
import enum
import keyword
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from meshwright.core.errors import ConfigError, nearest
from meshwright.core.names import under

from .ranges import limits
from .read import from_dict, plain, read_value, toml_value, type_words
from .schema import default_of, field_doc, field_types, item_types, row_of, section_of, sections, union_arms

# --- write the help of keys from the dataclasses themselves

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
    arms, words = union_arms(annotation), legal_words(annotation)
    if len(arms) > 1:
        return "|".join(map(key_kind, arms))
    if words:
        return "|".join(words)
    if row_of(annotation):
        return "TOML"
    if get_origin(annotation) in (tuple, list):
        return f"{key_kind(get_args(annotation)[0])} …"
    return {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}.get(annotation, "VALUE")


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
    """Return the help of all keys, or of those that ``wanted`` names: each with its type, its doc and its values.

    Args:
        instance: the config whose values are shown beside the defaults; ``cls()`` when None.
        wanted: a section (``layout``), a key (``layout.tp``), how some keys begin (``schedule.warm``), or a key's last
            part (``lr``); ConfigError if nothing is called so.
    """
    given, usual = cls() if instance is None else instance, cls()
    tree = [
        (path, section, [name for name, kind in field_types(section).items() if not section_of(kind)])
        for path, section in sections(cls)
    ]
    chosen = _named([(path, under(path, name)) for path, _, names in tree for name in names], wanted)
    blocks = []
    for path, section, names in tree:
        fields, lines = {field.name: field for field in dataclasses.fields(section)}, []
        for name in names:
            if (key := under(path, name)) not in chosen:
                continue
            kind = key_kind(field_types(section)[name])
            text, title = field_doc(section, name).replace("``", ""), f"  {key} = {kind}"
            if "[]" not in key:  # a key of tables is no flag, and has no value of its own
                title, default = f"  --{key} {kind}", _at(usual, key, default_of(fields[name]))
                value, spelt = _at(given, key, default), f"default: {_spelt(default)}"
                text += f" ({spelt})" if value == default else f" (here: {_spelt(value)}; {spelt})"
            lines += [title, *(f"      {line}" for line in _folded(text, width - 6))]
        if lines and path:
            doc = section.__doc__ or ""
            about = "" if doc.startswith(f"{section.__name__}(") else " ".join(doc.split("\n\n")[0].split())
            title = f"[[{path[:-2]}]], a table for each" if path.endswith("[]") else f"[{path}]"
            lines[:0] = textwrap.wrap(f"{title}  {about}".strip(), width, subsequent_indent="  ", **_WHOLE_WORDS)
        elif lines:
            lines[:0] = ["keys of the run"]
        blocks += ["\n".join(lines)] * bool(lines)
    return "\n\n".join(blocks)


def _named(keys: list[tuple[str, str]], wanted: str) -> set[str]:
    """Return the keys, of (section, key) each, that a word after ``--help`` means."""
    wanted = wanted.removeprefix("--").rstrip(".=").replace("-", "_").removesuffix("[]")
    plainly = {key: key.replace("[]", "") for _, key in keys}
    for test in (
        lambda key: key == wanted or key.startswith(f"{wanted}."),
        lambda key: key.startswith(wanted),
        lambda key: key.rpartition(".")[2] == wanted,
    ):
        if found := {key for key in plainly if test(plainly[key])}:
            return found
    named = list(dict.fromkeys(path.replace("[]", "") for path, _ in keys if path))
    leaves = {key.rpartition(".")[2]: key for key in plainly.values()}
    close = nearest(wanted, [*named, *plainly.values()]) or nearest(wanted, leaves)
    listed = ", ".join(path for path in named if "." not in path)
    raise ConfigError(f"--help {wanted}: no section and no key begins so.{close} Sections: {listed}.")


def _folded(text: str, width: int) -> list[str]:
    """Fold a text at a width, and no narrower than 20 characters, between words."""
    return textwrap.wrap(text.strip(), max(width, 20), **_WHOLE_WORDS)


# --- override a config by flags, ``--any.key=value`` or ``--any.key value``

T = TypeVar("T")


def parse_flags(cls: type[T], args: Sequence[str], *, default: T | None = None, prog: str) -> T:
    """Read command-line flags over ``default``.

    Every key of ``public_keys(cls)`` is a flag of that name; hyphens serve for underscores. ``true``, ``false`` and
    ``none`` are written in lower case; a list takes all its items after one flag (``--data.ignore prompt answer``) or
    one TOML array (``--data.ignore='["prompt", "answer"]'``); a list of tables takes one TOML value
    (``--optimizer.overrides='[{pattern = "norm"}]'``). Of a flag given twice the last value counts, but a list is
    refused then, since the first one's items would be lost. ``prog`` is the program's name in errors.
    """
    start = cls() if default is None else default
    given, rest = _read_flags(cls, args, of_verb=False)
    if rest:
        flag, _, value = rest[0].partition("=")
        if flag.startswith("--"):
            if section := section_of(_annotation(cls, _key_of(flag))):
                first = next(iter(field_types(section)))
                raise ConfigError(f"{flag}: '{_key_of(flag)}' is a section: give its keys, like {flag}.{first}=VALUE")
            nested: Any = value
            for part in reversed(_key_of(flag).split(".")):
                nested = {part: nested}
            from_dict(cls, nested, where=flag)  # raises, with the nearest key or where it belongs
        raise ConfigError(f"{prog} does not know '{rest[0]}': a file comes first, then flags with their values")
    return _changed(start, given)


def take_flags(cls: type[T], args: Sequence[str]) -> tuple[T, list[str]]:
    """Split off the flags that a dataclass has; return its instance, and the other words.

    A field ``per_node`` is the flag ``--per-node``. A ``bool`` is a switch, ``--json``, which may have a value where
    the type has others; a tuple takes one item for each time that its flag is given. All else is as ``parse_flags`` has
    it, but that nothing may be given twice.
    """
    given, rest = _read_flags(cls, args, of_verb=True)
    for key, limit in limits(cls).items():
        if given.get(key) is not None:
            limit.check(flag_of(key), given[key])
    return _changed(cls(), given), rest


def flag_of(key: str) -> str:
    """Return the flag of a verb's option."""
    return f"--{key.rstrip('_').replace('_', '-')}"


def options_text(cls: type, width: int = 80) -> str:
    """Return the help of the flags that a verb's dataclass has."""
    lines = []
    for name, annotation in field_types(cls).items():
        kinds = [key_kind(arm) for arm in union_arms(annotation) if arm not in (bool, type(None))]
        kind = "|".join(kinds) if bool not in union_arms(annotation) else f"[{'|'.join(kinds)}]" * bool(kinds)
        doc = field_doc(cls, name).replace("``", "")
        lines.append(f"  {flag_of(name)} {kind}".rstrip())
        lines += [f"      {line}" for line in _folded(doc, width - 6)]
    return "\n".join(lines)


def _read_flags(cls: type, args: Sequence[str], *, of_verb: bool) -> tuple[dict[str, Any], list[str]]:
    """Return values by dotted key, and the words that are no flags of ``cls`` and no values of such."""
    given: dict[str, Any] = {}
    rest: list[str] = []
    words = list(args)
    while words:
        word = words.pop(0)
        flag, has_value, text = word.partition("=")
        key = _key_of(flag)
        annotation = _annotation(cls, key) if flag.startswith("--") else None
        if annotation is None or section_of(annotation):
            rest.append(word)
            continue
        arms, is_list = union_arms(annotation), get_origin(annotation) is tuple and not row_of(annotation)
        items = [text] if has_value else []
        is_next = bool(words) and not words[0].startswith("--")
        if of_verb and bool in arms and not has_value:
            takes = is_next and (Path in arms or (int in arms and words[0].isdigit()))
            items = [words.pop(0) if takes else "true"]
        while words and not words[0].startswith("--") and ((is_list and not of_verb) or not items):
            items.append(words.pop(0))
        if of_verb and is_list and not items:
            example = re.search(r"such as ([^\s;:()]+)", field_doc(cls, key))
            such_as = f", such as {flag} {example[1].rstrip('.,')}" if example else ""
            raise ConfigError(f"{flag} needs a value: {type_words(get_args(annotation)[0])}{such_as}")
        if is_list and len(items) == 1 and items[0].startswith("[") and items[0].endswith("]"):
            written = _toml(items[0], flag, "['a', 'b']")
        elif is_list:
            types = item_types(annotation, len(items)) or (str,) * len(items)
            written = [_word(item, union_arms(each)) for item, each in zip(items, types, strict=True)]
        elif not items or (not items[0] and str not in arms):
            raise ConfigError(f"{flag} needs a value: {type_words(annotation)}")
        else:
            is_row = row_of(annotation) is not None
            written = _toml(items[0], flag, "[{key = value}]") if is_row else _word(items[0], arms)
        value = read_value(cls, annotation, written, key, where=flag)
        if is_list and of_verb:
            value = given.get(key, ()) + value
        elif key in given and (is_list or of_verb):
            times = sum(_key_of(each.partition("=")[0]) == key for each in args if each.startswith("--"))
            advice = f"give all items after one: {flag} first second" if is_list else "give it once"
            raise ConfigError(f"{flag} is given {times} times; {advice}")
        given[key] = value
    return given, rest


def _key_of(flag: str) -> str:
    key = flag.removeprefix("--").replace("-", "_")
    return f"{key}_" if keyword.iskeyword(key) else key


def _annotation(cls: type, key: str) -> Any:
    """Return the type of a dotted key; None of one that a table has not."""
    first, _, rest = key.partition(".")
    annotation = field_types(cls).get(first)
    section = None if annotation is None else section_of(annotation)
    return _annotation(section, rest) if rest and section else None if rest else annotation


def _word(text: str, arms: Sequence[Any]) -> Any:
    """Return none, a choice, true or false, or a number where a word is one and the type has it; else the text."""
    if type(None) in arms and text.lower() == "none":
        return None
    if any(arm in (str, Path) or text in get_args(arm) for arm in arms) and not (bool in arms and text == "true"):
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _toml(text: str, flag: str, example: str) -> Any:
    import tomllib

    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{flag}: {text} is not TOML ({error}); write {example}") from error


def _changed(config: Any, values: Mapping[str, Any]) -> Any:
    """Return a config with values at dotted keys; a section that is absent begins with its defaults."""
    changes = {name: value for name, value in values.items() if "." not in name}
    for name in dict.fromkeys(key.partition(".")[0] for key in values if "." in key):
        section = getattr(config, name)
        if section is None:
            made = section_of(field_types(type(config))[name])
            assert made is not None
            section = made()
        inner = {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{name}.")}
        changes[name] = _changed(section, inner)
    return dataclasses.replace(config, **changes)
