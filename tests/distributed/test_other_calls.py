"""Calls as users of KempnerForge, NeMo AutoModel and Optimus-DL write them: configs of theirs, plans on adapters,
transforms.
"""

from __future__ import annotations

import copy
import types
from dataclasses import replace

import pytest
import torch
from support.odd import VOCAB
from support.ranks import ranks
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from meshwright import ConfigError, Layout, UnsupportedError
from meshwright.distributed import (
    PipelineStageModule,
    apply_expert_parallel,
    apply_fsdp2,
    apply_tensor_parallel,
    build_parallel_model,
    build_stage_module,
    destroy_distributed,
    init_distributed,
)
from meshwright.distributed.parallelizer import (
    translate_to_torch_parallel_style,
)
from meshwright.distributed.transforms import (
    build_model_transform,
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


# --- plans


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


# --- transforms


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
