"""What is said of the optimizer's state reaches every door, or is refused there in words."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from meshwright import Layout, Techniques, plan
from meshwright.core.errors import MissingExtraError, UnsupportedError
from meshwright.distributed.optimizer.low_bit import TorchaoAdamW, refuse_absent
from meshwright.models.decoder_config import SIZES
from meshwright.planning.optimizer import OptimizerPlan
from meshwright.training.build import build_optimizer, refuse_early
from meshwright.training.config import Config
from meshwright.verification.verify import verify

WISHES = [
    ({"optimizer_state": "4bit"}, "techniques.optimizer_state = 4bit"),
    ({"stochastic_rounding": True, "precision": {"master": "bf16"}}, "techniques.stochastic_rounding = true"),
]


@pytest.mark.parametrize(("techniques", "asked"), WISHES)
def test_without_torchao_its_extra_is_named(monkeypatch, techniques, asked):
    made = plan(SIZES["debug"], Layout(dp_shard=1), techniques=techniques).optimizer
    refuse_absent(made)
    for name in [name for name in sys.modules if name == "torchao" or name.startswith("torchao.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    refuse_absent(OptimizerPlan(in_host_memory=True))
    with pytest.raises(
        MissingExtraError, match=re.escape(asked) + r" needs the package 'torchao'.*pip install .*torchao"
    ):
        refuse_absent(made)


@pytest.mark.parametrize(("techniques", "asked"), WISHES)
def test_what_rounds_further_is_neither_verified_nor_traced(techniques, asked):
    with pytest.raises(UnsupportedError, match=f"{asked} rounds further than a trace \\(check_trace\\) allows"):
        refuse_early(Config.from_dict({"check_trace": "some.trace", "techniques": techniques}))
    with pytest.raises(UnsupportedError, match=f"{asked}: verify compares steps in full precision"):
        verify(SIZES["debug"], Layout(dp_shard=1), techniques=techniques)


@pytest.mark.parametrize(("techniques", "asked"), WISHES)
def test_a_run_builds_what_its_config_says(techniques, asked):
    config = Config.from_dict(
        {"techniques": techniques, "seed": 7, "optimizer": {"overrides": [{"pattern": "bias", "lr_scale": 0.5}]}}
    )
    layer = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    made = plan(SIZES["debug"], Layout(dp_shard=1), techniques=config.techniques).optimizer
    built = build_optimizer(config, layer.named_parameters(), made)
    assert isinstance(built.optimizer, TorchaoAdamW) and built.implementation == "torchao"
    assert (built.optimizer.state_word, built.optimizer.stochastic) == (
        config.techniques.optimizer_state,
        config.techniques.stochastic_rounding,
    )
    assert built.optimizer.seed == 7 and [group["lr"] for group in built.optimizer.param_groups] == [3e-3, 1.5e-3]
    assert ("moments in 4bit" in built.note) == ("4bit" in asked) and ("stochastic rounding" in built.note) != (
        "4bit" in asked
    )


def test_only_cpu_offload_true_needs_sharded_parameters():
    of = {
        asked: plan(SIZES["debug"], Layout(dp_shard=1), techniques=Techniques(cpu_offload=asked))
        for asked in (False, True, "optimizer")
    }
    assert [made.data.technique for made in of.values()] == ["none", "fully_shard", "none"]
    assert [made.data.cpu_offload for made in of.values()] == [False, True, False]
    assert [made.optimizer.in_host_memory for made in of.values()] == [False, False, True]
