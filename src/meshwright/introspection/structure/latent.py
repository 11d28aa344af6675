"""Check that heads are made from latent layers alone."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from .probe import Probe


def follow_from(probe: Probe, begins: tuple[str, ...], fed: tuple[str, ...]) -> bool:
    """Return whether ``fed`` layers' inputs ignore the block's input while outputs of ``begins`` are held."""
    entered: dict[str, Tensor] = {}

    def note(path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        entered[path] = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)).clone()

    handles = [probe.module(path).register_forward_pre_hook(partial(note, path), with_kwargs=True) for path in fed]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad(), probe.giving({path: probe.output_of(path) for path in begins}):
            probe.rerun(lambda x: x + torch.randn(x.shape, dtype=x.dtype, generator=generator))
    finally:
        for handle in handles:
            handle.remove()
    before = {path: probe.calls[path][0].entered for path in fed}
    return all(
        kept is not None and torch.allclose(entered[path], kept, rtol=1e-9, atol=1e-12) for path, kept in before.items()
    )
