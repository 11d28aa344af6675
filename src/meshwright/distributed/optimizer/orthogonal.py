"""Orthogonalise a matrix by Newton–Schulz (Jordan et al. 2024, kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Of the quintic iteration, which is steep at zero and leaves singular values near 1, in 0.7 to 1.2."""
SMALLEST_NORM = 1e-7


def orthogonalised(matrix: Tensor, steps: int) -> Tensor:
    """Return a (rows, columns) matrix with its singular values moved to about 1, in its dtype.

    All products are computed in at least fp32, and in fp64 for an fp64 matrix; torch.optim.Muon's are in bfloat16.
    """
    a, b, c = COEFFICIENTS
    x = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    stands = x.shape[0] > x.shape[1]
    x = x.T if stands else x  # (short, long), so that the Gram matrix is the smaller one
    x = x / torch.linalg.vector_norm(x).clamp(min=SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if stands else x).to(matrix.dtype)
