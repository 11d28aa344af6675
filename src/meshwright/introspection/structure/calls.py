"""Record a module's inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Call:
    """One recorded call of a module, which holds the tensors themselves for identity checks."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    entered: Tensor | None
    """A copy of the first tensor among the arguments, which may be changed in place later."""
    left: Tensor | None
    """A copy of the output, or of the first tensor of a tuple."""

    @classmethod
    def of(cls, args: tuple, kwargs: dict, output: Any) -> Call:
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        result = output[0] if isinstance(output, (tuple, list)) and output else output
        result = result.clone() if isinstance(result, Tensor) else None
        return cls(args, kwargs, output, None if first is None else first.clone(), result)

    @property
    def tensors(self) -> dict[int | str, Tensor]:
        """The tensors among the arguments, by position or name."""
        found = {key: value for key, value in enumerate(self.args) if isinstance(value, Tensor)}
        return found | {key: value for key, value in self.kwargs.items() if isinstance(value, Tensor)}
