"""Find what a model does to its logits behind its head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import UnsupportedError
from meshwright.introspection.signature import logits_of
from meshwright.introspection.small.copies import copy_of
from meshwright.introspection.small.sample import SEQ

from .operation import begin
from .tape import LogitsTape


@dataclass(frozen=True)
class Tail:
    """What was seen between head and logits.

    Attributes:
        steps: the operators, in order, in words.
        obstacle: what cannot be done to some tokens at a time; "" if nothing.
        across: what cannot be done to some columns of the vocabulary at a time.
    """

    steps: tuple[str, ...] = ()
    obstacle: str = ""
    across: str = ""

    @property
    def obstacle_if_cut(self) -> str:
        """What cannot be done where ranks share the vocabulary."""
        return self.obstacle or self.across


def find_tail(model: nn.Module, head: str, inputs: Mapping[str, Any]) -> Tail:
    """Observe forwards in both modes, at two lengths; the steps are those of the first.

    Each step of a training observes its own forward anew. This one finds what is refused before the first step.
    """
    copy, found = copy_of(model), list[Tail]()
    # a weight that begins at zero hides nothing: no values are looked at
    for training in (True, False):
        copy.train(training)
        for arguments in _lengths(inputs):
            with torch.random.fork_rng(devices=()):
                found.append(_observed(copy, head, arguments))
    first = found[0]
    obstacle = next((tail.obstacle for tail in found if tail.obstacle), "")
    return Tail(first.steps, obstacle, next((tail.across for tail in found if tail.across), ""))


def _lengths(inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for length in (SEQ, SEQ // 2):
        yield {
            key: value[:, :length] if isinstance(value, Tensor) and value.dim() == 2 else value
            for key, value in inputs.items()
        }


def _observed(model: nn.Module, head: str, inputs: dict[str, Any]) -> Tail:
    tapes: list[LogitsTape] = []

    def deferred(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        tape, logits = begin(output, output.shape[-1])
        tapes.append(tape)
        return logits

    handle = model.get_submodule(head).register_forward_hook(deferred)
    try:
        logits = logits_of(model(**inputs))
        logits = tapes[-1].finish(logits)
        return Tail(tapes[-1].shown(logits), across=tapes[-1].obstacle(logits, cut=True))
    except UnsupportedError as refusal:
        return Tail(obstacle=str(refusal))
    except Exception as error:  # noqa: BLE001  whatever a model's code or torch raises of tensors without values
        return Tail(obstacle=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    finally:
        handle.remove()
