"""Find parameters that hold one matrix for each expert, beside which peft can put adapters."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import is_within, pattern
from meshwright.introspection.blocks import repeated_blocks

from .request import Adapters


def stacked_parameters(model: nn.Module) -> tuple[str, ...]:
    """List the names of a model's parameters of three dims inside its blocks, but those of torch's own modules."""
    blocks = repeated_blocks(model)
    return tuple(
        f"{path}.{name}"
        for path, module in model.named_modules()
        if not type(module).__module__.startswith("torch.nn.") and any(is_within(path, block) for block in blocks)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3
    )


def refuse_beside_stacks(parameters: Collection[str], adapters: Adapters, where: str) -> None:
    """Refuse what peft cannot do beside stacked parameters, to whose values it adds the adapters' product.

    Raises:
        UnsupportedError: dropout or DoRA.
    """
    if not parameters:
        return
    name = pattern(next(iter(parameters)))
    if adapters.dropout:
        raise UnsupportedError(
            f"{where}.dropout = {adapters.dropout}: beside stacked experts ({name}) adapters are added to the weights,"
            f" not to what comes out, so that no feature of their input can be zeroed. Set dropout = 0, or leave the"
            f" stacks out of {where}.targets."
        )
    if adapters.kind == "dora":
        raise UnsupportedError(
            f"{where}.kind = dora: peft has no magnitudes beside stacked experts ({name}). Set kind = lora, or leave"
            f" the stacks out of {where}.targets."
        )
