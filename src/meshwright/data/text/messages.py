"""Read a conversation as a list of messages with roles, as chat templates expect it."""

from __future__ import annotations

import json
from typing import Any

from meshwright.core.errors import nearest
from meshwright.data.sources.records import BadRow, Record, column

from .chat import ChatTemplate, Message

SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "tool": "tool",
}
"""The role of each speaker (``from``) of a ShareGPT conversation."""


ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles that chat templates write; others are known if the template's text names them."""
MARKS = ("weight", "train", "training", "loss")
"""Keys of a turn that say whether it is learnt."""
_SYSTEM = ("system", "developer")


def messages_of(value: Any, name: str, where: str) -> list[Message]:
    """Return the messages in a column: those with a role and a content as they are, those of ShareGPT (``from`` and
    ``value``) with their role and content. Messages that are JSON text, as in Parquet, are parsed.

    Raises:
        BadRow: the column holds no list of messages, or a speaker who has no role.
    """
    value = _parsed(value)
    is_list = isinstance(value, list) and all(isinstance(message, dict) for message in value)
    if is_list and value and all("from" in message and "role" not in message for message in value):
        return [_of_share_gpt(message, f"{where}, turn {turn}") for turn, message in enumerate(value, 1)]
    if not is_list or not all(message.get("role") for message in value):
        raise BadRow(
            f"{where}: '{name}' must be a list of messages with a role and a content each (or, as ShareGPT, a from and"
            f" a value), and is {str(value)[:60]!r}"
        )
    return value


def with_system(messages: list[Message], record: Record, where: str) -> list[Message]:
    """Return messages that begin with the record's own column ``system``, if it has one.

    Raises:
        BadRow: the column is no text, or the messages have another turn of the system.
    """
    system = record.get("system")
    if system is None or system == "":
        return messages
    own = [message["content"] for message in messages if message["role"] in _SYSTEM]
    if isinstance(system, str) and not own:
        return [{"role": "system", "content": system}, *messages]
    if system in own:
        return messages
    there = f", and the messages have a turn of the system, {str(own[0])[:60]!r}: leave one of them out" if own else ""
    raise BadRow(f"{where}: the column 'system' must be text, and is {str(system)[:60]!r}{there}")


def history_of(record: Record, where: str) -> list[Message]:
    """Return the turns in a column ``history`` of an Alpaca record: pairs of a question and its answer.

    Raises:
        BadRow: the column holds something else.
    """
    pairs = _parsed(record.get("history")) or []
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in pairs
    ):
        raise BadRow(
            f"{where}: 'history' must be a list of pairs of text, a question and its answer each, and is"
            f" {str(pairs)[:60]!r}"
        )
    turns = zip(("user", "assistant") * len(pairs), (text for pair in pairs for text in pair), strict=True)
    return [{"role": role, "content": text} for role, text in turns]


def tools_of(record: Record, template: ChatTemplate, where: str) -> dict[str, Any]:
    """Return the template's variable ``tools`` of a record, which may be JSON text; empty without tools.

    Raises:
        BadRow: they are no list of objects, or the template writes none.
    """
    tools = _parsed(record.get("tools"))
    if not tools:
        return {}
    tools = [_parsed(tool) for tool in tools] if isinstance(tools, list) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(f"{where}: 'tools' must be a list of objects, or JSON text of one, and is {str(tools)[:60]!r}")
    if "tools" not in template.text:
        raise BadRow(f"{where}: the record has tools, and the chat template writes none. {_otherwise('tools')}")
    return {"tools": tools}


def checked(messages: list[Message], template: ChatTemplate, where: str, *, parts: bool = False) -> list[Message]:
    """Return messages whose contents are text, with lists of text parts joined.

    Args:
        parts: leave lists of parts as they are, for a processor of images.

    Raises:
        BadRow: a role that the template does not name, a content that is neither text nor text parts, or calls of tools
            that the template does not write.
    """
    return [_checked(message, template, f"{where}, turn {turn}", parts) for turn, message in enumerate(messages, 1)]


def _checked(message: Message, template: ChatTemplate, where: str, parts: bool) -> Message:
    role, content, calls = message["role"], message.get("content"), message.get("tool_calls")
    others = _beside_content(message)
    if role not in ROLES and not any(f"{quote}{role}{quote}" in template.text for quote in "'\""):
        raise BadRow(
            f"{where}: the role {role!r} is none of {', '.join(ROLES)}, and the chat template does not name it."
            f"{nearest(str(role), ROLES)}"
        )
    if calls and "tool_calls" not in template.text:
        raise BadRow(f"{where}: the turn has tool_calls, and the chat template writes none: use a template that does")
    if (
        isinstance(content, str)
        or (content is None and any(key in template.text for key in others))
        or (parts and isinstance(content, list))
    ):
        return message
    if isinstance(content, list) and all(_is_text(part) for part in content):
        return {**message, "content": "".join(part if isinstance(part, str) else part["text"] for part in content)}
    raise BadRow(
        f"{where}: the content must be text, or a list of parts of text, and is {str(content)[:60]!r}"
        f" ({'null' if content is None else type(content).__name__})"
    )


def _is_text(part: Any) -> bool:
    is_part = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    return is_part or isinstance(part, str)


def is_learnt(message: Message, where: str) -> bool:
    """Return whether a turn's own marks leave it to be learnt; raises BadRow for a mark between 0 and 1."""
    for mark in MARKS:
        if (value := message.get(mark)) is not None and value not in (0, 1):
            raise BadRow(
                f"{where}: {mark} = {value!r} of a turn must be 0 or 1 (false or true): turns are learnt or not"
            )
    return all(message.get(mark) in (None, 1) for mark in MARKS)


def is_empty(message: Message) -> bool:
    """Return whether a turn says nothing, so that its end alone would be learnt."""
    content = message.get("content")
    return not (content.strip() if isinstance(content, str) else content) and not _beside_content(message)


def _beside_content(message: Message) -> list[str]:
    """List what a turn has besides its content, such as calls of tools or reasoning."""
    return [key for key, value in message.items() if value and key not in ("role", "content", *MARKS)]


def _otherwise(name: str) -> str:
    return f"Leave the column out on purpose with data.ignore = ['{name}'], or use a template that writes it"


def _parsed(value: Any) -> Any:
    """Parse text that is JSON of a list or an object, which Parquet keeps as text; return anything else as it is."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _of_share_gpt(message: Record, where: str) -> Message:
    speaker, text = message["from"], message.get("value")
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise BadRow(
            f"{where}: nobody knows the role of {speaker!r} (from).{nearest(str(speaker), SPEAKERS)} Known are"
            f" {', '.join(SPEAKERS)}; write other turns as messages with a role and a content"
        )
    if not isinstance(text, str):
        raise BadRow(f"{where}: its value must be text, and is {repr(text)[:60]}")
    return {"role": SPEAKERS[speaker], "content": text, **{mark: message[mark] for mark in MARKS if mark in message}}


def text_of(record: Record, name: str, where: str) -> str:
    """Return the text in a column; raises BadRow if it holds anything else."""
    value = column(record, name, where)
    if not isinstance(value, str):
        raise BadRow(
            f"{where}: the column '{name}' must hold text, and holds {type(value).__name__} {repr(value)[:60]}"
        )
    return value
