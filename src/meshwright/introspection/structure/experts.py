"""Find stacks of experts: modules that hold a layer's experts in tensors with one row each, and take expert numbers.

Such a module can compute with a part of its stack: for local numbers, and weights of one, its own forward returns
each row's expert output. So experts can be sharded without knowledge of their computation. A small copy in fp64
verifies this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import clean, is_within
from meshwright.introspection.blocks import repeated_blocks
from meshwright.introspection.small.configs import stated_width
from meshwright.introspection.small.sample import Sample, samples_of

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
        """Compute with the module's own forward each row's expert output, (m, dim).

        Args:
            forward: forward of the module, which holds a part of the stack; it takes its arguments as a dict.
            rows: (m, dim), at least one.
            index: (m,) int64 experts, counted within that part.
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
        if (stack := _stack(module, path)) is not None and any(is_within(path, block) for block in blocks):
            found[path] = stack
    return found


def stack_paths(*models: nn.Module) -> set[str]:
    """Return the paths of some models' stacks, whose inner modules see tokens by the placement of experts."""
    return {path for model in models for path in find_stacks(model)}


def _stack(module: nn.Module, path: str) -> Stack | None:
    own = {name: p for name, p in module._parameters.items() if p is not None}
    sizes = {p.shape[0] if p.dim() > 1 else 0 for p in own.values()}
    if len(sizes) != 1 or len(own) != len(list(module.parameters())) or not any(p.dim() == 3 for p in own.values()):
        return None
    (experts,) = sizes
    takes = [
        p
        for p in inspect.signature(module.forward).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if experts < 2 or len(takes) < 3:
        return None
    counts = tuple(
        name for name, value in vars(module).items() if type(value) is int and value == experts and "expert" in name
    )
    return Stack(path, experts, tuple(own), counts)


def measure_stacks(model: nn.Module, arguments: dict[str, str | None], ranks: int) -> tuple[Stack, ...]:
    """Measure a model's stacks and the roles of their arguments, and prove that ``ranks`` shares compute the same.

    Raises:
        UnsupportedError: there are no stacks, or shares compute something else; the text names the module.
    """
    known = find_stacks(model)
    trouble = UnsupportedError(f"{type(model).__name__} has no module of stacked experts inside its blocks")
    for sample in samples_of(model, arguments, 1) if known else ():
        try:
            tried = {key: _tried(sample, path, ranks) for key, path in _first_of_each(sample.model).items()}
            kinds = _kinds(model)
            found = [replace(stack, **tried[kinds[path]]) for path, stack in known.items()]
            return tuple(replace(stack, width=_width(model, sample.model, stack.width)) for stack in found)
        except UnsupportedError as error:
            trouble = error
        except Exception as error:  # noqa: BLE001  (whatever a model's code raises when it is called in parts)
            trouble = UnsupportedError(
                f"the experts of {type(model).__name__} could not be tried out on a small copy"
                f" ({type(error).__name__}: {error})"
            )
    raise trouble


def _width(model: nn.Module, small: nn.Module, here: int) -> int:
    """Return a token's features in the model: the residual stream's if its copy's are ``here``, else ``here``."""
    stated = [stated_width(m) for m in (model, small)]
    return stated[0] if stated[0] is not None and stated[1] == here else here


def _kinds(model: nn.Module) -> dict[str, tuple[type, str]]:
    """Map the path of each stack to its class and its path within its block."""
    blocks = repeated_blocks(model)
    paths = find_stacks(model)
    inside = {path: next(block for block in blocks if is_within(path, block)) for path in paths}
    return {path: (type(model.get_submodule(path)), path.removeprefix(f"{block}.")) for path, block in inside.items()}


def _first_of_each(model: nn.Module) -> dict[tuple[type, str], str]:
    found: dict[tuple[type, str], str] = {}
    for path, kind in _kinds(model).items():
        found.setdefault(kind, path)
    return found


def _tried(sample: Sample, path: str, ranks: int) -> dict[str, Any]:
    """Return the roles of a stack's arguments, its top_k and its width, after a proof."""
    module, stack = sample.model.get_submodule(path), find_stacks(sample.model)[path]
    args, kwargs = _call_of(sample, module, path)
    given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    index = [name for name, value in tensors.items() if not value.is_floating_point()]
    others = [name for name in tensors if name not in index]
    if len(index) != 1 or len(others) != 2:
        raise UnsupportedError(
            f"{path} ({type(module).__name__}) takes {', '.join(given)}, and not tokens, numbers of experts and weights"
        )
    roles = {"rows": others[0], "index": index[0], "weights": others[1]}
    full = replace(stack, **roles)
    _prove(full, module, given, ranks)
    rows, numbers, _ = full.arguments(given)
    return roles | {"top_k": numbers.shape[1], "width": rows.shape[1]}


def _call_of(sample: Sample, module: nn.Module, path: str) -> tuple[tuple, dict[str, Any]]:
    calls: list[tuple[tuple, dict[str, Any]]] = []
    handle = module.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((args, dict(kwargs))), with_kwargs=True
    )
    try:
        with torch.no_grad():
            sample.model(**sample.inputs[0])
    finally:
        handle.remove()
    if len(calls) != 1:
        raise UnsupportedError(
            f"{path} ({type(module).__name__}) is called {len(calls)} times in a forward, and not once"
        )
    return calls[0]


def _prove(stack: Stack, module: nn.Module, arguments: dict[str, Any], ranks: int) -> None:
    """Compare the whole stack's output and gradients with the sum over its shares."""
    leaves = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    x = arguments[stack.rows].detach().clone().requires_grad_()
    w = arguments[stack.weights].detach().clone().requires_grad_()
    given = dict(arguments) | {stack.rows: x, stack.weights: w}
    wanted = _first(functional_call(module, leaves, kwargs=given))
    rows, index, weights = stack.arguments(given)
    out = torch.zeros_like(rows)
    share = stack.experts // ranks
    for low in range(0, stack.experts, share):
        token, slot = ((index >= low) & (index < low + share)).nonzero(as_tuple=True)
        if len(token):
            held = {name: p[low : low + share] for name, p in leaves.items()}
            with _counting(module, stack, share):
                made = stack.compute(
                    partial(functional_call, module, held, None), rows[token], index[token, slot] - low
                )
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
                f"{stack.path} ({type(module).__name__}) does not give the same when {ranks} ranks share its"
                f" {stack.experts} experts out: {what} is another. Set layout.ep = 1."
            )


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def _counting(module: nn.Module, stack: Stack, experts: int) -> Iterator[None]:
    """Make the module count only ``experts`` experts inside the context."""
    before = {name: getattr(module, name) for name in stack.counts}
    for name in stack.counts:
        setattr(module, name, experts)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
