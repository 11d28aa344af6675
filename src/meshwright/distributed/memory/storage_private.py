"""See what torch does to storages behind its dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def noting_resizes(note: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call a function with each storage that Python code resizes, until dispatch modes see it."""
    resize = torch.UntypedStorage.resize_

    def resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        note(storage)
        return result

    torch.UntypedStorage.resize_ = resize_and_note  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
