"""Read a conversation as messages, render it by its tokenizer's template, and part it into answers and context."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshwright.core.errors import ConfigError, MissingExtraError, nearest
from meshwright.core.files import refuse_pointer

from .formats import BadRow, Record, column
from .tokenizers import Tokenizer, special_tokens, template_of

# --- render a conversation as the text that a model reads, with its tokenizer's Jinja template

Message = dict[str, Any]

ANSWER = "\N{OBJECT REPLACEMENT CHARACTER}"
"""An answer that is found again in a rendered conversation."""
PROBE = "some words that no conversation has"
_MARK = re.compile(r"{%-?\s*generation\s*-?%}")


class ChatTemplate:
    """A chat template with the special tokens that it may use.

    Args:
        text: Jinja source, from ``tokenizer_config.json`` or ``chat_template.jinja``.
        special_tokens: names such as ``bos_token``, and their texts.

    Raises:
        MissingExtraError: the package ``transformers``, which has the renderer, is not installed.
    """

    def __init__(self, text: str, special_tokens: dict[str, str]):
        try:
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError as error:
            raise MissingExtraError("a chat template", "transformers", "hf") from error
        self.text, self.special_tokens, self._render = text, special_tokens, render_jinja_template
        self._written = dict[tuple, bool]()
        self.has_marks = bool(_MARK.search(text))
        """Whether the template marks what the assistant writes ({% generation %})."""

    def render(self, messages: list[Message], *, prompts_answer: bool = False, **others: Any) -> str:
        """Return the text of ``messages``; with ``prompts_answer`` followed by the start of an assistant's turn.

        Raises:
            ValueError: the template fails on these messages; the text includes its error.
        """
        return self._rendered(messages, add_generation_prompt=prompts_answer, **others)[0][0]

    def render_marked(self, messages: list[Message], **others: Any) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of ``messages``, and where each part that the template marks as written by the assistant
        begins and ends.

        Raises:
            ValueError: as ``render``.
        """
        # asked for marks that are not there, transformers would warn
        texts, spans = self._rendered(messages, return_assistant_tokens_mask=self.has_marks, **others)
        return texts[0], [(begin, end) for spans_of in spans for begin, end in spans_of if begin < end]

    def _rendered(self, messages: list[Message], **options: Any) -> tuple[list[str], list[Any]]:
        try:
            texts, spans = self._render([messages], chat_template=self.text, **self.special_tokens, **options)
        except Exception as error:
            raise ValueError(f"the chat template refuses it ({type(error).__name__}: {error})") from error
        return list(texts), list(spans)

    def writes(self, turn: int, messages: list[Message], others: dict[str, Any]) -> bool:
        """Return whether the text of a turn is written; asked once for turns of these roles and keys."""
        shape = turn, *others, *((one["role"], *(key for key in one if one[key])) for one in messages)
        if shape not in self._written:
            asked = [{**one, "content": PROBE} if number == turn else one for number, one in enumerate(messages)]
            try:
                self._written[shape] = PROBE in self.render(asked, **others)
            except ValueError:  # it reads what it writes
                self._written[shape] = True
        return self._written[shape]


OWN = "own"
"""The value of data.template that names the tokenizer's own, for prompts and answers of text."""


def load_template(path: str, folder: Path | None) -> ChatTemplate:
    """Return the template in the file ``path``, or if that is empty or "own", that of the tokenizer in ``folder``.

    Raises:
        ConfigError: the template does not exist or is not text.
    """
    tokens = special_tokens(folder) if folder else {}
    if path not in ("", OWN):
        file = Path(path).expanduser()
        if not file.is_file():
            raise ConfigError(f"data.template = {path!r} does not exist; it is a file with a Jinja template, or own")
        refuse_pointer(file)
        try:
            return ChatTemplate(file.read_text(encoding="utf-8"), tokens)
        except UnicodeDecodeError as error:
            raise ConfigError(f"data.template = {path!r} is not UTF-8 text ({error})") from None
    text = template_of(folder) if folder else None
    if text is None:
        if folder is None:
            raise ConfigError(
                "conversations cannot be written out without a chat template, and bytes have none: name the"
                " model (model.hf) or a tokenizer (data.tokenizer) that has one, or a file with data.template"
            )
        where = f"the tokenizer in {folder} has"
        raise ConfigError(
            f"{where} no chat template (looked for chat_template.jinja, and chat_template in tokenizer_config.json),"
            f" so conversations cannot be written out. Save one with the tokenizer, name a file with data.template, or"
            f" choose a tokenizer made for chat"
        )
    return ChatTemplate(text, tokens)


def ends_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> set[int]:
    """Return the id that a template puts behind an assistant's answer, if it is a special token."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    try:
        _, found, behind = template.render(messages).rpartition(ANSWER)
    except ValueError:
        return set()
    ids = tokenizer.encode(behind)[:1].tolist() if found and behind.strip() else []
    return {i for i in ids if not tokenizer.decode([i])}


# --- read a conversation as a list of messages with roles, as chat templates expect it

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
WRITTEN = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Keys of a turn, besides its content, that hold what an assistant wrote."""
_SYSTEM = ("system", "developer")
_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|from|content|value)["']\s*:""")


def messages_of(value: Any, name: str, where: str) -> list[Message]:
    """Return the messages in a column: those with a role and a content as they are, those of ShareGPT (``from`` and
    ``value``) with their role and content. Messages that are JSON text, as in Parquet, are parsed.

    Raises:
        BadRow: the column holds no list of messages, or a speaker who has no role.
    """
    value = _parsed(value)
    is_list = isinstance(value, list) and all(isinstance(message, dict) for message in value)
    if is_list and value and all("from" in message and "role" not in message for message in value):
        messages = []
        for turn, message in enumerate(value, 1):
            here, speaker, text = f"{where}, turn {turn}", message["from"], message.get("value")
            if not isinstance(speaker, str) or speaker not in SPEAKERS:
                raise BadRow(
                    f"{here}: nobody knows the role of {speaker!r} (from).{nearest(str(speaker), SPEAKERS)} Known are"
                    f" {', '.join(SPEAKERS)}; write other turns as messages with a role and a content"
                )
            if not isinstance(text, str):
                raise BadRow(f"{here}: its value must be text, and is {repr(text)[:60]}")
            others = {key: one for key, one in message.items() if key not in ("from", "value")}
            messages.append({**others, "role": SPEAKERS[speaker], "content": text})
        return messages
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
        raise BadRow(
            f"{where}: the record has tools, and the chat template writes none: use one that does, or leave it out",
            ("tools",),
        )
    return {"tools": tools}


def checked(messages: list[Message], template: ChatTemplate, where: str, *, parts: bool = False) -> list[Message]:
    """Return messages whose contents are text, with lists of text parts joined.

    Args:
        parts: leave lists of parts as they are, for a processor of images.

    Raises:
        BadRow: a role that the template does not name, a content that is neither text nor text parts, or calls of tools
            that the template does not write.
    """
    found = []
    for turn, message in enumerate(messages, 1):
        here, role, content = f"{where}, turn {turn}", message["role"], message.get("content")
        if role not in ROLES and not any(f"{quote}{role}{quote}" in template.text for quote in "'\""):
            raise BadRow(
                f"{here}: the role {role!r} is none of {', '.join(ROLES)}, and the chat template does not name it."
                f"{nearest(str(role), ROLES)}"
            )
        if unwritten := [key for key in WRITTEN if message.get(key) and key not in template.text]:
            raise BadRow(
                f"{here}: the turn has {unwritten[0]}, and the chat template writes none: use a template that does, or"
                f" take the key out of the turn"
            )
        texts = []
        for part in content if isinstance(content, list) else ():
            is_part = isinstance(part, dict) and part.get("type") == "text"
            texts.append(part.get("text") if is_part else part)
        if isinstance(content, list) and not parts and all(isinstance(text, str) for text in texts):
            message = {**message, "content": "".join(texts)}
        elif not (
            isinstance(content, str)
            or (content is None and any(key in template.text for key in _beside_content(message)))
            or (parts and isinstance(content, list))
        ):
            raise BadRow(
                f"{here}: the content must be text, or a list of parts of text, and is {str(content)[:60]!r}"
                f" ({'null' if content is None else type(content).__name__})"
            )
        found.append(message)
    return found


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


def are_messages(value: Any) -> bool:
    """Return whether a value is a list, or text that is JSON of messages or begins like it; "[1, 2]" is plain text."""
    if isinstance(value, list) or (isinstance(value, str) and _MESSAGES.match(value)):
        return True
    found = _parsed(value) if isinstance(value, str) else None
    return isinstance(found, list) and any(isinstance(m, dict) and {"role", "from"} & m.keys() for m in found)


def _parsed(value: Any) -> Any:
    """Parse text that is JSON of a list or an object, which Parquet keeps as text; return anything else as it is."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def text_of(record: Record, name: str, where: str) -> str:
    """Return the text in a column; raises BadRow if it holds anything else."""
    value = column(record, name, where)
    if not isinstance(value, str):
        raise BadRow(
            f"{where}: the column '{name}' must hold text, and holds {type(value).__name__} {repr(value)[:60]}"
        )
    return value


# --- part a conversation into the answers, which are learnt, and the text around them

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
    unread: list[int] = field(default_factory=list, repr=False, compare=False)
    """Of each conversation that goes on behind the last turn that is learnt, the number of turns that are left out."""

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
        n, answers = len(messages), [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise BadRow(f"{where}: the conversation has no turn of the role 'assistant', so there is nothing to learn")
        marked = [is_learnt(message, f"{where}, turn {turn}") for turn, message in enumerate(messages, 1)]
        learnt = {i for i in (answers[-1:] if self.learn == "last" else answers) if i >= first and marked[i]}
        if not learnt:
            raise BadRow(f"{where}: no answer of the conversation is to be learnt: all of them are marked not to be")
        if (empty := next((i for i in sorted(learnt) if is_empty(messages[i])), None)) is not None:
            others_left = any(not is_empty(messages[i]) for i in learnt)
            advice = "; mark the turn with 'weight': 0 to read it only" if others_left else ""
            raise BadRow(
                f"{where}, turn {empty + 1}: the assistant's answer is empty, so an immediate stop would be"
                f" learnt{advice}"
            )
        try:
            if self.learn == "all" and not all(marked):
                raise BadRow(
                    f"{where}: data.learn = 'all' learns every turn, and turn {marked.index(False) + 1} is marked not"
                    f" to be learnt: set data.learn = 'answers'"
                )
            if self.learn == "all":
                examples: list[Example] = [((self.template.render(messages, **others), True),)]
            else:
                answers = [i for i in answers if i <= max(learnt)]  # what comes later is neither learnt nor context
                messages = messages[: answers[-1] + 1]
                if not self.template.has_marks:
                    examples = self._parted(messages, answers, learnt, others, where)
                else:
                    text, spans = self.template.render_marked(messages, **others)
                    if not spans:
                        raise BadRow(
                            f"{where}: the chat template has {{% generation %}} marks, and marks nothing of this"
                            f" conversation"
                        )
                    if learnt != set(answers):
                        if len(spans) != len(answers):
                            raise BadRow(
                                f"{where}: some of the {len(answers)} answers are not to be learnt, and the chat"
                                f" template marks {len(spans)} parts, so that none belongs to one answer"
                            )
                        spans = [span for i, span in zip(answers, spans, strict=True) if i in learnt]
                    examples = [pieces_of(text, spans)]
        except ValueError as error:
            raise (error if isinstance(error, BadRow) else BadRow(f"{where}: {error}")) from error
        if not parts:
            check_context(messages, examples, where, self.template, others)
        if behind := n - len(messages):
            self.unread.append(behind)
        return examples

    def _parted(
        self, messages: list[Message], answers: list[int], learnt: set[int], others: dict[str, Any], where: str
    ) -> list[Example]:
        answered = [self.template.render(messages[: i + 1], **others) for i in answers]
        asked: list[str] = []
        for i, after in zip(answers, answered, strict=True):
            if i:
                asked.append(self.template.render(messages[:i], prompts_answer=True, **others))
                continue
            try:  # templates need not write a text that asks for the very first turn
                found = self.template.render([], prompts_answer=True, **others)
            except ValueError:
                found = None
            if found is None or not after.startswith(found):
                found = after.partition(str(messages[0]["content"]).strip())[0]
            asked.append(found)
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


def pieces_of(text: str, spans: list[tuple[int, int]]) -> Example:
    """Return the pieces of a text of which spans, from a character to the one behind, are learnt."""
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    return tuple((text[a:b], bool(number % 2)) for number, (a, b) in enumerate(pairwise(edges)))


FEW = 16
"""Characters: shorter text may stand elsewhere in a conversation by chance."""


def check_context(
    messages: list[Message], examples: list[Example], where: str, template: ChatTemplate, others: dict[str, Any]
) -> None:
    """Raise BadRow where a chat template leaves out a turn of anybody but the assistant.

    A template may write what a tool returned as text of JSON.
    """
    whole = ["".join(text for text, _ in example) for example in examples]
    for turn, message in enumerate(messages, 1):
        content = message.get("content")
        if message["role"] == "assistant" or not isinstance(content, str):
            continue
        forms = content.strip(), *(json.dumps(content, ensure_ascii=ascii)[1:-1] for ascii in (False, True))
        found = any(form in text for form in forms for text in whole)
        if found and 0 < len(forms[0]) < FEW:
            found = template.writes(turn - 1, messages, others)
        if not found:
            raise BadRow(
                f"{where}, turn {turn}: the chat template does not write the {message['role']}'s {content[:60]!r}, so"
                f" the model would not read it: use a template that does, or leave the turn out"
            )
