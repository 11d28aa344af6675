"""Measure what each block of a model saves for its backward, by a dry run on tensors without memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from meshwright.introspection.facts import ModelFacts
from meshwright.planning.plan import Plan
from meshwright.planning.traffic import resolved
from meshwright.planning.values import Batch

from .dry_run import KEYS, DryRun
from .fake import same_random_numbers, untouched
from .live import addresses, storage_of
from .optimizers import default_optimizer


@dataclass(frozen=True)
class SavedByBlock:
    """Bytes that a block saves of a microbatch for its backward.

    Attributes:
        all: of tensors that no earlier block saved, parameters left out.
        in_attention: those among them that its attention saves.
    """

    all: int
    in_attention: int


def saved_by_blocks(facts: ModelFacts, plan: Plan, batch: Batch) -> tuple[SavedByBlock, ...]:
    """Measure each repeated block of a model in a step of one microbatch under a plan of one rank.

    The model is not changed. Empty where its code fails on tensors without memory.

    Args:
        facts: facts of the model before a plan is applied.
        plan: a plan of one rank that recomputes and compiles nothing.
    """
    if facts.module is None or plan.world != 1:
        return ()
    try:
        dry = DryRun(facts, plan, resolved(plan, batch), KEYS, default_optimizer)
        with same_random_numbers(), untouched(facts.module), dry.model_of(0) as model:
            step, seen = dry.step(model, 1), _BlockSaves(model.parts[0])
            with seen.watching(facts):
                model.run_opened(step)
    except Exception:  # noqa: BLE001  (whatever a model's code raises when its tensors have no values)
        return ()
    return tuple(SavedByBlock(seen.bytes[block], seen.in_attention[block]) for block in facts.blocks)


@dataclass
class _BlockSaves:
    """Counts saved bytes by the block that computes."""

    model: nn.Module
    bytes: Counter[str] = field(default_factory=Counter)
    in_attention: Counter[str] = field(default_factory=Counter)
    _block: str = ""
    _attends: int = 0
    _parameters: set[int] = field(default_factory=set)
    _known: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    """Storages that were saved, by address; held, since a freed one's address comes again."""

    @contextmanager
    def watching(self, facts: ModelFacts) -> Iterator[None]:
        """Watch a forward."""
        with ExitStack() as stack:
            for path in facts.blocks:
                self._hook(stack, path, lambda path=path: self._enter(path), lambda: self._enter(""))
            for path in facts.attentions:
                self._hook(stack, path, lambda: self._attend(1), lambda: self._attend(-1))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, lambda saved: saved))
            yield

    def _hook(self, stack: ExitStack, path: str, before: Callable[[], None], behind: Callable[[], None]) -> None:
        module = self.model.get_submodule(path)
        for handle in (
            module.register_forward_pre_hook(lambda *_: before()),
            module.register_forward_hook(lambda *_: behind()),
        ):
            stack.callback(handle.remove)

    def _enter(self, path: str) -> None:
        self._block = path
        if path:
            weights = self.model.get_submodule(path).parameters()
            self._parameters = addresses(weights)

    def _attend(self, step: int) -> None:
        self._attends += step

    def _save(self, tensor: Tensor) -> Tensor:
        storage = storage_of(tensor)
        key = id(storage)
        if self._block and key not in self._parameters and key not in self._known:
            self._known[key] = storage
            self.bytes[self._block] += storage.nbytes()
            if self._attends:
                self.in_attention[self._block] += storage.nbytes()
        return tensor
