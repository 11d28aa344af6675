"""Inspect a tree of dataclasses: types, keys, docs below its fields, and which values nobody chose."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from meshwright.core.names import under

# --- tell a default from a value that somebody chose

Value = TypeVar("Value", int, float, str)


class Unset:
    """Marks a number or text that nobody chose. It computes, compares and prints as the plain value does."""


class _UnsetInt(Unset, int):
    pass


class _UnsetFloat(Unset, float):
    pass


class _UnsetText(Unset, str):
    pass


_KINDS: tuple[tuple[type, type], ...] = ((int, _UnsetInt), (float, _UnsetFloat), (str, _UnsetText))


def unset(value: Value) -> Value:
    """Return a default that is still to be chosen: by the user, or else by what is known of model and data."""
    return next(marked(value) for plain, marked in _KINDS if isinstance(value, plain))


def is_unset(value: object) -> bool:
    """Return whether nobody chose a value."""
    return isinstance(value, Unset)


def without_mark(value: Any) -> Any:
    """Return the plain value, as if it had been chosen."""
    return next(plain(value) for plain, marked in _KINDS if isinstance(value, marked)) if is_unset(value) else value


# --- inspect a tree of dataclasses


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Map the names of public fields that the constructor takes to their resolved annotations, in field order."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init and not f.name.startswith("_")}


def union_arms(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union; any other annotation is its own only member."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def is_section(annotation: Any) -> bool:
    """Return whether a type is a dataclass, which has its own table in TOML."""
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def section_of(annotation: Any) -> type | None:
    """Return the dataclass ``X`` behind ``X`` or ``X | None``; None for other types."""
    return next((arm for arm in union_arms(annotation) if is_section(arm)), None)


def row_of(annotation: Any) -> type | None:
    """Return the dataclass ``X`` behind ``tuple[X, ...]`` or ``list[X]``, an array of tables in TOML; else None."""
    for arm in union_arms(annotation):
        if get_origin(arm) in (tuple, list) and not is_fixed(arm) and is_section(get_args(arm)[0]):
            return get_args(arm)[0]
    return None


def is_fixed(annotation: Any) -> bool:
    """Tell ``tuple[A, B]``, whose items have a type each (True), from ``tuple[T, ...]`` and ``list[T]`` (False)."""
    return get_origin(annotation) is tuple and Ellipsis not in get_args(annotation)


def item_types(annotation: Any, length: int) -> tuple[Any, ...] | None:
    """Return the item types of a tuple or list of that length; None when it cannot have that length."""
    args = get_args(annotation)
    if is_fixed(annotation):
        return args if len(args) == length else None
    return (args[0],) * length


def default_of(field: dataclasses.Field) -> Any:
    """Return the value of a field whose key is left out (``dataclasses.MISSING`` when it is required)."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def sections(cls: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Yield every (dotted prefix, dataclass) of the tree, the root first; rows of an array of tables as ``key[]``."""
    yield prefix, cls
    for name, annotation in field_types(cls).items():
        if section := section_of(annotation):
            yield from sections(section, under(prefix, name))
        elif row := row_of(annotation):
            yield from sections(row, under(prefix, name) + "[]")


def public_keys(cls: type) -> list[str]:
    """List every key a user can set, dotted, in field order; array-of-tables keys as ``overrides[].pattern``."""
    keys = []
    for name, annotation in field_types(cls).items():
        section, row = section_of(annotation), row_of(annotation)
        if section:
            keys += [under(name, key) for key in public_keys(section)]
        elif row:
            keys += [under(f"{name}[]", key) for key in public_keys(row)]
        else:
            keys.append(name)
    return keys


def field_doc(cls: type, name: str) -> str:
    """Return the text below a field, or a dotted key as ``public_keys`` has it, on one line; "" when there is none."""
    head, _, rest = name.partition(".")
    head = head.removesuffix("[]")
    annotation = field_types(cls)[head]
    if rest:
        inner = section_of(annotation) or row_of(annotation)
        if inner is None:
            raise KeyError(name)
        return field_doc(inner, rest)
    return next((docs[head] for base in cls.__mro__ if head in (docs := _docs(base))), "")


@cache
def _docs(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # built-in, or made without a source file
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs = {}
    for statement, below in zip(body, body[1:], strict=False):
        match statement, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text)):
                docs[name] = " ".join(text.split())
    return docs
