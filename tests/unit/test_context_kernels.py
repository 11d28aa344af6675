"""Kernels of attention: which one computes it, and that its wrapper gives what blocks of plain torch do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.mixing import Model, causal
from torch import Tensor

from meshwright import Layout, plan
from meshwright.core import torch_private
from meshwright.core.torch_private import fake_mode
from meshwright.distributed.context import kernels as kernels
from meshwright.distributed.context.kernels import FUSED, Fused, KeysAtHand, Scores, attention, fused_kernel
from meshwright.introspection.cluster import Cluster
from meshwright.introspection.mixing.arithmetic import Arithmetic
from meshwright.introspection.mixing.masks import causal as causal_places
from meshwright.introspection.mixing.masks import search
from meshwright.introspection.mixing.values import Sizes
from meshwright.planning.context.kernels import (
    BLOCKS,
    CPU_FLASH,
    CUDA_EFFICIENT,
    CUDA_FLASH,
    KERNELS,
    Need,
    choose_kernel,
)

PLAIN = Need("cpu", "float32", 64, 64)
CUDA = Need("cuda", "bfloat16", 128, 128)


@pytest.mark.parametrize(
    ("need", "kernel", "reason"),
    [
        (PLAIN, CPU_FLASH, "for runs of causal or full queries, blocks for others"),
        (replace(PLAIN, dtype="float64"), CPU_FLASH, "for runs"),
        (replace(PLAIN, value_features=32), BLOCKS, "cpu flash takes keys and values of equal heads, not 64 and 32"),
        (replace(PLAIN, has_cap=True), BLOCKS, "cpu flash has no soft cap"),
        (replace(PLAIN, has_sinks=True), BLOCKS, "cpu flash gives logarithms no gradient, which sinks need"),
        (CUDA, CUDA_FLASH, "for runs"),
        (replace(CUDA, dtype="float32"), CUDA_EFFICIENT, "cuda flash takes bfloat16, float16, not float32"),
        (replace(CUDA, dtype="float64"), BLOCKS, "cuda efficient takes bfloat16, float16, float32, not float64"),
        (replace(CUDA, key_features=512, value_features=512), CUDA_EFFICIENT, "heads of at most 256 features, not 512"),
        (replace(CUDA, key_features=192), CUDA_EFFICIENT, "equal heads, not 192 and 128 features"),
        (replace(CUDA, key_features=36, value_features=36), BLOCKS, "a multiple of 8 features, not 36"),
        (replace(CUDA, has_cap=True), BLOCKS, "cuda efficient has no soft cap"),
        (replace(PLAIN, device="mps"), BLOCKS, "none is fused on mps"),
    ],
)
def test_a_kernel_is_chosen_by_device_dtype_and_scores(need, kernel, reason):
    chosen, why = choose_kernel(need)
    assert chosen is kernel and reason in why


def test_blocks_take_everything_and_each_other_kernel_is_run():
    assert KERNELS[-1] is BLOCKS and set(FUSED) == {kernel.name for kernel in KERNELS[:-1]}
    odd = Need("anything", "bfloat16", 7, 5, has_cap=True, has_sinks=True)
    assert not list(BLOCKS.obstacles(odd))
    assert Need.of("cpu", "float32", Sizes(4, 2, 8, 6), Arithmetic("cap", "")) == Need("cpu", "float32", 8, 6, True)


def tensors(dtype: torch.dtype, heads: int = 4, key_heads: int = 2, length: int = 40) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, length, 8), (2, key_heads, length, 8), (2, key_heads, length, 8))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def attended(given: list[Tensor]) -> tuple[Tensor, ...]:
    """Output, logarithms and gradients of causal attention."""
    reach = search(causal_places, given[0].shape[2], 1)
    assert reach is not None
    output, logarithm = attention(*given, KeysAtHand(reach), Scores(0.3))
    (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)).sum().backward()
    return output.detach(), logarithm.detach(), *(x.grad for x in given if x.grad is not None)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("widens", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_fused_kernel_gives_what_blocks_do(monkeypatch, dtype, widens, key_heads):
    """A kernel that is given narrow tensors, as those of CUDA are, is the CPU's here: it takes them too."""
    calls = []

    def noted(*args, **options):
        calls.append(args[0].dtype)
        return torch_private.flash_attention(*args, **options)

    fused = Fused(replace(CPU_FLASH, widens=widens), noted, torch_private.flash_attention_backward)
    monkeypatch.setattr("meshwright.distributed.context.kernels.fused_kernel", lambda *given, **more: fused)
    found = attended(tensors(dtype, key_heads=key_heads))
    monkeypatch.setattr("meshwright.distributed.context.kernels.fused_kernel", lambda *given, **more: None)
    expected = attended(tensors(torch.float64, key_heads=key_heads))
    bound = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert calls == [torch.float32 if widens and dtype is torch.bfloat16 else dtype]
    for mine, exact in zip(found, expected, strict=True):
        assert float((mine.double() - exact).norm() / exact.norm()) < bound


def test_narrow_parts_are_merged_in_fp32(monkeypatch):
    narrow = Fused(
        replace(CPU_FLASH, widens=False), torch_private.flash_attention, torch_private.flash_attention_backward
    )
    monkeypatch.setattr("meshwright.distributed.context.kernels.fused_kernel", lambda *given, **more: narrow)
    from meshwright.distributed.context.kernels import Attended

    q, k, v = (x.detach() for x in tensors(torch.bfloat16))
    reach = search(causal_places, 40, 1)
    assert reach is not None
    found = Attended()
    for part in (slice(0, 24), slice(24, 40)):
        found.add(q, k[:, :, part], v[:, :, part], reach.among(torch.arange(40)[None, part]), Scores(0.3))
    output, logarithm = found.finish()
    assert output.dtype is logarithm.dtype is torch.float32
    exact = attended(tensors(torch.float64))[0]
    assert float((output.double() - exact).norm() / exact.norm()) < 2e-2


@pytest.mark.parametrize(("name", "dtype"), [("cuda flash", torch.bfloat16), ("cuda efficient", torch.float32)])
def test_kernels_of_cuda_have_the_shapes_that_are_expected_of_them(name, dtype):
    """Their numbers need a GPU (tests/gpu); shapes and dtypes are those of torch's fake tensors."""
    with fake_mode():
        query = torch.empty(2, 4, 40, 64, dtype=dtype, device="cuda")
        key, value = (torch.empty(2, 4, 72, 64, dtype=dtype, device="cuda") for _ in range(2))
        options = {"is_causal": False, "scale": 0.1}
        output, logarithm = FUSED[name].forward(query, key, value, **options)
        assert output.shape == query.shape and output.dtype is dtype
        assert logarithm.shape == (2, 4, 40) and logarithm.dtype is torch.float32
        found = FUSED[name].backward(torch.empty_like(output), query, key, value, output, logarithm, **options)
    assert [x.shape for x in found] == [x.shape for x in (query, key, value)]
    assert {x.dtype for x in found} == {dtype}


def test_the_fused_kernel_is_that_of_the_tensors():
    q, _, v = tensors(torch.float32)
    assert fused_kernel(q, v, has_cap=False, has_sinks=False) is FUSED["cpu flash"]
    assert fused_kernel(q, v, has_cap=True, has_sinks=False) is None
    assert fused_kernel(q, v[..., :4], has_cap=False, has_sinks=False) is None
    assert kernels.wide(q.bfloat16()).dtype is torch.float32


def test_the_plan_says_kernel_and_reason():
    text = str(plan(Model(causal), Layout(dp_shard=1, cp=2)))
    assert "by cpu flash, for runs of causal or full queries, blocks for others" in text
    on_cuda = plan(Model(causal), Layout(dp_shard=1, cp=2), cluster=Cluster(2, 2, "cuda"))
    assert "by cuda flash, for runs of causal or full queries, blocks for others" in str(on_cuda)
