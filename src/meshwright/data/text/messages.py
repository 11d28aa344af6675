"""Read a conversation as a list of messages with roles, as chat templates expect it."""

from __future__ import annotations

from typing import Any

from meshwright.core.errors import nearest
from meshwright.data.sources.records import BadRow, Record, column

from .chat import Message

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


def messages_of(value: Any, name: str, record: Record, where: str) -> list[Message]:
    """Return the messages in a column: those with a role and a content as they are, those of ShareGPT (``from`` and
    ``value``) with their role and content.

    A ShareGPT record's own column ``system`` is its first message.

    Raises:
        BadRow: the column holds no list of messages, or a speaker who has no role.
    """
    is_list = isinstance(value, list) and all(isinstance(message, dict) for message in value)
    if is_list and value and all("from" in message and "role" not in message for message in value):
        system = record.get("system")
        first = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
        return first + [_of_share_gpt(message, f"{where}, turn {turn}") for turn, message in enumerate(value, 1)]
    if not is_list or not all(message.get("role") for message in value):
        raise BadRow(
            f"{where}: '{name}' must be a list of messages with a role and a content each (or, as ShareGPT, a from and"
            f" a value), and is {str(value)[:60]!r}"
        )
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
    return {"role": SPEAKERS[speaker], "content": text}


def text_of(record: Record, name: str, where: str) -> str:
    """Return the text in a column; raises BadRow if it holds anything else."""
    value = column(record, name, where)
    if not isinstance(value, str):
        raise BadRow(
            f"{where}: the column '{name}' must hold text, and holds {type(value).__name__} {repr(value)[:60]}"
        )
    return value
