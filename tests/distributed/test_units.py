"""Units of several blocks: forwards that call their blocks in other ways than one after the other, and what stays."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright import ConfigError, Layout, UnsupportedError, parallelize
from meshwright.core.names import clean
from meshwright.distributed.data import fully_sharded
from meshwright.distributed.data.fully_sharded import prefetched, sharded_modules
from meshwright.distributed.mesh import data_position
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import as_module
from meshwright.models.decoder_config import DecoderConfig
from meshwright.planning import data
from meshwright.planning.build import plan
from meshwright.planning.values import Batch
from meshwright.simulation.cards import machines
from meshwright.simulation.from_model import job_of_plan

IDS, DIM, ROWS, SEQ, STEPS = 11, 6, 4, 5, 2
CLOSE = 1e-11
"""Relative, in fp64."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Calls its blocks in order."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(IDS, DIM), nn.Linear(DIM, IDS)
        self.layers = nn.ModuleList(Block() for _ in range(5))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.through(self.embedding(tokens)))

    def through(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x)
        return x


class EachTwice(Stack):
    def through(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(block(x))
        return x


class Looped(Stack):
    def through(self, x: Tensor) -> Tensor:
        return super().through(super().through(x))


class Backwards(Stack):
    def through(self, x: Tensor) -> Tensor:
        for block in reversed(self.layers):
            x = block(x)
        return x


class EveryOutput(Stack):
    def through(self, x: Tensor) -> Tensor:
        outputs = [x]
        for block in self.layers:
            outputs.append(block(outputs[-1]))
        return torch.stack(outputs).sum(dim=0)


class InsideUnits(Stack):
    """No gradient reaches the second block of any unit. (Data ranks keep such blocks outside of units.)"""

    def through(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        second = self.layers[1](first)
        third = self.layers[2](first + second.detach())
        return third + self.layers[3](third).detach() + self.layers[4](third)


class Views(Stack):
    def through(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x).transpose(0, 1).transpose(0, 1)
            x = x.add_(1.0)
        return x


MODELS = {kind.__name__: kind for kind in (Stack, EachTwice, Looped, Backwards, EveryOutput, InsideUnits, Views)}
REQUESTS: dict[str, tuple[dict[str, Any], int]] = {
    "ZeRO-3": ({"zero_stage": 3}, 0),
    "ZeRO-3, rows": ({"zero_stage": 3}, 1),
    "ZeRO-2, rows": ({"zero_stage": 2}, 1),
    "ZeRO-1, rows": ({"zero_stage": 1}, 1),
    "recomputed": ({"zero_stage": 3, "activation_checkpointing": "full"}, 0),
}


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, IDS, (ROWS, SEQ), generator=generator) for _ in range(STEPS)]


def one_process(name: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for tokens in batches():
        loss = F.cross_entropy(model(tokens).flatten(0, 1), (tokens + 1).flatten() % IDS)
        loss.backward()
        optimizer.step()
        model.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


def errors(name: str) -> dict[str, float]:
    """The largest error of a parameter after the steps, by request, with units of two blocks."""
    found, expected = {}, one_process(name)
    for key, (requested, rows) in REQUESTS.items():
        requested = requested | {"blocks_per_unit": 2, "data_parallel": "fully_shard"}
        model = parallelize(
            lambda: MODELS[name]().double(), Layout(dp_shard=-1), techniques=requested, microbatch_rows=rows
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        rank, of = data_position(model.mesh)
        for tokens in batches():
            own = tokens[rank * ROWS // of : (rank + 1) * ROWS // of]
            model.forward_backward({"tokens": own, "labels": (own + 1) % IDS})
            model.optimizer_step(optimizer)
        values = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
        found[key] = max(
            float((value.detach() - expected[n]).norm() / expected[n].norm()) for n, value in values.items()
        )
    return found


@pytest.mark.parametrize("world", [2, 1])
@pytest.mark.parametrize("name", MODELS)
def test_blocks_may_be_called_in_any_way(spmd, name, world):
    for found in spmd(world, errors, name):
        assert max(found.values()) <= CLOSE, found


def errors_of_units_gathered_late() -> str:
    with patch.object(fully_sharded, "_gather_before_backward", lambda *unused: None):
        try:
            return str(errors("InsideUnits"))
        except RuntimeError as error:
            return f"failed: {error}"


@pytest.mark.all
def test_units_that_only_their_last_block_gathers_are_caught(spmd):
    """A gradient that reaches the first block of a unit, and not the last, finds freed parameters."""
    (said,) = spmd(1, errors_of_units_gathered_late)
    assert "failed: " in said


CONFIG = DecoderConfig(257, 24, 8, n_heads=4, n_kv_heads=2, hidden_dim=20, max_seq_len=16)


def shown(most: int) -> tuple[list[str], list[str], str]:
    model = parallelize(CONFIG, Layout(dp_shard=2), techniques={"blocks_per_unit": most})
    (part,) = model.parts
    units = [clean(name) for name, module in part.named_modules() if module in set(sharded_modules(part))]
    return units, [name for name, _ in model.named_parameters()], str(model)


def test_names_and_what_is_printed_do_not_change(spmd):
    (single, names, printed), (several, names_too, printed_too) = spmd(2, shown, 1)[0], spmd(2, shown, 3)[0]
    assert single == ["", *(f"layers.{number}" for number in range(8))]
    assert several == ["", "layers.0", "layers.3", "layers.6"]
    assert names == names_too and printed == printed_too


def test_the_next_unit_is_gathered_while_one_computes():
    forward, backward = prefetched(["layers.0", "layers.3", "layers.6"])
    assert forward == {"layers.0": ["layers.3"], "layers.3": ["layers.6"], "layers.6": []}
    assert backward == {"layers.6": ["layers.3"], "layers.3": ["layers.0"], "layers.0": []}


# --- the choice


def sizes(layout: Layout | None = None, blocks: int = 24, dim: int = 64, **techniques: Any) -> list[int]:
    config = DecoderConfig(257, dim, blocks, n_heads=4, n_kv_heads=2, hidden_dim=3 * dim, max_seq_len=16)
    made = plan(config, layout or Layout(dp_shard=2), techniques=techniques)
    return [len(unit.blocks) for unit in made.units if unit.blocks]


def test_small_blocks_are_joined_up_to_a_quarter_and_large_ones_are_not():
    assert sizes() == sizes(zero_stage=2) == [6, 6, 6, 6]
    assert sizes(blocks=7) == [1] * 7, "two are more than a quarter"
    assert sizes(blocks=16, dim=256) == [2] * 8, "up to 8 MiB"
    assert sizes(blocks=8, dim=512) == [1] * 8
    assert sizes(Layout(dp_shard=1), data_parallel="fully_shard") == [1] * 24, "one rank sends nothing"
    assert sizes(Layout(pp=2, dp_shard=2)) == [6, 6, 6, 6]
    assert sizes(Layout(pp=5, dp_shard=2), blocks=24) == [5, 5, 5, 5, 4], "a unit ends with its stage"


def test_a_unit_ends_where_blocks_are_trained_otherwise():
    assert sizes(blocks=5, blocks_per_unit=2) == [2, 2, 1]
    assert sizes(blocks=5, blocks_per_unit=5) == [5]
    assert sizes(blocks=5, blocks_per_unit=3, freeze=("embedding", r"layers\.[01]\.")) == [2, 3]


@pytest.mark.parametrize("layout", [Layout(dp_shard=4), Layout(dp_shard=2, tp=2), Layout(pp=2, dp_shard=2)], ids=str)
@pytest.mark.parametrize("shape", [(24, 64), (16, 256), (8, 512)], ids=str)
def test_a_forecast_joins_as_many_as_the_plan(layout, shape):
    blocks, dim = shape
    facts = model_facts(as_module(DecoderConfig(257, dim, blocks, 4, 2, 3 * dim, 16)))
    for most in (0, 1, 3):
        made = plan(facts, layout, techniques={"blocks_per_unit": most})
        job = job_of_plan(facts, made, Batch(8, 16), machines("h100", 4, per_node=4))
        assert job.joined(job.architecture.blocks[0]) == max(len(unit.blocks) for unit in made.units)


@pytest.mark.follows("techniques.blocks_per_unit = …")
def test_what_joins_nothing_is_refused():
    layout = Layout(pp=8, dp_shard=2)
    with pytest.raises(
        ConfigError, match=r"no two blocks that follow each other .* Set techniques.blocks_per_unit = 1"
    ):
        plan(CONFIG, layout, techniques={"blocks_per_unit": 2})
    assert all(len(unit.blocks) < 2 for unit in plan(CONFIG, layout, techniques={"blocks_per_unit": 1}).units)


def test_torch_that_treats_the_first_of_several_modules_alone_gathers_them_one_by_one(monkeypatch):
    monkeypatch.setattr(data, "JOINS_BLOCKS", False)
    assert sizes() == [1] * 24
    with pytest.raises(UnsupportedError, match="techniques.blocks_per_unit = 2 needs torch 2.13"):
        sizes(blocks_per_unit=2)


@pytest.mark.parametrize(
    ("techniques", "words"),
    [
        ({}, "2 of 8 blocks each, 25.1 KiB at most: up to 8 MiB and a quarter of the blocks travel in one message"),
        ({"blocks_per_unit": 3}, "3 of 8 blocks each, 37.7 KiB at most: as techniques.blocks_per_unit = 3 says"),
        ({"blocks_per_unit": 1}, "each block, 12.6 KiB at most: as techniques.blocks_per_unit = 1 says"),
    ],
    ids=["chosen", "three", "one"],
)
def test_the_plan_says_how_many_and_why(techniques, words):
    assert f"  units           {words}\n" in str(plan(CONFIG, Layout(dp_shard=2), techniques=techniques))
