"""Have functions of other modules note their arguments or results, or draw what needs no luck.

Like the recorder, this file is loaded by its path into whatever environment the script has.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor


def before(home: Any, name: str, note: Any) -> None:
    """Have a function of torch note its arguments first."""
    plain = getattr(home, name)

    @wraps(plain)
    def noted(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return plain(*args, **kwargs)

    setattr(home, name, noted)


def after(home: Any, name: str, note: Any) -> None:
    """Have a method of torch note its result."""
    plain = getattr(home, name)

    @wraps(plain)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = plain(self, *args, **kwargs)
        if not args and kwargs.get("destination") is None:
            note(found)
        return found

    setattr(home, name, noted)


def expected(found: Tensor) -> Tensor:
    """Replace numbers by 0.5, which a comparison with a rate of less than a half keeps, or 0 of a normal draw."""
    if found.is_floating_point() and not found.is_meta:
        with torch.no_grad():
            found.fill_(0.5 if bool((found >= 0).all()) else 0.0)
    return found
