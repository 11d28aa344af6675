"""Turn a record into examples: pieces of text, of which some are learnt and others are only context."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.core.errors import ConfigError
from meshwright.data.images.source import ANSWERS, COLUMNS, NO_IMAGES, PROMPTS, Vision, names_images
from meshwright.data.options import SourceOptions
from meshwright.data.sources.records import BadRow, Record, column

from .chat import ChatTemplate, load_template
from .messages import messages_of, text_of
from .preference import SIDES, TASK, Preferences, holds_messages
from .tokenizers import Tokenizer
from .turns import Example, examples_of

if TYPE_CHECKING:
    from meshwright.data.images.conversation import PicturedChat


@dataclass(frozen=True)
class Task:
    """A function from records to documents, with its properties."""

    name: str
    examples: Callable[[Record, str], list[Example]]
    """Returns the examples of a record; the text is the record's location, for errors. Raises BadRow."""
    is_whole: bool
    """Whether samples hold whole documents; otherwise documents are cut into rows."""
    ends: bool
    """Whether documents get the tokens that begin and end a text; otherwise a chat template has written them."""
    fingerprint: str = ""
    """Further settings that determine the examples."""
    pictured: PicturedChat | None = None
    """Makes the examples, in place of ``examples``, where records may have images."""
    refusal: str = ""
    """Why a record with images is refused, as the end of a sentence; "" where it is not."""

    def examples_in(self, record: Record, where: str, folder: Path) -> list[Example]:
        """Return the examples of a record of a file in ``folder``. Raises BadRow, also for images that are refused."""
        if self.pictured is not None:
            return self.pictured.examples(record, where, folder)
        if self.refusal and names_images(record):
            raise BadRow(f"{where}: the record has images, {self.refusal}")
        return self.examples(record, where)


def choose_task(options: SourceOptions, tokenizer: Tokenizer, sample: Record, vision: Vision = NO_IMAGES) -> Task:
    """Return the task that ``options`` name, or that the columns of ``sample`` imply.

    Where the model has a processor, conversations are read with their images, also those that have none.

    Raises:
        ConfigError: a chat has no template, or another task has one; as ``VisionProcessor`` does.
    """
    name = task_name(options, sample)
    key = "" if name == "completion" else options.column if options.column != "text" else _column_of_messages(sample)
    if vision.folder and (name == "chat" or (name == "completion" and any(map(sample.get, COLUMNS)))):
        return _pictured(options, tokenizer, key, vision)
    task = _of_text(name, key, options, tokenizer, sample)
    reads_none = f"and the task '{name}' reads none: write conversations (messages), or a prompt with its completion"
    return replace(task, refusal=reads_none if vision.folder else vision.refusal) if task.is_whole else task


def _of_text(name: str, key: str, options: SourceOptions, tokenizer: Tokenizer, sample: Record) -> Task:
    if name == "chat":
        template = load_template(options.template, getattr(tokenizer, "folder", None))
        chat = _Chat(key, template)
        decides = json.dumps([key, template.text, sorted(template.special_tokens.items())])
        return Task("chat", chat.examples, is_whole=True, ends=False, fingerprint=decides)
    if name == TASK and holds_messages(sample):
        preferences = Preferences(load_template(options.template, getattr(tokenizer, "folder", None)))
        return Task(TASK, preferences.examples, True, ends=False, fingerprint=preferences.fingerprint)
    if options.template:
        raise ConfigError(f"data.template is set, and the task is '{name}' of text: only messages have a template")
    if name == TASK:
        return Task(TASK, Preferences(None).examples, is_whole=True, ends=True)
    if name == "completion":
        return Task(name, _completion, is_whole=True, ends=True)
    if name == "alpaca":
        return Task(name, _alpaca, is_whole=True, ends=True)
    return Task("text", _Text(options.column).examples, is_whole=False, ends=True, fingerprint=options.column)


def _pictured(options: SourceOptions, tokenizer: Tokenizer, key: str, vision: Vision) -> Task:
    from meshwright.data.images.conversation import PicturedChat

    processor = vision.processor
    processor.check(tokenizer)
    if options.template or processor.template is None:
        template = load_template(options.template, getattr(tokenizer, "folder", None))
    else:
        template = ChatTemplate(processor.template, processor.special_tokens)
    chat = PicturedChat(key, template, processor)

    return Task("chat", _in_no_folder, True, ends=False, fingerprint=chat.fingerprint, pictured=chat)


def _in_no_folder(record: Record, where: str) -> list[Example]:
    raise AssertionError("paths of images are relative to a folder: call examples_in")


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
    if any(map(sample.get, COLUMNS)) and any(map(sample.get, PROMPTS)) and any(map(sample.get, ANSWERS)):
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
    """Conversations: only the assistant's turns are learnt, with the tokens that end them (see ``turns``)."""

    column: str
    template: ChatTemplate

    def examples(self, record: Record, where: str) -> list[Example]:
        others = {"tools": record["tools"]} if record.get("tools") else {}
        messages = messages_of(column(record, self.column, where), self.column, record, where)
        return examples_of(messages, self.template, others, where)
