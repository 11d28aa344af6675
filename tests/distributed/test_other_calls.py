"""Calls as users of KempnerForge, NeMo AutoModel and Optimus-DL write them: configs of theirs, plans on adapters,
transforms.
"""

from __future__ import annotations

import copy
import logging
import types
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from support.adapters import adapted
from support.families import some_tokens
from support.odd import VOCAB, Odd
from support.ranks import ranks
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from meshwright import ConfigError, Layout, UnsupportedError
from meshwright.comparison.equality import relative_errors
from meshwright.distributed import (
    PipelineStageModule,
    apply_expert_parallel,
    apply_fsdp2,
    apply_tensor_parallel,
    build_parallel_model,
    build_pipeline_schedule,
    build_pipeline_stage,
    build_stage_module,
    destroy_distributed,
    get_pp_rank,
    init_distributed,
)
from meshwright.distributed.mesh import data_position
from meshwright.distributed.parallelizer import (
    fsdp2_strategy_parallelize,
    get_hf_tp_shard_plan,
    nvfsdp_strategy_parallelize,
    to_cpu,
    translate_to_torch_parallel_style,
)
from meshwright.distributed.transforms import (
    FullyShardTransform,
    FullyShardTransformConfig,
    MixedPrecisionConfig,
    ModelTransform,
    ModelTransformConfig,
    apply_model_transforms,
    build_model_transform,
    register_model_transform,
)
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig

FP32 = MixedPrecisionPolicy()
SMALL = DecoderConfig(VOCAB, 16, 3, n_heads=2, n_kv_heads=2, hidden_dim=24, max_seq_len=16)
TOKENS = torch.arange(48).reshape(4, 12) * 7 % VOCAB


def said(action) -> str:
    try:
        return f"accepted: {type(action()).__name__}"
    except (ConfigError, UnsupportedError) as error:
        return f"{type(error).__name__}: {error}"


def mean(logits, labels):
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def gradients(model):
    return {name: to_cpu(p.grad) for name, p in model.named_parameters() if p.grad is not None}


# --- order and numbers


@pytest.mark.all
@ranks(2)
def test_a_technique_that_comes_too_late_is_named():
    """FSDP2 cannot be copied, so the order is looked at before the model is measured."""
    mesh = init_distributed(Layout(dp_shard=1, tp=2))
    torch.manual_seed(0)
    sharded = apply_fsdp2(Decoder(SMALL), mesh, FP32)
    experts = init_distributed(Layout(dp_shard=2, ep=2))
    found = (
        said(lambda: apply_tensor_parallel(sharded, mesh)),
        said(lambda: build_model_transform("tensor_parallel", None, device_mesh=mesh).apply(sharded)),
        said(lambda: apply_expert_parallel(sharded, experts)),
    )
    for text, name in zip(found, ("tensor_parallel", "tensor_parallel", "expert_parallel"), strict=True):
        assert text.startswith(f"ConfigError: {name} must come before fully_shard"), text


@ranks(2)
def test_too_few_microbatches_are_refused_with_the_number():
    mesh = init_distributed(Layout(pp=2, dp_shard=1))
    stage = build_pipeline_stage(build_stage_module(SMALL, get_pp_rank(mesh), 2), mesh, "cpu", 1, 8, torch.float32)
    none, one, two = [said(lambda n=n: build_pipeline_schedule(stage, n, mean)) for n in (0, 1, 2)]
    assert none == "ConfigError: 1f1b on 2 ranks takes 2 microbatches or more, not 0"
    assert one == "ConfigError: 1f1b on 2 ranks takes 2 microbatches or more, not 1" and two.startswith("accepted")


# --- configs of another system


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Calls on one process make a mesh of one."""
    yield
    destroy_distributed()


def forge_config(**changes):
    fields = {
        "dim": 16,
        "n_layers": 3,
        "n_heads": 2,
        "n_kv_heads": None,
        "vocab_size": VOCAB,
        "ffn_hidden_dim": 24,
        "max_seq_len": 16,
    }
    fields |= {
        "norm_type": "rmsnorm",
        "activation": "silu",
        "tie_embeddings": False,
        "num_experts": 0,
        "qk_norm": False,
    }
    return types.SimpleNamespace(**fields | changes)


@pytest.mark.all
def test_a_model_config_of_kempnerforge_is_read():
    assert build_stage_module(forge_config(), 0, 2).config == SMALL
    tied = PipelineStageModule(forge_config(tie_embeddings=True), 0, 1, (0, 3))
    assert tied.config == replace(SMALL, tied_embeddings=True) and tied.head is not None and tied.embedding is not None
    assert tied.head.weight is tied.embedding.weight
    model = build_parallel_model(
        forge_config(computed_ffn_hidden_dim=256, ffn_hidden_dim=None), "cpu", param_dtype=torch.float32
    )
    assert dict(model.named_parameters())["layers.0.feed_forward.w_up.weight"].shape == (256, 16)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    (
        ("norm_type", "layernorm", "norm_type = rmsnorm alone"),
        ("activation", "gelu", "activation = silu alone"),
        ("init_std", 0.1, "init_std = 0.02 alone"),
        ("num_experts", 4, "moe=MoEConfig"),
        ("vision_config", "clip", "apply_fsdp2"),
        ("ffn_hidden_dim", None, "hidden_dim of a DecoderConfig"),
    ),
)
def test_what_our_decoder_has_not_is_refused_by_its_field(field, value, words):
    assert field in said(lambda: build_stage_module(forge_config(**{field: value}), 0, 2))
    assert words in said(lambda: build_parallel_model(forge_config(**{field: value}), "cpu"))


def test_a_field_by_another_systems_name_is_told_ours():
    with pytest.raises(ValueError, match="no field tie_embeddings, ffn_hidden_dim: write tied_embeddings, hidden_dim"):
        DecoderConfig(VOCAB, 16, 3, 2, 2, max_seq_len=16, tie_embeddings=True, ffn_hidden_dim=24)  # type: ignore[call-arg]
    assert copy.deepcopy(SMALL) == SMALL == replace(SMALL)


def test_a_stage_says_what_it_has(caplog):
    with caplog.at_level(logging.INFO, logger="meshwright"):
        for rank in range(3):
            build_stage_module(SMALL, rank, 3)
    assert [record.getMessage() for record in caplog.records] == [
        "stage 0 of 3: layers 0 to 0, embedding",
        "stage 1 of 3: layers 1 to 1",
        "stage 2 of 3: layers 2 to 2, norm and head",
    ]


# --- plans


@pytest.mark.all
@ranks(2)
def test_a_models_own_plan_names_layers_with_adapters():
    mesh = init_distributed(Layout(dp_shard=1, tp=2))

    def loss(model):
        tokens = some_tokens(4, 11)
        return mean(model(input_ids=tokens[:, :-1]).logits, tokens[:, 1:])

    plain = adapted("llama", ["q_proj", "v_proj"]).double()
    loss(plain).backward()
    found = {}
    for name, lay_out in {
        "fsdp2": lambda m: fsdp2_strategy_parallelize(m, mesh, FP32, get_hf_tp_shard_plan(m)),
        "nvfsdp": lambda m: nvfsdp_strategy_parallelize(m, mesh, tp_shard_plan=get_hf_tp_shard_plan(m)),
    }.items():
        model = lay_out(adapted("llama", ["q_proj", "v_proj"]).double())
        loss(model).backward()
        cut = dict(model.named_parameters())["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"]
        found[name] = max(relative_errors(gradients(model), gradients(plain)).values()), str(cut.placements)
    for error, placements in found.values():
        assert error < 1e-6 and "Shard(dim=0)" in placements


def test_styles_are_torchs_too():
    kinds = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel, "sequence_parallel": SequenceParallel}
    for word, kind in kinds.items():
        style = translate_to_torch_parallel_style(word)
        assert [isinstance(style, other) for other in kinds.values()] == [other is kind for other in kinds.values()]
    laid = {
        word: translate_to_torch_parallel_style(word) for word in ("colwise", "colwise_rep", "rowwise", "rowwise_rep")
    }
    assert [laid[word].output_layouts for word in ("colwise", "colwise_rep")] == [(Shard(-1),), (Replicate(),)]  # type: ignore[attr-defined]
    assert [laid[word].input_layouts for word in ("rowwise", "rowwise_rep")] == [(Shard(-1),), (Replicate(),)]  # type: ignore[attr-defined]


@pytest.mark.all
@ranks(2)
def test_a_call_without_a_policy_computes_in_one_dtype_however_many_data_ranks():
    found = []
    for layout in (Layout(dp_shard=2, tp=1), Layout(dp_shard=1, tp=2)):
        torch.manual_seed(0)
        model = fsdp2_strategy_parallelize(Decoder(SMALL), init_distributed(layout))
        found.append((str(model(TOKENS).dtype), str(next(model.parameters()).dtype)))
    assert [dtype for dtype, _ in found] == ["torch.bfloat16"] * 2


# --- transforms


@dataclass
class Marked(ModelTransformConfig):
    size: int = 1


@register_model_transform("marked", Marked)
class Mark(ModelTransform):
    def apply(self, model, **kwargs):
        model.mark = self.config.size
        return model


def test_configs_have_one_base_and_can_be_changed():
    config = Marked()
    config.size = 5
    assert apply_model_transforms(Odd(), {"marked": config}).mark == 5
    shard = FullyShardTransformConfig(mixed_precision=MixedPrecisionConfig())
    assert isinstance(shard, ModelTransformConfig) and shard.mixed_precision is not None
    shard.mixed_precision.param_dtype = "int8"
    assert "mixed_precision.param_dtype = 'int8'" in said(lambda: FullyShardTransform(shard).apply(Odd()))


@ranks(1)
def test_one_process_gets_its_model_back_unless_something_acts():
    plain = build_model_transform("fully_shard").apply(model := Odd())
    narrow = build_model_transform("fully_shard", {"mixed_precision": {"param_dtype": "bfloat16"}}).apply(Odd())
    with plain.accumulation_context(False):
        pass
    assert (plain is model, isinstance(plain, FSDPModule), isinstance(narrow, FSDPModule)) == (True, False, True)


@pytest.mark.all
@ranks(4)
def test_a_collective_with_replicas_is_flattened_where_asked():
    mesh = init_distributed(Layout(dp_replicate=2, dp_shard=2))
    torch.manual_seed(0)
    config = FullyShardTransformConfig(use_hybrid_sharding=False)
    model = FullyShardTransform(config, types.SimpleNamespace(mesh=mesh), torch.device("cpu")).apply(Decoder(SMALL))
    place, ranks = data_position(mesh)
    mean(model(TOKENS[place : place + 1]), TOKENS[place : place + 1]).backward()
    torch.manual_seed(0)
    plain = Decoder(SMALL)
    mean(plain(TOKENS), TOKENS).backward()
    errors = relative_errors(gradients(model), gradients(plain))
    error, shape = max(errors.values()), tuple(dict(model.named_parameters())["head.weight"].to_local().shape)
    assert error < 1e-5 and shape[0] <= -(-VOCAB // 4) and ranks == 4


def test_classes_to_recompute_by_name_alone():
    from meshwright.distributed.order import applied

    config = {"layer_classes": ["FeedForward"]}
    assert applied(build_model_transform("activation_checkpoint", config).apply(Decoder(SMALL))) == (
        "activation_checkpoint",
    )
    wrong = build_model_transform("activation_checkpoint", {"layer_classes": ["FeedForwards"]})
    assert "no module of Decoder is of the class 'FeedForwards'. Did you mean 'FeedForward'?" in said(
        lambda: wrong.apply(Decoder(SMALL))
    )
