"""Stand in for the modules that other stages have.

The model's own forward runs on every stage. So masks, positions, rotary tables and whatever else its code gives to
its blocks are its own, and no family needs code of its own. Blocks that are elsewhere hand on what they are given;
the last of them before the stage's own gives what was received, and the first behind them takes what is to be sent.
Other modules that are elsewhere are asked on meta what shape they would give, and give that, without values.
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
    """The activations that enter and leave a stage in the present forward.

    Attributes:
        shape: (rows, seq) of the token ids.
        entering: (rows, seq, features) that was received; None on the first stage.
        leaving: (rows, seq, features) that is to be sent; None on the last stage.
    """

    shape: tuple[int, ...] = ()
    entering: Tensor | None = None
    leaving: Tensor | None = None


class Absent(nn.Module):
    """Has no parameters; other attributes are those of the module for which it stands, such as a block's type of
    attention.

    Attributes:
        begins_part: it gives what another stage computed; what lies before it computes nothing.
        ends_part: what lies behind it, and around it, returns nothing.
    """

    is_absent = True
    begins_part = False
    ends_part = False

    def __init__(self, original: nn.Module):
        super().__init__()
        self.__dict__["_original"] = original  # no submodule: its parameters are elsewhere

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)


class AbsentBlock(Absent):
    """A repeated block that another stage has.

    Args:
        keeps_shape: what follows the exit is given a tensor of the shape that it expects; else one of no tokens,
            which costs nothing.
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
    """A module outside the blocks, such as an embedding or a head, that another stage has.

    Args:
        dtype: in which it would compute: what it gives must be of the right kind, since tables and masks are made in
            that of the stream.
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
    """Return a copy without memory."""
    tensors = [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {id(tensor): _bare(tensor) for tensor in tensors}
    return copy.deepcopy(module, memo)


def _bare(tensor: Tensor) -> Tensor:
    bare = torch.empty_like(tensor, device="meta")
    return nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare


def _stand_in(like: Tensor, device: torch.device | None, shape: tuple[int, ...] | None = None) -> Tensor:
    """Return a NaN of the shape of ``like`` (or another) without memory, so that code which reads it shows."""
    blank = torch.nan if like.is_floating_point() else 0
    return torch.full((1,), blank, dtype=like.dtype, device=device).expand(like.shape if shape is None else shape)
