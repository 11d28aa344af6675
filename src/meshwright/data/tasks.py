"""Turn a record into examples: pieces of text, of which some are learnt and others are only context."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.core.errors import ConfigError

from .formats import BadRow, Record, column
from .images import ANSWERS, COLUMNS, NO_IMAGES, PROMPTS, Vision, names_images, sides_of
from .options import SourceOptions
from .tokenizers import Tokenizer, template_of
from .turns import (
    ROLES,
    SPEAKERS,
    ChatTemplate,
    Example,
    Message,
    Turns,
    are_messages,
    check_context,
    checked,
    history_of,
    is_empty,
    load_template,
    messages_of,
    pieces_of,
    text_of,
    tools_of,
    with_system,
)

if TYPE_CHECKING:
    from .conversation import PicturedChat

TASK = "preference"
SIDES = ("chosen", "rejected")
ASKED = ("prompt", "messages", "conversations")
"""Columns of what both sides answer."""


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
        return (*SIDES, "prompt") if self.template is None else (*SIDES, *ASKED, "system", "tools")

    def examples(self, record: Record, where: str) -> list[Example]:
        """Return the two examples of a record: the prompt, which is not learnt, and an answer, which is
        (of a template with {% generation %} marks, what they mark of it).

        Raises:
            BadRow: an answer is missing, both are the same, or more than an answer tells them apart.
        """
        pairs: list[Example]
        if self.template is not None:
            given = [_side(record, side, "assistant", where) for side in SIDES]
            shared = _common(*given)
            asked = with_system(_prompt(record, given, shared, where) + shared, record, where)
            others = tools_of(record, self.template, where)
            pairs = [
                self._written(asked, messages[len(shared) :], f"{where}: '{side}'", others)
                for side, messages in zip(SIDES, given, strict=True)
            ]
        else:
            answers = [text_of(record, side, where) for side in SIDES]
            if record.get("prompt") is not None:
                prompt = text_of(record, "prompt", where)
            else:
                shared = _common(*answers)
                prompt = shared[: max(shared.rfind(space) for space in " \n") + 1]
                answers = [side[len(prompt) :] for side in answers]
                if not prompt.strip():
                    raise BadRow(
                        f"{where}: there is no column 'prompt', and the two sides do not begin with the same words"
                    )
            if empty := [side for side, answer in zip(SIDES, answers, strict=True) if not answer.strip()]:
                raise BadRow(f"{where}: '{empty[0]}' is empty, so an immediate end would be learnt")
            pairs = [((prompt, False), (answer, True)) for answer in answers]
        if pairs[0] == pairs[1]:
            raise BadRow(f"{where}: '{SIDES[0]}' and '{SIDES[1]}' are the same, so there is nothing to prefer")
        return pairs

    def _written(self, asked: list[Message], answer: list[Message], where: str, others: dict[str, Any]) -> Example:
        assert self.template is not None
        if [message["role"] for message in answer] != ["assistant"]:
            roles = ", ".join(str(message["role"]) for message in answer) or "nothing"
            raise BadRow(
                f"{where} must add one answer (a turn of the role 'assistant') to what both sides share, and adds"
                f" {roles}"
            )
        if is_empty(answer[0]):
            raise BadRow(f"{where} is empty, so an immediate end would be learnt")
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
        check_context(asked, [((whole, True),)], where, self.template, others)
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

    Many data sets repeat the prompt there, as text or as messages, at the beginning of both sides; some have a side
    again behind it.
    """
    found: list[Message] = []
    for name in ASKED:
        if (value := record.get(name)) is None or value in ([], ""):
            continue
        is_text = isinstance(value, str) and not are_messages(value)
        before = _side(record, name, "user", where)
        answer = next((side for side in given if _texts(before[-len(side) :]) == _texts(side)), [])
        texts = _texts(before := before[: len(before) - len(answer)])
        if texts in (_texts(shared[: len(before)]), _texts(found)) or (is_text and texts[0] in _texts(shared)):
            continue
        if before[-1]["role"] == "assistant":
            raise BadRow(
                f"{where}: '{name}' ends with an answer that is neither '{SIDES[0]}' nor '{SIDES[1]}', and both would"
                f" be learnt behind it: take that turn out"
            )
        if shared or found:
            raise BadRow(
                f"{where}: '{name}' has other messages than {'the two sides begin with' if shared else ASKED[0]}:"
                f" leave one of them out",
                (name,),
            )
        found = before
    return found


def _texts(messages: list[Message]) -> list[tuple[Any, Any]]:
    return [(message["role"], message.get("content")) for message in messages]


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
    columns: tuple[str, ...] = ()
    """The columns that are read."""
    missed: tuple[str, ...] = ()
    """Columns that are not read, and would change what a model learns or sees: records that have one are refused."""
    ignore: tuple[str, ...] = ()
    """Columns that are left out on purpose."""
    turns: Turns | None = None
    """Makes the examples of conversations."""
    advice: str = ""
    """What reads them, as the end of a sentence; "" where nothing does."""

    def examples_in(self, record: Record, where: str, folder: Path) -> list[Example]:
        """Return the examples of a record of a file in ``folder``.

        Raises:
            BadRow: the record cannot be used, has images that are refused, or more than its examples hold.
        """
        if self.ignore:
            record = without(record, self.ignore)
        try:
            if self.pictured is not None:
                examples = self.pictured.examples(record, where, folder)
            else:
                if self.refusal and names_images(record):
                    raise BadRow(f"{where}: the record has images, {self.refusal}")
                examples = self.examples(record, where)
            untold = [name for name in self.missed if (value := record.get(name)) and not _is_told(value, examples)]
            if untold:
                raise BadRow(
                    f"{where}: the column '{untold[0]}' holds {str(record[untold[0]])[:60]!r}, and the task"
                    f" '{self.name}' does not read it (it reads {', '.join(self.columns)}). Write it into these, or"
                    f" leave it out",
                    untold,
                )
            return examples
        except BadRow as error:
            if not error.columns:
                raise
            raise BadRow(f"{error} on purpose: data.ignore = {[*self.ignore, *error.columns]}{self.advice}") from None


def without(record: Record, names: tuple[str, ...]) -> Record:
    return {name: value for name, value in record.items() if name not in names}


def _is_told(value: Any, examples: list[Example]) -> bool:
    """Return whether all texts in a column's value stand in a record's examples, as a repeated prompt does."""
    if isinstance(value, list | dict):
        inside = value.values() if isinstance(value, dict) else value
        # a turn's role is no text of it
        return all(
            _is_told(each, examples) for each in inside if not (isinstance(each, str) and each in (*SPEAKERS, *ROLES))
        )
    whole = ("".join(text for text, _ in example) for example in examples)
    is_role = value in SPEAKERS or value in ROLES if isinstance(value, str) else True
    return is_role or any(value.strip() in text for text in whole)


CONTEXT = ("system", "system_prompt", "history", "context", "tools", "functions", "documents")
"""Columns that data sets give a model to read, beside those of a question and its answer."""
_PARTS = ("instruction", "input", "output", "response", "answer", "prompt", "completion", "question", "query")
"""Columns of questions and answers."""
_TALKS = ("messages", "conversations", "conversation", *SIDES)


def choose_task(options: SourceOptions, tokenizer: Tokenizer, sample: Record, vision: Vision = NO_IMAGES) -> Task:
    """Return the task that ``options`` name, or that the columns of ``sample`` imply.

    Where the model has a processor, conversations are read with their images, also those that have none.

    Raises:
        ConfigError: a chat has no template, or another task has one; as ``VisionProcessor`` does.
    """
    sample = without(sample, options.ignore)
    name = task_name(options, sample)
    key = "" if name == "completion" else options.column if options.column != "text" else _column_of_messages(sample)
    if vision.folder and (name == "chat" or (name == "completion" and any(map(sample.get, COLUMNS)))):
        from .conversation import PicturedChat

        processor = vision.processor
        processor.check(tokenizer)
        if options.template or processor.template is None:
            template = load_template(options.template, getattr(tokenizer, "folder", None))
        else:
            template = ChatTemplate(processor.template, processor.special_tokens)
        chat = PicturedChat(key, Turns(template, options.learn), processor)
        columns = (*((key,) if key else (*PROMPTS, *ANSWERS)), *COLUMNS, "system", "tools")

        def in_no_folder(record: Record, where: str) -> list[Example]:
            raise AssertionError("paths of images are relative to a folder: call examples_in")

        own: dict[str, Any] = {"fingerprint": chat.fingerprint, "columns": columns, "turns": chat.turns}
        task = Task("chat", in_no_folder, True, ends=False, pictured=chat, **own)
    else:
        task = _of_text(name, key, options, tokenizer, sample)
        reads_none = (
            f"and the task '{name}' reads none: write conversations (messages), or a prompt with its completion"
        )
        task = replace(task, refusal=reads_none if vision.folder else vision.refusal) if task.is_whole else task
    others = CONTEXT if options.column != "text" or name == "text" else (*CONTEXT, *_PARTS, *_TALKS)
    missed = tuple(other for other in others if other not in task.columns) if task.is_whole else ()
    return replace(task, missed=missed, ignore=options.ignore)


def _of_text(name: str, key: str, options: SourceOptions, tokenizer: Tokenizer, sample: Record) -> Task:
    folder = getattr(tokenizer, "folder", None)
    own_template = template_of(folder) if folder else None
    sides = sides_of(sample)
    are_turns = options.template or any(are_messages(sample.get(side)) for side in sides)
    if name == "chat" or (name == "completion" and are_turns):
        return _chat(name, key, sides, Turns(load_template(options.template, folder), options.learn))
    if name == "alpaca" and (options.template or (own_template and any(other in sample for other in _TALKED))):
        turns = Turns(load_template(options.template, folder), options.learn)

        def talk(record: Record, where: str) -> list[Example]:
            instruction, given, answer = _alpaca(record, where)
            asked = {"role": "user", "content": "\n".join(text for text in (instruction, given) if text)}
            messages = [*history_of(record, where), asked, {"role": "assistant", "content": answer}]
            others = tools_of(record, turns.template, where)
            return turns.examples(with_system(messages, record, where), others, where)

        decides, columns = json.dumps(["alpaca", *turns.fingerprint]), (*_ALPACA_COLUMNS, *_TALKED, "tools")
        return Task("alpaca", talk, is_whole=True, ends=False, fingerprint=decides, columns=columns, turns=turns)
    if options.learn == "last":
        raise ConfigError(f"data.learn = 'last' is of conversations, and the task is '{name}': leave it out")
    if name == TASK and options.learn != "answers":
        raise ConfigError("data.learn = 'all', and of pairs of answers the answers alone are learnt: leave it out")
    if name == TASK:
        is_text = isinstance(sample.get(SIDES[0]), str) and not options.template
        of_messages = not is_text or any(are_messages(sample.get(other)) for other in (SIDES[0], *ASKED))
        pairs = Preferences(load_template(options.template, folder) if of_messages else None)
        return Task(TASK, pairs.examples, True, not of_messages, fingerprint=pairs.fingerprint, columns=pairs.columns)
    if name not in ("completion", "alpaca"):
        own = options.column
        if options.template:
            raise ConfigError(
                "data.template is set, and the task is 'text', whose documents have no turns: leave it out"
            )

        def text(record: Record, where: str) -> list[Example]:
            return [((text_of(record, own, where), True),)]

        return Task("text", text, is_whole=False, ends=True, fingerprint=own, columns=(own,))
    asks, columns = options.learn == "all", _ALPACA_COLUMNS if name == "alpaca" else sides

    def pair(record: Record, where: str) -> list[Example]:
        if name == "alpaca":
            instruction, given, answer = _alpaca(record, where)
            with_input = ", paired with an input that provides further context" if given else ""
            prompt = f"{_ALPACA}{with_input}. Write a response that appropriately completes the request."
            prompt += f"\n\n### Instruction:\n{instruction}"
            prompt += f"\n\n### Input:\n{given}" if given else ""
            prompt += "\n\n### Response:\n"
        else:
            prompt, answer = (text_of(record, side, where) for side in sides)
        if not answer.strip():
            raise BadRow(f"{where}: the answer is empty, so an immediate end would be learnt")
        return [((prompt, asks), (answer, True))]

    advice = (
        ". A chat template (the tokenizer's, or data.template) writes 'system' and 'history' as turns, if the first"
        " record has these columns, empty or not"
    )
    advice, decides = advice * (name == "alpaca"), "all" * asks + ", ".join(columns) * (sides != _COMPLETION)
    return Task(name, pair, is_whole=True, ends=True, fingerprint=decides, columns=columns, advice=advice)


def _chat(name: str, key: str, sides: tuple[str, ...], turns: Turns) -> Task:
    """Make a task of conversations (see ``Turns``); without a column, of messages of a prompt and its completion."""

    def examples(record: Record, where: str) -> list[Example]:
        others = tools_of(record, turns.template, where)
        if key:
            messages = messages_of(column(record, key, where), key, where)
            return turns.examples(with_system(messages, record, where), others, where)
        prompt, completion = (
            _side(record, side, role, where) for side, role in zip(sides, ("user", "assistant"), strict=True)
        )
        if _texts(completion[: len(prompt)]) == _texts(prompt):  # some data sets repeat it there
            completion = completion[len(prompt) :]
        prompt = with_system(prompt, record, where)
        return turns.examples(prompt + completion, others, where, first=len(prompt))

    columns = (*((key,) if key else sides), "system", "tools")
    decides = json.dumps([key or (", ".join(sides) if sides != _COMPLETION else ""), *turns.fingerprint])
    return Task(name, examples, True, ends=False, fingerprint=decides, columns=columns, turns=turns)


def task_name(options: SourceOptions, sample: Record) -> str:
    """Return the name of the task; "auto" decides by the columns."""
    if options.task != "auto":
        return options.task
    has_images = any(map(sample.get, COLUMNS))
    own = options.column != "text"
    # a pair's conversation is its prompt, unless a column of messages is asked for
    if all(sample.get(side) is not None for side in SIDES) and not (
        own and isinstance(sample.get(options.column), list)
    ):
        return TASK
    fits = {
        "chat": isinstance(sample.get(options.column if own else _column_of_messages(sample)), list | str),
        "completion": ("prompt" in sample and "completion" in sample)
        or (has_images and any(map(sample.get, PROMPTS)) and any(map(sample.get, ANSWERS))),
        "alpaca": "instruction" in sample and "output" in sample,
    }
    if own and isinstance(sample.get(options.column), str):
        return "text"
    names = [name for name, is_so in fits.items() if is_so]
    if len(names) > 1:
        raise ConfigError(
            f"data.source: the columns {', '.join(sample)} fit the tasks {' and '.join(names)}: set data.task, and name"
            " the columns that are not meant in data.ignore"
        )
    if (
        not names
        and options.column not in sample
        and all(any(map(sample.__contains__, one)) for one in (PROMPTS, ANSWERS))
    ):
        return "completion"
    return names[0] if names else "text"


def _column_of_messages(sample: Record) -> str:
    return "conversations" if "messages" not in sample and "conversations" in sample else "messages"


_COMPLETION = ("prompt", "completion")


_ALPACA = "Below is an instruction that describes a task"
"""Beginning of the format's prompts, in the wording of its publication (Taori et al. 2023), on which models were
trained."""


def _alpaca(record: Record, where: str) -> tuple[str, str, str]:
    """Return the instruction of an Alpaca record, its input ("" without one) and its output."""
    instruction, answer = text_of(record, "instruction", where), text_of(record, "output", where)
    given = text_of(record, "input", where) if record.get("input") is not None else ""
    return instruction, given, answer


_ALPACA_COLUMNS = ("instruction", "input", "output")
_TALKED = ("system", "history")
"""Columns by which Alpaca records are conversations, which the chat template writes, as in LLaMA-Factory."""


def _side(record: Record, name: str, role: str, where: str) -> list[Message]:
    """Return the messages in a column: one of a role for text."""
    value = column(record, name, where)
    if isinstance(value, str) and not are_messages(value):
        return [{"role": role, "content": value}]
    return messages_of([value] if isinstance(value, dict) else value, name, where)
