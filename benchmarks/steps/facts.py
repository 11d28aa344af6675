"""Read an operator's kind, shape and bytes off its arguments and results."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from meshwright.core.torch_private import tree_leaves
from meshwright.distributed.process.absent_peers import name_of_operator

from .operators import OperatorKind, OperatorWork, Phase

K = OperatorKind
NAMES = {
    K.VIEW: "view _unsafe_view t transpose permute expand unsqueeze squeeze slice select split split_with_sizes"
    " as_strided detach alias unbind chunk narrow diagonal reshape unfold view_as_real _reshape_alias lift_fresh"
    " set_ resize_ squeeze_ unsqueeze_ requires_grad_ detach_ transpose_ is_same_size",
    K.EMPTY: "empty empty_like empty_strided new_empty new_empty_strided _local_scalar_dense promote_types"
    " scalar_tensor arange",
    K.PRODUCT: "mm addmm bmm baddbmm _grouped_mm addmm_ baddbmm_",
    K.REDUCTION: "sum mean norm linalg_vector_norm max min amax amin argmax any all var var_mean std logsumexp"
    " nll_loss_forward nll_loss_backward count_nonzero prod",
    K.SOFTMAX: "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm"
    " native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward cumsum",
    K.FUNCTION: "silu silu_backward gelu gelu_backward sigmoid sigmoid_backward tanh tanh_backward exp exp_ log log1p"
    " sin cos erf softplus softplus_backward native_dropout bernoulli_ normal_ uniform_ mish pow pow_ sqrt"
    " rsqrt div div_ reciprocal",
    K.GATHER: "embedding index_select index gather take",
    K.SCATTER: "embedding_dense_backward index_add index_add_ index_put index_put_ scatter scatter_ scatter_add"
    " scatter_add_ _index_put_impl_ slice_backward select_backward",
    K.SORT: "sort topk argsort unique _unique2 nonzero bincount histc searchsorted",
    K.CAST: "_to_copy",
    K.OPTIMIZER: "_fused_adamw_ _fused_adam_ _fused_sgd_",
}
KINDS = {name: kind for kind, names in NAMES.items() for name in names.split()}
FREE = ("prim", "profiler")
"""Namespaces of operators that compute nothing."""


def work_of(func: Any, args: tuple, made: Any, phase: Phase) -> OperatorWork | None:
    """Describe an operator; None for one that does nothing."""
    namespace, name = func.namespace, name_of_operator(func)
    if namespace in FREE:
        return None
    title = f"{namespace}.{name}"
    kind = KINDS.get(name)
    given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    results = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
    if kind is K.VIEW or kind is K.EMPTY:
        return OperatorWork(title, kind, phase)
    if kind is K.PRODUCT:
        return _product(title, name, given, results, phase)
    if "scaled_dot_product" in name or "flash_attention" in name:
        return _attention(title, name, args, given, phase)
    moved = float(sum(map(_bytes, given)) + sum(map(_bytes, results)))
    if kind is K.GATHER:
        moved = 2.0 * sum(map(_bytes, results)) + sum(_bytes(one) for one in given if not one.is_floating_point())
    elif kind is K.REDUCTION and given and _is_over_rows(name, args):
        kind = K.COLUMNS
    elif name.startswith(("_foreach", "_fused")):
        tensors = max((len(one) for one in args if isinstance(one, (list, tuple))), default=1)
        return OperatorWork(title, kind or K.INPLACE, phase, moved, tensors=max(1, tensors))
    elif name == "pow" and isinstance(args[1], (int, float)) and args[1] in (2, 2.0):
        kind = K.POINTWISE
    if kind is None:
        kind = _of_others(name, given, results)
    if kind in (K.POINTWISE, K.INPLACE, K.STRIDED) and not results and namespace != "aten":
        moved *= 2  # copies into tensors that were given
    if kind is K.INPLACE and results:
        moved = float(sum(map(_bytes, given)) + _bytes(results[0]))
    return OperatorWork(title, kind, phase, moved)


def _of_others(name: str, given: list[Tensor], results: list[Tensor]) -> OperatorKind:
    """Return the kind of an operator that is not named: a copy that reorders, or one elementwise."""
    if name in ("clone", "copy_", "cat", "stack", "contiguous", "repeat", "flip", "roll", "expand_copy"):
        if name == "copy_" and len({one.dtype for one in given}) > 1:
            return K.CAST
        if any(not one.is_contiguous() for one in [*given, *results]):
            return K.STRIDED
    if any(_is_strided(one) for one in given):
        return K.STRIDED
    return K.INPLACE if name.endswith("_") else K.POINTWISE


def _is_strided(tensor: Tensor) -> bool:
    """Return whether neighbours in a large tensor's last dims lie apart, other than by repetition."""
    return not tensor.is_contiguous() and tensor.dim() > 1 and all(tensor.stride())


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's own elements; those that are repeated by a stride of 0 count once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size() if tensor.numel() else 0


def _is_over_rows(name: str, args: tuple) -> bool:
    """Return whether a sum runs over the leading dims, so that neighbours in memory go to different sums."""
    if name not in ("sum", "mean") or len(args) < 2 or not isinstance(args[1], (list, tuple)) or not args[1]:
        return False
    dims = args[0].dim()
    return (dims - 1) not in [dim % dims for dim in args[1]]


def _is_transposed(matrix: Tensor) -> bool:
    *_, rows, columns = matrix.stride()
    return rows == 1 and columns > 1 and matrix.shape[-1] > 1


def _product(title: str, name: str, given: list[Tensor], results: list[Tensor], phase: Phase) -> OperatorWork:
    first, second = given[1:3] if name.startswith(("addmm", "baddbmm")) else given[:2]
    result = results[0]
    number = math.prod(result.shape[:-2])
    rows, columns, depth = result.shape[-2], result.shape[-1], first.shape[-1]
    if name == "_grouped_mm":
        number = max(one.shape[0] if one.dim() == 3 else 1 for one in (first, second, result))
        if result.dim() == 2:  # rows of all groups after each other
            rows = max(1, rows // number)
        else:
            depth = max(1, depth // number)
    layout = "tn" if _is_transposed(first) else "nt" if _is_transposed(second) else "nn"
    moved = float(sum(map(_bytes, given)) + _bytes(result))
    dtype = str(first.dtype).removeprefix("torch.")
    return OperatorWork(title, K.PRODUCT, phase, moved, dtype, layout, (rows, columns, depth, number))


def _attention(title: str, name: str, args: tuple, given: list[Tensor], phase: Phase) -> OperatorWork:
    backward = "backward" in name
    queries, keys = given[1:3] if backward else given[:2]
    rows, heads, tokens, dim = queries.shape
    causal = any(flag is True for flag in args if isinstance(flag, bool))
    dtype = str(queries.dtype).removeprefix("torch.")
    return OperatorWork(
        title,
        K.ATTENTION,
        phase,
        float(sum(map(_bytes, given))),
        dtype,
        "backward" if backward else "forward",
        (tokens, keys.shape[-2], dim, rows * heads),
        causal,
    )
