"""Convert the oracle to float8 with plain torchao, and count the products in float8 of any implementation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshwright.comparison.findings import Difference
from meshwright.core.errors import MissingExtraError, UnsupportedError
from meshwright.core.names import clean
from meshwright.core.torch_private import TorchDispatchMode
from meshwright.distributed.float8.torchao_private import role_of
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import as_module
from meshwright.planning.float8.plan import make_float8_plan
from meshwright.planning.techniques import as_techniques
from meshwright.verification.problem import Problem

Products = dict[str, int]
"""Results of products with operands in float8 → number of multiplications.

All ranks together make as many as one process, however rows and features are sharded; recomputation makes more."""
GIVES = {
    frozenset(("input", "weight")): "outputs",
    frozenset(("grad_output", "weight")): "gradients of inputs",
    frozenset(("grad_output", "input")): "gradients of weights",
}
"""Result of a product, by the roles of its operands."""


def converted(model: nn.Module, problem: Problem) -> nn.Module:
    """Convert in place the linear layers that a problem's techniques name, and return the model.

    Raises:
        MissingExtraError: torchao is not installed.
    """
    planned, _ = make_float8_plan(model_facts(model), as_techniques(problem.requested), "cpu")
    if planned is None:
        return model
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise MissingExtraError(f"techniques.float8 = '{planned.recipe}'", "torchao", "float8") from error
    config = replace(Float8LinearConfig.from_recipe_name(planned.recipe), emulate=True)
    return convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, path: clean(path) in planned.modules
    )


def refuse_unseen(problem: Problem) -> None:
    """Refuse tensorwise float8 in compiled blocks with experts: nobody sees where rounding moves tokens.

    Raises:
        UnsupportedError: the comparison could not tell tokens that rounding moved to other experts from a fault.
    """
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
