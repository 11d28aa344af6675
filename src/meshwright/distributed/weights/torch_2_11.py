"""Give operators on tensors in parts to their class on torch 2.11, which gives them to DTensor's own dispatch.

Delete this file, and its two uses, when torch 2.12 is the oldest release that is supported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.core.host import is_at_least
from meshwright.core.torch_private import EagerDispatchMode, is_in_backward, tree_leaves, without_subclass_functions
from meshwright.distributed.torch_private import local_part, spec_of

PASSES_OVER_SUBCLASSES = not is_at_least("torch", "2.12")


def may_hash() -> bool:
    """Return whether torch's dispatch may look placements up: autograd's own copies of gradients need it."""
    return PASSES_OVER_SUBCLASSES and is_in_backward()


class PassedOver:
    """Adds to a subclass of DTensor that a dispatch mode is asked first, and that gradients are summed in Python.

    Autograd sums gradients below Python. So before it would, the sum is taken here and passed on as the only gradient;
    what it stores, a plain DTensor, gets the class of its parameter.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        with without_subclass_functions(), _ToSubclass(cls):
            result: Any = func(*args, **(kwargs or {}))
        if func is Tensor.requires_grad_ and isinstance(args[0], cls) and result.requires_grad:
            kind: Any = cls

            def sum_of_gradients(gradient: Any) -> Tensor:
                node: Any = torch._C._current_autograd_node()
                parameter = node.variable  # a reference that the hook holds would keep modules from swapping tensors
                if parameter.grad is None:
                    return gradient
                before, parameter.grad = parameter.grad, None
                return kind(local_part(gradient) + local_part(before), spec_of(gradient), requires_grad=False)

            def restore_class(parameter: Any) -> None:
                if parameter.grad is not None and not isinstance(parameter.grad, kind):
                    parameter.grad = kind(local_part(parameter.grad), spec_of(parameter.grad), requires_grad=False)

            result.register_hook(sum_of_gradients)
            result.register_post_accumulate_grad_hook(restore_class)
        return result


class _ToSubclass(EagerDispatchMode):
    def __init__(self, kind: Any):
        super().__init__()
        self._kind = kind

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if any(isinstance(leaf, self._kind) for leaf in tree_leaves((args, kwargs))):
            return self._kind.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))
