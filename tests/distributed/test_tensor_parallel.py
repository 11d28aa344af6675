"""Tensor and sequence parallelism in real processes: equal to one process, sends what the plan said, keeps what it
holds, hides nothing.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from support import families, users
from support.laid_out import Figures, Held, assert_estimated, assert_same, counted, estimated, held, own_rows
from support.ranks import ranks

from meshwright.checkpoint import load, save
from meshwright.comparison.equality import relative_errors
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.parallelize import parallelize
from meshwright.distributed.process.absent_peers import WireCounter
from meshwright.distributed.step import whole_model
from meshwright.distributed.tensor.layers import local
from meshwright.distributed.tensor.parallel import Sums
from meshwright.distributed.weights.shards import whole_on_first
from meshwright.models.decoder_config import DecoderConfig
from meshwright.planning.layout import Layout
from meshwright.planning.values import Batch
from meshwright.verification.problem import RandomBatches
from meshwright.verification.verify import verify

pytestmark = pytest.mark.all

# 257 tokens, 12 hidden features, two key heads (on four ranks each is held twice), heads of six features.
UNTIED = DecoderConfig(257, 24, 3, n_heads=4, n_kv_heads=2, hidden_dim=12, max_seq_len=20, qk_norm=True)
TIED = replace(UNTIED, tied_embeddings=True)
ONE = Layout(dp_shard=1)
TP2, TP4 = Layout(dp_shard=1, tp=2), Layout(dp_shard=1, tp=4)
SHARDED = Layout(dp_shard=2, tp=2)
DATA4 = Layout(dp_shard=4)


@dataclass(frozen=True)
class Way:
    layout: Layout
    techniques: tuple[tuple[str, Any], ...] = ()
    rows: int = 0
    """Per forward; 0: all."""
    model: DecoderConfig = UNTIED
    seq: int = 11
    frozen: bool = False

    @property
    def requested(self) -> dict[str, Any]:
        return dict(self.techniques)


WAYS = {
    "tp4, fewer tokens than ranks": Way(TP4, seq=3),
    "norms frozen": Way(TP4, (("freeze", ("norm",)),)),
    "norms trained": Way(SHARDED, (("freeze", (r"^(?!.*norm)",)),), 1),
    "norms trained, whole sequences": Way(TP4, (("freeze", (r"^(?!.*norm)",)), ("sequence_parallel", False))),
    "last block trained": Way(SHARDED, (("freeze", (r"^(?!layers\.2\.)",)),)),
    "feed-forwards trained": Way(
        TP2, (("freeze", (r"^(?!.*feed_forward\.)",)), ("activation_checkpointing", "full")), 2
    ),
}
"""Not in the array (test_ways): a short sequence, and other parts of the model frozen."""


@pytest.mark.parametrize("name", WAYS)
def test_our_decoder_is_equal_to_one_process(pool, measured, name):
    way = WAYS[name]
    batches = RandomBatches(257, rows=4, seq_len=way.seq)
    options = {"dtypes": ("float64",), "techniques": way.requested, "max_norm": 0.03, "microbatch_rows": way.rows}
    report = verify(way.model, way.layout, batches, steps=2, pool=pool, **options)
    assert report, report
    worst = max(d.error for d in report.comparisons[0].of("gradient"))
    assert 0 < worst <= 1e-10
    measured(f"{way.layout}: {name}", "tensor parallel, decoder", {"gradient": worst})


@pytest.mark.parametrize(("layout", "model"), [(TP4, TIED), (SHARDED, UNTIED)], ids=str)
def test_bf16_costs_no_more_than_the_dtype_does(pool, layout, model):
    report = verify(model, layout, RandomBatches(257, rows=4, seq_len=11), steps=1, dtypes=("bfloat16",), pool=pool)
    assert report, report


# --- Hugging Face in real processes


def family(name: str, **changes: Any) -> torch.nn.Module:
    with torch.device("cpu"):
        return families.on_cpu(families.config_of(name, **changes))


def latent_keys_alone() -> torch.nn.Module:
    """Queries come from all features, and the layers that give few features have biases."""
    config = families.config_of("deepseek_v2", use_cache=False, first_k_dense_replace=2, attention_bias=True)
    config.q_lora_rank = None
    with torch.device("cpu"):
        return families.on_cpu(config)


FAMILIES = {
    "olmo2": partial(family, "olmo2", use_cache=False),
    "falcon": partial(family, "falcon", use_cache=False),
    "falcon, two norms": partial(family, "falcon_grouped", use_cache=False, num_kv_heads=4),
    "gpt_neox": partial(family, "gpt_neox", use_cache=False),
    "latent": partial(family, "deepseek_v3", use_cache=False, first_k_dense_replace=2),
    "latent keys alone": latent_keys_alone,
}


@pytest.mark.parametrize(
    ("name", "layout", "techniques"),
    [
        *((name, TP4, {}) for name in ("olmo2", "falcon", "latent")),
        *(("latent keys alone", layout, {}) for layout in (TP4, SHARDED)),
        ("latent keys alone", TP2, {"sequence_parallel": False}),
        *(("falcon, two norms", layout, {}) for layout in (TP2, TP4, SHARDED)),
        *((name, TP2, {"activation_checkpointing": "selective"}) for name in ("falcon", "falcon, two norms")),
    ],
    ids=str,
)
def test_a_family_is_equal_to_one_process(pool, name, layout, techniques):
    report = verify(FAMILIES[name], layout, steps=2, dtypes=("float64",), techniques=techniques, pool=pool)
    assert report, report


# --- what travels


def batch_of(rows: int, seq: int, vocabulary: int, step: int = 0) -> dict[str, torch.Tensor]:
    return dict(RandomBatches(vocabulary, rows, seq, ())(step))


def lay_out(source: Any, way: Way, **options: Any) -> ParallelModel:
    techniques = {"precision": {"master": "float32", "compute": "float32"}, **way.requested}
    return parallelize(source, way.layout, techniques=techniques, microbatch_rows=way.rows, **options)


def one_warm_step(source: Any, way: Way, vocabulary: int) -> tuple[Figures, Figures]:
    """(operation, ranks) -> (calls, bytes per rank) of a step: as the plan foresees, and as counted in the third."""
    model = lay_out(source, way)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for number in range(3):
        mine = own_rows(model, batch_of(4, way.seq, vocabulary, number))
        with WireCounter() if number == 2 else nullcontext() as wire:
            model.forward_backward(mine)
            model.optimizer_step(optimizer, 1.0)
    return estimated(model.plan, Batch(4, way.seq, way.rows)), counted(wire)


def assert_all_estimated(ranks: list[tuple[Figures, Figures]], tp: int) -> None:
    """The plan speaks for the first rank of the tensor axis.

    The others may have fewer rows of the vocabulary, and send no more.
    """
    for rank, (planned, sent) in enumerate(ranks):
        if rank % tp == 0:
            assert_estimated(planned, sent)
        else:
            assert {key: calls for key, (calls, _) in sent.items()} == {
                key: calls for key, (calls, _) in ranks[0][1].items()
            }
            assert all(0 < moved <= planned[key][1] for key, (_, moved) in sent.items())


@pytest.mark.parametrize("name", WAYS)
def test_the_plan_estimates_every_byte(spmd, name):
    way = WAYS[name]
    assert_all_estimated(spmd(way.layout.world, one_warm_step, way.model, way, 257), way.layout.tp)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, Way(TP4)) for name in ("olmo2", "falcon")),
        ("latent keys alone", Way(TP2, (("sequence_parallel", False),))),
        ("latent", Way(TP2, (("freeze", (r"embed_tokens", r"layers\.0\.", r"q_b_proj")),))),
        *(("falcon, two norms", Way(layout)) for layout in (TP2, TP4, SHARDED)),
        ("falcon, two norms", Way(TP2, (("activation_checkpointing", "selective"),))),
        ("gpt_neox", Way(TP2, (("freeze", (r"embed_in", r"layers\.0\.", r"query_key_value", "dense")),))),
        ("gpt_neox", Way(TP2, (("freeze", (r"embed_in", "norm")),))),
    ],
)
def test_the_plan_estimates_every_byte_of_a_family(spmd, name, way):
    said = spmd(way.layout.world, one_warm_step, FAMILIES[name], way, families.VOCABULARY)
    assert_all_estimated(said, way.layout.tp)


def test_branches_behind_two_norms_gather_their_input_once(spmd):
    """Forward 1 all-gather and 1 reduce-scatter in each of two blocks, backward 2 and 1.

    One more of each for embedding and head, and the head gathers again.
    """
    for _, sent in spmd(2, one_warm_step, FAMILIES["gpt_neox"], Way(TP2), families.VOCABULARY):
        assert (sent["all_gather", 2][0], sent["reduce_scatter", 2][0]) == (2 * (1 + 2) + 3, 2 * (1 + 1) + 2)


def test_a_collective_that_is_not_in_the_plan_is_seen(spmd):
    planned, sent = spmd(2, one_warm_step, UNTIED, Way(TP2), 257)[0]
    planned["all_reduce", 2] = (planned["all_reduce", 2][0] - 1, planned["all_reduce", 2][1])  # type: ignore[operator]
    with pytest.raises(AssertionError, match="all_reduce"):
        assert_estimated(planned, sent)


# --- evaluation, generation, a loss of the user's own


def squared(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss that needs whole logits: it knows their number."""
    assert logits.shape[-1] == 257
    real = labels != -100
    return ((logits.softmax(-1) - F.one_hot(labels.where(real, 0), 257)).square().sum(-1) * real).sum()


def used(layout: Layout, sequence_parallel: bool = True) -> dict[str, Any]:
    """What evaluation and generation give, before and after a step; then a step with a loss of the user's own."""
    requested = {"sequence_parallel": sequence_parallel, "precision": {"master": "float64"}}
    model = parallelize(UNTIED, layout, techniques=requested, seed=3)
    batch = own_rows(model, batch_of(4, 11, 257))
    said: dict[str, Any] = {"evaluated": float(model.evaluate(batch))}
    said["trained"] = float(model.forward_backward(batch))
    said["norm"] = model.optimizer_step(torch.optim.SGD(model.parameters(), lr=1.0), 0.5).grad_norm
    said["after"] = float(model.evaluate(batch))
    said["likeliest"] = model.generate([1, 2, 3], 6, temperature=0.0)
    said["sampled"] = model.generate(list(range(18)), 4, seed=7)  # beyond the longest sequence
    return said | with_own_loss(layout, sequence_parallel)


def with_own_loss(layout: Layout, sequence_parallel: bool = True) -> dict[str, Any]:
    requested = {"sequence_parallel": sequence_parallel, "precision": {"master": "float64"}}
    model = parallelize(UNTIED, layout, techniques=requested, seed=3, loss_fn=squared)
    loss = float(model.forward_backward(own_rows(model, batch_of(4, 11, 257))))
    return {
        "own loss": loss,
        "gradients": whole_on_first({n: p.grad for n, p in model.named_parameters() if p.grad is not None}),
    }


@pytest.fixture(scope="session")
def by_one_process(pool):
    return pool.run(used, ONE, world=1, timeout=120)[0]


@pytest.mark.parametrize(("layout", "cut"), [(TP2, True), (TP4, True), (SHARDED, True), (TP4, False)], ids=str)
def test_evaluation_generation_clipping_and_ones_own_loss_are_those_of_one_process(spmd, by_one_process, layout, cut):
    runs = spmd(layout.world, used, layout, cut)
    for said in runs:
        for key in ("likeliest", "sampled"):
            assert said[key] == by_one_process[key]
        for key in ("evaluated", "trained", "norm", "after", "own loss"):
            assert said[key] == pytest.approx(by_one_process[key], rel=1e-12), key
    errors = relative_errors(runs[0]["gradients"], by_one_process["gradients"])
    assert len(errors) > 20 and max(errors.values()) <= 1e-10


# --- what several ranks hold is summed, and counted once


def without_sums(model: Any, plan: Any) -> Sums:
    return Sums([], [], [])


def without_sums_of_copies(whole: Any, model: Any, plan: Any) -> Sums:
    return replace(whole(model, plan), copied=[])


def broken(layout: Layout, fault: str) -> dict[str, Any]:
    real = whole_model.sums_of
    with patch.object(
        whole_model, "sums_of", {"none": without_sums, "no copies": partial(without_sums_of_copies, real)}[fault]
    ):
        return with_own_loss(layout)


@pytest.mark.kills("tensor", "fault")
@pytest.mark.parametrize("fault", ["none", "no copies"])
def test_gradients_that_are_not_summed_are_caught(spmd, by_one_process, fault):
    said = spmd(4, broken, TP4, fault)[0]
    assert max(relative_errors(said["gradients"], by_one_process["gradients"]).values()) > 1e-2


@ranks(4)
def test_a_part_has_the_gradient_that_torch_would_give_it():
    model = parallelize(UNTIED, TP4, seed=3)
    found = []
    for name, parameter in model.named_parameters():
        summand = torch.randn_like(parameter._local_tensor)
        for gradient in (summand, summand.T.contiguous().T):
            (theirs,) = torch.autograd.grad(parameter.to_local(), parameter, gradient)
            (ours,) = torch.autograd.grad(local(parameter), parameter, gradient)
            same = torch.equal(ours._local_tensor, theirs._local_tensor) and ours.placements == parameter.placements
            found.append((name, same and (ours.shape, ours.stride()) == (parameter.shape, parameter.stride())))
    assert len(found) > 50 and [name for name, same in found if not same] == []


# --- checkpoints


def phi3_for(layout: Layout, seed: int) -> ParallelModel:
    with torch.random.fork_rng(devices=[]):
        return parallelize(families.on_cpu(families.config_of("phi3", use_cache=False), seed=seed), layout)


def decoder_for(layout: Layout, seed: int) -> ParallelModel:
    return parallelize(UNTIED, layout, seed=seed)


BUILDERS = {"decoder": (decoder_for, 257), "phi3": (phi3_for, families.VOCABULARY)}


def trained(kind: str, layout: Layout, folder: str) -> Held:
    build, vocabulary = BUILDERS[kind]
    model = build(layout, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        model.forward_backward(own_rows(model, batch_of(4, 9, vocabulary, step)))
        model.optimizer_step(optimizer, 1.0)
    save(model, folder, optimizer=optimizer)
    return held(model, optimizer)


def passed_on(kind: str, layout: Layout, folders: list[str], onto: str = "") -> list[Held]:
    """What a new model holds that has read each of the folders; the last one is saved ``onto`` another."""
    found = []
    for folder in folders:
        model = BUILDERS[kind][0](layout, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        load(model, folder, optimizer=optimizer)
        found.append(held(model, optimizer))
    if onto:
        save(model, onto, optimizer=optimizer)
    return found


@pytest.mark.parametrize("kind", BUILDERS)
def test_a_checkpoint_is_read_by_every_other_layout_bit_by_bit(spmd, tmp_path, kind):
    """Tensor-parallel shards to data-parallel ones and to another tensor axis, and what those save back again."""
    sharded, data, tp4 = (str(tmp_path / name) for name in ("sharded", "data", "tp4"))
    written = spmd(4, trained, kind, SHARDED, sharded)[0]
    assert len(written[0]) > 5 and len(written[1]) == 3 * len(written[0])
    for layout, folders, onto in ((DATA4, [sharded], data), (TP4, [sharded], tp4), (SHARDED, [data, tp4], "")):
        for folder, read in zip(folders, spmd(4, passed_on, kind, layout, folders, onto)[0], strict=True):
            assert_same(read, written, (layout, folder))


# --- nothing is changed that others can see

COUNTS = "num_heads num_key_value_heads num_key_value_groups head_dim split_size n_heads num_attention_heads embed_dim"


def torchs_own() -> tuple[Any, ...]:
    functions = (F.scaled_dot_product_attention, F.linear, F.embedding, F.cross_entropy)
    return (*functions, torch.nn.Linear.forward, torch.nn.Embedding.forward)


@pytest.mark.parametrize("name", ["gpt2", "phi3", "bloom", "falcon_alibi"])
@ranks(2)
def test_nobody_outside_sees_another_number_of_heads(name):
    source = families.on_cpu(families.config_of(name, use_cache=False))
    torchs = torchs_own()

    def now() -> dict[str, Any]:
        module = model.parts[0]
        counts = ((path, m, key) for path, m in module.named_modules() for key in COUNTS.split() if hasattr(m, key))
        found = {f"{path}.{key}": getattr(m, key) for path, m, key in counts}
        return found | {"config": str(module.config.to_dict()), "torch": torchs == torchs_own()}

    model = parallelize(source, TP2)
    seen = [now()]
    for path, module in model.parts[0].named_modules():
        if path in (*model.facts.blocks, *(attention for attention in model.facts.attentions), model.plan.tensor.head):
            module.register_forward_pre_hook(lambda *_: seen.append(now()))
            module.register_forward_hook(lambda *_: seen.append(now()))
    model.forward_backward(own_rows(model, batch_of(2, 9, families.VOCABULARY)))
    seen.append(now())
    assert torchs == torchs_own() and len(seen) >= 2 + 2 * 5 and len(seen[0]) > 3
    assert all(now == seen[0] for now in seen[1:])


def after_an_error(name: str) -> bool:
    """Counts are whole again after a forward that breaks off inside attention."""
    model = parallelize(families.on_cpu(families.config_of(name, use_cache=False)), TP2)
    attention = model.parts[0].get_submodule(model.facts.attentions[0])
    before = {key: value for key, value in vars(attention).items() if type(value) is int}

    def fail(*_: Any) -> None:
        inside = {key: value for key, value in vars(attention).items() if type(value) is int}
        raise ZeroDivisionError(str(inside != before))

    inner = attention.get_submodule(model.plan.tensor.kinds[0].regions[0].region.consumer.rpartition(".")[2])
    inner.register_forward_pre_hook(fail)
    try:
        model.forward_backward(own_rows(model, batch_of(2, 9, families.VOCABULARY)))
    except ZeroDivisionError as error:
        assert str(error) == "True", "inside, the count is this rank's"
        return before == {key: value for key, value in vars(attention).items() if type(value) is int}
    return False


@pytest.mark.first
def test_numbers_are_whole_again_after_an_error(spmd):
    assert spmd(2, after_an_error, "gpt2") == [True, True]


# --- the plan is what is applied


def placed(layout: Layout) -> dict[str, tuple[str, tuple[int, ...]]]:
    model = parallelize(UNTIED, layout)
    return {name: (str(p.placements), tuple(p.to_local().shape)) for name, p in model.named_parameters()}  # type: ignore[union-attr]


def test_ranks_hold_their_parts_alone(spmd):
    ranks = spmd(4, placed, TP4)
    assert [r["layers.0.attention.wq.weight"][1] for r in ranks] == [(6, 24)] * 4
    assert [r["layers.0.attention.wk.weight"][1] for r in ranks] == [(6, 24)] * 4 and "12/2" in ranks[0][
        "layers.0.attention.wk.weight"
    ][0]
    assert [r["embedding.weight"][1] for r in ranks] == [(65, 24)] * 3 + [(62, 24)]
    assert [r["layers.0.attention_norm.weight"][1] for r in ranks] == [(24,)] * 4


@pytest.mark.parametrize("name", ["no module of its own", "norms over all heads", "low rank", "tied and scaled"])
def test_a_model_of_a_user_is_equal_to_one_process(pool, name):
    batches = RandomBatches(users.VOCABULARY, rows=4, seq_len=7, keys=())
    report = verify(partial(users.build, name), SHARDED, batches, steps=2, dtypes=("float64",), pool=pool)
    assert report, report


def test_a_plan_that_is_changed_is_another_model(spmd):
    """The plan is read, and not the wish: without its sequences cut, activations between blocks are whole."""
    assert spmd(2, shapes_between_blocks, True) == [(2, 6, 24)] * 2
    assert spmd(2, shapes_between_blocks, False) == [(2, 11, 24)] * 2


def shapes_between_blocks(sequence_parallel: bool) -> tuple[int, ...]:
    model = parallelize(UNTIED, TP2, techniques={"sequence_parallel": sequence_parallel})
    seen: list[tuple[int, ...]] = []
    model.parts[0].get_submodule("layers.1").register_forward_hook(
        lambda m, a, output: seen.append(tuple(output.shape))
    )
    model.forward_backward(own_rows(model, batch_of(2, 11, 257)))
    assert dataclasses.is_dataclass(model.plan.tensor)
    return seen[0]
