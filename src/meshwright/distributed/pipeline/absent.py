"""Replace the modules that other stages have.

The model's own forward runs on every stage. So its own code computes masks, positions, rotary tables and other
arguments of its blocks, and no family needs special code. Absent blocks pass their input on; the last one before the
stage's own blocks returns the received tensor, and the first one after them takes the tensor to send. Other absent
modules run on meta to find the shape of their output, and return a tensor of that shape without values.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshwright.core.torch_private import tree_leaves, tree_map
from meshwright.introspection.stages.block_flow import BlockFlow

Part = Literal["entrance", "exit", "bystander"]


@dataclass
class StageIO:
    """The activations that enter and leave a stage in the current forward.

    Attributes:
        shape: (rows, seq) of the token ids.
        entering: (rows, seq, features), received; None on the first stage.
        leaving: (rows, seq, features), to be sent; None on the last stage.
    """

    shape: tuple[int, ...] = ()
    entering: Tensor | None = None
    leaving: Tensor | None = None


class Absent(nn.Module):
    """A module without parameters in place of one that another stage has.

    Its other attributes are those of the original, such as a block's type of attention.

    Attributes:
        begins_part: whether its output comes from another stage, so that modules before it compute nothing.
        ends_part: whether the modules after it, and around it, return nothing.
    """

    is_absent = True
    begins_part = False
    ends_part = False

    def __init__(self, original: nn.Module):
        super().__init__()
        self.__dict__["_original"] = original  # not a submodule: its parameters are on another stage

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)


class AbsentBlock(Absent):
    """Takes the place of a repeated block that another stage has.

    Args:
        keeps_shape: whether modules after the exit get a tensor of the full shape; else one of no tokens, which costs
            nothing.
    """

    def __init__(self, original: nn.Module, flow: BlockFlow, part: Part, passage: StageIO, *, keeps_shape: bool):
        super().__init__(original)
        self._flow, self._part, self._passage, self._keeps_shape = flow, part, passage, keeps_shape
        self.begins_part, self.ends_part = part == "entrance", part == "exit"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        key = self._flow.hidden
        hidden = args[key] if isinstance(key, int) else kwargs[key]
        if self._part == "entrance":
            assert self._passage.entering is not None
            hidden = self._passage.entering
        elif self._part == "exit":
            self._passage.leaving = hidden
            hidden = hidden.detach()[:, :0]
            if self._keeps_shape:
                hidden = _stand_in(hidden, hidden.device, (*self._passage.shape, *hidden.shape[2:]))
        return (hidden,) if self._flow.returns_tuple else hidden


class AbsentModule(Absent):
    """Takes the place of a module outside the blocks, such as an embedding or a head, that another stage has.

    Args:
        dtype: dtype of the module's output, since tables and masks take the dtype of the activations.
    """

    def __init__(self, original: nn.Module, dtype: torch.dtype):
        super().__init__(on_meta(original).to(dtype))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device = next((leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
        given = tree_map(lambda leaf: leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        with torch.no_grad():
            output = self.__dict__["_original"](*given[0], **given[1])
        return tree_map(lambda leaf: _stand_in(leaf, device) if isinstance(leaf, Tensor) else leaf, output)


def on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of a module on meta."""
    tensors = [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {id(tensor): _bare(tensor) for tensor in tensors}
    return copy.deepcopy(module, memo)


def _bare(tensor: Tensor) -> Tensor:
    bare = torch.empty_like(tensor, device="meta")
    return nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare


def _stand_in(like: Tensor, device: torch.device | None, shape: tuple[int, ...] | None = None) -> Tensor:
    """Return a NaN without memory in the shape of ``like`` (or ``shape``), so that code which reads it shows."""
    blank = torch.nan if like.is_floating_point() else 0
    return torch.full((1,), blank, dtype=like.dtype, device=device).expand(like.shape if shape is None else shape)
