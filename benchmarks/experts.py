#!/usr/bin/env python3
"""Sixteen experts of our decoder in grouped products, against one product for each: paired rounds in one process, CPU
time.

    OMP_NUM_THREADS=1 python benchmarks/experts.py [--rounds 40] [--tokens 256] [--dim 128] [--hidden 64] \
        [--dtype float32]

Exit status 1 where the grouped one is not faster, or gives something else.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from unittest.mock import patch

import torch

from meshwright.models import layers
from meshwright.models.layers import Experts

EXPERTS, TOP_K = 16, 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    g = torch.Generator().manual_seed(0)
    experts = Experts(args.dim, args.hidden, EXPERTS).to(dtype)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g) / parameter.shape[-1] ** 0.5)
    x = torch.randn(args.tokens, args.dim, generator=g).to(dtype).requires_grad_()
    index = torch.rand(args.tokens, EXPERTS, generator=g).topk(TOP_K).indices
    weights = torch.rand(args.tokens, TOP_K, generator=g).to(dtype)

    def once() -> tuple[float, list[torch.Tensor]]:
        begun = time.process_time()
        out = experts(x, index, weights)
        gradients = torch.autograd.grad(out.square().sum(), [x, *experts.parameters()])
        return time.process_time() - begun, [out.detach(), *gradients]

    def in_a_loop() -> tuple[float, list[torch.Tensor]]:
        with patch.object(layers, "is_grouped", lambda *_: False):
            return once()

    once(), in_a_loop()
    ratios, errors = [], []
    for number in range(args.rounds):
        pair = (once, in_a_loop) if number % 2 else (in_a_loop, once)
        (one, found), (other, wanted) = [run() for run in pair] if pair[0] is once else [run() for run in pair][::-1]
        ratios.append(one / other)
        errors.append(max(((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)))
    median, worst = statistics.median(ratios), max(errors)
    sizes = f"{EXPERTS} experts, {args.tokens} tokens, {args.dim} × {args.hidden}, {args.dtype}"
    print(f"{sizes}: grouped / loop, CPU time of forward and backward")
    print(
        f"median {median:.3f} of {args.rounds} rounds (fastest {min(ratios):.3f}, slowest {max(ratios):.3f}); results"
        f" within {worst:.1e}"
    )
    return int(not (median < 1 and worst < (1e-5 if dtype is torch.float32 else 2e-2)))


if __name__ == "__main__":
    sys.exit(main())
