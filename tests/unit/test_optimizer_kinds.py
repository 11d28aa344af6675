"""An optimizer is a row: planning, memory, groups, config, train and verify read the row, and refuse what the row
cannot do.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from meshwright import Layout, plan
from meshwright.core.errors import ConfigError
from meshwright.distributed.optimizer.muon import optimizer_class
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import as_module
from meshwright.models.decoder_config import SIZES, DecoderConfig
from meshwright.planning.memory import plan_memory
from meshwright.planning.optimizer import KINDS, OptimizerPlan, kind_of
from meshwright.training.config import Config
from meshwright.training.optimizer import make_optimizer
from meshwright.verification.verify import verify

MODEL = DecoderConfig(256, 64, 2, 4, 2, 128, 64)


def optimizer_of(word: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer to which the first parameter is a hidden matrix."""
    plan = OptimizerPlan(kind=word, matrices=("0",) if kind_of(word).by_role else ())
    named = [(str(number), parameter) for number, parameter in enumerate(parameters)]
    return make_optimizer([{"params": parameters}], lr=0.01, plan=plan, named_parameters=named).optimizer


def stepped(word: str) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.randn(*shape)) for shape in ((12, 8), (3, 4, 5), (7,))]
    optimizer = optimizer_of(word, parameters)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer, parameters


@pytest.mark.parametrize("word", KINDS)
def test_a_row_says_what_its_class_is_and_keeps(word):
    row = kind_of(word)
    takes = inspect.signature(optimizer_class(row)).parameters
    assert {argument for argument, _ in row.arguments} | {argument for argument, _ in row.verified_with} <= set(takes)
    assert set(row.kernels) <= set(takes)
    optimizer, parameters = stepped(word)
    assert type(optimizer) is optimizer_class(row)
    for number, parameter in enumerate(parameters):
        hidden, shape = number == 0, tuple(parameter.shape)
        state = {key: value for key, value in optimizer.state[parameter].items() if value.dim()}
        assert sum(value.numel() for value in state.values()) == row.state_elements(shape, hidden=hidden)
        assert set(state) == {tensor.name for tensor in row.state if tensor.elements(shape, hidden=hidden)}
        assert all((state[t.name] >= 0).all() for t in row.state if t.name in state and not t.signed)


@pytest.mark.parametrize("word", KINDS)
def test_the_update_of_an_element_depends_on_others_where_the_row_says_so(word):
    whole, half = (nn.Parameter(torch.arange(1.0, 9.0).view(4, 2)[:rows].clone()) for rows in (4, 2))
    for parameter in (whole, half):
        optimizer = optimizer_of(word, [parameter])
        parameter.grad = torch.tensor([[1.0, -2.0], [3.0, 0.5], [9.0, 7.0], [-8.0, 0.1]])[: len(parameter)].clone()
        optimizer.step()
    assert (kind_of(word).sums_parts or kind_of(word).by_role) != torch.equal(whole[:2], half)


@pytest.mark.first
@pytest.mark.parametrize("word", KINDS)
def test_memory_is_that_of_the_row(word):
    facts = model_facts(as_module(MODEL))
    made = plan(MODEL, Layout(dp_replicate=2, dp_shard=1), techniques={"optimizer": word})
    assert plan_memory(made).optimizer == 4 * sum(
        kind_of(word).state_elements(p.shape, hidden=p.hidden) for p in facts.parameters
    )
    assert made.optimizer.row.title in str(made) and type(made).from_json(made.to_json()) == made


def test_words_that_are_no_row_are_refused_at_every_door():
    legal = "adamw, adam, lion, schedule_free_adamw, muon, sgd, adafactor"
    words = rf"optimizer 'adamW': legal are {legal}\. Did you mean 'adamw'\?"
    with pytest.raises(ConfigError, match=words):
        plan(MODEL, Layout(dp_shard=1), techniques={"optimizer": "adamW"})
    with pytest.raises(ConfigError, match=words):
        Config.from_dict({"optimizer": {"kind": "adamW"}})
    with pytest.raises(ConfigError, match=words):
        verify(SIZES["debug"], Layout(dp_shard=1), techniques={"optimizer": "adamW"})


def test_values_that_an_optimizer_does_not_read_are_refused():
    with pytest.raises(
        ConfigError, match=r"optimizer.beta2 = 0.5 and optimizer.kind = sgd, .* takes lr, beta1, weight_decay"
    ):
        Config.from_dict({"optimizer": {"kind": "sgd", "beta2": 0.5}})
    Config.from_dict({"optimizer": {"kind": "sgd", "beta1": 0.5}})
    with pytest.raises(ConfigError, match="Adafactor takes no 'betas' here; known are lr, weight_decay"):
        make_optimizer(
            [{"params": [nn.Parameter(torch.ones(2))]}], lr=0.1, plan=OptimizerPlan(kind="adafactor"), betas=(0.9, 0.9)
        )


@pytest.mark.first
@pytest.mark.parametrize(
    "asked", [{"optimizer_state": "8bit"}, {"stochastic_rounding": True, "precision": {"master": "bfloat16"}}], ids=str
)
def test_low_bit_state_is_that_of_adamw(asked):
    with pytest.raises(
        ConfigError, match="the optimizer sgd: torchao has low-bit state and stochastic rounding of adamw"
    ):
        plan(MODEL, Layout(dp_shard=1), techniques={"optimizer": "sgd", **asked})
