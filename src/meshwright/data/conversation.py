"""Read a record of text and images as a conversation whose examples know where their images stand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.core.errors import ConfigError

from .formats import BadRow, Record, column
from .images import COLUMNS, IMAGE_PARTS, ImageFile, VisionProcessor, find_image, sides_of
from .turns import Example, Message, Piece, Turns, messages_of, tools_of, with_system

MARK = "<image>"
"""The placeholder of an image in plain text, whatever the model's own is, as LLaVA's data has it."""


class PicturedExample(tuple[Piece, ...]):
    """The pieces of a document, some of which stand for images.

    Attributes:
        images: (index of its piece, file) of each image, in order.
        ids_before: ids that come before those of the pieces.
    """

    images: tuple[tuple[int, ImageFile], ...] = ()
    ids_before: tuple[int, ...] = ()


@dataclass(frozen=True)
class PicturedChat:
    """Conversations with images; or a prompt and its answer, which are a conversation of two turns.

    Args:
        column: of the messages; "" where records have a prompt and an answer.
        turns: those that are learnt; the template writes the processor's ``image_token`` for each image.
    """

    column: str
    turns: Turns
    processor: VisionProcessor
    _found: dict[tuple[Path, str], ImageFile] = field(default_factory=dict, repr=False, compare=False)

    @property
    def fingerprint(self) -> str:
        return json.dumps([self.column, self.turns.fingerprint, self.processor.fingerprint])

    def examples(self, record: Record, where: str, folder: Path) -> list[Example]:
        """Return the examples of a record; an image is a piece of its own, of the processor's text, and not learnt.

        Args:
            folder: of the data file; paths of images are relative to it.

        Raises:
            BadRow: as ``Turns.examples``; also for an image that cannot be read, and for more or fewer places for
                images than images.
        """
        if self.column:
            messages = messages_of(column(record, self.column, where), self.column, where)
        else:
            messages = []
            for role, name in zip(("user", "assistant"), sides_of(record), strict=True):
                value = column(record, name, where)
                is_text = isinstance(value, str)
                messages += [{"role": role, "content": value}] if is_text else messages_of(value, name, where)
        messages = with_system(messages, record, where)
        given = [name for name in COLUMNS if record.get(name)]
        if len(given) > 1:
            raise BadRow(f"{where}: both columns {' and '.join(given)} name images: leave one of them out")
        value = record[given[0]] if given else []
        named = [_path_of(each) for each in (value if isinstance(value, list) else [value])]
        messages, names = with_parts(messages, named, where)
        template = self.turns.template
        others = tools_of(record, template, where)
        examples = self.turns.examples(messages, others, where, parts=True)
        mark, places = self.processor.image_token, template.render(messages, **others)
        if (n := places.count(mark)) != len(names):
            raise BadRow(
                f"{where}: the conversation, as its chat template writes it, has {n} places for images ({mark}), and"
                f" the record has {len(names)} images: give one image for each place, and write {mark} in no text"
            )
        files = []
        for name in names:
            known = self._found.get((folder, name)) if isinstance(name, str) else None
            files.append(known or find_image(folder, name, where))
            if isinstance(name, str):
                self._found[folder, name] = files[-1]
        return [self._pictured(example, files, where) for example in examples]

    def _pictured(self, example: Example, files: list[ImageFile], where: str) -> PicturedExample:
        left = iter(files)
        pieces: list[Piece] = []
        images: list[tuple[int, ImageFile]] = []
        spelt = self.processor.spelt_tokens()
        for text, learnt in example:
            first, *others = text.split(self.processor.image_token)
            pieces.append((first, learnt))
            for after in others:
                file = next(left)
                images.append((len(pieces), file))
                try:
                    tokens = self.processor.text_of(file.width, file.height)
                except ConfigError as error:
                    raise BadRow(f"{where}: the image {file.path} cannot be used: {error}") from error
                pieces += [(tokens, False), (after, learnt)]
        written = {place for place, _ in images}
        for place, (text, _) in enumerate(pieces):
            if place not in written and (found := next((token for token in spelt if token in text), "")):
                raise BadRow(f"{where}: the text holds {found}, a token that only images have: take it out")
        made = PicturedExample(pieces)
        made.images, made.ids_before = tuple(images), self.processor.ids_before(example[0][0])
        return made


def with_parts(messages: list[Message], named: list[Any], where: str) -> tuple[list[Message], list[Any]]:
    """Return messages whose contents are lists of texts and places of images, and the image of each place, in order.

    A part that is an image names it, or is a place for one of ``named``, the images of the record's columns. Where no
    part is a place, each ``<image>`` in a text is one; the line break beside it belongs to it. Where there is none
    either, the images come before the text of the first turn of the user.

    Raises:
        BadRow: there are more places than images or fewer, or a part is neither text nor image.
    """
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    is_marked = bool(named) and not any(_is_place(part) for part in parts)
    every = [part for content in contents for part in _as_list(content) if isinstance(part, dict)]
    if is_marked and not any(isinstance(part.get("text"), str) and MARK in part["text"] for part in every):
        first = next((i for i, message in enumerate(messages) if message.get("role") == "user"), 0)
        messages = [
            {**message, "content": [*({"type": "image"} for _ in named), *_as_list(message.get("content"))]}
            if i == first
            else message
            for i, message in enumerate(messages)
        ]
        is_marked = False
    left, images, made = iter(named), [], []
    n_places = 0
    for turn, message in enumerate(messages, 1):
        new: list[Message] = []
        for part in _as_list(message.get("content")):
            for each in _marked(part) if is_marked else [part]:
                # as templates expect it: a text, or the place of an image without its path
                kind = each.get("type") if isinstance(each, dict) else None
                if kind == "text" and isinstance(each.get("text"), str):
                    new.append({"type": "text", "text": each["text"]})
                elif kind not in IMAGE_PARTS:
                    raise BadRow(
                        f"{where}, turn {turn}: a part of a content is a text ({{type: text, text: …}}) or an image"
                        f" ({{type: image, image: path}}), and here is {str(each)[:60]!r}"
                    )
                else:
                    new.append({"type": "image"})
                    is_place = _is_place(each)
                    n_places += is_place
                    images.append(next(left, None) if is_place else _path_in(each))
        made.append({**message, "content": new} if message.get("content") is not None else message)
    if n_places != len(named):
        raise BadRow(
            f"{where}: the conversation has {n_places} places for images ({MARK}, or parts of the type 'image'), and"
            f" the record has {len(named)} images: give one image for each place"
        )
    return made, images


def _as_list(content: Any) -> list[Any]:
    if content is None:
        return []
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _marked(part: Any) -> Iterator[Any]:
    """Yield a text in pieces, with a place for an image at each mark; other parts as they are."""
    if not (isinstance(part, dict) and isinstance(part.get("text"), str) and MARK in part["text"]):
        yield part
        return
    pieces = part["text"].split(MARK)
    for number, piece in enumerate(pieces):
        if number:
            yield {"type": "image"}
        text = piece.removeprefix("\n") if number else piece
        text = text.removesuffix("\n") if number < len(pieces) - 1 else text
        if text:
            yield {"type": "text", "text": text}


def _path_in(part: Message) -> Any:
    """Return the path that a part of the type image holds; None where it is a place only."""
    for key in IMAGE_PARTS[part["type"]]:
        found = part.get(key)
        if found is not None:
            return _path_of(found)
    return None


def _is_place(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in IMAGE_PARTS and _path_in(part) is None


def _path_of(value: Any) -> Any:
    """Return the path in an image as data sets write it: a path, or a dict with the path or its address alone."""
    if isinstance(value, dict) and not value.get("bytes"):
        return next((value[key] for key in ("path", "url") if value.get(key)), value)
    return value
