"""Readers of records, deliberately broken: each mutant is a fault of ids, of the mask or of what is refused."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from unittest.mock import patch

import numpy as np

from meshwright.data import building, tasks, turns
from meshwright.data import tasks as preference


def mask_one_early() -> AbstractContextManager:
    """The last token of each prompt is learnt too."""
    return _shifted(lambda mask: np.append(mask[1:], mask[-1:]))


def mask_one_late() -> AbstractContextManager:
    """The first token of each answer is not learnt."""
    return _shifted(lambda mask: np.append(mask[:1], mask[:-1]))


def _shifted(shift) -> AbstractContextManager:
    whole = building.learnt_tokens
    return patch.object(building, "learnt_tokens", lambda *args: shift(whole(*args)))


def bos_dropped() -> AbstractContextManager:
    """No token begins a text."""
    return patch.object(building, "ids_before", lambda tokenizer, ids: ())


def end_dropped() -> AbstractContextManager:
    """No token ends a document."""
    return patch.object(building.Encoder, "_closed", _without_end(building.Encoder._closed))


def _without_end(whole):
    def closed(self, ids, learnt):
        found, mask = whole(self, ids, learnt)
        n = len(found) - (found[-1] == self.tokenizer.end_of_document)
        return found[:n], mask[:n]

    return closed


def weight_0_learnt() -> AbstractContextManager:
    """Marks of turns that are not to be learnt are not looked at."""
    return patch.object(turns, "is_learnt", lambda message, where: True)


def column_dropped() -> AbstractContextManager:
    """A column of context that the task does not read is left out in silence."""
    return patch.object(tasks, "_is_told", lambda value, examples: True)


def calls_dropped() -> AbstractContextManager:
    """Calls of tools are taken out of turns before the template writes them."""
    whole = turns.checked

    def checked(messages, *args, **options):
        plain = [
            {k: v for k, v in {**m, "content": m.get("content") or "-"}.items() if k != "tool_calls"} for m in messages
        ]
        return whole(plain, *args, **options)

    return patch.object(turns, "checked", checked)


def parts_of_answers_dropped() -> AbstractContextManager:
    """Of a content in parts, the first is read."""

    def checked(messages, template, where, *, parts=False):
        return [m | {"content": m["content"][0]["text"]} if isinstance(m.get("content"), list) else m for m in messages]

    stack = ExitStack()
    for module in (turns, preference):
        stack.enter_context(patch.object(module, "checked", checked))
    return stack
