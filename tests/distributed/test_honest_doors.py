"""The public doors: replicas that differ are refused, options act or are refused, one norm is one norm, and calls run
as other systems' documents print them.
"""

from __future__ import annotations

import types
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.odd import VOCAB
from support.ranks import ranks
from support.ranks import told as said
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from meshwright import Layout, parallelize
from meshwright.distributed import (
    DistributedConfig,
    apply_expert_parallel,
    apply_fsdp2,
    apply_tensor_parallel,
    build_pipeline_schedule,
    build_pipeline_stage,
    build_stage_module,
    clip_grad_norm_,
    get_pp_rank,
    init_distributed,
    order,
)
from meshwright.distributed.mesh import data_position
from meshwright.distributed.optimizer import grad_clip
from meshwright.distributed.parallelizer import fsdp2_strategy_parallelize, nvfsdp_strategy_parallelize, to_cpu
from meshwright.distributed.process import agree
from meshwright.distributed.process.workers import WorkerFailed
from meshwright.distributed.transforms import build_model_transform
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig

FP32 = MixedPrecisionPolicy()
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SMALL = DecoderConfig(vocab_size=VOCAB, dim=16, n_layers=4, n_heads=2, n_kv_heads=1, hidden_dim=24, max_seq_len=16)
TOKENS = torch.arange(48).reshape(4, 12) % VOCAB


def llama(seed=None):
    """With a seed, equal on every rank; without one as torch's stream has it, which differs by data rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if seed is not None:
        torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))


# --- replicas


def transformed(name, mesh, model, **config):
    return build_model_transform(name, config, device_mesh=mesh).apply(model)


DOORS = {
    "apply_fsdp2": (Layout(dp_replicate=2, dp_shard=2), lambda m, mesh: apply_fsdp2(m, mesh, FP32)),
    "apply_fsdp2 shards": (Layout(dp_shard=4), lambda m, mesh: apply_fsdp2(m, mesh, FP32)),
    "fsdp2_strategy": (Layout(dp_replicate=2, dp_shard=2), lambda m, mesh: fsdp2_strategy_parallelize(m, mesh, FP32)),
    "no_shard": (
        Layout(dp_shard=4),
        lambda m, mesh: nvfsdp_strategy_parallelize(m, mesh, data_parallel_sharding_strategy="no_shard"),
    ),
    "optim_grads": (
        Layout(dp_shard=4),
        lambda m, mesh: nvfsdp_strategy_parallelize(m, mesh, data_parallel_sharding_strategy="optim_grads"),
    ),
    "fully_shard": (Layout(dp_replicate=2, dp_shard=2), lambda m, mesh: transformed("fully_shard", mesh, m)),
    "parallelize": (Layout(dp_replicate=4, dp_shard=1), lambda m, mesh: parallelize(m, mesh).parts[0]),
    "parallelize shards": (Layout(dp_shard=4), lambda m, mesh: parallelize(m, mesh).parts[0]),
    "ddp": (Layout(dp_replicate=4, dp_shard=1), lambda m, mesh: transformed("ddp", mesh, m)),
}


def through(door, seed):
    layout, lay_out = DOORS[door]
    mesh = init_distributed(layout)
    found = said(lambda: lay_out(llama(seed), mesh))
    if isinstance(found, str):
        return found
    return sum(float(getattr(p, "full_tensor", lambda p=p: p)().detach().double().sum()) for p in found.parameters())


@pytest.mark.all
@pytest.mark.parametrize("door", DOORS)
def test_ranks_that_bring_different_weights_do_not_train_different_models(spmd, door):
    equal = spmd(4, through, door, 3)
    assert len(set(equal)) == 1 and isinstance(equal[0], float)
    differing = spmd(4, through, door, None)
    assert len(set(differing)) == 1
    if door != "ddp":  # torch's gives all ranks the first one's
        assert differing[0].startswith(
            "IntegrityError: the ranks bring different models: model.embed_tokens.weight differs"
        )


@pytest.mark.all
@ranks(4)
def test_ranks_of_the_tensor_axis_must_bring_one_model():
    mesh = init_distributed(Layout(dp_shard=2, tp=2))
    model = llama(dist.get_rank())  # differs on ranks that share one model out
    text = said(lambda: apply_tensor_parallel(model, mesh))
    assert "the ranks bring different models" in text


class Counting(nn.Module):
    """Keeps a number of what it saw: its calls, or its tokens."""

    def __init__(self, *, tokens: bool):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 4)
        self.by_tokens = tokens
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens):
        self.seen += tokens.sum() if self.by_tokens else 1
        return self.embed(tokens)


@ranks(4)
def test_ddp_keeps_buffers_alike_and_refuses_those_that_follow_a_ranks_rows():
    mesh = init_distributed(Layout(dp_replicate=4, dp_shard=1))
    torch.manual_seed(0)
    model = Counting(tokens=False)
    model.seen += dist.get_rank()  # type: ignore[operator]
    model = transformed("ddp", mesh, model)
    for _ in range(3):
        model(torch.full((1, 2), dist.get_rank())).sum().backward()
    seen, refused = float(model.module.seen), said(lambda: transformed("ddp", mesh, Counting(tokens=True)))
    assert seen == 3.0
    assert refused.startswith("UnsupportedError: a forward of Counting keeps state that depends on its rows: seen.")


# --- axes and options


def axes():
    def mesh(*names, shape=(4,)):
        return init_device_mesh("cpu", shape, mesh_dim_names=names or None)

    cp = init_distributed(DistributedConfig(dp_shard=1, cp=4))
    doors = {
        "apply_fsdp2": lambda mesh: apply_fsdp2(llama(0), mesh),
        "apply_tensor_parallel": lambda mesh: apply_tensor_parallel(llama(0), mesh),
        "apply_expert_parallel": lambda mesh: apply_expert_parallel(llama(0), mesh),
        "fully_shard": lambda mesh: transformed("fully_shard", mesh, llama(0)),
        "parallelize": lambda mesh: parallelize(llama(0), mesh),
        "fsdp2_strategy": lambda mesh: fsdp2_strategy_parallelize(llama(0), mesh),
        "nvfsdp": lambda mesh: nvfsdp_strategy_parallelize(llama(0), mesh),
    }
    meshes = {"dp": mesh("dp"), "nobody's": mesh("mine"), "without names": mesh(), "cp": cp}
    meshes["tensor_parallel"] = mesh("data_parallel", "tensor_parallel", shape=(2, 2))
    found = {
        (door, name): said(lambda lay=lay, m=m: lay(m)) for door, lay in doors.items() for name, m in meshes.items()
    }
    return {key: text if isinstance(text, str) else type(text).__name__ for key, text in found.items()}


@pytest.mark.all
def test_an_axis_that_is_not_ours_is_an_error_and_never_ignored(spmd):
    for found in spmd(4, axes):
        for (door, name), text in found.items():
            if name == "tensor_parallel" and door in ("fsdp2_strategy", "nvfsdp"):
                assert text == "FSDPLlamaForCausalLM"
            elif name == "cp" and door == "fully_shard":
                assert text.startswith("ConfigError: the mesh has cp = 4, and nothing cuts rows over it"), text
            elif name == "cp":
                kind = {"parallelize": "ParallelModel", "apply_tensor_parallel": "LlamaForCausalLM"}
                kind["apply_expert_parallel"] = "LlamaForCausalLM"
                assert text == kind.get(door, "FSDPLlamaForCausalLM"), (door, text)
            else:
                assert text.startswith("ConfigError: the mesh"), (door, name, text)
        assert "(dp is dp_shard here)" in found["apply_fsdp2", "dp"]


def loss_of(model, rows):
    logits = model(input_ids=rows, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten())


def worst(model, plain):
    found = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in model.named_parameters()}
    return max(float((found[n] - p.grad).norm() / (p.grad.norm() + 1e-6)) for n, p in plain.named_parameters())


@pytest.mark.all
@ranks(4)
def test_an_option_acts_or_is_refused():
    mesh = init_distributed(Layout(dp_replicate=2, dp_shard=2))
    collective = types.SimpleNamespace(mesh=mesh)
    placements = (
        build_model_transform("fully_shard", None, collective=collective).apply(llama(0)).lm_head.weight.placements
    )
    made = build_model_transform(
        "fully_shard", {"mixed_precision": {"param_dtype": "bfloat16"}}, device_mesh=mesh
    ).apply(llama(0))
    found = {
        "hybrid": said(lambda: transformed("fully_shard", mesh, llama(0), use_hybrid_sharding=False)),
        "unknown": said(lambda: build_model_transform("fully_shard", None, mesh=mesh)),
        "near": said(lambda: build_model_transform("fully_shard", None, device_mehs=mesh)),
        "no mesh in it": said(lambda: build_model_transform("fully_shard", None, collective=object())),
        "keyword": said(lambda: build_model_transform("fully_shard", None, device_mesh=mesh).apply(llama(0), step=3)),
        "collective": str(placements),
        "narrow": str(made(input_ids=TOKENS[:1], use_cache=False).logits.dtype),
    }
    assert found["hybrid"].startswith(
        "ConfigError: fully_shard.use_hybrid_sharding = false shards over all data ranks, and this mesh"
    )
    assert found["unknown"].startswith("ConfigError: FullyShardTransform is given mesh=, which no transform reads.")
    assert "Did you mean 'device_mesh'?" in found["near"]
    assert found["no mesh in it"].startswith("ConfigError: collective= is a object without a mesh")
    assert found["keyword"] == "ConfigError: FullyShardTransform.apply takes the model alone, and was given step"
    assert found["collective"] == "(Replicate(), Shard(dim=0))" and found["narrow"] == "torch.bfloat16"


# --- one norm


def clipped_stages(pp, per_rank):
    mesh = init_distributed(Layout(pp=pp, dp_shard=1))
    rank, stages = get_pp_rank(mesh), pp * per_rank
    modules = [build_stage_module(SMALL, rank + i * pp, stages) for i in range(per_rank)]
    torch.manual_seed(0)
    whole = Decoder(SMALL)
    for module in (whole, *modules):
        for name, p in module.named_parameters():
            p.grad = torch.full_like(p, (sum(map(ord, name)) % 7) / 7)
    given = modules[0] if per_rank == 1 else nn.ModuleList(modules)
    unsaid = said(lambda: clip_grad_norm_(given, 1.0))
    some = said(lambda: clip_grad_norm_(modules[0], 1.0, device_mesh=mesh)) if per_rank > 1 else None
    by_mesh = float(clip_grad_norm_(given, 1e9, device_mesh=mesh))
    for module in modules:
        build_pipeline_stage(module, mesh, "cpu", 1, 4, torch.float32)
    found = float(clip_grad_norm_(given, 1.0))
    wanted = float(nn.utils.clip_grad_norm_(whole.parameters(), 1.0))
    truth = dict(whole.named_parameters())
    worst = max(float((p.grad - truth[n].grad).abs().max()) for module in modules for n, p in module.named_parameters())
    return unsaid, some, by_mesh, found, wanted, worst


@pytest.mark.parametrize(("pp", "per_rank"), ((2, 1), (4, 1), (2, 2)))
def test_the_norm_of_a_pipelines_stages_is_one(spmd, pp, per_rank):
    for unsaid, some, by_mesh, found, wanted, worst in spmd(pp, clipped_stages, pp, per_rank):
        assert unsaid.startswith("ConfigError: this is stage") and "build_pipeline_stage first" in unsaid
        assert some is None or "this rank has 2 of the 4 stages, and clip_grad_norm_ was given 1" in some
        assert found == pytest.approx(wanted, rel=1e-6) and by_mesh == pytest.approx(wanted, rel=1e-6)
        assert worst < 1e-6


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


def partial_gradients():
    mesh = init_distributed(Layout(dp_shard=1, tp=2))["tp"]
    torch.manual_seed(0)
    plain = Normed()
    x = torch.randn(2, 4, 8)
    plain(x).square().sum().backward()
    torch.manual_seed(0)
    model = Normed()
    plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    model(x.chunk(2, dim=1)[dist.get_rank()]).square().sum().backward()  # each rank brings its part of the sequence
    found, wanted = float(clip_grad_norm_(model, 1.0)), float(nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
    whole = {n: p.grad.redistribute(placements=[Replicate()]).to_local() for n, p in model.named_parameters()}
    return found, wanted, max(float((whole[n] - p.grad).abs().max()) for n, p in plain.named_parameters())


def test_gradients_that_are_summands_are_summed_before_clipping(spmd):
    for found, wanted, worst in spmd(2, partial_gradients):
        assert found == pytest.approx(wanted, rel=1e-5) and worst < 1e-6


# --- stage modules


def stage_refusals():
    mesh = init_distributed(Layout(pp=2, dp_shard=1))
    stage = build_stage_module(SMALL, get_pp_rank(mesh), 2)
    other_dtype = said(lambda: build_pipeline_stage(stage, mesh, "cpu", 2, 8))
    too_long = said(lambda: build_pipeline_stage(stage, mesh, "cpu", 2, 17, torch.float32))
    x = torch.zeros(1, 17, dtype=torch.int64) if stage.is_first else torch.zeros(1, 17, SMALL.dim)
    try:
        stage(x)
        longer = ""
    except ValueError as error:
        longer = str(error)
    narrow = apply_fsdp2(
        build_stage_module(SMALL, get_pp_rank(mesh), 2), mesh, MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    )
    build_pipeline_stage(narrow, mesh, "cpu", 2, 8)
    made = build_pipeline_stage(stage, mesh, "cpu", 2, 8, param_dtype=torch.float32)
    schedule = build_pipeline_schedule(
        made, 2, lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten())
    )
    tokens = TOKENS[:, :8]
    losses: list = []
    schedule.step(*([tokens] if stage.is_first else []), target=tokens if stage.is_last else None, losses=losses)
    names = (stage.token_embedding is None, stage.output_head is None)
    return other_dtype, too_long, longer, [float(loss) for loss in losses], names


@pytest.mark.follows("param_dtype=")
def test_a_stage_refuses_messages_of_another_dtype_and_longer_sequences(spmd):
    first, last = spmd(2, stage_refusals)
    for other_dtype, too_long, longer, _, _ in (first, last):
        assert other_dtype.startswith(
            "ConfigError: param_dtype = torch.bfloat16, but the stage computes in torch.float32, and ranks that expect"
            " messages of other sizes abort or hang: give param_dtype=torch.float32, or shard the stage first with"
        )
        assert too_long == "ConfigError: seq_len = 17 is longer than the model's max_seq_len = 16"
        assert longer == "a sequence of 17 tokens is longer than the model's max_seq_len = 16"
    assert len(last[3]) == 2 and all(loss == pytest.approx(4, abs=2) for loss in last[3])
    assert first[4] == (False, True) and last[4] == (True, False)


# --- a NaN on one replica


def local(tensor):
    return tensor.detach()._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def poisoned(layout, rank):
    """A NaN that one rank's gradient gets behind the reduction: (skipped, norm, weights as they were) of each rank,
    then of a good step.
    """
    torch.manual_seed(0)
    mesh = init_distributed(layout)
    model = parallelize(SMALL, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for spoilt in (True, False):
        before = [p.detach().clone() for p in model.parameters()]
        model.forward_backward({"tokens": TOKENS[:2], "labels": TOKENS[:2]})
        if spoilt and dist.get_rank() == rank:
            local(next(p.grad for name, p in model.named_parameters() if "norm" in name)).view(-1)[:1] = torch.nan
        result = model.optimizer_step(optimizer, 1.0)
        same = all(torch.equal(local(a), local(p)) for a, p in zip(before, model.parameters(), strict=True))
        seen.append((result.skipped, str(result.grad_norm), same))
    model.audit()
    return seen


REPLICAS = {
    "ddp": Layout(dp_replicate=2, dp_shard=1),
    "hsdp": Layout(dp_replicate=2, dp_shard=2),
    "tp": Layout(tp=2, dp_shard=1),
    "tp and ddp": Layout(tp=2, dp_shard=1, dp_replicate=2),
    "pp and ddp": Layout(pp=2, dp_shard=1, dp_replicate=2),
    "fsdp": Layout(dp_shard=2),
}


def world_of(layout):
    return layout.pp * layout.dp_replicate * layout.dp_shard * layout.tp


@pytest.mark.parametrize("at", REPLICAS)
def test_a_gradient_that_breaks_behind_the_reduction_skips_the_step_on_all(spmd, at):
    layout = REPLICAS[at]
    for bad, good in spmd(world_of(layout), poisoned, layout, world_of(layout) - 1):
        assert bad == (True, "nan", True)
        assert good[0] is False and good[1] != "nan" and not good[2]


# --- broken on purpose


def sees_a_fault(fault):
    """Whether a door that is broken so is seen to be."""
    with FAULTS[fault][0]():
        return FAULTS[fault][1]()


def different_replicas():
    return isinstance(through("apply_fsdp2", None), str)


def stage_norms():
    _, _, _, found, wanted, _ = clipped_stages(2, 1)
    return found == pytest.approx(wanted, rel=1e-6)


def summands():
    found, wanted, _ = partial_gradients()
    return found == pytest.approx(wanted, rel=1e-5)


def skipping():
    return poisoned(REPLICAS["ddp"], 1)[0] == (True, "nan", True)


def as_copies(parameters):
    """Summands taken for copies."""
    axes = lambda g: tuple(g.device_mesh.get_group(0) for place in g.placements if isinstance(place, Shard))  # noqa: E731
    return [grad_clip.GradientPart(local(p.grad), axes(p.grad)) for p in parameters]


FAULTS = {
    "weights that ranks bring are not compared": (
        lambda: patch.object(order, "refuse_unequal", lambda *a: None),
        different_replicas,
        4,
    ),
    "a stage clips by its own norm": (
        lambda: patch.object(grad_clip, "PipelineStageModule", ()),  # nothing is a stage
        stage_norms,
        2,
    ),
    "summands are not summed": (lambda: patch.object(grad_clip, "local_gradients", as_copies), summands, 2),
    "each copy skips by itself": (
        lambda: patch.object(agree, "largest_of_copies", lambda norm, groups: norm),
        skipping,
        2,
    ),
}
"""Fault -> (how the library is broken, whether the promise holds, ranks)."""


@pytest.mark.kills("doors", "fault")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(spmd, fault):
    try:
        assert not all(spmd(FAULTS[fault][2], sees_a_fault, fault))
    except WorkerFailed as failed:
        assert "differs between ranks that should hold the same values" in str(failed), "the audit sees it"


# --- weights of tokens, and losses of the user's


def weighted(layout, techniques):
    mesh = init_distributed(layout)
    model = parallelize(SMALL, mesh or layout, techniques=techniques)
    rank, ranks = data_position(mesh)
    rows = len(TOKENS) // ranks
    batch = {k: v[rank * rows : (rank + 1) * rows] for k, v in weighted_batch().items()}
    found = model.forward_backward(batch)
    gradients = {
        n: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
        for n, p in model.named_parameters()
    }
    return (
        float(found),
        found.tokens,
        float(model.evaluate(batch)),
        gradients,
        {n: to_cpu(p.detach()) for n, p in model.named_parameters()},
    )


def weighted_batch():
    weights = torch.rand(TOKENS.shape, generator=torch.Generator().manual_seed(2))
    weights[1, 3:5] = 0
    return {"tokens": TOKENS, "labels": TOKENS.roll(-1, 1), "loss_mask": weights}


WEIGHTED = {
    "one": (Layout(dp_shard=1), {}),
    "fsdp": (Layout(dp_shard=2), {}),
    "ddp in chunks": (Layout(dp_replicate=2, dp_shard=1), {"loss_chunks": 3}),
    "tp": (Layout(tp=2, dp_shard=1), {}),
    "tp in chunks": (Layout(tp=2, dp_shard=2), {"loss_chunks": 2}),
    "pp": (Layout(pp=2, dp_shard=1), {}),
}


@pytest.mark.parametrize("at", WEIGHTED)
def test_a_float_mask_weighs(spmd, at):
    layout, techniques = WEIGHTED[at]
    techniques = {"precision": {"master": "float64"}} | techniques
    batch, plain = weighted_batch(), Decoder(SMALL).double()
    (first, *_) = spmd(1, weighted, *WEIGHTED["one"][:1], techniques)
    plain.load_state_dict(first[-1])
    each = F.cross_entropy(plain(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), reduction="none")
    mask = batch["loss_mask"].flatten().double()
    truth = (each * mask).sum() / mask.sum()
    truth.backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    for loss, tokens, evaluated, gradients, _ in spmd(world_of(layout), weighted, layout, techniques):
        assert tokens == int((mask > 0).sum())
        assert loss == pytest.approx(truth.item(), rel=1e-12) and evaluated == pytest.approx(truth.item(), rel=1e-12)
        for name, gradient in gradients.items():
            assert float((gradient - wanted[name]).norm()) <= 1e-10 * float(wanted[name].norm()) + 1e-14, name


@ranks(1)
def test_a_loss_that_is_no_sum_is_refused():
    def summed(logits, labels):
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, logits, labels):
            return summed(logits, labels) * self.scale

    batch = {"tokens": TOKENS, "labels": TOKENS, "loss_mask": torch.full(TOKENS.shape, 0.5)}
    told = {
        "mean": lambda: parallelize(SMALL, loss_fn=lambda x, y: F.cross_entropy(x.flatten(0, -2), y.flatten())),
        "module": lambda: parallelize(SMALL, loss_fn=nn.CrossEntropyLoss()),
        "not a sum": lambda: parallelize(SMALL, loss_fn=lambda x, y: summed(x, y) + 7),
        "parameters": lambda: parallelize(SMALL, loss_fn=Scaled()),
        "its method": lambda: parallelize(SMALL, loss_fn=Scaled().forward),
        "weights": lambda: parallelize(SMALL, loss_fn=summed).forward_backward(batch),
        "negative": lambda: parallelize(SMALL).forward_backward(batch | {"loss_mask": torch.full(TOKENS.shape, -0.5)}),
        "not a number": lambda: parallelize(SMALL).forward_backward(
            batch | {"loss_mask": torch.full(TOKENS.shape, torch.nan)}
        ),
        "sum": lambda: parallelize(SMALL, loss_fn=summed),
    }
    found = {name: said(action) for name, action in told.items()}
    found = {name: text if isinstance(text, str) else type(text).__name__ for name, text in found.items()}
    assert "it is a mean, and parallelize wants the SUM" in found["mean"]
    assert "for the same rows twice: it does not add up over rows" in found["not a sum"]
    assert "loss_fn is a Scaled with parameters that are trained (scale)" in found["parameters"]
    assert found["its method"] == found["parameters"]
    assert "a loss_fn of your own is given logits and labels alone" in found["weights"]
    assert "each must be finite, and 0 or more" in found["negative"] and "each must be finite" in found["not a number"]
    assert found["sum"] == "ParallelModel"
