"""Which parameters Muon takes follows from the modules that hold them; and matrices are shared out evenly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.states import DENSE, SPARSE
from torch import nn

from meshwright import Layout, plan
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.distributed.optimizer.muon import Muon
from meshwright.distributed.optimizer.parameter_groups import split_by_role
from meshwright.introspection.facts import model_facts
from meshwright.introspection.roles import hidden_matrices
from meshwright.introspection.source import as_module
from meshwright.planning import optimizer_collectives as collectives
from meshwright.planning.optimizer_collectives import HeldBox, Matrix, matrices_of, rounds_of, sent_by, sent_elements


class Odd(nn.Module):
    """A block with a router beside a list of experts, a bias that is looked up, a convolution and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.north = nn.Linear(8, 3, bias=False)
        self.some = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.looked_up = nn.Embedding(4, 8)
        self.along = nn.Conv1d(8, 8, 3)
        self.one = nn.Linear(8, 1)
        self.own = nn.Parameter(torch.ones(8, 8))
        self.low = nn.Linear(8, 2, bias=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Odd() for _ in range(2))
        self.before = nn.Linear(8, 8)
        self.logits = nn.Linear(8, 16)


def test_hidden_matrices_are_weights_of_linear_layers_inside_blocks_without_routers():
    found = hidden_matrices(Model())
    assert found == {f"blocks.{n}.{rest}.weight" for n in range(2) for rest in ("some.0", "some.1", "some.2", "low")}


def test_those_of_our_decoder():
    facts = model_facts(as_module(replace(SPARSE, n_layers=1, moe=replace(SPARSE.moe, n_shared=1))))
    hidden = {p.name.removeprefix("layers.0.").removesuffix(".weight") for p in facts.parameters if p.hidden}
    of_attention = {f"attention.{name}" for name in ("wq", "wk", "wv", "wo")}
    of_experts = {
        f"feed_forward.{where}.{name}" for where in ("experts", "shared") for name in ("w_gate", "w_up", "w_down")
    }
    assert hidden == of_attention | of_experts


@pytest.mark.first
@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"cpu_offload": "optimizer"}, "cpu_offload = optimizer and .*muon.*travel together.*adamw"),
        ({"cpu_offload": True}, "cpu_offload = true and .*muon.*on the host"),
        ({"optimizer_state": "8bit"}, "torchao has low-bit state and stochastic rounding of adamw"),
        ({"freeze": ("layers",)}, "Decoder trains none .3 parameters in 2 blocks.*adamw"),
    ],
    ids=str,
)
def test_what_muon_cannot_is_refused_before_any_process_group(asked, words):
    with pytest.raises((ConfigError, UnsupportedError), match=words):
        plan(DENSE, Layout(dp_shard=2), techniques={"optimizer": "muon", **asked})


def test_groups_are_split_by_role_and_mistakes_are_told():
    matrix, vector = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))
    named = [("m", matrix), ("v", vector)]
    groups = split_by_role([{"params": [matrix, vector], "weight_decay": 0.2}], named, ["m"])
    assert [(group["params"], group["use_muon"], group["weight_decay"]) for group in groups] == [
        ([matrix], True, 0.2),
        ([vector], False, 0.2),
    ]
    with pytest.raises(ConfigError, match="no hidden matrices are named"):
        split_by_role([{"params": [matrix]}], named, [])
    with pytest.raises(ConfigError, match=r"shape \(2, 3\) without a name"):
        split_by_role([{"params": [matrix]}], [], ["m"])
    with pytest.raises(ConfigError, match="has no use_muon"):
        Muon([matrix])
    with pytest.raises(ConfigError, match=r"of shape \(3,\), which is no"):
        Muon([{"params": [vector], "use_muon": True}])
    for wrong in ({"lr": -1.0}, {"momentum": 1.0}, {"ns_steps": 0}):
        with pytest.raises(ConfigError, match=f"Muon: .*{next(iter(wrong))}"):
            Muon([{"params": [matrix], "use_muon": True}], **wrong)


def cut(rows: int, columns: int, ranks: int) -> Matrix:
    share = rows // ranks
    boxes = [[((rank * share, (rank + 1) * share), (0, columns))] for rank in range(ranks)]
    return matrices_of((rows, columns), boxes)[0]


def test_every_matrix_has_one_owner_and_work_is_even():
    matrices = [cut(rows, 64, 4) for rows in (64, 64, 64, 64, 256, 256, 128, 32)]
    rounds = rounds_of(matrices, 4)
    owned = [entry for one in rounds for entry in one.owners]
    assert sorted(number for number, _ in owned) == list(range(8))
    work = [sum(matrices[number].cost for number, owner in owned if owner == rank) for rank in range(4)]
    assert max(work) <= 1.5 * sum(work) / 4
    shuffled = [matrices[place] for place in (3, 7, 0, 5, 1, 6, 2, 4)]
    assert sent_by(shuffled, rounds_of(shuffled, 4), 4) == sent_by(matrices, rounds, 4)


def test_a_matrix_that_a_rank_holds_whole_is_not_sent():
    matrices = matrices_of((4, 8, 8), [[((low, low + 2), (0, 8), (0, 8))] for low in (0, 2)])
    rounds = rounds_of(matrices, 2)
    assert sent_by(matrices, rounds, 2) == [0, 0]
    assert dict(entry for one in rounds for entry in one.owners) == {0: 0, 1: 0, 2: 1, 3: 1}


def test_a_copy_is_brought_by_the_nearest_rank():
    held = HeldBox(((0, 4), (0, 8)), (0, 3, 6))
    assert [held.sender(owner) for owner in (3, 4, 5, 7, 1)] == [3, 3, 6, 6, 0]


def test_rounds_hold_what_fits_and_at_least_one_matrix_of_each_owner(monkeypatch):
    matrices = [cut(64, 64, 2) for _ in range(8)]
    assert [len(one.owners) for one in rounds_of(matrices, 2)] == [8]
    monkeypatch.setattr(collectives, "ROUND_ELEMENTS", 4 * 64 * 64)
    assert [len(one.owners) for one in rounds_of(matrices, 2)] == [4, 4]
    monkeypatch.setattr(collectives, "ROUND_ELEMENTS", 1)
    assert [len(one.owners) for one in rounds_of(matrices, 2)] == [2, 2, 2, 2]


def test_the_bytes_of_replicas_are_those_of_an_all_gather():
    made = plan(DENSE, Layout(dp_replicate=4, dp_shard=1), techniques={"optimizer": "muon"})
    facts = model_facts(as_module(DENSE))
    hidden = sum(p.numel for p in facts.parameters if p.hidden)
    sent, messages = sent_elements(made, facts.parameters)
    assert messages == 1 and sum(sent) == 3 * hidden
