"""Turn a record with a better and a worse answer into two examples."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from meshwright.data.sources.records import BadRow, Record, column

from .chat import ChatTemplate, Message
from .messages import messages_of, text_of

TASK = "preference"
SIDES = ("chosen", "rejected")


def holds_messages(sample: Record) -> bool:
    """Return whether the answers of a record are messages, and not text."""
    return not isinstance(sample.get(SIDES[0]), str)


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

    def examples(self, record: Record, where: str) -> list[tuple[tuple[str, bool], ...]]:
        """Return the two examples of a record: the prompt, which is not learnt, and an answer, which is.

        Raises:
            BadRow: an answer is missing, both are the same, or more than an answer tells them apart.
        """
        pairs = self._of_text(record, where) if self.template is None else self._of_messages(record, where)
        if pairs[0] == pairs[1]:
            raise BadRow(f"{where}: '{SIDES[0]}' and '{SIDES[1]}' are the same, so there is nothing to prefer")
        return [((prompt, False), (answer, True)) for prompt, answer in pairs]

    def _of_text(self, record: Record, where: str) -> list[tuple[str, str]]:
        prompt = text_of(record, "prompt", where)
        return [(prompt, text_of(record, side, where)) for side in SIDES]

    def _of_messages(self, record: Record, where: str) -> list[tuple[str, str]]:
        given = [self._side(record, side, where) for side in SIDES]
        shared = _common(*given)
        before = _prompt(record, shared, where)
        others = {"tools": record["tools"]} if record.get("tools") else {}
        return [
            self._written(before + shared, messages[len(shared) :], f"{where}: '{side}'", others)
            for side, messages in zip(SIDES, given, strict=True)
        ]

    def _side(self, record: Record, side: str, where: str) -> list[Message]:
        value = column(record, side, where)
        return messages_of([value] if isinstance(value, dict) else value, side, {}, where)

    def _written(
        self, asked: list[Message], answer: list[Message], where: str, others: dict[str, Any]
    ) -> tuple[str, str]:
        assert self.template is not None
        if [message["role"] for message in answer] != ["assistant"]:
            roles = ", ".join(str(message["role"]) for message in answer) or "nothing"
            raise BadRow(
                f"{where} must add one answer (a turn of the role 'assistant') to what both sides share, and adds"
                f" {roles}"
            )
        if not asked:
            raise BadRow(f"{where} answers nothing: the column 'prompt' is empty, and the two sides share no turn")
        try:
            prompt = self.template.render(asked, prompts_answer=True, **others)
            whole = self.template.render(asked + answer, **others)
        except ValueError as error:
            raise BadRow(f"{where}: {error}") from error
        if not whole.startswith(prompt):
            raise BadRow(f"{where}: the chat template writes an answer differently from how it asks for it")
        return prompt, whole[len(prompt) :]


def _common(one: list[Message], other: list[Message]) -> list[Message]:
    """Return the messages with which both lists begin."""
    n = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:n]


def _prompt(record: Record, shared: list[Message], where: str) -> list[Message]:
    """Return the messages of the column ``prompt`` that come before those that both sides share.

    Many data sets repeat the prompt there, as text or as messages, at the beginning of both sides.
    """
    prompt = record.get("prompt")
    if prompt is None or prompt == []:
        return []
    is_text = isinstance(prompt, str)
    before = [{"role": "user", "content": prompt}] if is_text else messages_of(prompt, "prompt", record, where)
    if shared[: len(before)] == before or (is_text and before[0] in shared):
        return []
    if shared:
        raise BadRow(
            f"{where}: both sides begin with other messages than the column 'prompt' has: leave one of them out"
        )
    return before
