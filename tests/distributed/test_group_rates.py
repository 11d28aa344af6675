"""Rates and decays of parameters that patterns name: of every optimizer, on every layout, those of one process."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from support.laid_out import own_rows
from support.muon import problem_of
from support.oracle import Named, oracle, relative_errors
from support.problems import SEED
from support.states import DEEP, LAYOUTS, uncompiled
from torch import nn

from meshwright import Layout, parallelize
from meshwright.core.errors import ConfigError
from meshwright.distributed.optimizer.parameter_groups import refuse_unused, trained_names
from meshwright.distributed.weights.shards import whole_on_first
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import as_module
from meshwright.planning.build import plan as make_plan
from meshwright.planning.optimizer import KINDS, OptimizerPlan
from meshwright.training.build import build_optimizer
from meshwright.training.config import Config
from meshwright.training.optimizer import make_optimizer

STEPS, LR = 2, 0.01
OVERRIDES = (
    {"pattern": r"^embedding", "lr_scale": 0.1, "weight_decay": 0.3},
    {"pattern": "norm", "lr_scale": 0.5},
    {"pattern": r"layers\.3\.", "lr_scale": 2.0},
)
"""The first and the third name parameters of one pipeline stage each."""
WHOLE = {"precision": dict.fromkeys(("master", "compute", "reduce"), "float64")}
PLACES = {"one": (1, Layout(dp_shard=1)), **{place: LAYOUTS[place][:2] for place in ("FSDP2 + TP", "PP + FSDP2")}}


def config_of(word: str) -> Config:
    schedule = {"kind": "constant"}
    return Config.from_dict({"schedule": schedule, "optimizer": {"kind": word, "lr": LR, "overrides": OVERRIDES}})


def _trained(word: str, place: str) -> Named:
    """Parameters behind steps of the optimizer that ``train`` builds."""
    model = parallelize(DEEP, PLACES[place][1], techniques={"optimizer": word, **WHOLE}, seed=SEED)
    names = [fact.name for fact in model.facts.parameters]
    optimizer = build_optimizer(config_of(word), model.named_parameters(), model.plan.optimizer, names).optimizer
    for batch in problem_of(DEEP, STEPS).data.steps(STEPS):
        model.forward_backward(own_rows(model, batch))
        model.optimizer_step(optimizer, 0.3)
    named = {name: p.detach() for name, p in model.named_parameters()}
    return whole_on_first(named, differ=model.plan.pipeline is not None)


def adamw_by_hand(model: nn.Module) -> torch.optim.Optimizer:
    """A group for each parameter, whose options are written out."""
    groups = []
    for name, p in model.named_parameters():
        scale = 0.1 if name.startswith("embedding") else 0.5 if "norm" in name else 2.0 if "layers.3." in name else 1.0
        decay = 0.3 if name.startswith("embedding") else 0.1 if p.dim() > 1 else 0.0
        groups.append({"params": [p], "lr": LR * scale, "weight_decay": decay})
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)


@cache
def by_hand() -> Named:
    return oracle(problem_of(DEEP, STEPS), make=adamw_by_hand).parameters


@pytest.mark.parametrize("place", PLACES)
def test_groups_of_adamw_are_those_that_are_written_out(spmd, place):
    found = spmd(PLACES[place][0], _trained, "adamw", place)[0]
    errors = relative_errors(found, by_hand())
    assert max(errors.values()) <= 1e-10, errors


@pytest.mark.all
@pytest.mark.parametrize("place", [place for place in PLACES if place != "one"])
@pytest.mark.parametrize("word", [word for word in KINDS if word != "adamw"])
def test_every_optimizer_has_the_groups_of_one_process(spmd, word, place):
    (one,), found = spmd(1, _trained, word, "one"), spmd(PLACES[place][0], _trained, word, place)[0]
    errors = relative_errors(found, one)
    assert max(errors.values()) <= 1e-10, errors


LOW_BIT = {f"adamw, {state}": OptimizerPlan(state) for state in ("8bit", "4bit")}
PLANS = {**{word: OptimizerPlan(kind=word, matrices=("0", "1")) for word in KINDS}, **LOW_BIT}


@pytest.mark.parametrize("name", PLANS)
def test_a_scale_is_that_of_the_rate(name):
    """A step at a scaled rate is one at that rate; and another parameter's step is as without."""

    def stepped(scales: list[float], lr: float) -> list[torch.Tensor]:
        plan, start = PLANS[name], torch.linspace(-1, 2, 64 * 64).view(64, 64)
        parameters = [nn.Parameter(start.clone()) for _ in scales]
        groups: list[dict[str, Any]] = [
            {"params": [p], "lr_scale": scale, "weight_decay": 0.1} for p, scale in zip(parameters, scales, strict=True)
        ]
        named = [(str(number), p) for number, p in enumerate(parameters)]
        optimizer = make_optimizer(groups, lr=lr, plan=plan, named_parameters=named).optimizer
        for p in parameters:
            p.grad = torch.cos(3 * start)
        with uncompiled() if plan.needs_torchao else nullcontext():
            optimizer.step()
        return [p.detach() for p in parameters]

    scaled, plain = stepped([0.25, 1.0], 0.02)
    torch.testing.assert_close(scaled, stepped([1.0], 0.005)[0], rtol=1e-6, atol=1e-7)
    assert torch.equal(plain, stepped([1.0], 0.02)[0]) and (scaled - plain).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["embeding"], r"'embeding' matches no trainable parameter\. Did you mean 'embedding.weight'\?"),
        (["norm", "layers.0.attention_norm"], "attention_norm' matches no trainable parameter that an earlier"),
    ],
    ids=str,
)
def test_patterns_without_a_parameter_are_refused_on_every_stage(patterns, words):
    facts = model_facts(as_module(DEEP))
    made = make_plan(DEEP, Layout(pp=2, dp_shard=1))

    with pytest.raises(ConfigError, match=words):
        refuse_unused(patterns, trained_names(facts, made))
