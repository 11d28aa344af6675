"""The one call of NeMo AutoModel's users: any transformer on any mesh, every gradient right after one backward."""

from __future__ import annotations

import copy
import inspect
from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.families import config_of, on_cpu, some_tokens
from support.heard import heard
from support.ranks import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from meshwright import ConfigError, Layout, UnsupportedError
from meshwright.core.parts import FusedPart
from meshwright.distributed import init_distributed, parallelizer
from meshwright.distributed.mesh import data_position
from meshwright.distributed.order import applied
from meshwright.distributed.parallelize import single_process_mesh
from meshwright.distributed.parallelizer import (
    fsdp2_strategy_parallelize,
    get_hf_tp_shard_plan,
    import_classes_from_paths,
    to_cpu,
)
from meshwright.distributed.tensor import parallel
from meshwright.distributed.transforms import apply_model_transforms, build_model_transform
from meshwright.distributed.weights.parts_tensor import distribute
from meshwright.distributed.weights.shards import PartsShard

KEPT = MixedPrecisionPolicy()
FP32_INSIDE = 1e-6
"""Their norms compute in fp32 whatever the dtype."""

SIGNATURES = {
    "fsdp2_strategy_parallelize": ["model", "device_mesh", "mp_policy", "tp_shard_plan", "offload_policy"],
    "get_hf_tp_shard_plan": ["model"],
    "translate_to_torch_parallel_style": ["style"],
    "import_classes_from_paths": ["class_paths"],
    "to_cpu": ["v"],
}
LAYOUTS = {
    "tp2": Layout(dp_shard=1, tp=2),
    "tp2 x dp2": Layout(dp_shard=2, tp=2),
    "tp2 x replicas": Layout(dp_replicate=2, dp_shard=1, tp=2),
    "tp4": Layout(dp_shard=1, tp=4),
}
NORMS = ("qwen3", "gemma3_text", "olmo2")
"""Families with norms on queries and keys: of each head, and over all of them."""


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signature_is_the_published_one(name):
    found = inspect.signature(getattr(parallelizer, name)).parameters
    assert list(found) == SIGNATURES[name]
    assert all(found[p].default is None for p in ("mp_policy", "tp_shard_plan", "offload_policy") if p in found)


# --- one backward against one process


@cache
def built(family: str) -> nn.Module:
    without_experts = {"first_k_dense_replace": 2} if family == "deepseek_v2" else {}
    return on_cpu(config_of(family, **without_experts)).double()


def model_of(family: str) -> nn.Module:
    return copy.deepcopy(built(family))


def mean_loss(model: nn.Module, rank: int = 0, ranks: int = 1) -> torch.Tensor:
    tokens = some_tokens(4, 11)[rank * 4 // ranks : (rank + 1) * 4 // ranks]
    logits = model(tokens[:, :-1]).logits
    return F.cross_entropy(logits.double().flatten(0, 1), tokens[:, 1:].flatten())


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: to_cpu(p.grad) for name, p in model.named_parameters() if p.grad is not None}


@cache
def of_one_process(family: str) -> dict[str, torch.Tensor]:
    """Every gradient, computed once by each worker."""
    reference = model_of(family)
    mean_loss(reference).backward()
    return gradients(reference)


def errors(family: str, lay_out, layout: Layout) -> dict[str, float]:
    """Of every gradient after one backward, relative."""
    mesh = init_distributed(layout)
    assert mesh is not None
    wanted = of_one_process(family)
    model = lay_out(model_of(family), mesh)
    mean_loss(model, *data_position(mesh)).backward()
    found = gradients(model)
    assert found.keys() == wanted.keys()
    floor = 1e-6 * torch.stack([w.norm() for w in wanted.values()]).norm()
    return {name: ((found[name] - w).norm() / torch.maximum(w.norm(), floor)).item() for name, w in wanted.items()}


def by_one_call(model: nn.Module, mesh) -> nn.Module:
    return fsdp2_strategy_parallelize(model, mesh, mp_policy=KEPT)


def by_its_own_plan(model: nn.Module, mesh) -> nn.Module:
    return fsdp2_strategy_parallelize(model, mesh, KEPT, get_hf_tp_shard_plan(model))


FEED_FORWARD = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
CUT = {"plan": {f"model.layers.*.mlp.{name}": style for name, style in FEED_FORWARD.items()}}


def by_transforms(model: nn.Module, mesh) -> nn.Module:
    return apply_model_transforms(model, {"fully_shard": {}, "tensor_parallel": CUT}, device_mesh=mesh)


def by_replicas(model: nn.Module, mesh) -> nn.Module:
    """``ddp`` beside a tensor axis; what it cannot do there it refuses first."""
    with pytest.raises(ConfigError, match="ddp: static_graph is about DDP's buckets, and beside tp = 2 there are none"):
        build_model_transform("ddp", {"static_graph": True}, device_mesh=mesh).apply(model_of("qwen3"))
    return apply_model_transforms(model, {"ddp": {}, "tensor_parallel": CUT}, device_mesh=mesh)


def by_attention_alone(model: nn.Module, mesh) -> nn.Module:
    """torch's own styles; a whole head behind cut sequences."""
    plan = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    return fsdp2_strategy_parallelize(model, mesh, KEPT, {**plan, "model.layers.*.self_attn.o_proj": RowwiseParallel()})


WAYS = {
    "call": by_one_call,
    "own plan": by_its_own_plan,
    "transforms": by_transforms,
    "replicas": by_replicas,
    "attention": by_attention_alone,
}
CASES = [
    *(("call", family, layout) for family in NORMS for layout in ("tp2", "tp2 x dp2", "tp2 x replicas")),
    ("call", "qwen3", "tp4"),
    ("call", "deepseek_v2", "tp2"),
    ("own plan", "olmo2", "tp2"),
    ("own plan", "gpt_neox", "tp2"),
    ("transforms", "qwen3", "tp2 x dp2"),
    ("replicas", "qwen3", "tp2 x replicas"),
    ("attention", "gemma3_text", "tp2"),
]


@pytest.mark.all
@pytest.mark.parametrize(("way", "family", "layout"), CASES)
@ranks(lambda layout: LAYOUTS[layout].world)
def test_gradients_are_those_of_one_process_after_one_backward(way, family, layout):
    found = errors(family, WAYS[way], LAYOUTS[layout])
    assert found and not {name: error for name, error in found.items() if not error <= FP32_INSIDE}


def without_sums(family: str) -> dict[str, float]:
    cut = parallel.wrap_modules

    def broken(model, plan, group, **options):
        return cut(model, plan, group, **{**options, "sums_at_once": False})

    proven = mock.patch("meshwright.distributed.doors.prove")  # the rehearsal would refuse it
    with proven, mock.patch.object(parallel, "wrap_modules", broken):
        return errors(family, by_one_call, LAYOUTS["tp2"])


@pytest.mark.kills("tensor", mutant="sums left out by the one call")
def test_leaving_out_the_sums_shows_in_the_norms(spmd):
    norms = ("q_norm", "k_norm")
    for family, shared in (
        ("qwen3", norms),
        ("olmo2", norms),
        ("deepseek_v2", ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa")),
    ):
        wrong = {name for name, error in spmd(2, without_sums, family)[0].items() if error > 0.01}
        assert {f"model.layers.0.self_attn.{name}.weight" for name in shared} <= wrong
        assert "model.norm.weight" in wrong and "lm_head.weight" not in wrong


# --- what is applied


@pytest.mark.all
@ranks(4)
def test_what_is_applied():
    mesh = init_distributed(LAYOUTS["tp2 x dp2"])
    assert mesh is not None
    found: dict[str, object] = {}
    model = fsdp2_strategy_parallelize(model_of("llama"), mesh)
    layers = model.get_submodule("model.layers")
    found["row"] = applied(model)
    found["policy"] = model._get_fsdp_state()._mp_policy
    found["units"] = [isinstance(layer, FSDPModule) for layer in layers]
    mean_loss(model, *data_position(mesh))
    found["held"] = [layer._get_fsdp_state()._fsdp_param_group.is_unsharded for layer in layers]
    offloaded = fsdp2_strategy_parallelize(
        model_of("llama"), mesh, KEPT, offload_policy=CPUOffloadPolicy(pin_memory=False)
    )
    found["offload"] = type(offloaded._get_fsdp_state()._fsdp_param_group.offload_policy)
    narrow = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    alone = fsdp2_strategy_parallelize(model_of("llama"), narrow)
    found["tp alone"] = applied(alone), next(alone.parameters()).dtype
    one = Layout(dp_shard=1, tp=4)
    found["explicit"] = applied(fsdp2_strategy_parallelize(model_of("llama"), init_distributed(one), KEPT))
    both = ("tensor_parallel", "fully_shard")
    assert (
        found["row"] == both
        and found["explicit"] == both
        and found["tp alone"] == (("tensor_parallel",), torch.float64)
    )
    policy = found["policy"]
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32), (
        "None means default_mp_policy()"
    )
    assert found["units"] == [True, True] and found["held"] == [False, True], "the last block keeps its parameters"
    assert found["offload"] is CPUOffloadPolicy


def alone() -> tuple[list[str], tuple]:
    mesh, plan = single_process_mesh("cpu"), {"lm_head": "colwise"}
    with heard() as said:
        model = fsdp2_strategy_parallelize(model_of("llama"), mesh, tp_shard_plan=plan, offload_policy=OffloadPolicy())
    return said, applied(model)


def test_where_there_is_nothing_to_do_it_is_said(spmd):
    ((said, rows),) = spmd(1, alone)
    assert rows == () and "tp_shard_plan has nothing to do" in said[-2] and "there is nothing to do" in said[-1]


REFUSED = {
    "model.layers.*.mlp.upp_proj": ("colwise", ConfigError, "Did you mean 'model.layers.*.mlp.up_proj'?"),
    "model.norm": (
        "colwise",
        ConfigError,
        "model.norm (pattern 'model.norm'): this is a norm. Legal here: replicate, ",
    ),
    "model.layers.*.mlp.up_proj": ("colwise", ConfigError, "model.layers.*.mlp.gate_proj: not named"),
    "lm_head": ("colvise", ConfigError, "Did you mean 'colwise'?"),
    "model.layers.*.mlp": ("moe_tp_experts", UnsupportedError, "experts"),
}


@pytest.mark.all
@ranks(2)
def test_a_plan_that_does_not_fit_is_refused_before_anything_is_changed():
    mesh = init_distributed(LAYOUTS["tp2"])
    found = {}
    for pattern, (style, *_) in REFUSED.items():
        model = on_cpu(config_of("llama"))
        try:
            fsdp2_strategy_parallelize(model, mesh, tp_shard_plan={pattern: style})
        except Exception as error:
            found[pattern] = type(error).__name__, str(error)
        assert applied(model) == () and not any(isinstance(p, DTensor) for p in model.parameters())
    for pattern, (_, kind, words) in REFUSED.items():
        name, text = found[pattern]
        assert name == kind.__name__ and words in text.replace("model.layers.0", "model.layers.*"), text


# --- plans that models bring along


@pytest.mark.all
def test_the_plan_of_a_model_has_its_names():
    plan = get_hf_tp_shard_plan(on_cpu(config_of("llama")))
    assert plan["model.layers.*.self_attn.q_proj"].word == "colwise" and plan["lm_head"].word == "colwise_gather_output"
    assert (
        set(plan)
        == set(get_hf_tp_shard_plan(on_cpu(config_of("qwen3_moe")))) - MOE
        | {"model.layers.*.mlp.up_proj"}
        | FEED_FORWARD
    )


MOE = {
    "model.layers.*.mlp.experts",
    "model.layers.*.mlp.experts.gate_up_proj",
    "model.layers.*.mlp.experts.down_proj",
} | {f"model.layers.*.self_attn.{n}_norm" for n in "qk"}
FEED_FORWARD = {"model.layers.*.mlp.gate_proj", "model.layers.*.mlp.down_proj"}


def test_a_plan_is_found_where_there_is_no_model_dot_model():
    neox = get_hf_tp_shard_plan(on_cpu(config_of("gpt_neox", tie_word_embeddings=True)))
    assert neox["gpt_neox.layers.*.attention.dense"].word == "rowwise"
    assert neox["gpt_neox.embed_in"].word == "embedding_rowwise", "tied to the head, which is named"
    base = get_hf_tp_shard_plan(on_cpu(config_of("llama")).model)
    assert base["layers.*.mlp.down_proj"].word == "rowwise" and "lm_head" not in base


def test_a_model_without_a_plan_is_told_that_it_needs_none():
    for model in (on_cpu(config_of("gpt2")), nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="leave tp_shard_plan = None"):
            get_hf_tp_shard_plan(model)


# --- small things


def wholes() -> list[bool]:
    init_distributed(Layout(dp_shard=2, tp=2))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    whole = torch.arange(24.0).view(12, 2)
    packed = PartsShard(0, (FusedPart(8, 2), FusedPart(4, 2)))
    (part,) = (distribute(nn.Parameter(whole), mesh["tp"], packed),)
    block = nn.Module()
    block.weight = part
    torch.distributed.fsdp.fully_shard(block, mesh=mesh["dp_shard"])
    plain = DTensor.from_local(whole.chunk(4)[dist.get_rank()], init_device_mesh("cpu", (4,)), [Shard(0)])
    return [torch.equal(to_cpu(tensor), whole) for tensor in (part, block.weight, plain, whole)]


def test_a_tensor_comes_whole_to_the_cpu(spmd):
    assert all(found == [True] * 4 for found in spmd(4, wholes))
    assert to_cpu("word") == "word" and to_cpu(None) is None


def on_meta() -> str:
    mesh = single_process_mesh("cpu")["tp"]
    try:
        return str(to_cpu(DTensor.from_local(torch.empty(2, device="meta"), mesh, [Shard(0)])))
    except ValueError as error:
        return str(error)


def test_a_dtensor_elsewhere_is_refused(spmd):
    assert "is on meta" in spmd(1, on_meta)[0]


def test_classes_come_by_their_paths():
    assert import_classes_from_paths(["torch.nn.Linear", "torch.nn.modules.linear.Linear"]) == [nn.Linear, nn.Linear]
    for path in ("torch.nn.Linea", "nowhere.at.All", "torch.nn.functional.linear", "Linear"):
        with pytest.raises(ImportError, match=path):
            import_classes_from_paths([path])
