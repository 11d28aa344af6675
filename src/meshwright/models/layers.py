"""Define a mixture of experts in plain torch: a router, stacked experts, shared experts.

Shapes in comments: ``n`` tokens of ``dim`` features; each goes to ``k`` of ``experts``. The expert number ``experts``
means no expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.core.torch_private import is_in_backward, uncompiled
from meshwright.models.decoder_config import MoEConfig

GROUPED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of grouped matrix products; others take one product for each expert."""
GROUPED_BYTES = 16
"""Bytes at whose multiples rows must begin in grouped matrix products."""


class Router(nn.Module):
    """A module that chooses each token's experts, computed in at least fp32.

    Scores are softmax (arXiv 2401.04088) or sigmoid (arXiv 2412.19437); with groups, a token chooses only from its
    best groups. A group is as good as its best expert, or (sigmoid) its two best together.

    Experts are balanced by a loss per sequence (arXiv 2412.19437, eq. 17 to 20), or per microbatch with the tokens of
    all ranks that compute the microbatch (arXiv 2501.11873), or by a bias on the choice alone that follows the load
    without a gradient (arXiv 2408.15664). A loss on the size of the logits (arXiv 2202.08906) keeps the logits small.

    Attributes:
        loss_share: weight of one token's auxiliary loss in the loss of the step, a tensor without dims; None: the
            auxiliary loss is left in ``auxiliary``, for the caller to add.
        auxiliary: the sum of the auxiliary losses over the tokens of the last forward (0 dims), where ``loss_share``
            is None.
        across: function that sums numbers, in place, over the ranks with other parts of the same sequences; None:
            the sequences are whole on this rank.
        everywhere: function from (rows, experts + 1) numbers of this microbatch's sequences to their sum over the
            microbatch's sequences on all ranks, (1, experts + 1) or one for each row; None: all are on this rank.
        counts: (experts,) int64 tokens per expert since the last ``balance``, of forwards in training; None: no
            forward yet.
        z: (2,) float64, of forwards in training: log²(Σ exp(logits)) summed over the routed tokens, and the number of
            these tokens; its reader sets it to None to begin again.
    """

    def __init__(self, dim: int, config: MoEConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_experts, dim))
        self.bias: Tensor | None
        self.register_buffer("bias", torch.zeros(config.n_experts) if config.bias_rate else None)
        self.loss_share: Tensor | None = None
        self.auxiliary: Tensor | None = None
        self.counts: Tensor | None = None
        self.z: Tensor | None = None
        self.across: Callable[[Tensor], Tensor] | None = None
        self.everywhere: Callable[[Tensor], Tensor] | None = None

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Router:
        """Cast the module, but keep the bias in at least fp32, since its steps are small."""
        bias = self.bias
        super()._apply(fn, recurse)
        if bias is not None and self.bias is not None and self.bias.dtype != at_least_fp32(self.bias.dtype):
            self.bias = bias.to(self.bias.device)
        return self

    def reset_parameters(self) -> None:
        """Zero the bias; weights follow the model's law."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, routed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the tokens' experts and their weights, (n, k) int64 and (n, k).

        Args:
            x: (rows, seq, dim).
            routed: (rows, seq) bool, False for padding, which no expert computes and no loss counts; by default all
                are routed.
        """
        c, wide = self.config, at_least_fp32(x.dtype)
        logits = F.linear(x.to(wide), self.weight.to(wide))  # (rows, seq, experts)
        scores = logits.softmax(-1) if c.router == "softmax" else logits.sigmoid()
        index = self._choose(scores.detach())
        weights = scores.gather(-1, index)
        if c.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + torch.finfo(wide).tiny)
        weights = weights * c.scale
        if c.capacity_factor:  # drop tokens over it, counted per sequence so that it depends on no microbatch or layout
            _, seq, k = index.shape
            limit = max(1, int(c.capacity_factor * seq * k / c.n_experts))
            chosen = F.one_hot(index, c.n_experts)  # (rows, seq, k, experts)
            if routed is not None:
                chosen = chosen * routed[..., None, None]
            # each expert's tokens in the sequence up to this one
            before = chosen.flatten(1, 2).cumsum(1).unflatten(1, (seq, k))
            index = index.masked_fill((before * chosen).sum(-1) > limit, c.n_experts)
        if routed is not None:
            index = index.masked_fill(~routed.unsqueeze(-1), c.n_experts)
        if self.training and not is_recomputing():
            found = tokens_per_expert(index.flatten(), c.n_experts)
            self.counts = found if self.counts is None else self.counts + found
            real = torch.ones_like(logits[..., 0]) if routed is None else routed.to(logits.dtype)
            z = torch.stack([(logits.detach().logsumexp(-1).square() * real).sum(), real.sum()]).double().detach()
            self.z = z if self.z is None else self.z + z
        if self.training and (c.sequence_loss or c.batch_loss or c.z_loss):
            weights = self._with_losses(weights, logits, scores, index, routed)
        return index.flatten(0, 1), weights.flatten(0, 1).to(x.dtype)

    def _choose(self, scores: Tensor) -> Tensor:
        """Choose experts, (rows, seq, k) int64, from scores, (rows, seq, experts)."""
        c = self.config
        if self.bias is not None:
            scores = scores + self.bias.to(scores.dtype)
        if c.n_groups > 1:
            groups = scores.unflatten(-1, (c.n_groups, -1))
            best = (
                groups.amax(-1) if c.router == "softmax" else groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1)
            )
            chosen = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(c.top_groups, -1).indices, True)
            scores = groups.masked_fill(~chosen.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores.topk(c.top_k, -1).indices

    def balance(self, counts: Tensor) -> None:
        """Move the bias by one optimizer step's counts, (experts,), of all data ranks and microbatches.

        The counts of this process are reset. The bias of a frozen router stays."""
        self.counts = None
        if self.bias is not None and self.weight.requires_grad:
            load = counts.to(torch.float64)
            self.bias += self.config.bias_rate * (load.mean() - load).sign().to(self.bias.dtype)

    def _with_losses(
        self, weights: Tensor, logits: Tensor, scores: Tensor, index: Tensor, routed: Tensor | None
    ) -> Tensor:
        """Return ``weights`` such that their backward adds the auxiliary losses' gradients."""
        c = self.config
        real = torch.ones_like(index[..., 0], dtype=logits.dtype) if routed is None else routed.to(logits.dtype)
        total = logits.new_zeros(())
        if c.sequence_loss or c.batch_loss:
            shares = (scores / scores.sum(-1, keepdim=True) * real.unsqueeze(-1)).sum(1)  # (rows, experts)
            loads = F.one_hot(index, c.n_experts + 1)[..., : c.n_experts].sum((1, 2)).to(logits.dtype)
            counted = torch.cat([loads, real.sum(1, keepdim=True)], dim=1)  # (rows, experts + 1)
            counted = counted if self.across is None else self.across(counted)
            if c.sequence_loss:
                total = total + c.sequence_loss * self._unevenness(counted, shares)
            if c.batch_loss:
                counted = counted.sum(0, keepdim=True) if self.everywhere is None else self.everywhere(counted)
                total = total + c.batch_loss * self._unevenness(counted, shares)
        if c.z_loss:
            total = total + c.z_loss * (logits.logsumexp(-1).square() * real).sum()
        if self.loss_share is None:
            self.auxiliary = total
            return weights
        return _attached(weights, total, self.loss_share)

    def _unevenness(self, counted: Tensor, shares: Tensor) -> Tensor:
        """Sum the imbalance over tokens, 1 per token for even experts.

        ``counted``: tokens per expert and their sum; ``shares``: the scores' shares, (rows, experts)."""
        loads, tokens = counted.split([self.config.n_experts, 1], dim=1)
        return self.config.n_experts / self.config.top_k * (loads / tokens.clamp(min=1) * shares).sum()


@uncompiled  # The compiler takes a loss that no result depends on for one without a gradient.
def _attached(value: Tensor, loss: Tensor, share: Tensor) -> Tensor:
    return _Attached.apply(value, loss, share)


class _Attached(torch.autograd.Function):
    """The identity on ``value``; its backward gives ``loss`` the gradient ``share``, whatever that of ``value`` is.

    A loss computed inside a model thus needs no way out, neither past pipeline stages nor past recomputed blocks."""

    @staticmethod
    def forward(ctx, value: Tensor, loss: Tensor, share: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(share)
        ctx.dtype = loss.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        (share,) = ctx.saved_tensors
        return gradient, share.to(ctx.dtype), None


class Experts(nn.Module):
    """Stacked SwiGLU feed-forwards of one shape, computed in three grouped matrix products.

    Where torch has no grouped product for the dtype or the shape (``is_grouped``), each expert has its own product.
    """

    def __init__(self, dim: int, hidden_dim: int, n_experts: int):
        super().__init__()
        self.n_experts = n_experts
        self.w_gate = nn.Parameter(torch.empty(n_experts, hidden_dim, dim))
        self.w_up = nn.Parameter(torch.empty(n_experts, hidden_dim, dim))
        self.w_down = nn.Parameter(torch.empty(n_experts, dim, hidden_dim))

    def forward(
        self, x: Tensor, index: Tensor, weights: Tensor, meanwhile: Callable[[], object] | None = None
    ) -> Tensor:
        """Sum the weighted outputs of each token's experts, (n, dim).

        Args:
            x: (n, dim).
            index: (n, k) int64 experts; ``n_experts``: no expert.
            weights: (n, k).
            meanwhile: independent computation, for a replacement of this forward that waits for other ranks.
        """
        n, k = index.shape
        order = index.flatten().argsort(stable=True)  # (n * k), by expert; rows without an expert come last
        ends = tokens_per_expert(index.flatten(), self.n_experts).cumsum(0)
        # The last expert computes the rows without an expert too: rows that no product wrote have random gradients.
        ends[-1] = n * k
        places = torch.empty_like(order).scatter_(0, order, torch.arange(n * k, device=order.device))
        out = self.compute(x[order // k], ends)[places].unflatten(0, (n, k))
        out = out.masked_fill((index == self.n_experts).unsqueeze(-1), 0)
        return (out * weights.unsqueeze(-1)).sum(1)

    def compute(self, x: Tensor, ends: Tensor) -> Tensor:
        """Compute the experts' outputs for rows sorted by expert, (m, dim).

        Args:
            x: (m, dim), the rows of each expert one behind the other.
            ends: (experts,) int64, one past each expert's last row; the last is m.
        """
        product = grouped_product if is_grouped(x, self.w_gate, self.w_down) else product_by_expert
        hidden = F.silu(product(x, self.w_gate, ends)) * product(x, self.w_up, ends)
        return product(hidden, self.w_down, ends)


def tokens_per_expert(index: Tensor, n_experts: int) -> Tensor:
    """Count each expert among the expert numbers ``index``, (experts,) int64, without waiting for the device."""
    counts = torch.zeros(n_experts + 1, dtype=torch.int64, device=index.device)
    return counts.scatter_add_(0, index, torch.ones_like(index))[:n_experts]


def is_grouped(x: Tensor, *weights: Tensor) -> bool:
    """Return whether torch's grouped product takes these operands; under the compiler it takes bfloat16 alone."""
    dtypes = GROUPED_DTYPES[:1] if torch.compiler.is_compiling() else GROUPED_DTYPES
    fits = all(weight.shape[-1] * weight.element_size() % GROUPED_BYTES == 0 for weight in weights)
    return x.dtype in dtypes and fits and len(x) > 0


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows by their experts' weights: (m, in), (experts, out, in) → (m, out)."""
    return _Contiguous.apply(F.grouped_mm(x, weight.transpose(-2, -1), offs=ends.to(torch.int32)))


class _Contiguous(torch.autograd.Function):
    """The identity, whose backward makes the gradient contiguous, as grouped products require."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.contiguous()


def product_by_expert(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Compute ``grouped_product`` one expert at a time."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([rows @ w.mT for rows, w in zip(x.split(sizes), weight.unbind(0), strict=True)])


def is_recomputing() -> bool:
    """Return whether a backward is running, in which a forward repeats one already computed and counted."""
    return is_in_backward()


class MixtureOfExperts(nn.Module):
    """A feed-forward in which each token uses some experts; shared experts see every token."""

    def __init__(self, dim: int, hidden_dim: int, config: MoEConfig):
        super().__init__()
        self.router = Router(dim, config)
        self.experts = Experts(dim, hidden_dim, config.n_experts)
        self.shared = FeedForward(dim, config.n_shared * hidden_dim) if config.n_shared else None

    def forward(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """Compute the experts' output, (rows, seq, dim); see ``Router`` for ``routed``."""
        index, weights = self.router(x, routed)
        if self.shared is None:
            return self.experts(x.flatten(0, 1), index, weights).view_as(x)
        # The compiler cannot pass a function that it compiles to one that it does not.
        if torch.compiler.is_compiling():
            return self.experts(x.flatten(0, 1), index, weights).view_as(x) + self.shared(x)
        shared = functools.cache(functools.partial(self.shared, x))
        return self.experts(x.flatten(0, 1), index, weights, meanwhile=shared).view_as(x) + shared()


# --- define the layers of blocks, besides attention and experts


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class RMSNorm(nn.Module):
    """A root-mean-square norm over the last dim (arXiv 1910.07467), computed in at least fp32."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_fp32(x.dtype)
        return F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps).to(x.dtype)


class FeedForward(nn.Module):
    """A SwiGLU feed-forward (arXiv 2002.05202)."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.w_gate = nn.Linear(dim, hidden_dim, bias=False)
        self.w_up = nn.Linear(dim, hidden_dim, bias=False)
        self.w_down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_down(F.silu(self.w_gate(x)) * self.w_up(x))
