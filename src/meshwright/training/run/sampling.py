"""Write text with an opened model, in one process, as it comes."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from meshwright.data.text.unfolding import Unfolding
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.training.tokenizer import prompt_ids

from .opened import Opened

PARAMETERS_PER_THREAD = 32_000_000
"""Below so many, the threads of a product of one token wait for each other longer than they compute."""

Write = Callable[[str], object]


def use_threads(threads: int | None, parameters: int) -> None:
    """Set torch's number of threads for products of one token.

    Args:
        threads: number that the user asks for; None: by the model's size, at most one for each physical core that
            this process may use, or as ``OMP_NUM_THREADS`` says.
    """
    if threads is None and os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        return
    torch.set_num_threads(threads if threads is not None else threads_for(parameters))


def threads_for(parameters: int) -> int:
    """Return the number of threads that write with a model of so many parameters."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(allowed, psutil.cpu_count(logical=False) or allowed)
    return max(1, min(cores, parameters // PARAMETERS_PER_THREAD))


@dataclass
class Sampler:
    """A model that continues texts.

    Attributes:
        sampling: fields of ``Sampling``.
    """

    opened: Opened
    model: ParallelModel
    sampling: dict[str, Any]

    @classmethod
    def of(cls, opened: Opened, threads: int | None = None, **sampling: Any) -> Sampler:
        """Read an opened model onto this machine's device."""
        use_threads(threads, 0)
        model = opened.model()
        use_threads(threads, model.facts.numel)
        return cls(opened, model, sampling)

    def continue_text(self, prompt: str, tokens: int, write: Write) -> None:
        """Write the prompt and at most ``tokens`` more tokens, up to the end of the document.

        Args:
            write: called with each part of the text as soon as it is known.
        """
        ids = prompt_ids(prompt, self.opened.tokenizer, self.opened.path)
        self.follow(ids, Unfolding(self.opened.tokenizer), tokens, write, shown=ids)

    def follow(
        self,
        ids: Sequence[int],
        text: Unfolding,
        tokens: int,
        write: Write,
        *,
        shown: Sequence[int] = (),
        stop: Collection[int] = (),
    ) -> list[int]:
        """Write the text that follows ``ids``, and return its ids.

        Args:
            shown: those of ``ids`` that are written too.
            stop: ids that end the text, besides the end of a document.
        """

        def give(part: str) -> None:
            if part:
                write(part)

        if len(ids):
            give(text.more(*shown))
        stops = {self.opened.tokenizer.end_of_document, *stop}
        found = self.model.generate(ids, tokens, stop=stops, heard=lambda new: give(text.more(new)), **self.sampling)
        give(text.rest())
        return found
