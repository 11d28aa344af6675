"""Part a conversation into the answers, which are learnt, and the text around them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from meshwright.data.sources.records import BadRow

from .chat import ChatTemplate, Message

Piece = tuple[str, bool]
"""Text, and whether it is learnt."""

Example = tuple[Piece, ...]
"""The pieces of one document."""


def examples_of(messages: list[Message], template: ChatTemplate, others: dict[str, Any], where: str) -> list[Example]:
    """Return the examples of a conversation: only the assistant's turns are learnt, with the tokens that end them.

    The template defines an answer: the text of the messages up to the answer, minus the text that prompts for it. A
    template may render earlier turns differently once others follow (some drop an earlier answer's reasoning). Then
    each answer becomes its own example, with the context that the model would read. A template that marks what the
    assistant writes ({% generation %}) says itself what is learnt.

    Args:
        others: further variables of the template, such as ``tools``.
        where: the record's location, for errors.

    Raises:
        BadRow: there is no answer, or the template cannot write the conversation.
    """
    answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if not answers:
        raise BadRow(f"{where}: the conversation has no turn of the role 'assistant', so there is nothing to learn")
    if template.has_marks:
        return [_marked(messages[: answers[-1] + 1], template, others, where)]
    try:
        asked = [template.render(messages[:i], prompts_answer=True, **others) for i in answers]
        answered = [template.render(messages[: i + 1], **others) for i in answers]
        whole = template.render(messages, **others)
    except ValueError as error:
        raise BadRow(f"{where}: {error}") from error
    for before, after in zip(asked, answered, strict=True):
        if not after.startswith(before):
            raise BadRow(
                f"{where}: the chat template writes an answer differently from how it asks for it: it asks with"
                f" {before[-40:]!r}, but the conversation with the answer does not begin like that"
            )
    ends = [0, *map(len, answered[:-1])]
    if all(whole.startswith(after) for after in answered) and all(
        end <= len(text) for end, text in zip(ends, asked, strict=True)
    ):
        pieces: list[Piece] = []
        for end, before, after in zip(ends, asked, answered, strict=True):
            pieces += [(after[end : len(before)], False), (after[len(before) :], True)]
        # text after the last answer is left out: it is not learnt, nor is it context of an answer
        return [tuple(pieces)]
    return [((before, False), (after[len(before) :], True)) for before, after in zip(asked, answered, strict=True)]


def _marked(messages: list[Message], template: ChatTemplate, others: dict[str, Any], where: str) -> Example:
    try:
        text, spans = template.render_marked(messages, **others)
    except ValueError as error:
        raise BadRow(f"{where}: {error}") from error
    if not spans:
        raise BadRow(f"{where}: the chat template has {{% generation %}} marks, and marks nothing of this conversation")
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    return tuple((text[a:b], bool(number % 2)) for number, (a, b) in enumerate(pairwise(edges)))
