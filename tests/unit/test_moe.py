"""Mixtures of experts in plain torch: routers by their definitions, stacked experts by a loop of experts.

What is found, and refused.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support import families

from meshwright import ConfigError, Layout, Plan, UnsupportedError, plan
from meshwright.distributed.data.fully_sharded import prefetched
from meshwright.distributed.experts import ExpertLoad, LayerLoad
from meshwright.distributed.optimizer.parameter_groups import make_parameter_groups
from meshwright.distributed.weights.constructed import materialise
from meshwright.introspection.facts import model_facts
from meshwright.introspection.source import CausalLM, as_module
from meshwright.introspection.structure import experts as stacks
from meshwright.introspection.structure.experts import RouterLoss
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig, MoEConfig, idle_parameters, parameter_count
from meshwright.models.layers import Experts, MixtureOfExperts, Router, grouped_product, is_grouped, product_by_expert
from meshwright.planning.techniques import Techniques
from meshwright.training.views.telling import figures_of_experts

DIM, EXPERTS = 16, 8
CONFIG = DecoderConfig(64, DIM, 3, n_heads=4, n_kv_heads=2, hidden_dim=24, max_seq_len=16)
SOFTMAX = MoEConfig(n_experts=EXPERTS, top_k=2)
SIGMOID = MoEConfig(
    n_experts=EXPERTS, top_k=3, router="sigmoid", n_groups=4, top_groups=2, scale=2.5, n_shared=1, first_dense=1
)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stack_of(dtype: torch.dtype = torch.float32, hidden: int = 24) -> Experts:
    made = Experts(DIM, hidden, EXPERTS).to(dtype)
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.copy_(drawn(*parameter.shape, dtype=dtype, seed=number) / 4)
    return made


def router_of(config: MoEConfig) -> Router:
    made = Router(DIM, config)
    with torch.no_grad():
        made.weight.copy_(drawn(*made.weight.shape, seed=7))
    return made


def by_a_loop(experts: Experts, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What a token's experts give, one token at a time."""
    rows = []
    for token in range(len(x)):
        row = torch.zeros_like(x[token])
        for number, weight in zip(index[token].tolist(), weights[token], strict=True):
            if number < experts.n_experts:
                gate, up = experts.w_gate[number] @ x[token], experts.w_up[number] @ x[token]
                row = row + weight * (experts.w_down[number] @ (F.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


ROUTINGS = st.lists(st.lists(st.integers(0, EXPERTS), min_size=2, max_size=2), min_size=1, max_size=12)
"""Experts of each token; EXPERTS stands for nowhere."""


@pytest.mark.all
@settings(max_examples=60)
@given(ROUTINGS)
def test_stacked_experts_give_what_a_loop_gives_and_the_same_gradients(routing):
    index = torch.tensor(routing)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        experts = stack_of(dtype)
        x = drawn(len(index), DIM, dtype=dtype).requires_grad_()
        weights = drawn(*index.shape, dtype=dtype, seed=3).requires_grad_()
        inputs = [x, weights, *experts.parameters()]
        pushed = drawn(len(index), DIM, dtype=dtype, seed=4)
        found = experts(x, index, weights)
        wanted = by_a_loop(experts, x, index, weights)
        assert torch.allclose(found, wanted, atol=bound)
        gradients = torch.autograd.grad(found, inputs, pushed)
        if wanted.requires_grad:
            for one, other in zip(
                gradients, torch.autograd.grad(wanted, inputs, pushed, allow_unused=True), strict=True
            ):
                assert torch.allclose(one, torch.zeros_like(one) if other is None else other, atol=10 * bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3] * EXPERTS, [24] + [0] * 7, [0] * 7 + [24], [0, 5, 0, 19, 0, 0, 0, 0]], ids=str)
def test_the_grouped_product_is_that_of_expert_by_expert(dtype, counts):
    ends = torch.tensor(counts).cumsum(0)
    x, weight = (
        drawn(24, DIM, dtype=dtype).requires_grad_(),
        drawn(EXPERTS, 24, DIM, dtype=dtype, seed=1).requires_grad_(),
    )
    assert is_grouped(x, weight)
    pushed = drawn(24, 24, dtype=dtype, seed=2)
    one, other = grouped_product(x, weight, ends), product_by_expert(x, weight, ends)
    results = [(one, other), *zip(*(torch.autograd.grad(y, [x, weight], pushed) for y in (one, other)), strict=True)]
    for a, b in results:
        assert torch.allclose(a.double(), b.double(), rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-4)


def test_what_torch_groups_not_is_known():
    assert not is_grouped(drawn(4, DIM, dtype=torch.float64), drawn(2, 8, DIM, dtype=torch.float64))
    assert not is_grouped(drawn(4, 6), drawn(2, 8, 6)), "rows of 24 bytes"
    assert not is_grouped(drawn(0, DIM), drawn(2, 8, DIM))


def test_units_are_gathered_in_the_order_in_which_they_are_needed():
    """A backward comes to a block before it comes to what is inside, and a recomputed forward needs no other block."""
    units = ["layers.0", "layers.1", "layers.1.a", "layers.1.b", "layers.10", "layers.10.a", "head"]
    forward, backward = prefetched(units)
    assert forward == {
        "layers.0": ["layers.1"],
        "layers.1": ["layers.1.a", "layers.10"],
        "layers.1.a": ["layers.1.b"],
        "layers.1.b": [],
        "layers.10": ["layers.10.a", "head"],
        "layers.10.a": [],
        "head": [],
    }
    order = ["head", "layers.10", "layers.10.a", "layers.1", "layers.1.a", "layers.1.b", "layers.0"]
    assert backward == {this: [following] for this, following in pairwise(order)} | {"layers.0": []}
    assert prefetched([]) == ({}, {})


# --- routers


def test_a_softmax_router_takes_the_best_and_weighs_them_to_one():
    router, x = router_of(SOFTMAX), drawn(2, 5, DIM)
    index, weights = router(x)
    scores = (x @ router.weight.T).softmax(-1).flatten(0, 1)
    best = scores.topk(2)
    assert torch.equal(index, best.indices)
    assert torch.allclose(weights, best.values / best.values.sum(-1, keepdim=True))
    raw = router_of(replace(SOFTMAX, normalise=False, scale=3.0))(x)[1]
    assert torch.allclose(raw, 3 * best.values)


def test_a_sigmoid_router_chooses_by_bias_and_groups_and_weighs_without_the_bias():
    router, x = router_of(replace(SIGMOID, bias_rate=0.1)), drawn(2, 5, DIM)
    assert router.bias is not None
    router.bias.copy_(drawn(EXPERTS, seed=9) / 2)
    index, weights = router(x)
    scores = (x @ router.weight.T).sigmoid().flatten(0, 1)
    for token in range(10):
        chosen = scores[token] + router.bias
        groups = chosen.view(4, 2).sum(-1).topk(2).indices.tolist()  # two experts a group: both count
        legal = [e for e in range(EXPERTS) if e // 2 in groups]
        best = sorted(legal, key=lambda e: -chosen[e].item())[:3]
        assert index[token].tolist() == best
        wanted = scores[token][best] / scores[token][best].sum() * 2.5
        assert torch.allclose(weights[token], wanted)


def test_padding_is_neither_routed_nor_counted():
    router, x = router_of(replace(SOFTMAX, sequence_loss=0.1, z_loss=0.1)), drawn(2, 6, DIM)
    routed = torch.ones(2, 6, dtype=torch.bool)
    routed[:, 4:] = False
    index, _ = router(x, routed)
    counts, auxiliary = router.counts, router.auxiliary
    assert (index.view(2, 6, 2)[:, 4:] == EXPERTS).all() and counts is not None and auxiliary is not None
    assert counts.sum() == 2 * 4 * 2
    router.balance(counts)
    index, _ = router(x[:, :4])
    assert torch.equal(router.counts, counts) and torch.allclose(router.auxiliary, auxiliary)


def test_auxiliary_losses_are_those_of_their_papers():
    config = replace(SOFTMAX, sequence_loss=0.3, z_loss=0.2)
    router, x = router_of(config), drawn(3, 6, DIM)
    index, _ = router(x)
    logits = x @ router.weight.T
    total = torch.zeros(())
    for row in range(3):  # arXiv 2412.19437, equations 17 to 20; tokens of a row times the row's loss
        scores = logits[row].softmax(-1)
        load = F.one_hot(index.view(3, 6, 2)[row], EXPERTS).sum((0, 1)) * EXPERTS / (2 * 6)
        total = total + 6 * 0.3 * (load * scores.mean(0)).sum()
    total = total + 0.2 * logits.logsumexp(-1).square().sum()
    assert router.auxiliary is not None and torch.allclose(router.auxiliary, total)


def test_the_loss_of_a_microbatch_counts_all_its_tokens():
    """arXiv 2501.11873, with as much weight for a token as the loss per sequence; padding counts for nothing."""
    config = replace(SOFTMAX, batch_loss=0.3)
    router, x = router_of(config), drawn(3, 6, DIM)
    routed = torch.ones(3, 6, dtype=torch.bool)
    routed[1, 2:] = False
    index, _ = router(x, routed)
    tokens, chosen = x[routed], index.view(3, 6, 2)[routed]
    scores = (tokens @ router.weight.T).softmax(-1)
    load = F.one_hot(chosen, EXPERTS).sum((0, 1)) * EXPERTS / (2 * 14)
    expected = 14 * 0.3 * (load * scores.mean(0)).sum()
    assert router.auxiliary is not None and torch.allclose(router.auxiliary, expected)
    together = torch.zeros(())
    counted: list[torch.Tensor] = []
    router.everywhere = lambda found: counted.append(found) or found.sum(0, keepdim=True)
    router(x, routed)
    (of_rows,) = counted
    router.everywhere = lambda found: of_rows.sum(0, keepdim=True)  # of ranks that have a row each
    for row in range(3):
        router(x[row : row + 1], routed[row : row + 1])
        assert router.auxiliary is not None
        together = together + router.auxiliary
    assert torch.allclose(together, expected)


def test_losses_that_are_attached_have_the_gradients_of_losses_that_are_added():
    config = replace(SOFTMAX, sequence_loss=0.3, z_loss=0.2)
    gradients = []
    for share in (None, torch.tensor(0.125, dtype=torch.float64)):
        router, x = router_of(config), drawn(2, 5, DIM).requires_grad_()
        router.loss_share = share
        _, weights = router(x)
        loss = weights.square().sum()
        if share is None:
            assert router.auxiliary is not None
            loss = loss + router.auxiliary * 0.125
        gradients.append(torch.autograd.grad(loss, [x, router.weight]))
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, rtol=1e-5)


def test_an_expert_takes_no_more_of_a_sequence_than_its_capacity():
    x = drawn(1, 8, DIM).expand(2, 8, DIM)[:, :1].expand(2, 8, DIM)  # all tokens alike: all choose the same two experts
    router = router_of(replace(SOFTMAX, capacity_factor=1.0))
    index, _ = router(x)
    limit = 8 * 2 // EXPERTS
    kept = (index.view(2, 8, 2) < EXPERTS).sum(1)
    assert (kept == limit).all() and (index.view(2, 8, 2)[:, :limit] < EXPERTS).all(), (
        "the first tokens keep their place"
    )


def test_the_bias_moves_against_the_load_once():
    router = router_of(replace(SOFTMAX, bias_rate=0.5))
    router(drawn(2, 5, DIM))
    counts = torch.tensor([9, 1, 2, 2, 2, 2, 1, 1])
    router.balance(counts)
    assert (
        router.bias is not None
        and router.bias.tolist() == [-0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]
        and router.counts is None
    )
    router.eval()
    router(drawn(2, 5, DIM))
    assert router.counts is None, "evaluation does not count"


def test_shared_experts_see_every_token():
    mixture = MixtureOfExperts(DIM, 24, SIGMOID)
    for number, parameter in enumerate(mixture.parameters()):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    x = drawn(1, 4, DIM)
    assert mixture.shared is not None
    nowhere = mixture(x, torch.zeros(1, 4, dtype=torch.bool))
    assert torch.allclose(nowhere, mixture.shared(x)) and not torch.allclose(mixture(x), nowhere)


# --- the decoder


@pytest.mark.parametrize(
    "moe", [SOFTMAX, SIGMOID, replace(SIGMOID, hidden_dim=12, first_dense=2)], ids=["softmax", "sigmoid", "fine"]
)
def test_parameters_are_counted(moe):
    config = replace(CONFIG, moe=moe)
    model = Decoder(config)
    assert sum(p.numel() for p in model.parameters()) == parameter_count(config)
    sparse = [block.feed_forward for block in model.layers.values() if isinstance(block.feed_forward, MixtureOfExperts)]
    assert len(sparse) == config.n_layers - moe.first_dense
    one = sum(p[0].numel() for p in sparse[0].experts.parameters())
    assert idle_parameters(config) == len(sparse) * (EXPERTS - moe.top_k) * one


def test_experts_begin_different():
    with torch.device("meta"):
        model = Decoder(replace(CONFIG, moe=SOFTMAX))
    materialise(model, torch.device("cpu"), 5, {})
    weights = [p for name, p in model.named_parameters() if ".experts." in name]
    assert len(weights) == 9
    for weight in weights:
        assert len({row.sum().item() for row in weight}) == EXPERTS
        assert 0 < weight.std() < 0.1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_k": 9}, "model.moe.top_k = 9 is more than the 8 experts that a token can choose from"),
        ({"n_groups": 3}, "model.moe.n_groups = 3 does not divide model.moe.n_experts = 8"),
        ({"n_groups": 4, "top_groups": 5}, "model.moe.top_groups = 5 is more than model.moe.n_groups = 4"),
        (
            {"n_groups": 4, "top_groups": 1, "top_k": 3},
            "model.moe.top_k = 3 is more than the 2 experts of 1 of 4 groups",
        ),
        ({"router": "softmin"}, "model.moe.router = 'softmin': legal are softmax and sigmoid"),
        ({"n_experts": 0}, "model.moe.n_experts = 0 is out of range: it must be 1 or more"),
        ({"z_loss": -1.0}, "model.moe.z_loss = -1.0 is out of range"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, words):
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        replace(CONFIG, moe=replace(SOFTMAX, **changes))


def test_dense_layers_must_leave_some():
    with pytest.raises(ValueError, match=r"model\.moe\.first_dense = 3 leaves no layer of 3 for experts"):
        replace(CONFIG, moe=replace(SOFTMAX, first_dense=3))


# --- what is found in any model

SPARSE = ["gpt_oss", "mixtral", "qwen3_moe", *families.SPARSE]


@pytest.mark.first
@pytest.mark.parametrize("name", SPARSE)
def test_stacks_are_found_in_a_family_and_compute_alone(name):
    facts = model_facts(as_module(CausalLM(families.config_of(name))))
    found = facts.measurements.stacks(2)
    dense = 1 if "first_k_dense_replace" in families.SPARSE.get(name, {}) else 0
    assert len(found) == 2 - dense
    assert {stack.experts for stack in found} == {4} and {stack.width for stack in found} == {32}
    assert all(stack.top_k == (1 if name == "hunyuan_v1_moe" else 2) for stack in found)
    shapes = {p.name: p.shape for p in facts.parameters}
    assert all(shapes[f"{stack.path}.{name}"][0] == 4 for stack in found for name in stack.parameters)


class MixesExperts(Experts):
    """Its experts know of each other: no stack that can be shared out."""

    def forward(self, x, index, weights):
        return super().forward(x, index, weights) + self.w_gate.mean()


class MixingDecoder(Decoder):
    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        for block in self.layers.values():
            block.feed_forward.experts.__class__ = MixesExperts


def test_experts_that_know_of_each_other_are_refused():
    with torch.device("meta"):
        model = MixingDecoder(replace(CONFIG, moe=SOFTMAX))
    words = (
        r"layers\.0\.feed_forward\.experts \(MixesExperts\) does not give the same when 2 ranks share its 8"
        r" experts out: its output"
    )
    with pytest.raises(UnsupportedError, match=words):
        stacks.measure_stacks(model, 2)


# --- plans and rules


def test_a_plan_says_where_experts_lie_and_what_travels():
    made = plan(replace(CONFIG, moe=SIGMOID), Layout(dp_replicate=2, dp_shard=4, ep=2))
    rows = {p.pattern: dict(p.placements) for p in made.parameters}
    assert rows["layers.*.feed_forward.experts.w_up"] == {
        "dp_replicate": "Replicate()",
        "efsdp": "Shard(0)",
        "ep": "Shard(0)",
    }
    assert rows["layers.*.feed_forward.router.weight"] == {"dp_replicate": "Replicate()", "dp_shard": "Shard(0)"}
    assert made.experts is not None and dict(made.experts.mesh) == {"pp": 1, "dp_replicate": 2, "efsdp": 2, "ep": 2}
    travelling = [c for c in made.collectives if c.op == "all_to_all"]
    assert {c.unit for c in travelling if c.by_token} == {f"tokens of layers.{i}.feed_forward.experts" for i in (1, 2)}
    assert {(c.elements, c.calls) for c in travelling if c.by_token} == {(4 * 3 * DIM, 4)}
    recomputed = plan(
        replace(CONFIG, moe=SIGMOID), Layout(dp_shard=2, ep=2), techniques={"activation_checkpointing": "full"}
    )
    assert {(c.elements, c.calls) for c in recomputed.collectives if c.op == "all_to_all" and c.by_token} == {
        (6 * 3 * DIM, 6)
    }
    assert (
        Plan.from_json(made.to_json()) == made
        and json.loads(made.to_json())["experts"]["stacks"][0]["experts"] == EXPERTS
    )


def test_a_share_that_does_not_divide_by_experts_is_sharded_inside_them():
    made = plan(replace(CONFIG, moe=SOFTMAX), Layout(dp_shard=16, ep=4))
    rows = {p.pattern: dict(p.placements) for p in made.parameters}
    assert rows["layers.*.feed_forward.experts.w_up"]["efsdp"] == "Shard(1)", "two experts on four ranks"


CASES = {
    "dense": (CONFIG, Layout(dp_shard=2, ep=2), {}, ConfigError, "has no module of stacked experts"),
    "ranks": (
        replace(CONFIG, moe=SOFTMAX),
        Layout(dp_shard=2, ep=4),
        {},
        ConfigError,
        "does not divide the 2 ranks .* Legal here: 1, 2",
    ),
    "experts": (
        replace(CONFIG, moe=replace(SOFTMAX, n_experts=6)),
        Layout(dp_shard=4, ep=4),
        {},
        ConfigError,
        r"layout\.ep = 4 does not divide the 6 experts of layers\.\*\.feed_forward\.experts\. Legal here: 1, 2",
    ),
    "whole sequences": (
        replace(CONFIG, moe=SOFTMAX),
        Layout(dp_shard=1, tp=2, ep=2),
        {"sequence_parallel": False},
        ConfigError,
        r"layout\.ep = 2 with layout\.tp = 2 needs cut sequences",
    ),
    "capacity": (
        replace(CONFIG, moe=replace(SOFTMAX, capacity_factor=1.5)),
        Layout(dp_shard=1, tp=2),
        {},
        UnsupportedError,
        r"capacity_factor = 1\.5 with layout\.tp = 2",
    ),
    "multiplied": (
        replace(CONFIG, moe=SOFTMAX),
        Layout(dp_shard=2, ep=-1),
        {},
        ConfigError,
        "expert parallelism does not fill the world",
    ),
}


@pytest.mark.first
@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_shared_out_is_refused(name):
    model, layout, techniques, kind, words = CASES[name]
    with pytest.raises(kind, match=words):
        plan(model, layout, techniques=techniques)


BALANCED = partial(families.config_of, "mixtral", output_router_logits=True, router_aux_loss_coef=0.3)


def test_the_loss_of_a_familys_own_routers_is_found_by_what_it_is():
    made = plan(CausalLM(BALANCED()), Layout(dp_shard=2)).router_loss
    routers = ("model.layers.0.mlp.gate", "model.layers.1.mlp.gate")
    assert made == RouterLoss(coefficient=0.3, experts=4, top_k=2, routers=routers)
    without = families.config_of("hunyuan_v1_moe", output_router_logits=True)
    assert plan(CausalLM(without), Layout(dp_shard=2)).router_loss is None, (
        "its loss has none, whatever its config says"
    )


def test_another_loss_of_routers_is_refused(monkeypatch):
    from transformers.models.mixtral import modeling_mixtral

    known = modeling_mixtral.load_balancing_loss_func
    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", lambda *args: known(*args) ** 2)
    with pytest.raises(
        UnsupportedError, match="is not the balance of its routers' choices and probabilities over all tokens"
    ):
        plan(CausalLM(BALANCED()), Layout(dp_shard=2))


@pytest.mark.parametrize(
    "layout, reduction, words",
    [(Layout(pp=2, dp_shard=1), "sum", "all layers together"), (Layout(dp_shard=2), "mean", "a loop of your own")],
)
def test_where_the_loss_of_a_familys_own_routers_would_be_another_it_is_refused(layout, reduction, words):
    with pytest.raises(UnsupportedError, match=f"output_router_logits = true, .*{words}"):
        plan(CausalLM(BALANCED()), layout, reduction=reduction)


@pytest.mark.all
def test_a_plan_says_that_experts_are_not_tensor_sharded_and_what_would_share_them_out():
    made = plan(replace(CONFIG, moe=SOFTMAX), Layout(dp_shard=1, tp=2))
    (said,) = [note for note in made.notes if "experts" in note]
    assert said.startswith(
        "the experts of layers.*.feed_forward.experts are not tensor-sharded: every rank of the tensor axis has all"
        " of them"
    )
    assert said.endswith("layout.ep = 2 would share them out over its ranks")
    assert not any(
        "experts" in note for note in plan(replace(CONFIG, moe=SOFTMAX), Layout(dp_shard=1, tp=2, ep=2)).notes
    )


def test_techniques_say_nothing_of_experts():
    assert not [name for name in vars(Techniques()) if "expert" in name], "the layout alone says it"


# --- the load


def test_the_load_of_experts_is_counted_where_they_are_given_tokens():
    with torch.device("meta"):
        model = Decoder(replace(CONFIG, moe=SOFTMAX))
    materialise(model, torch.device("cpu"), 5, {})
    load = ExpertLoad([model])
    tokens = torch.arange(12).view(2, 6)
    padded = torch.zeros(2, 6, dtype=torch.int64)
    padded[:, 5] = -1
    expected: list[float] = []

    def note(router: torch.nn.Module, args: tuple, _: object) -> None:
        if router.training:
            expected.append(F.linear(args[0][:, :5], router.weight).logsumexp(-1).square().mean().item())  # type: ignore[arg-type]

    for block in model.layers.values():
        block.feed_forward.router.register_forward_hook(note)  # type: ignore[union-attr]
    model(tokens, document_ids=padded)
    model.eval()(tokens)
    found = load.take([], [])
    assert [one.path for one in found] == [f"layers.{i}.feed_forward.experts" for i in range(3)]
    assert all(sum(one.tokens) == 2 * 5 * 2 and one.dropped == 2 * 2 for one in found)
    assert [one.router_z for one in found] == pytest.approx(expected)
    again = load.take([], [])
    assert all(sum(one.tokens) == 0 and one.router_z == 0 for one in again)


class ByHeads(torch.nn.Module):
    """Attention whose weights are stacked by heads: it looks like a stack of experts, and is called like none."""

    def __init__(self):
        super().__init__()
        self.w_in, self.w_out = (torch.nn.Parameter(torch.randn(4, 8, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return torch.einsum("bsd,hde,hef->bsf", x, self.w_in, self.w_out) + positions.unsqueeze(-1)


def test_what_only_looks_like_experts_is_not_counted():
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList(torch.nn.Sequential(ByHeads(), torch.nn.Linear(8, 8)) for _ in range(2))
    assert stacks.find_stacks(model).keys() == {"blocks.0.0", "blocks.1.0"}
    load = ExpertLoad([model])
    x, positions = torch.randn(2, 9, 8), torch.arange(9).expand(2, 9)
    for mask in (None, torch.zeros(2, 9, 9)):
        model.blocks[0][0](x, positions, mask)  # type: ignore[index]
    assert load.take([], []) == []


def test_the_bias_is_cast_to_nothing_narrow():
    router = router_of(replace(SOFTMAX, bias_rate=0.1))
    router = router.to(torch.bfloat16)
    assert router.bias is not None and router.weight.dtype == torch.bfloat16 and router.bias.dtype == torch.float32
    assert router.double().bias.dtype == torch.float64  # type: ignore[union-attr]


def test_biases_of_stacked_experts_do_not_decay():
    facts = model_facts(as_module(CausalLM(families.config_of("gpt_oss"))))
    assert facts.module is not None
    named = dict(facts.module.named_parameters())
    of = {
        id(p): group["weight_decay"]
        for group in make_parameter_groups(named.items(), weight_decay=0.1)
        for p in group["params"]
    }
    decays = {name: of[id(p)] > 0 for name, p in named.items() if ".experts." in name}
    assert decays and all(decays[name] is not name.endswith("_bias") for name in decays)


def test_adapters_on_experts_do_not_go_with_their_axis():
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(families.config_of("mixtral"))
    wanted = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    adapted = peft.get_peft_model(model, wanted)
    with pytest.raises(UnsupportedError, match=r"have adapters around them.*target_parameters"):
        plan(adapted, Layout(dp_shard=2, ep=2))
    assert plan(adapted, Layout(dp_shard=2)).experts is None


def test_the_load_in_numbers():
    even, one = LayerLoad("a", (3, 3, 3, 3), 0), LayerLoad("b", (0, 12, 0, 0), 5)
    assert (even.max_over_mean, one.max_over_mean) == (1.0, 4.0) and (even.entropy, one.entropy) == pytest.approx(
        (1.0, 0.0)
    )
    figures = figures_of_experts([even, one])
    assert (
        figures["experts.max_over_mean"] == 4.0
        and figures["experts.entropy"] == 0.0
        and figures["experts.dropped"] == 5.0
    )
    assert figures["experts.a.max_over_mean"] == 1.0 and figures_of_experts([]) == {}
    assert not any("router_z" in name for name in figures)
    figures = figures_of_experts([replace(even, router_z=2.5), replace(one, router_z=1.5)])
    assert (figures["experts.router_z"], figures["experts.b.router_z"]) == (2.5, 1.5)
