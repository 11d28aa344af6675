"""Turn a record with a better and a worse answer into two examples."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from meshwright.data.sources.formats import BadRow, Record, column

from .turns import (
    ChatTemplate,
    Example,
    Message,
    check_context,
    checked,
    messages_of,
    pieces_of,
    text_of,
    tools_of,
    with_system,
)

TASK = "preference"
SIDES = ("chosen", "rejected")
PROMPTS = ("prompt", "messages", "conversations")
"""Columns of what both sides answer."""


def holds_messages(sample: Record) -> bool:
    """Return whether the answers of a record, or what they answer, are messages, and not text."""
    return not isinstance(sample.get(SIDES[0]), str) or any(isinstance(sample.get(name), list) for name in PROMPTS)


@dataclass(frozen=True)
class Preferences:
    """A prompt with two answers, of which ``chosen`` is better: an example of each, in this order.

    Args:
        template: of the records' messages; None where prompt and answers are text.
    """

    template: ChatTemplate | None

    @property
    def fingerprint(self) -> str:
        if self.template is None:
            return ""
        return json.dumps([self.template.text, sorted(self.template.special_tokens.items())])

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read."""
        return (*SIDES, "prompt") if self.template is None else (*SIDES, *PROMPTS, "system", "tools")

    def examples(self, record: Record, where: str) -> list[Example]:
        """Return the two examples of a record: the prompt, which is not learnt, and an answer, which is
        (of a template with {% generation %} marks, what they mark of it).

        Raises:
            BadRow: an answer is missing, both are the same, or more than an answer tells them apart.
        """
        pairs = self._of_text(record, where) if self.template is None else self._of_messages(record, where)
        if pairs[0] == pairs[1]:
            raise BadRow(f"{where}: '{SIDES[0]}' and '{SIDES[1]}' are the same, so there is nothing to prefer")
        return pairs

    def _of_text(self, record: Record, where: str) -> list[Example]:
        sides = [text_of(record, side, where) for side in SIDES]
        if record.get("prompt") is not None:
            prompt = text_of(record, "prompt", where)
            return [((prompt, False), (side, True)) for side in sides]
        shared = _common(*sides)
        prompt = shared[: max(shared.rfind(space) for space in " \n") + 1]
        if not prompt.strip():
            raise BadRow(f"{where}: there is no column 'prompt', and the two sides do not begin with the same words")
        return [((prompt, False), (side[len(prompt) :], True)) for side in sides]

    def _of_messages(self, record: Record, where: str) -> list[Example]:
        assert self.template is not None
        given = [self._side(record, side, where) for side in SIDES]
        shared = _common(*given)
        asked = with_system(_prompt(record, given, shared, where) + shared, record, where)
        others = tools_of(record, self.template, where)
        return [
            self._written(asked, messages[len(shared) :], f"{where}: '{side}'", others)
            for side, messages in zip(SIDES, given, strict=True)
        ]

    def _side(self, record: Record, side: str, where: str) -> list[Message]:
        value = column(record, side, where)
        if isinstance(value, str) and value.lstrip()[:1] not in ("[", "{"):
            return [{"role": "assistant", "content": value}]
        return messages_of([value] if isinstance(value, dict) else value, side, where)

    def _written(self, asked: list[Message], answer: list[Message], where: str, others: dict[str, Any]) -> Example:
        assert self.template is not None
        if [message["role"] for message in answer] != ["assistant"]:
            roles = ", ".join(str(message["role"]) for message in answer) or "nothing"
            raise BadRow(
                f"{where} must add one answer (a turn of the role 'assistant') to what both sides share, and adds"
                f" {roles}"
            )
        if not asked:
            raise BadRow(f"{where} answers nothing: the column 'prompt' is empty, and the two sides share no turn")
        asked, answer = checked(asked, self.template, where), checked(answer, self.template, where)
        try:
            prompt = self.template.render(asked, prompts_answer=True, **others)
            whole, spans = self.template.render_marked(asked + answer, **others)
        except ValueError as error:
            raise BadRow(f"{where}: {error}") from error
        if not whole.startswith(prompt):
            raise BadRow(f"{where}: the chat template writes an answer differently from how it asks for it")
        check_context(asked, [((whole, True),)], where)
        if not self.template.has_marks:
            return ((prompt, False), (whole[len(prompt) :], True))
        # a mark may begin before the answer, with the words that ask for it
        spans = [(max(begin, len(prompt)), end) for begin, end in spans if end > len(prompt)]
        if not spans:
            raise BadRow(f"{where}: the chat template has {{% generation %}} marks, and marks nothing of the answer")
        return pieces_of(whole, spans)


def _common(one: Any, other: Any) -> Any:
    """Return that with which both lists of messages, or both texts, begin."""
    n = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:n]


def _prompt(record: Record, given: list[list[Message]], shared: list[Message], where: str) -> list[Message]:
    """Return the messages, of the columns of prompts, that come before those that both sides share.

    Many data sets repeat the prompt there, as text or as messages, at the beginning of both sides; some have a whole
    side again as a conversation.
    """
    found: list[Message] = []
    for name in PROMPTS:
        if (value := record.get(name)) is None or value in ([], ""):
            continue
        is_text = isinstance(value, str) and value.lstrip()[:1] != "["
        before = [{"role": "user", "content": value}] if is_text else messages_of(value, name, where)
        texts = _texts(before)
        if texts in (_texts(shared[: len(before)]), _texts(found)) or (is_text and texts[0] in _texts(shared)):
            continue
        if name != PROMPTS[0] and any(_texts(found + side) == texts or _texts(side) == texts for side in given):
            continue
        if shared or found:
            raise BadRow(
                f"{where}: '{name}' has other messages than {'the two sides begin with' if shared else PROMPTS[0]}:"
                f" leave one of them out",
                (name,),
            )
        found = before
    return found


def _texts(messages: list[Message]) -> list[tuple[Any, Any]]:
    return [(message["role"], message.get("content")) for message in messages]
