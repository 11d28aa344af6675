"""Turn names of operators into a policy of ``torch.utils.checkpoint``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy

from meshwright.core.errors import UnsupportedError
from meshwright.planning.recompute.operators import OPERATOR, is_fresh, operators, policy_function
from meshwright.planning.recompute.plan import KEPT

Policy = Callable[..., CheckpointPolicy]
"""Type of a policy: (context, operator, *args, **kwargs) → whether to save or recompute the result."""

SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
WORDS = {
    "attention": (
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
    ),
    "matmuls": ("aten.mm.default", "aten.addmm.default", "aten._scaled_mm.default", "aten._grouped_mm.default"),
    "topk": ("aten.topk.default",),
}
"""Operators by the word that names them. Linear layers are mm, or addmm with a bias. Batched products (bmm) have no
word: in attention computed step by step their results are as large as the sequence squared."""


class OperatorPolicy:
    """The operators of a region's forward whose results are saved.

    Args:
        keep: words of ``planning.recompute.plan.KEPT``, names of operators, or "module:function".
        every: distance between saved results of the matrix products of "matmuls": each ``every``-th is saved.
    """

    def __init__(self, keep: tuple[str, ...], every: int):
        where = "techniques.checkpoint_keep"
        named = [name for word in keep if word in WORDS and word != "matmuls" for name in WORDS[word]]
        named += [word for word in keep if word not in KEPT and ":" not in word]
        self.keeps_exchanges, self.keeps_attention = "collectives" in keep, "attention" in keep
        self.every = every
        self._always = {form for name in named for form in operators(name, where)}
        self._products = (
            {form for name in WORDS["matmuls"] for form in operators(name, where)} if "matmuls" in keep else set()
        )
        self._products -= self._always
        self._functions = [policy_function(word, where) for word in keep if ":" in word]

    def asks_about(self, operator: Any) -> bool:
        """Return whether the operator's results may be saved at all."""
        return bool(self._functions) or operator in self._always or operator in self._products

    def start(self) -> Policy:
        """Return the policy of one forward, which counts that forward's matrix products."""
        products = 0

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            nonlocal products
            if operator in self._products:
                products += 1
                if products % self.every == 0:
                    return CheckpointPolicy.MUST_SAVE
            if operator in self._always:
                return CheckpointPolicy.MUST_SAVE
            return self._asked(context, operator, args, kwargs)

        return policy

    def _asked(self, context: Any, operator: Any, args: tuple, kwargs: dict[str, Any]) -> CheckpointPolicy:
        """Ask the user's functions in turn; the first that wants to save decides."""
        for function in self._functions:
            answer = function(context, operator, *args, **kwargs)
            # older versions of torch lack these two
            if getattr(answer, "name", "") in (
                "MUST_CPU_OFFLOAD",
                "PREFER_CPU_OFFLOAD",
            ):
                raise UnsupportedError(
                    f"techniques.checkpoint_keep: {function.__name__} wants {operator} offloaded; a policy can save or"
                    f" recompute. For host memory set techniques.activation_checkpointing = offload."
                )
            if answer is True or answer in SAVED:
                if not (isinstance(operator, OPERATOR) and is_fresh(operator)):
                    raise UnsupportedError(
                        f"techniques.checkpoint_keep: {function.__name__} wants to save {operator}, which has no result"
                        f" of its own: it writes into its inputs or gives a view of them"
                    )
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE
