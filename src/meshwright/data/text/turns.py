"""Part a conversation into the answers, which are learnt, and the text around them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from meshwright.data.sources.records import BadRow

from .chat import ChatTemplate, Message
from .messages import checked, is_empty, is_learnt

Piece = tuple[str, bool]
"""Text, and whether it is learnt."""

Example = tuple[Piece, ...]
"""The pieces of one document."""


@dataclass(frozen=True)
class Turns:
    """The turns of conversations that are learnt, and the template that writes them.

    Args:
        learn: "answers": the assistant's turns; "last": the last of them; "all": the whole text.
    """

    template: ChatTemplate
    learn: str = "answers"

    @property
    def fingerprint(self) -> list[Any]:
        return [self.template.text, sorted(self.template.special_tokens.items()), self.learn]

    def examples(
        self, messages: list[Message], others: dict[str, Any], where: str, *, first: int = 0, parts: bool = False
    ) -> list[Example]:
        """Return the examples of a conversation; an answer is learnt with the tokens that end it.

        The template defines an answer: the text of the messages up to the answer, minus the text that prompts for it. A
        template may render earlier turns differently once others follow (some drop an earlier answer's reasoning).
        Then each answer becomes its own example, with the context that the model would read. A template that marks
        what the assistant writes ({% generation %}) says itself what is learnt.

        Args:
            others: further variables of the template, such as ``tools``.
            where: the record's location, for errors.
            first: the first turn that may be learnt.
            parts: whether contents may be lists of parts, some of them images.

        Raises:
            BadRow: nothing is to be learnt, an answer that is learnt is empty, or the template cannot write the
                conversation.
        """
        messages = checked(messages, self.template, where, parts=parts)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise BadRow(f"{where}: the conversation has no turn of the role 'assistant', so there is nothing to learn")
        marked = [is_learnt(message, f"{where}, turn {turn}") for turn, message in enumerate(messages, 1)]
        learnt = {i for i in (answers[-1:] if self.learn == "last" else answers) if i >= first and marked[i]}
        if not learnt:
            raise BadRow(f"{where}: no answer of the conversation is to be learnt: all of them are marked not to be")
        if (empty := next((i for i in sorted(learnt) if is_empty(messages[i])), None)) is not None:
            raise BadRow(
                f"{where}, turn {empty + 1}: the assistant's answer is empty, so an immediate stop would be learnt;"
                " mark the turn with 'weight': 0 to read it only"
            )
        try:
            if self.learn == "all":
                examples = [self._whole(messages, marked, others, where)]
            else:
                answers = [i for i in answers if i <= max(learnt)]  # what comes later is neither learnt nor context
                messages = messages[: answers[-1] + 1]
                if self.template.has_marks:
                    examples = [self._marked(messages, answers, learnt, others, where)]
                else:
                    examples = self._parted(messages, answers, learnt, others, where)
        except ValueError as error:
            raise (error if isinstance(error, BadRow) else BadRow(f"{where}: {error}")) from error
        if not parts:
            check_context(messages, examples, where)
        return examples

    def _whole(self, messages: list[Message], marked: list[bool], others: dict[str, Any], where: str) -> Example:
        if not all(marked):
            raise BadRow(
                f"{where}: data.learn = 'all' learns every turn, and turn {marked.index(False) + 1} is marked not to be"
                " learnt: set data.learn = 'answers'"
            )
        return ((self.template.render(messages, **others), True),)

    def _parted(
        self, messages: list[Message], answers: list[int], learnt: set[int], others: dict[str, Any], where: str
    ) -> list[Example]:
        answered = [self.template.render(messages[: i + 1], **others) for i in answers]
        asked = [self._asked(messages, i, after, others) for i, after in zip(answers, answered, strict=True)]
        whole = self.template.render(messages, **others)
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
            for i, end, before, after in zip(answers, ends, asked, answered, strict=True):
                pieces += [(after[end : len(before)], False), (after[len(before) :], i in learnt)]
            return [tuple(pieces)]
        return [
            ((before, False), (after[len(before) :], True))
            for i, before, after in zip(answers, asked, answered, strict=True)
            if i in learnt
        ]

    def _asked(self, messages: list[Message], turn: int, answered: str, others: dict[str, Any]) -> str:
        """Return the text that asks for an answer; templates need not write one for the very first turn."""
        if turn:
            return self.template.render(messages[:turn], prompts_answer=True, **others)
        try:
            found = self.template.render([], prompts_answer=True, **others)
        except ValueError:
            found = None
        if found is not None and answered.startswith(found):
            return found
        return answered.partition(str(messages[0]["content"]).strip())[0]

    def _marked(
        self, messages: list[Message], answers: list[int], learnt: set[int], others: dict[str, Any], where: str
    ) -> Example:
        text, spans = self.template.render_marked(messages, **others)
        if not spans:
            raise BadRow(
                f"{where}: the chat template has {{% generation %}} marks, and marks nothing of this conversation"
            )
        if learnt != set(answers):
            if len(spans) != len(answers):
                raise BadRow(
                    f"{where}: some of the {len(answers)} answers are not to be learnt, and the chat template marks"
                    f" {len(spans)} parts, so that none belongs to one answer"
                )
            spans = [span for i, span in zip(answers, spans, strict=True) if i in learnt]
        return pieces_of(text, spans)


def pieces_of(text: str, spans: list[tuple[int, int]]) -> Example:
    """Return the pieces of a text of which spans, from a character to the one behind, are learnt."""
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    return tuple((text[a:b], bool(number % 2)) for number, (a, b) in enumerate(pairwise(edges)))


def check_context(messages: list[Message], examples: list[Example], where: str) -> None:
    """Raise BadRow where a chat template leaves out a turn of the system or the user."""
    whole = ["".join(text for text, _ in example) for example in examples]
    for turn, message in enumerate(messages, 1):
        content = message.get("content")
        if message["role"] not in ("system", "developer", "user") or not isinstance(content, str):
            continue
        if not any(content.strip() in text for text in whole):
            raise BadRow(
                f"{where}, turn {turn}: the chat template does not write the {message['role']}'s {content[:60]!r}, so"
                f" the model would not read it: use a template that does, or leave the turn out"
            )
