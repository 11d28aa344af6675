"""Find the words that may stand where the cursor is: verbs, flags, keys and their values, runs and files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from meshwright.core.config.flags import flag_of, legal_words
from meshwright.core.config.schema import field_types, union_arms

from .help import KEYS, config_of, described, options_of

RUN_FILES = ("config.toml", "identity.json")
OUT = "runs"
"""Folder in which runs lie by default."""
SHELLS = ("bash", "zsh", "fish")


def split(line: str) -> list[str]:
    """Split a command line up to the cursor into words; the last is the one to complete, empty behind a space."""
    try:
        words = shlex.split(line)
    except ValueError:  # a quote that is still open
        words = re.sub("[\"']", "", line).split()
    return [*words, ""] if not words or line[-1:].isspace() else words


def candidates(words: list[str], verbs: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return the words that may stand in place of the last one.

    One that ends with ``=``, ``.`` or ``/`` goes on; the others are complete.

    Args:
        words: those behind the program's name.
        verbs: verb -> (module:function, its help).
    """
    last = words[-1]
    if len(words) == 1:
        return _that_begin([*verbs, "--help", "--version"], last)
    verb, before = words[0], words[1:-1]
    if verb not in verbs:
        return []
    if verb == "completion":
        return _that_begin([*SHELLS, "--install"], last)
    usage, _ = described(verb, verbs[verb][0])
    takes_keys = KEYS in usage
    if before and before[-1] in ("-h", "--help") and takes_keys:
        return _that_begin(_sections(config_of(verb)), last)
    own = {flag_of(name): kind for cls in options_of(verbs[verb][0]) for name, kind in field_types(cls).items()}
    if last.startswith("-"):
        flag, equals, value = last.partition("=")
        if equals:
            legal = _legal(own[flag]) if flag in own else _values_of_key(config_of(verb), flag) if takes_keys else ()
            found = _that_begin(legal, value) or list(_paths(value, ("",)))
            return [f"{flag}={one}" for one in found]
        return _that_begin(["--help", *own], last) + (_keys(config_of(verb), last) if takes_keys else [])
    if before and (kind := own.get(before[-1])) is not None and bool not in union_arms(kind):
        return _that_begin(_legal(kind), last) or list(_paths(last, ("",)))
    if before and before[-1].startswith("-") and "=" not in before[-1] and before[-1] not in own:
        return list(_paths(last, ("",)))
    return list(dict.fromkeys([*(_runs(last) if "RUN" in usage else ()), *_paths(last, _endings(usage))]))


def _that_begin(words: Iterable[str], beginning: str) -> list[str]:
    return sorted({word for word in words if word.startswith(beginning)})


def _endings(usage: str) -> tuple[str, ...]:
    """Return the endings of the files that a verb takes; of other verbs, only folders are offered."""
    if re.search("DATA|FILE", re.sub(r"\[.*?\]", "", usage)):
        return ("",)
    return (".toml",) if "CONFIG" in usage else ()


def _legal(annotation: Any) -> list[str]:
    """Return the words that an option may be, but for none, which is its absence."""
    return [word for word in legal_words(annotation) if word != "none"]


def _sections(cls: type) -> list[str]:
    from meshwright.core.config.schema import sections

    return [path for path, _ in sections(cls) if path and "[]" not in path]


def _keys(cls: type, beginning: str) -> list[str]:
    """Return flags of keys, up to their next dot where several go on there."""
    from meshwright.core.config import public_keys

    typed = beginning.replace("-", "_").replace("__", "--", 1)
    flags = [f"--{key}" for key in _without_tables(public_keys(cls))]
    found = {flag for flag in flags if flag.startswith(typed)}
    ends = {(flag + "=").find(".", len(typed)) for flag in found}
    if len(found) > 1 and len(ends) == 1 and (end := ends.pop()) >= 0 and len({flag[:end] for flag in found}) == 1:
        return _keys(cls, next(iter(found))[: end + 1])
    return sorted({flag[: end + 1] if (end := flag.find(".", len(typed))) >= 0 else f"{flag}=" for flag in found})


def _without_tables(keys: Iterable[str]) -> list[str]:
    """Return keys with those of an array's tables replaced by the array's own, which is the flag."""
    return list(dict.fromkeys(key.partition("[]")[0] for key in keys))


def _values_of_key(cls: type, flag: str) -> tuple[str, ...]:
    from meshwright.core.config.schema import section_of

    *path, last = flag.removeprefix("--").replace("-", "_").split(".")
    for name in path:
        inner = section_of(field_types(cls).get(name, str))
        if inner is None:
            return ()
        cls = inner
    annotation = field_types(cls).get(last)
    if f"{flag}".endswith("model.size"):
        from meshwright.models.decoder_config import SIZES

        return tuple(SIZES)
    return legal_words(annotation) if annotation is not None else ()


def _runs(beginning: str) -> Iterator[str]:
    """Yield folders of runs: those in ``runs``, newest first, and those where the typed path leads."""
    head, slash, _ = beginning.rpartition("/")
    for place in dict.fromkeys([Path(OUT), Path(head or "/") if slash else Path(OUT)]):
        try:
            found = [path for path in place.iterdir() if any((path / name).is_file() for name in RUN_FILES)]
            found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        except OSError:
            continue
        yield from (str(path) for path in found if str(path).startswith(beginning))


def _paths(beginning: str, endings: tuple[str, ...]) -> Iterator[str]:
    """Yield folders, and files with one of the endings, whose paths begin as typed; hidden ones only if asked for."""
    head, _, tail = beginning.rpartition("/")
    folder = Path(head + "/" if head or beginning.startswith("/") else ".").expanduser()
    try:
        inside = sorted(folder.iterdir())
    except OSError:
        return
    for path in inside:
        if not path.name.startswith(tail) or (path.name.startswith(".") and not tail.startswith(".")):
            continue
        shown = f"{head}/{path.name}" if "/" in beginning else path.name
        if path.is_dir():
            if not any((path / name).is_file() for name in RUN_FILES) or "" in endings:
                yield f"{shown}/"
        elif path.name.endswith(endings):
            yield shown
