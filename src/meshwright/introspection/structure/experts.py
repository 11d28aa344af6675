"""Find stacks of experts: modules that hold a layer's experts in tensors with one row each, and take expert numbers.

Such a module can compute with a part of its stack: for local numbers, and weights of one, its own forward returns
each row's expert output. So experts can be sharded without knowledge of their computation. A small copy in fp64
verifies this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean, is_within
from meshwright.introspection.blocks import repeated_blocks
from meshwright.introspection.calls import watching
from meshwright.introspection.signature import Signature, core_of
from meshwright.introspection.small.configs import stated_width
from meshwright.introspection.small.sample import Sample, on_samples, samples_of
from meshwright.models.layers import at_least_fp32, is_recomputing, tokens_per_expert

LARGEST_ERROR = 1e-6
"""Relative, in fp64; models that compute in fp32 inside are not more exact."""


@dataclass(frozen=True)
class Stack:
    """A module of stacked experts.

    Attributes:
        path: path of the module.
        experts: number of experts.
        parameters: names of the module's own parameters; the first dim of each is the experts.
        counts: names of the module's attributes that hold the number of experts.
        rows, index, weights: its forward's arguments: tokens, each token's expert numbers, and their weights.
        top_k: number of experts of each token.
        width: number of features of a token.
    """

    path: str
    experts: int
    parameters: tuple[str, ...]
    counts: tuple[str, ...]
    rows: str = ""
    index: str = ""
    weights: str = ""
    top_k: int = 0
    width: int = 0

    def arguments(self, given: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Return a call's (n, dim) tokens, (n, k) int64 expert numbers and (n, k) weights, by argument name."""
        rows, weights = given[self.rows].flatten(0, -2), given[self.weights]
        index = given[self.index].reshape(len(rows), -1)
        weights = weights.reshape(len(rows), -1)
        return rows, index, weights if weights.shape == index.shape else weights.gather(1, index)

    def compute(self, forward: Callable[[dict[str, Tensor]], Any], rows: Tensor, index: Tensor) -> Tensor:
        """Compute each row's expert output, (m, dim), with a ``forward`` that takes its arguments as a dict.

        The module of the forward holds a part of the stack; ``index``, (m,) int64, counts experts within that part.
        """
        given = {self.rows: rows, self.index: index.unsqueeze(1), self.weights: rows.new_ones(len(rows), 1)}
        return _first(forward(given))


def asked_for(stack: Stack, args: tuple, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the expert numbers of a call with tokens, numbers, and weights for each number or each expert.

    Any other call returns None: its module only looks like a stack.
    """
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    numbers = [tensor for tensor in tensors if not tensor.is_floating_point()]
    if len(tensors) != 3 or len(numbers) != 1:
        return None
    *tokens, k = numbers[0].shape
    has_weights = any(
        t.is_floating_point() and list(t.shape) in ([*tokens, k], [*tokens, stack.experts]) for t in tensors
    )
    return numbers[0] if has_weights else None


def find_stacks(model: nn.Module) -> dict[str, Stack]:
    """Find by path the modules inside repeated blocks that look like stacks, without calling any."""
    blocks = repeated_blocks(model)
    found: dict[str, Stack] = {}
    for raw, module in model.named_modules():
        path = clean(raw)
        own = {name: p for name, p in module._parameters.items() if p is not None}
        sizes = {p.shape[0] if p.dim() > 1 else 0 for p in own.values()}
        holds_all = len(own) == len(list(module.parameters())) and any(p.dim() == 3 for p in own.values())
        if len(sizes) != 1 or not holds_all or not any(is_within(path, block) for block in blocks):
            continue
        (experts,) = sizes
        takes = inspect.signature(module.forward).parameters.values()
        if experts < 2 or len([p for p in takes if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]) < 3:
            continue
        counted = (name for name, value in vars(module).items() if type(value) is int and value == experts)
        found[path] = Stack(path, experts, tuple(own), tuple(name for name in counted if "expert" in name))
    return found


def stack_paths(*models: nn.Module) -> set[str]:
    """Return the paths of some models' stacks, whose inner modules see tokens by the placement of experts."""
    return {path for model in models for path in find_stacks(model)}


def measure_stacks(model: nn.Module, ranks: int) -> tuple[Stack, ...]:
    """Measure a model's stacks and their arguments' roles, and prove that ``ranks`` shares compute the same."""
    known = find_stacks(model)
    if not known:
        raise UnsupportedError(f"{type(model).__name__} has no module of stacked experts inside its blocks")

    def measure(sample: Sample) -> tuple[Stack, ...]:
        small, kinds = _kinds(sample.model), _kinds(model)
        first = {small[path]: path for path in reversed(find_stacks(sample.model))}
        tried = {kind: _tried(sample, path, ranks) for kind, path in first.items()}
        stated = [stated_width(m) for m in (model, sample.model)]
        found = [replace(stack, **tried[kinds[path]]) for path, stack in known.items()]
        # tokens that are as wide as the copy's residual stream are as wide as the model's
        return tuple(
            replace(stack, width=stated[0]) if stated[0] is not None and stated[1] == stack.width else stack
            for stack in found
        )

    return on_samples(
        model, 1, measure, f"the experts of {type(model).__name__} could not be tried out on a small copy"
    )


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


def _tried(sample: Sample, path: str, ranks: int) -> dict[str, Any]:
    """Return the roles of a stack's arguments, its top_k and its width, if its shares give the same as the whole."""
    module, stack = sample.model.get_submodule(path), find_stacks(sample.model)[path]
    calls: list[tuple[tuple, dict[str, Any]]] = []
    watch = watching([(path, module)], lambda path, module, args, kwargs: calls.append((args, dict(kwargs))))
    with torch.no_grad(), watch:
        sample.model(**sample.inputs[0])
    if len(calls) != 1:
        raise UnsupportedError(
            f"{path} ({type(module).__name__}) is called {len(calls)} times in a forward, and not once"
        )
    args, kwargs = calls[0]
    given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    index = [name for name, value in tensors.items() if not value.is_floating_point()]
    others = [name for name in tensors if name not in index]
    if len(index) != 1 or len(others) != 2:
        raise UnsupportedError(
            f"{path} ({type(module).__name__}) takes {', '.join(given)}, and not tokens, numbers of experts and weights"
        )
    roles = {"rows": others[0], "index": index[0], "weights": others[1]}
    stack = replace(stack, **roles)
    # compare the whole stack's output and gradients with the sum over its shares
    leaves = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    x, w = (given[name].detach().clone().requires_grad_() for name in (stack.rows, stack.weights))
    given = dict(given) | {stack.rows: x, stack.weights: w}
    wanted = _first(functional_call(module, leaves, kwargs=given))
    rows, numbers, weights = stack.arguments(given)
    out = torch.zeros_like(rows)
    share = stack.experts // ranks
    for low in range(0, stack.experts, share):
        token, slot = ((numbers >= low) & (numbers < low + share)).nonzero(as_tuple=True)
        if len(token):
            held = {name: p[low : low + share] for name, p in leaves.items()}
            forward = partial(functional_call, module, held, None)
            try:  # the module counts the experts that it holds
                vars(module).update(dict.fromkeys(stack.counts, share))
                made = stack.compute(forward, rows[token], numbers[token, slot] - low)
            finally:
                vars(module).update(dict.fromkeys(stack.counts, stack.experts))
            out = out.index_add(0, token, made * weights[token, slot].unsqueeze(1))
    pushed = torch.randn(wanted.shape, dtype=wanted.dtype, generator=torch.Generator().manual_seed(0))
    inputs = [x, w, *leaves.values()]
    here = torch.autograd.grad(wanted, inputs, pushed, allow_unused=True)
    there = torch.autograd.grad(out.view_as(wanted), inputs, pushed, allow_unused=True)
    found = [(wanted.detach(), out.detach().view_as(wanted)), *zip(here, there, strict=True)]
    for name, (one, other) in zip(("output", stack.rows, stack.weights, *leaves), found, strict=True):
        one, other = (torch.zeros(()) if t is None else t for t in (one, other))
        if not torch.linalg.vector_norm(one - other) <= LARGEST_ERROR * torch.linalg.vector_norm(one):
            what = "its output" if name == "output" else f"the gradient of {name}"
            raise UnsupportedError(
                f"{path} ({type(module).__name__}) does not give the same when {ranks} ranks share its"
                f" {stack.experts} experts out: {what} is another. Set layout.ep = 1."
            )
    return roles | {"top_k": numbers.shape[1], "width": rows.shape[1]}


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


# --- measure the load-balancing loss of transformers models: E · Σₑ Fₑ · Pₑ (arXiv 2101.03961, eq. 4 to 6)

SWITCH = "output_router_logits"
COEFFICIENT = "router_aux_loss_coef"
LARGEST_LOSS_ERROR = 1e-5
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
        """Sum experts' choices, (experts,) int64, and probabilities, float64, over all layers' tokens but padding."""
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

        @torch.compiler.disable
        def note(module: nn.Module, args: tuple, output: Any) -> None:
            if self._is_on and not is_recomputing():
                self._found.append(_parts(output)[loss.place])

        modules = {clean(raw): module for raw, module in model.named_modules()}
        for path in loss.routers:
            modules[path].register_forward_hook(note)  # pyright: ignore[reportArgumentType]

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


def measure_router_loss(model: nn.Module) -> RouterLoss | None:
    """Measure a model's loss for its routers; None if nothing is added, whatever its config says."""
    sample = next(samples_of(model, 1))
    core = core_of(sample.model)
    if hasattr(core, COEFFICIENT):
        setattr(core, COEFFICIENT, 1.0)
    try:
        known = _measured(sample, Signature.of(model).takes["tokens"] or "")
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
        given: list[tuple[str, tuple]] = []
        watch = watching(
            [(path, sample.model.get_submodule(path)) for path in _kinds(sample.model)],
            after=lambda path, _, args, kwargs, output, given=given: given.append((path, _parts(output))),
        )
        with watch:
            on = sample.model(**asked | {SWITCH: True})
        off = sample.model(**asked | {SWITCH: False})
        added, size = (on.loss - off.loss).item(), abs(off.loss.item())
        if abs(added) <= LARGEST_LOSS_ERROR * size and getattr(on, "aux_loss", None) is None:
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
        fitting = set()
        for one in tried if are_known and len({layer.shape[-1] for layer in logits}) == 1 else ():
            chosen, probabilities = one.terms(logits, real)
            count = sum(layer.shape[:-1].numel() if real is None else int(real.sum()) for layer in logits)
            found = one.experts * (chosen * probabilities).sum().item() / count**2
            if abs(found - added) <= LARGEST_LOSS_ERROR * max(size, abs(added)):
                fitting.add(one)
        legal = fitting if legal is None else legal & fitting
    if not legal:
        raise UnsupportedError(
            f"the config of {type(core_of(sample.model)).__name__} has {SWITCH} = true, and what that adds to its loss"
            f" is not the balance of its routers' choices and probabilities over all tokens: it could not be computed"
            f" over several ranks. Set {SWITCH} = false to train without it."
        )
    return min(legal, key=lambda one: one.top_k)


def _parts(output: Any) -> tuple:
    return output if isinstance(output, tuple) else (output,)
