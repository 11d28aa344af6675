"""Record the experts that tokens go to, and convert the oracle to float8 and 4 bits as layouts do.

Rounding makes two experts that are almost equally good for a token change places, and then everything behind differs.
So routing is compared first; where rounding alone moved it, one process computes once more with the layout's routing,
and the rest is compared with that run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.comparison.equality import Difference
from meshwright.comparison.sketch import TokensOfRank
from meshwright.core.errors import MissingExtraError, UnsupportedError
from meshwright.core.names import clean
from meshwright.core.torch_private import TorchDispatchMode
from meshwright.distributed.nf4 import pack, unpack
from meshwright.distributed.products import role_of
from meshwright.introspection.calls import watching
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import as_module
from meshwright.introspection.structure.experts import asked_for, find_stacks
from meshwright.models.layers import is_recomputing
from meshwright.planning.quantize import rounded_weights
from meshwright.planning.techniques import as_techniques
from meshwright.verification.problem import Problem

# --- record the experts that tokens go to, and replay them in another run of the same batches

Routes = dict[str, Tensor]
"""By stack of experts: (rows, seq, k) int32 numbers of each token's experts, as chosen.

The number of experts itself stands for no expert."""


@contextmanager
def noting(models: Collection[nn.Module]) -> Iterator[Routes]:
    """Record the experts chosen in each stack, (tokens, k) of all calls concatenated; recomputation is left out."""
    calls: dict[str, list[Tensor]] = {}
    found: Routes = {}
    known = {path: stack for model in models for path, stack in find_stacks(model).items()}

    def note(path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        numbers = asked_for(known[path], args, kwargs)
        if numbers is not None and not is_recomputing():
            calls.setdefault(path, []).append(numbers.detach().flatten(0, -2).to("cpu", torch.int32))

    modules = [pair for model in models for pair in model.named_modules() if clean(pair[0]) in known]
    with watching(modules, note):
        yield found
    found |= {path: torch.cat(parts) for path, parts in calls.items() if parts}


def numbers_of_experts(models: Iterable[nn.Module]) -> dict[str, int]:
    """Return the number of experts of each stack; the same number stands for no expert in routes."""
    return {path: stack.experts for model in models for path, stack in find_stacks(model).items()}


def put_together(
    by_rank: Sequence[tuple[tuple[int, int], TokensOfRank, Routes]], rows: int, seq: int, nowhere: Mapping[str, int]
) -> Routes:
    """Assemble the routes of a batch of ``rows`` × ``seq`` tokens, in stacks that each token meets once.

    Stacks that drop single choices of tokens (over an expert's capacity) are left out: the remaining choices do not
    show what was chosen.

    Args:
        by_rank: for every rank, its place among ranks with other rows, its tokens of each row where it has a part of
            them, and the routes of its own tokens.
        nowhere: by stack, the number that stands for no expert.
    """
    found: Routes = {}
    for path in dict.fromkeys(path for *_, routes in by_rank for path in routes):
        by_rows: dict[int, list[tuple[TokensOfRank, Tensor]]] = {}
        own_rows = rows // by_rank[0][0][1]
        for (rank, _), tokens, routes in by_rank:
            if path in routes and len(routes[path]) % own_rows == 0:
                by_rows.setdefault(rank, []).append((tokens, routes[path].unflatten(0, (own_rows, -1))))
        shares = [_row(parts, seq) for _, parts in sorted(by_rows.items())]
        if len(shares) == by_rank[0][0][1] and all(share is not None for share in shares):
            whole = torch.cat(shares)  # type: ignore[arg-type]
            is_none = whole == nowhere[path]
            if torch.equal(is_none.any(-1), is_none.all(-1)):
                found[path] = whole
    return found


def _row(parts: Sequence[tuple[TokensOfRank, Tensor]], seq: int) -> Tensor | None:
    """Join whole rows, where ranks have all of them or each its own tokens; else return None."""
    if {part.shape[1] for _, part in parts} == {seq}:
        return parts[0][1]
    first = parts[0][1]
    rows = first.shape[0]
    places = [tokens.places.expand(rows, -1) for tokens, _ in parts]
    together = torch.cat(places, dim=1).sort(dim=1).values
    if any(part.shape[1] != tokens.filled for tokens, part in parts):
        return None
    if together.shape[1] != seq or not bool((together == torch.arange(seq)).all()):
        return None
    whole = first.new_empty((rows, seq, *first.shape[2:]))
    row = torch.arange(rows)[:, None]
    for (tokens, part), own in zip(parts, places, strict=True):
        whole[row, own] = part[:, : tokens.count]
    return whole


def flips(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, int]:
    """Count by stack the tokens that went to other experts; stacks without any are left out."""
    both = {
        path: (found[path].sort(-1).values, reference[path].sort(-1).values) for path in found.keys() & reference.keys()
    }
    counted = {
        path: int((one != other).any(-1).sum()) for path, (one, other) in both.items() if one.shape == other.shape
    }
    return {path: number for path, number in counted.items() if number}


class Replay(TorchFunctionMode):
    """A mode that makes routers choose given experts inside ``at``.

    Routers must choose by ``topk``; for those that choose among groups of experts first, the groups are given too.

    Attributes:
        routes: the given experts.
        lacks: by stack, the largest shortfall of the given choices' scores against the scores of what would have been
            chosen, the best of both compared, the second best and so on; of groups too. Infinite where a token is
            given an expert twice.
        scores: by stack, the scores of each forward that choices are made by.
    """

    def __init__(self, model: nn.Module, routes: Routes):
        super().__init__()
        stacks = find_stacks(model)
        self._experts = {path: stack.experts for path, stack in stacks.items() if path in routes}
        self._modules = {path: module for raw, module in model.named_modules() if (path := clean(raw)) in self._experts}
        self.routes = routes
        self._waiting: list[str] = []
        self._rows = slice(0)
        self.lacks: dict[str, float] = {}
        self.scores: dict[str, list[Tensor]] = {}

    @contextmanager
    def at(self, first: int, rows: int) -> Iterator[None]:
        """Replay a forward of the batch's ``rows`` rows from row ``first``."""
        self._rows, self._waiting = slice(first, first + rows), list(self._experts)

        def arrived(path: str, *_: Any) -> None:  # later choices are for other stacks
            if path in self._waiting:
                self._waiting.remove(path)

        with watching(self._modules.items(), arrived), self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or not self._waiting:
            return found
        path, scores = self._waiting[0], args[0] if args else (kwargs or {})["input"]
        experts, choices = self._experts[path], scores.shape[-1]
        wanted = self.routes[path][self._rows].flatten(0, 1).to(scores.device, torch.int64)
        if scores.numel() != len(wanted) * choices or experts % choices:
            return found
        if choices == experts and found.indices.numel() == wanted.numel():
            wanted = wanted.view(found.indices.shape)
            return self._chosen(path, scores, found, torch.where(wanted < experts, wanted, found.indices))
        if choices < experts:
            needed = (
                torch.nn.functional.one_hot(wanted * choices // experts, choices + 1)[..., :choices]
                .amax(1)
                .view(scores.shape)
            )
            indices = scores.masked_fill(needed.bool(), torch.inf).topk(found.indices.shape[-1], -1).indices
            return self._chosen(f"{path} groups", scores, found, indices)
        return found

    def _chosen(self, what: str, scores: Tensor, found: Any, indices: Tensor) -> Any:
        values = scores.gather(-1, indices)
        lack = (found.values.sort(-1).values - values.sort(-1).values).nan_to_num(torch.inf).amax().item()
        ordered = indices.sort(-1).values
        is_twice = bool((ordered[..., 1:] == ordered[..., :-1]).any())
        self.lacks[what] = max(self.lacks.get(what, 0.0), torch.inf if is_twice else lack)
        self.scores.setdefault(what, []).append(scores.detach().double().flatten(0, -2).cpu())
        return torch.return_types.topk((values, indices))  # type: ignore[attr-defined]


# --- round the oracle to 4 bits, and to float8 by plain torchao, and count the products in float8 of an implementation

Products = dict[str, int]
"""Results of products with operands in float8 → number of multiplications.

All ranks together make as many as one process, however rows and features are sharded; recomputation makes more."""
GIVES = {
    frozenset(("input", "weight")): "outputs",
    frozenset(("grad_output", "weight")): "gradients of inputs",
    frozenset(("grad_output", "input")): "gradients of weights",
}
"""Result of a product, by the roles of its operands."""


def rounded(model: nn.Module, problem: Problem) -> nn.Module:
    """Round in place what a problem's techniques round, and return the model: weights to 4 bits, layers to float8.

    Weights in 4 bits become plain ones with the values that the codes stand for, so that plain torch computes.
    """
    float8, quantize, _ = rounded_weights(model_facts(model), as_techniques(problem.requested), "cpu", None)
    for path in quantize.modules if quantize is not None else ():
        weight = model.get_submodule(path).get_parameter("weight").detach()
        weight.copy_(unpack(pack(weight), weight.dtype))
    if float8 is None:
        return model
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise MissingExtraError(f"techniques.float8 = '{float8.recipe}'", "torchao", "float8") from error
    config = replace(Float8LinearConfig.from_recipe_name(float8.recipe), emulate=True)
    return convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, path: clean(path) in float8.modules
    )


def refuse_unseen(problem: Problem) -> None:
    """Refuse tensorwise float8 in compiled blocks with experts: nobody sees where rounding moves tokens."""
    asked = problem.techniques
    if (
        asked.get("float8") == "tensorwise"
        and asked.get("compile")
        and model_facts(as_module(problem.source())).has_experts
    ):
        raise UnsupportedError(
            "verify cannot tell techniques.float8 = tensorwise with techniques.compile = true from a fault where the"
            " model has experts: with the scales of other rows rounding moves tokens to other experts, and routing"
            " inside compiled blocks is not seen. Verify it with techniques.compile = false, or with techniques.float8"
            " = rowwise."
        )


@contextmanager
def counting(products: Products, problem: Problem, step: int) -> Iterator[None]:
    """Count products in float8 into ``products``, in the first step only, whose blocks run uncompiled, so visibly."""
    if step > 1 or not problem.sees_products:
        yield
        return
    with _Counter(products):
        yield


class _Counter(TorchDispatchMode):
    def __init__(self, products: Products):
        super().__init__()
        self.products = products

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        from torchao.float8 import Float8TrainingTensor

        if func is torch.ops.aten.mm.default and all(isinstance(operand, Float8TrainingTensor) for operand in args):
            a, b = args
            gives = GIVES[frozenset(role_of(operand) for operand in args)]
            self.products[gives] = self.products.get(gives, 0) + a.shape[0] * a.shape[1] * b.shape[1]
        return func(*args, **(kwargs or {}))


def together(of_ranks: Sequence[Products]) -> Products:
    return {gives: sum(products.get(gives, 0) for products in of_ranks) for gives in GIVES.values()}


def fewer(found: Products, reference: Products) -> Iterator[Difference]:
    """Yield the share of the reference's products that are not in float8; an audit finds layers wrongly in float8."""
    for gives, number in reference.items():
        yield Difference("products", gives, max(0.0, 1 - found.get(gives, 0) / number), 0.0)
