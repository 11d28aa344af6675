"""The loss of a vocabulary that ranks share out, and of a head whose logits are never whole, against plain
F.cross_entropy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.distributed.exchange import Thread, on_threads
from meshwright.distributed.tensor.loss import VocabularyShard, head_loss_sum, vocabulary_parallel_cross_entropy_sum

WIDTH = 8


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype = torch.float64
    vocabulary: int = 37
    ranks: int = 2
    ignored: str = "some"
    chunks: int = 5
    bias: bool = True
    scale: float = 1.0

    @property
    def bound(self) -> float:
        """A few roundings of the dtype; what is summed inside is at least fp32."""
        return {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2**-7}[self.dtype]


def tensors(case: Case) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(hidden, weight, bias, labels)."""
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn((3, 7, WIDTH), generator=g, dtype=torch.float64).to(case.dtype)
    weight = (case.scale * torch.randn((case.vocabulary, WIDTH), generator=g, dtype=torch.float64)).to(case.dtype)
    bias = torch.randn(case.vocabulary, generator=g, dtype=torch.float64).to(case.dtype) if case.bias else None
    labels = torch.randint(0, case.vocabulary, (3, 7), generator=g)
    labels[0, 0], labels[1, 1] = 0, case.vocabulary - 1
    if case.ignored == "some":
        labels[0, 3:] = -100
        labels[2, 0] = -100
    elif case.ignored == "all":
        labels[:] = -100
    return hidden, weight, bias, labels


def plain_loss(logits: Tensor, labels: Tensor, case: Case) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    labels = labels.flatten()
    return F.cross_entropy(wide, labels, reduction="sum")


def plain(case: Case, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The loss and the gradients of logits, hidden, weight and bias, with whole logits; ``dtype``: of the
    computation.
    """
    *parts, labels = tensors(case)
    parts = [part if part is None else part.to(dtype or case.dtype).requires_grad_() for part in parts]
    hidden, weight, bias = parts
    assert hidden is not None and weight is not None
    logits = F.linear(hidden, weight, bias)
    logits.retain_grad()
    loss = 0.7 * plain_loss(logits, labels, case)
    loss.backward()
    return [loss.detach(), *(part.grad for part in (logits, hidden, weight, bias) if part is not None)]  # type: ignore[misc]


def of_logits(case: Case, group: Thread) -> tuple[Tensor, Tensor]:
    """The loss and this rank's part of the gradient of the logits."""
    hidden, weight, bias, labels = tensors(case)
    shard = VocabularyShard.of(case.vocabulary, group)
    own = F.linear(hidden, weight, bias)[..., shard.first : shard.first + shard.size].clone().requires_grad_()
    loss = 0.7 * vocabulary_parallel_cross_entropy_sum(own, labels, shard)
    loss.backward()
    assert own.grad is not None
    return loss.detach(), own.grad


def of_head(case: Case, group: Thread) -> list[Tensor]:
    """The loss, the summand of hidden's gradient, and this rank's parts of the gradients of weight and bias."""
    hidden, weight, bias, labels = tensors(case)
    shard = VocabularyShard.of(case.vocabulary, group)
    mine = slice(shard.first, shard.first + shard.size)
    parts = [hidden.requires_grad_(), weight[mine].clone().requires_grad_()]
    own_bias = None if bias is None else bias[mine].clone().requires_grad_()

    def loss_of(logits: Tensor, tokens: slice) -> Tensor:
        return vocabulary_parallel_cross_entropy_sum(logits, labels.flatten()[tokens], shard)

    loss = 0.7 * head_loss_sum(parts[0], parts[1], loss_of, bias=own_bias, chunks=case.chunks)
    loss.backward()
    gradients = [part.grad for part in (*parts, own_bias) if part is not None]
    assert all(g is not None for g in gradients)
    return [loss.detach(), *gradients]  # type: ignore[list-item]


def error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-9))


CASES = {
    "fp64": Case(),
    "fp32": Case(torch.float32),
    "bf16": Case(torch.bfloat16),
    "four ranks": Case(ranks=4),
    "one rank": Case(ranks=1),
    "a rank with no vocabulary": Case(vocabulary=9, ranks=4),
    "fewer ids than ranks": Case(vocabulary=3, ranks=4),
    "fp32 on four ranks": Case(torch.float32, ranks=4),
    "no label is ignored": Case(ignored="none"),
    "every label is ignored": Case(ignored="all"),
    "without bias": Case(bias=False),
    "one chunk": Case(chunks=1),
    "more chunks than tokens": Case(chunks=99),
    "logits that overflow exp": Case(scale=400.0),
    "the same in fp32": Case(torch.float32, scale=40.0),
}


@pytest.mark.parametrize("name", CASES)
def test_a_shared_vocabulary_gives_what_a_whole_one_gives(name):
    case = CASES[name]
    loss, slope, *_ = plain(case)
    found = on_threads(case.ranks, lambda group: of_logits(case, group))
    assert all(torch.equal(part[0], found[0][0]) for part in found), "ranks disagree"
    assert error(found[0][0], loss) <= min(case.bound, 2e-6), "the loss is summed in at least fp32"
    assert error(torch.cat([part[1] for part in found], dim=-1), slope) <= case.bound
    assert found[0][1].dtype == case.dtype


@pytest.mark.first
@pytest.mark.parametrize("name", CASES)
def test_a_head_in_chunks_gives_what_whole_logits_give(name):
    case = CASES[name]
    loss, _, *gradients = plain(case)
    parts = on_threads(case.ranks, lambda group: of_head(case, group))
    assert all(torch.equal(part[0], parts[0][0]) for part in parts), "ranks disagree"
    assert error(parts[0][0], loss) <= min(case.bound, 2e-6)
    found = [
        sum(part[1].double() for part in parts),
        *(torch.cat([part[i] for part in parts]) for i in range(2, len(parts[0]))),
    ]
    for mine, expected in zip(found, gradients, strict=True):
        # bf16: ranks' summands are rounded
        assert error(mine, expected) <= (2 * case.bound if case.dtype == torch.bfloat16 else case.bound)
    if case.ignored == "all":
        assert all(not g.any() for g in found) and parts[0][0] == 0


def test_the_weights_gradient_is_added_up_in_fp32_and_not_in_bf16():
    case = Case(torch.bfloat16, chunks=21, ranks=1)
    exact = plain(case, torch.float64)[3]
    in_chunks = on_threads(1, lambda group: of_head(case, group))[0][2]
    at_once = plain(case)[3]
    assert error(in_chunks, exact) <= 1.2 * error(at_once, exact)


class Largest(TorchDispatchMode):
    """Notes the most elements of any logits, with one of these last dims, that an operation makes (weights are not
    logits). Modes belong to a thread.
    """

    def __init__(self, *widths: int):
        super().__init__()
        self.widths, self.elements = widths, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if (
                isinstance(tensor, Tensor)
                and tensor.dim() == 2
                and tensor.shape[-1] in self.widths
                and tensor.shape[0] != WIDTH
            ):
                self.elements = max(self.elements, tensor.numel())
        return result


def largest_logits(job: Callable[[Case, Thread], Any], case: Case) -> list[int]:
    """On each rank."""

    def watched(group: Thread) -> int:
        share = VocabularyShard.of(case.vocabulary, group).size
        with Largest(case.vocabulary, share) as watch:
            job(case, group)
        return watch.elements

    return on_threads(case.ranks, watched)


def test_no_larger_part_of_the_logits_ever_exists():
    case = Case(vocabulary=36, ranks=2, chunks=7)  # 21 tokens
    whole = 21 * 36
    assert largest_logits(of_head, case) == [whole // (case.ranks * case.chunks)] * 2
    assert largest_logits(of_head, replace(case, chunks=1)) == [whole // case.ranks] * 2, "the watch sees what is there"


def test_gradients_of_a_fused_head_are_used_up():
    hidden, weight, _, labels = tensors(Case(ranks=1))
    shard = VocabularyShard.of(37, None)
    loss = head_loss_sum(
        hidden.requires_grad_(),
        weight,
        lambda x, tokens: vocabulary_parallel_cross_entropy_sum(x, labels.flatten()[tokens], shard),
    )
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used up by their first backward"):
        loss.backward()


def test_only_what_needs_a_gradient_gets_one():
    hidden, weight, bias, labels = tensors(Case(ranks=1))
    shard = VocabularyShard.of(37, None)

    def loss_of(logits: Tensor, tokens: slice) -> Tensor:
        return vocabulary_parallel_cross_entropy_sum(logits, labels.flatten()[tokens], shard)

    assert bias is not None
    head_loss_sum(hidden, weight, loss_of, bias=bias.requires_grad_()).backward()
    assert hidden.grad is None and weight.grad is None and bias.grad is not None
    with torch.no_grad():
        loss = head_loss_sum(hidden, weight, loss_of, bias=bias)
    assert error(loss, plain(Case(ranks=1))[0] / 0.7) <= 1e-13
