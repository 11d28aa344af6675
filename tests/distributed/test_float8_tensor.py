"""One scale for an operand in float8 of which every tensor rank has a part: as in one process, and nothing travels
that was not planned.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.adapters import adapted
from support.laid_out import own_rows
from test_float8 import BATCHES, TENSOR, WIDE, verified
from test_tensor_parallel import SHARDED, TP2, Way, assert_all_estimated, family, one_warm_step
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.distributed import products as agreed
from meshwright.distributed.parallelize import parallelize
from meshwright.planning.layout import Layout
from meshwright.verification import verify as verifying
from meshwright.verification.outcome import candidate

pytestmark = pytest.mark.skipif(
    find_spec("torchao") is None, reason="float8 is torchao's: pip install 'meshwright[float8]'"
)

ONE_SCALE = {"float8": "tensorwise"}
DEEP = replace(WIDE, n_layers=4)
EXACT_WAYS: dict[str, tuple[Any, Layout, dict[str, Any], int]] = {
    "cut sequences": (WIDE, TENSOR, {}, 0),
    "whole sequences": (WIDE, TENSOR, {"sequence_parallel": False}, 0),
    "gathered tensors kept": (WIDE, TENSOR, {"regather": False}, 0),
    "recomputed": (WIDE, TENSOR, {"activation_checkpointing": "full"}, 0),
    "collectives kept": (
        WIDE,
        TENSOR,
        {"activation_checkpointing": "selective_op", "checkpoint_keep": ["collectives"]},
        0,
    ),
    "compiled": (WIDE, TENSOR, {"compile": True, "compile_backend": "aot_eager"}, 0),
    "split backward": (DEEP, Layout(pp=2, dp_shard=1, tp=2), {"pipeline_schedule": "zbv_zero_bubble"}, 8),
}


@pytest.mark.all
@pytest.mark.parametrize("name", EXACT_WAYS)
def test_parts_are_rounded_as_the_whole_is_in_one_process(pool, name):
    """What differs are sums in another order, and a few roundings that those tip over: far less than rounding to
    float8 does.
    """
    model, layout, techniques, rows = EXACT_WAYS[name]
    report = verified(pool, model, layout, ONE_SCALE | techniques, rows=rows)
    assert report, str(report)
    assert max(d.error for d in report.comparisons[0].of("gradient")) < 5e-3


def keep_to_oneself(operands: Any, group: Any) -> list[Any]:
    """The mutant: each rank takes the largest of its own part."""
    return [None if operand is None else operand.abs().max().float() for operand in operands]


def disagree(problem: Any, layout: Layout, parallelize_fn: Any) -> Any:
    with patch.object(agreed, "_agreed", keep_to_oneself):
        return candidate(problem, layout, parallelize_fn)


@pytest.mark.all
def test_without_agreement_parts_are_rounded_otherwise(pool, monkeypatch):
    monkeypatch.setattr(verifying, "candidate", disagree)
    report = verified(pool, WIDE, TENSOR, ONE_SCALE)
    assert max(d.error for d in report.comparisons[0].of("gradient")) > 2e-2


class Scales(TorchDispatchMode):
    """Of the operands of all products in float8, by role and product, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[float]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        from torchao.float8.float8_training_tensor import Float8TrainingTensor

        if func is torch.ops.aten.mm.default and all(isinstance(operand, Float8TrainingTensor) for operand in args):
            roles = [operand._gemm_input_role.name for operand in args]
            for role, operand in zip(roles, args, strict=True):
                self.seen[f"{role} of {' @ '.join(roles)}"].append(operand._scale.item())
        return func(*args, **(kwargs or {}))


def scales(layout: Layout, techniques: dict[str, Any], agrees: bool = True) -> dict[str, list[float]]:
    model = parallelize(WIDE, layout, techniques=ONE_SCALE | techniques, seed=3)
    with Scales() as observed, patch.object(agreed, "_agreed", agreed._agreed if agrees else keep_to_oneself):
        model.forward_backward(own_rows(model, dict(BATCHES(0))))
    return {what: sorted(found) for what, found in observed.seen.items()}


@pytest.mark.all
@pytest.mark.parametrize("techniques", [{}, {"sequence_parallel": False}], ids=["cut sequences", "whole sequences"])
def test_the_scales_are_those_of_one_process(spmd, techniques):
    """Of weights bit by bit; of activations and gradients up to what sums in another order tip over."""
    whole = spmd(1, scales, Layout(dp_shard=1), {})[0]
    for found in spmd(2, scales, TENSOR, techniques):
        assert found.keys() == whole.keys()
        for what, expected in whole.items():
            near = 0.0 if what.startswith("WEIGHT") else 1e-2
            assert found[what] == pytest.approx(expected, rel=near, abs=0), what
    ranks = spmd(2, scales, TENSOR, techniques, False)
    for what in (what for what in whole if what.startswith("WEIGHT")):
        assert ranks[0][what] != ranks[1][what] != whole[what]


# --- what travels


def wide(name: str, **changes: Any) -> nn.Module:
    """Parts on two ranks divide by 16."""
    return family(name, **({"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "use_cache": False} | changes))


gpt_neox = partial(wide, "gpt_neox")
phi = partial(wide, "phi", head_dim=None)
latent = partial(wide, "deepseek_v3", first_k_dense_replace=2, head_dim=None, kv_lora_rank=48)
shared_experts = partial(wide, "qwen2_moe", head_dim=None)
llama = partial(adapted, "llama", r=16, model_hidden_size=64, model_head_dim=16, model_intermediate_size=96)


class Mixed(nn.Module):
    """What a module gives, through one linear layer of all features more, or through one of a list."""

    def __init__(self, inner: nn.Module, in_list: bool):
        super().__init__()
        self.inner = inner
        made = nn.Linear(64, 64, bias=False)
        self.mix = nn.ModuleList([made]) if in_list else made

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        mix = self.mix[0] if isinstance(self.mix, nn.ModuleList) else self.mix
        made = self.inner(*args, **kwargs)
        return made + mix(made)


def mixing(in_list: bool = False) -> nn.Module:
    """Its whole layers see this rank's tokens only."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = wide("llama")
        made.model.layers = nn.ModuleList(Mixed(layer, in_list) for layer in made.model.layers)
    return made


mixing_in_lists = partial(mixing, True)


FROZEN = ["embedding", r"layers\.0", r"w_up", "norm"]
COUNTED: dict[str, tuple[Any, Way]] = {
    "cut sequences": (WIDE, Way(TP2)),
    "sharded, microbatches": (WIDE, Way(SHARDED, rows=1)),
    "whole sequences, synced": (WIDE, Way(SHARDED, (("sequence_parallel", False), ("sync_grad_accum", True)), 1)),
    "recomputed": (WIDE, Way(TP2, (("activation_checkpointing", "full"),), 2)),
    "attention recomputed": (WIDE, Way(TP2, (("activation_checkpointing", "selective"),))),
    "frozen": (WIDE, Way(TP2, (("freeze", FROZEN),))),
    "filtered": (WIDE, Way(TP2, (("float8_filter", ["wq", "w_down", r"layers\.1\.attention"]),))),
    "each row": (WIDE, Way(TP2, (("float8", "rowwise"),))),
    "experts": (shared_experts, Way(TP2)),
    "branches behind two norms": (gpt_neox, Way(TP2)),
    "branches behind one norm, recomputed": (phi, Way(TP2, (("activation_checkpointing", "full"),))),
    "latent": (latent, Way(TP2)),
    "latent, whole sequences, frozen": (
        latent,
        Way(TP2, (("sequence_parallel", False), ("freeze", [r"embed_tokens", "q_b_proj"]))),
    ),
    "whole layers between": (mixing, Way(TP2)),
    "whole layers between, recomputed": (
        mixing,
        Way(TP2, (("activation_checkpointing", "full"), ("freeze", [r"embed_tokens", r"layers\.0\."]))),
    ),
    "whole layers between, in lists": (mixing_in_lists, Way(TP2)),
    "adapters": (llama, Way(TP2)),
    "adapters, recomputed": (llama, Way(TP2, (("activation_checkpointing", "full"), ("sequence_parallel", False)))),
}


@pytest.mark.first("frozen")
@pytest.mark.parametrize("name", COUNTED)
def test_the_plan_estimates_every_message(spmd, name):
    source, way = COUNTED[name]
    way = replace(way, techniques=(*ONE_SCALE.items(), *way.techniques))
    if callable(source):
        source = partial(source)
    ranks = spmd(way.layout.world, one_warm_step, source, way, 61)
    assert_all_estimated(ranks, way.layout.tp)


@pytest.mark.all
def test_whole_layers_between_cost_no_more_than_float8_does(pool):
    batches = replace(BATCHES, keys=())
    report = verifying.verify(mixing, TENSOR, batches, techniques=ONE_SCALE, steps=1, dtypes=("float32",), pool=pool)
    assert report, str(report)


class Chosen(nn.Module):
    """Beside what a module gives, a linear layer that the first tensor rank alone calls, as it may be with experts."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.only = inner, nn.Linear(64, 64, bias=False)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = self.inner(*args, **kwargs)
        if dist.is_initialized() and dist.get_rank() == 0:
            self.only(input=made.detach())
        return made


def called_by_one(technique: str) -> float:
    with torch.device("cpu"):
        torch.manual_seed(0)
        made = wide("llama")
        made.model.layers = nn.ModuleList(map(Chosen, made.model.layers))
    laid = parallelize(made, TENSOR, techniques={"float8": technique})
    return float(laid.evaluate(dict(replace(BATCHES, keys=())(0))))


@pytest.mark.all
def test_a_layer_that_some_ranks_do_not_call_keeps_nobody_waiting(spmd):
    one, other = spmd(2, called_by_one, "tensorwise", timeout=60)
    assert one == other
