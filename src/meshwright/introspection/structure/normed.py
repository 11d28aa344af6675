"""Find parallel norms of one tensor, each of which alone feeds some of a block's layers."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.introspection.small.copies import copy_of

from .probe import Probe


def side_by_side(probe: Probe, gathers: tuple[tuple[str, ...], ...], hidden: int | str) -> tuple[str, ...]:
    """Return the module before each group of ``gathers`` if all take the block's input itself; else nothing.

    Each module acts on every token by itself, in the same way in training, and its output goes only to its group. So
    each rank may compute it from the gathered input, if all the layers after it are.
    """
    if len(gathers) < 2:
        return ()
    found = [_before(probe, paths, probe.call.tensors[hidden]) for paths in gathers]
    norms = tuple(path for path in found if path is not None)
    if len(set(norms)) < len(gathers) or not all(_acts_by_token(probe, path) for path in norms):
        return ()
    return norms if _read_by_nobody_else(probe, norms, gathers) else ()


def _before(probe: Probe, paths: tuple[str, ...], entered: Tensor) -> str | None:
    """Return the module that takes the block's input and whose output the layers of these paths take."""
    taken = next(iter(probe.calls[paths[0]][0].tensors.values()))
    for path, (call, *others) in probe.calls.items():
        if path and not others and call.output is taken and taken is not entered:
            alone = len(call.args) == 1 and not call.kwargs and call.args[0] is entered
            return path if alone and taken.shape == entered.shape and not any(probe.module(path).children()) else None
    return None


def _acts_by_token(probe: Probe, path: str) -> bool:
    """Return whether, in training mode, some of the tokens alone give the same outputs as among all."""
    call = probe.calls[path][0]
    assert call.entered is not None and call.left is not None
    half = call.entered.shape[1] // 2
    with torch.no_grad():
        found = copy_of(probe.module(path)).train()(call.entered[:, :half].clone())
    return torch.allclose(found, call.left[:, :half], rtol=1e-9, atol=1e-12)


def _read_by_nobody_else(probe: Probe, norms: tuple[str, ...], gathers: tuple[tuple[str, ...], ...]) -> bool:
    """Return whether the block's output is unchanged if norms return NaN, and the layers after them recorded values."""
    rest = probe.call.left
    given = {path: probe.output_of(path) for paths in gathers for path in paths}
    given |= {path: torch.full_like(probe.output_of(path), torch.nan) for path in norms}
    with torch.no_grad(), probe.giving(given):
        found = probe.rerun()
    return rest is not None and torch.equal(found, rest)
