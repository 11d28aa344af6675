"""Measure the load-balancing loss of transformers models: E · Σₑ Fₑ · Pₑ (arXiv 2101.03961, eq. 4 to 6).

It runs over the tokens of all layers, with F the share of tokens that chose an expert, and P its mean probability.
Such a model computes this loss as a part of its own, over the tokens of one process. A small copy confirms it, so
that the loss can be computed over the tokens of many processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean, is_within
from meshwright.introspection.blocks import repeated_blocks
from meshwright.introspection.signature import core_of
from meshwright.introspection.small.sample import Sample, samples_of
from meshwright.models.layers import at_least_fp32
from meshwright.models.moe import is_recomputing, tokens_per_expert

SWITCH = "output_router_logits"
COEFFICIENT = "router_aux_loss_coef"
LARGEST_ERROR = 1e-5
"""Relative: transformers computes its losses in float32, and this one is the difference of two others."""


@dataclass(frozen=True)
class RouterLoss:
    """The routers' loss of a model.

    Attributes:
        coefficient: factor of the loss beside the mean cross entropy.
        experts: number of experts of a layer.
        top_k: number of experts of each token.
        routers: paths of the modules that return a layer's logits, in the order of layers.
        place: index of the logits in these modules' outputs, where those are tuples.
    """

    coefficient: float
    experts: int
    top_k: int
    routers: tuple[str, ...]
    place: int = 0

    def terms(self, logits: Sequence[Tensor], real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sum experts' choices, (experts,) int64, and probabilities, (experts,) float64, over all layers' tokens.

        Args:
            logits: each layer's router logits: (tokens, experts), or with more dims in front.
            real: (tokens,) bool, False for those that do not count.
        """
        chosen: list[Tensor] = []
        added: list[Tensor] = []
        for layer in logits:
            flat = layer.flatten(0, -2).to(at_least_fp32(layer.dtype))
            probabilities, index = flat.softmax(-1), flat.topk(self.top_k, -1).indices
            if real is not None:
                probabilities, index = (
                    probabilities * real.unsqueeze(-1),
                    index.masked_fill(~real.unsqueeze(-1), self.experts),
                )
            chosen.append(tokens_per_expert(index.flatten(), self.experts))
            added.append(probabilities.sum(0, dtype=torch.float64))
        return torch.stack(chosen).sum(0), torch.stack(added).sum(0)


class RouterLogits:
    """A recorder of the logits that a model's routers return, from ``begin`` to ``take``, without recomputation."""

    def __init__(self, model: nn.Module, loss: RouterLoss):
        self._found: list[Tensor] = []
        self._is_on = False
        modules = {clean(raw): module for raw, module in model.named_modules()}
        for path in loss.routers:
            modules[path].register_forward_hook(self._hook(loss.place))

    def _hook(self, place: int) -> Any:
        @torch.compiler.disable
        def note(module: nn.Module, args: tuple, output: Any) -> None:
            if self._is_on and not is_recomputing():
                self._found.append(_parts(output)[place])

        return note

    def begin(self) -> None:
        """Begin a forward, and drop logits that were recorded and not taken."""
        self._found, self._is_on = [], True

    def take(self) -> list[Tensor]:
        """Return the recorded logits by layer, and stop recording."""
        found, self._found, self._is_on = self._found, [], False
        return found


def asks_for_router_loss(model: nn.Module) -> bool:
    """Return whether the config of a transformers model includes its routers' loss in its loss."""
    return bool(getattr(getattr(core_of(model), "config", None), SWITCH, False))


def measure_router_loss(model: nn.Module, arguments: dict[str, str | None]) -> RouterLoss | None:
    """Measure a model's loss for its routers; None if nothing is added, whatever its config says.

    Raises:
        UnsupportedError: the loss has another form, or could not be tried out.
    """
    sample = next(samples_of(model, arguments, 1))
    core = core_of(sample.model)
    if hasattr(core, COEFFICIENT):
        setattr(core, COEFFICIENT, 1.0)
    try:
        known = _measured(sample, arguments["tokens"] or "")
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedError(
            f"the config of {type(core).__name__} has {SWITCH} = true, and what that adds to its loss could not be"
            f" tried out on a small copy ({type(error).__name__}: {error}). Set {SWITCH} = false to train without it."
        ) from error
    if known is None:
        return None
    small = _kinds(sample.model)
    wanted = {small[path] for path in known.routers}
    routers = tuple(path for path, kind in _kinds(model).items() if kind in wanted)
    return replace(known, coefficient=float(getattr(core_of(model), COEFFICIENT)), routers=routers)


@torch.no_grad()
def _measured(sample: Sample, tokens: str) -> RouterLoss | None:
    """Measure the loss with a coefficient of one; None if the switch changes no loss."""
    legal: set[RouterLoss] | None = None
    for inputs in sample.inputs:
        asked = {**inputs, "labels": inputs[tokens], "return_dict": True}
        with _watching(sample.model) as given:
            on = sample.model(**asked | {SWITCH: True})
        off = sample.model(**asked | {SWITCH: False})
        added, size = (on.loss - off.loss).item(), abs(off.loss.item())
        if abs(added) <= LARGEST_ERROR * size and getattr(on, "aux_loss", None) is None:
            return None
        logits: Sequence[Tensor] = getattr(on, "router_logits", None) or ()
        places = [
            (path, place)
            for layer in logits
            for path, parts in given
            for place, part in enumerate(parts)
            if part is layer
        ]
        routers, place = tuple(path for path, _ in places), min((place for _, place in places), default=0)
        real = inputs["attention_mask"].flatten().bool() if "attention_mask" in inputs else None
        tried = {
            RouterLoss(1.0, layer.shape[-1], k, routers, place)
            for layer in logits
            for k in range(1, layer.shape[-1] + 1)
        }
        are_known = len(routers) == len(logits) and len({place for _, place in places}) == 1
        fitting = {one for one in tried if are_known and _fits(one, logits, real, added, size)}
        legal = fitting if legal is None else legal & fitting
    if not legal:
        raise UnsupportedError(
            f"the config of {type(core_of(sample.model)).__name__} has {SWITCH} = true, and what that adds to its loss"
            f" is not the balance of its routers' choices and probabilities over all tokens: it could not be computed"
            f" over several ranks. Set {SWITCH} = false to train without it."
        )
    return min(legal, key=lambda one: one.top_k)


@contextmanager
def _watching(model: nn.Module) -> Iterator[list[tuple[str, tuple]]]:
    """Record inside the outputs of modules in the blocks of a model, by path."""
    given: list[tuple[str, tuple]] = []

    def note(path: str, module: nn.Module, args: tuple, output: Any) -> None:
        given.append((path, _parts(output)))

    with ExitStack() as stack:
        for path in _kinds(model):
            stack.callback(model.get_submodule(path).register_forward_hook(partial(note, path)).remove)
        yield given


def _parts(output: Any) -> tuple:
    return output if isinstance(output, tuple) else (output,)


def _kinds(model: nn.Module) -> dict[str, tuple[type[nn.Module], str]]:
    """Map the path of each module in a block to (class, path within the block)."""
    found = {clean(raw): module for raw, module in model.named_modules()}
    blocks = repeated_blocks(model)
    return {
        path: (type(module), path.removeprefix(f"{block}."))
        for block in blocks
        for path, module in found.items()
        if is_within(path, block)
    }


def _fits(loss: RouterLoss, logits: Sequence[Tensor], real: Tensor | None, added: float, size: float) -> bool:
    if any(layer.shape[-1] != loss.experts for layer in logits):
        return False
    chosen, probabilities = loss.terms(logits, real)
    tokens = len(logits) * (logits[0].flatten(0, -2).shape[0] if real is None else int(real.sum()))
    found = loss.experts * (chosen * probabilities).sum().item() / tokens**2
    return abs(found - added) <= LARGEST_ERROR * max(size, abs(added))
