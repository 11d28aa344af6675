"""A small copy of a model to measure: fp64, on the CPU, random weights, no more blocks than it has kinds of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean
from meshwright.introspection.blocks import repeated_blocks

ROWS, SEQ = 2, 6
LARGEST = 3_000_000
"""Parameters of a block beyond which it is not measured at its own width."""


@dataclass
class Sample:
    """A model to be measured.

    Attributes:
        model: in fp64 on the CPU, in evaluation mode.
        blocks: paths of its repeated blocks.
        inputs: keyword arguments of forwards to watch: plain, and (where the model takes one) with a padding mask.
    """

    model: nn.Module
    blocks: tuple[str, ...]
    inputs: tuple[dict[str, Any], ...]


def sample_of(model: nn.Module, arguments: dict[str, str | None], vocab_size: int) -> Sample:
    """A copy of ``model`` that can be measured.

    Args:
        model: on meta or not; it is left as it is.
        arguments: "tokens" -> what the forward calls them.
        vocab_size: ids that it takes.

    Raises:
        UnsupportedError: its weights cannot be made up here, or a block is too large.
    """
    made = _constructed(model) or _copied(model)
    made = made.double().eval()
    config: Any = getattr(made, "config", None)
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"  # a copy's own config; grouped kernels know no fp64
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(_random(parameter, generator))
    tokens = torch.randint(0, vocab_size, (ROWS, SEQ), generator=generator)
    return Sample(made, repeated_blocks(made), tuple(_inputs(made, arguments["tokens"] or "tokens", tokens)))


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    """Values of an order at which nothing saturates: matrices keep the size of what they multiply, vectors are around one."""
    drawn = torch.randn(like.shape, dtype=like.dtype, generator=generator)
    return 1 + 0.3 * drawn if like.dim() < 2 else drawn / like.shape[-1] ** 0.5


def _constructed(model: nn.Module) -> nn.Module | None:
    """The same class from a copy of its config, with fewer blocks; None where it is not built from one."""
    config = getattr(model, "config", None)
    if config is None:
        return None
    try:
        small = fewer_blocks(copy.deepcopy(config), model)
        with torch.device("cpu"):
            return type(model)(small)
    except Exception:  # noqa: BLE001  (whatever the class wants besides a config)
        return None


def fewer_blocks(config: Any, model: nn.Module) -> Any:
    """The config with as many blocks as it takes to have one of each kind, where its keys for that are known."""
    needed = max(2, 1 + max(index for index, _ in kinds_of(model).values()))
    for key in ("num_hidden_layers", "n_layers", "n_layer", "num_layers"):
        if isinstance(getattr(config, key, None), int) and needed < getattr(config, key):
            changes: dict[str, Any] = {key: needed}
            if isinstance(getattr(config, "layer_types", None), (list, tuple)):
                changes["layer_types"] = list(config.layer_types)[:needed]
            return _replaced(config, changes)
    return config


def _replaced(config: Any, changes: dict[str, Any]) -> Any:
    import dataclasses

    if dataclasses.is_dataclass(config) and getattr(type(config), "__dataclass_params__").frozen:  # noqa: B009
        return dataclasses.replace(config, **changes)  # type: ignore[type-var]
    for key, value in changes.items():
        setattr(config, key, value)
    return config


def kinds_of(model: nn.Module) -> dict[tuple, tuple[int, list[str]]]:
    """Blocks by what they are made of: -> (index of the first, all their paths)."""
    found: dict[tuple, tuple[int, list[str]]] = {}
    for index, path in enumerate(repeated_blocks(model)):
        block = model.get_submodule(path)
        key = (type(block), tuple((clean(name), tuple(p.shape)) for name, p in block.named_parameters()))
        found.setdefault(key, (index, []))[1].append(path)
    return found


def _copied(model: nn.Module) -> nn.Module:
    """A copy of the module itself; one on meta is given memory and its modules' own initial values."""
    made = copy.deepcopy(model)
    if not any(parameter.is_meta for parameter in made.parameters()):
        return made.cpu()
    made.to_empty(device="cpu")
    for module in reversed(list(made.modules())):
        reset: Callable[[], object] | None = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()
        elif module._buffers:
            raise UnsupportedError(
                f"{type(module).__name__} was built on meta with buffers and has no reset_parameters() that fills them, so the structure"
                f" of {type(model).__name__} cannot be measured; give it one, or build the model on the CPU"
            )
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = next(other for other, p in model.named_parameters(remove_duplicate=False) if p is parameter)
        if first != name:  # to_empty unties
            path, _, last = name.rpartition(".")
            setattr(made.get_submodule(path), last, made.get_parameter(first))
    return made


def _inputs(model: nn.Module, name: str, tokens: Tensor) -> list[dict[str, Any]]:
    import inspect

    takes = inspect.signature(model.forward).parameters
    plain: dict[str, Any] = {name: tokens}
    if "use_cache" in takes:
        plain["use_cache"] = False
    if "attention_mask" not in takes:
        return [plain]
    mask = torch.ones(tokens.shape, dtype=torch.int64)
    mask[1, -2:] = 0
    return [plain, plain | {"attention_mask": mask}]
