"""Turn a record into examples: pieces of text, of which some are learnt and others are only context."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from meshwright.core.errors import ConfigError
from meshwright.data.options import SourceOptions
from meshwright.data.sources.records import BadRow, Record, column

from .chat import ChatTemplate, Message, load_template
from .messages import messages_of, text_of
from .preference import SIDES, TASK, Preferences, holds_messages
from .tokenizers import Tokenizer

Piece = tuple[str, bool]
"""Text, and whether it is learnt."""

Example = tuple[Piece, ...]
"""The pieces of one document."""


@dataclass(frozen=True)
class Task:
    """A function from records to documents, with its properties."""

    name: str
    examples: Callable[[Record, str], list[Example]]
    """Returns the examples of a record; the text is the record's location, for errors. Raises BadRow."""
    is_whole: bool
    """Whether samples hold whole documents; otherwise documents are cut into rows."""
    ends: bool
    """Whether each document is closed by the end-of-document token, which is learnt."""
    special: bool = False
    """Whether special tokens spelt out in the text (as by a chat template) become tokens; otherwise they are text."""
    fingerprint: str = ""
    """Further settings that determine the examples."""


def choose_task(options: SourceOptions, tokenizer: Tokenizer, sample: Record) -> Task:
    """Return the task that ``options`` name, or that the columns of ``sample`` imply.

    Raises:
        ConfigError: a chat has no template, or another task has one.
    """
    name = task_name(options, sample)
    if name == "chat":
        key = options.column if options.column != "text" else _column_of_messages(sample)
        template = load_template(options.template, getattr(tokenizer, "folder", None))
        chat = _Chat(key, template)
        decides = json.dumps([key, template.text, sorted(template.special_tokens.items())])
        return Task("chat", chat.examples, is_whole=True, ends=False, special=True, fingerprint=decides)
    if name == TASK and holds_messages(sample):
        preferences = Preferences(load_template(options.template, getattr(tokenizer, "folder", None)))
        return Task(TASK, preferences.examples, True, ends=False, special=True, fingerprint=preferences.fingerprint)
    if options.template:
        raise ConfigError(f"data.template is set, and the task is '{name}' of text: only messages have a template")
    if name == TASK:
        return Task(TASK, Preferences(None).examples, is_whole=True, ends=True)
    if name == "completion":
        return Task(name, _completion, is_whole=True, ends=True)
    if name == "alpaca":
        return Task(name, _alpaca, is_whole=True, ends=True)
    return Task("text", _Text(options.column).examples, is_whole=False, ends=True, fingerprint=options.column)


def task_name(options: SourceOptions, sample: Record) -> str:
    """Return the name of the task; "auto" decides by the columns."""
    if options.task != "auto":
        return options.task
    if isinstance(sample.get(options.column if options.column != "text" else _column_of_messages(sample)), list):
        return "chat"
    if all(side in sample for side in SIDES):
        return TASK
    if "prompt" in sample and "completion" in sample:
        return "completion"
    if "instruction" in sample and "output" in sample:
        return "alpaca"
    return "text"


def _column_of_messages(sample: Record) -> str:
    return "conversations" if "messages" not in sample and isinstance(sample.get("conversations"), list) else "messages"


@dataclass(frozen=True)
class _Text:
    column: str

    def examples(self, record: Record, where: str) -> list[Example]:
        return [((text_of(record, self.column, where), True),)]


def _completion(record: Record, where: str) -> list[Example]:
    return [((text_of(record, "prompt", where), False), (text_of(record, "completion", where), True))]


_ALPACA = "Below is an instruction that describes a task"
"""Beginning of the format's prompts, in the wording of its publication (Taori et al. 2023), on which models were
trained."""


def _alpaca(record: Record, where: str) -> list[Example]:
    instruction, answer = text_of(record, "instruction", where), text_of(record, "output", where)
    if given := record.get("input") or "":
        prompt = (
            f"{_ALPACA}, paired with an input that provides further context. Write a response that appropriately"
            f" completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{given}\n\n### Response:\n"
        )
    else:
        prompt = (
            f"{_ALPACA}. Write a response that appropriately completes the request.\n\n###"
            f" Instruction:\n{instruction}\n\n### Response:\n"
        )
    return [((prompt, False), (answer, True))]


@dataclass(frozen=True)
class _Chat:
    """Conversations: only the assistant's turns are learnt, with the tokens that end them.

    The template defines an answer: the text of the messages up to the answer, minus the text that prompts for it. A
    template may render earlier turns differently once others follow (some drop an earlier answer's reasoning). Then
    each answer becomes its own example, with the context that the model would read.
    """

    column: str
    template: ChatTemplate

    def examples(self, record: Record, where: str) -> list[Example]:
        messages = self._messages(record, where)
        others = {"tools": record["tools"]} if record.get("tools") else {}
        answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        if not answers:
            raise BadRow(f"{where}: the conversation has no turn of the role 'assistant', so there is nothing to learn")
        try:
            asked = [self.template.render(messages[:i], prompts_answer=True, **others) for i in answers]
            answered = [self.template.render(messages[: i + 1], **others) for i in answers]
            whole = self.template.render(messages, **others)
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

    def _messages(self, record: Record, where: str) -> list[Message]:
        return messages_of(column(record, self.column, where), self.column, record, where)
