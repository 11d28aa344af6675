"""Find the table that a model looks its token ids up in, by a forward without values that ends there."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.introspection.signature import Signature

from .copies import meta_copy_of


class _Found(Exception):
    """A table was given the token ids themselves."""


def rows_of_token_table(model: nn.Module) -> int | None:
    """Return the number of rows of the embedding that takes a model's token ids, None where none is seen to.

    Positions, types and images have tables too, so what a table is given decides. No weight is copied or computed with.
    """
    name = Signature.of(model).takes["tokens"]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if name is None or not tables:
        return None
    found: list[int] = []

    def look(table: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        given = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if given is not None and given.device == tokens.device and torch.equal(given, tokens):
            found.append(int(table.num_embeddings))  # type: ignore[arg-type]
            raise _Found

    # whatever a model's code or torch raises of tensors without values: then nothing is known
    with contextlib.suppress(Exception), torch.no_grad():
        tokens = torch.tensor([[1, 0, 1], [0, 1, 1]])  # on the CPU, with values: neither positions nor types
        copy = meta_copy_of(model)
        for module in copy.modules():
            if isinstance(module, nn.Embedding):
                module.register_forward_pre_hook(look, with_kwargs=True)
        copy(**{name: tokens})
    return found[0] if found else None
