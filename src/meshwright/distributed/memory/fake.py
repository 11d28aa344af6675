"""Run code on fake tensors, which have shapes but no memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from meshwright.core.torch_private import TorchDispatchMode, fake_mode, is_grouped_product

if TYPE_CHECKING:
    from meshwright.core.torch_private import FakeTensorMode

PATIENCE, PATIENCE_PER_BLOCK = 100_000, 4_000
"""Largest number of operators in a dry run, about ten seconds, and how many each repeated block adds: three
microbatches of a decoder's block over a context axis have a thousand."""


@contextmanager
def imagining(*, experts: bool, blocks: int = 0, mode: FakeTensorMode | None = None) -> Iterator[None]:
    """Make every tensor created inside fake.

    Args:
        experts: whether the model may compute grouped products.
        blocks: number of repeated blocks.
        mode: makes them; tensors of two modes do not go together.

    Raises:
        DryRunError: the step has more operators than any model of so many blocks, like a Python loop over tokens.
    """
    with ExitStack() as stack:
        stack.enter_context(mode or fake_mode())
        stack.enter_context(_Patience(PATIENCE + blocks * PATIENCE_PER_BLOCK))
        if experts:
            stack.enter_context(_GroupedProducts())
        yield


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Restore the random states of torch (CPU), numpy and Python on exit."""
    own, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(own)
        np.random.set_state(arrays)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Check that a dry run of a copy of ``model`` gives no gradients to the original, and restore them if it does.

    Functions that were set on a copied module may still refer to the original.

    Raises:
        DryRunError: a gradient of the original changed.
    """
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        touched = [parameter for parameter, gradient in before if parameter.grad is not gradient]
        for parameter, gradient in before:
            parameter.grad = gradient
    if touched:
        raise DryRunError(
            "a function that was set on one of its modules computes with the model itself, but the dry run uses a copy"
        )


class DryRunError(Exception):
    """Raised if a model cannot be dry-run; the text gives the reason."""


class _Patience(TorchDispatchMode):
    """Limits the number of operators."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._operators, self._most = 0, most

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self._operators += 1
        if self._operators > self._most:
            raise DryRunError(f"its step has more than {self._most:,} operators, too many for a dry run")
        return func(*args, **(kwargs or {}))


class _GroupedProducts(TorchDispatchMode):
    """Gives grouped products their shapes in every dtype, without computing them.

    torch limits them to bfloat16 on fake tensors, although their kernels take other dtypes too.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not is_grouped_product(func):
            return func(*args, **(kwargs or {}))
        first, second = args[:2]
        if first.dim() == second.dim() == 2:  # a weight's gradient: as many products as there are groups
            groups = (args[2] if len(args) > 2 else (kwargs or {})["offs"]).shape[0]
            return first.new_empty((groups, first.shape[0], second.shape[1]))
        return first.new_empty((*first.shape[:-1], second.shape[-1]))
