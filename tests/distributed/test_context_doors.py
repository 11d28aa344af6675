"""Loops of users' own cut rows over ranks, behind every door: gradients are those of one process with plain torch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.own_loops import batch_of, by_mean, by_sum, step, whole_gradients, worst
from support.ranks import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from meshwright import Layout
from meshwright.core.errors import MeshwrightError
from meshwright.core.names import clean
from meshwright.distributed import (
    DistributedConfig,
    apply_ac,
    apply_context_parallel,
    apply_expert_parallel,
    apply_float8,
    apply_fsdp2,
    apply_tensor_parallel,
    build_parallel_model,
    context_parallel_rows,
    get_cp_mesh,
    get_dp_mesh,
    get_fsdp_mesh,
    init_distributed,
)
from meshwright.distributed.parallelizer import fsdp2_strategy_parallelize, nvfsdp_strategy_parallelize
from meshwright.distributed.transforms import apply_model_transforms
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig, MoEConfig

DECODER = DecoderConfig(vocab_size=61, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=24, max_seq_len=64)
EXPERTS = replace(DECODER, moe=MoEConfig(n_experts=4, top_k=2))
PLAIN = MixedPrecisionPolicy()


def decoder(config: DecoderConfig = DECODER) -> Decoder:
    torch.manual_seed(0)
    made = Decoder(config).double()
    for module in made.modules():
        if (initialise := getattr(module, "reset_parameters", None)) is not None:
            initialise()
    return made


def fsdp2(model: nn.Module, mesh: Any) -> nn.Module:
    return apply_fsdp2(model, mesh, PLAIN)


def recomputed(model: nn.Module, mesh: Any) -> nn.Module:
    return fsdp2(apply_ac(apply_context_parallel(model, mesh, "ring"), "full"), mesh)


def tensor_first(model: nn.Module, mesh: Any) -> nn.Module:
    return fsdp2(apply_tensor_parallel(model, mesh), mesh)


def experts_first(model: nn.Module, mesh: Any) -> nn.Module:
    return fsdp2(apply_expert_parallel(model, mesh), mesh)


FUNCTIONS = {
    "cp 2": (DECODER, Layout(dp_shard=1, cp=2), fsdp2),
    "fsdp 2, cp 2": (DECODER, Layout(dp_shard=2, cp=2), fsdp2),
    "hsdp, cp 2": (DECODER, Layout(dp_replicate=2, dp_shard=1, cp=2), fsdp2),
    "cp 2, recomputed": (DECODER, Layout(dp_shard=1, cp=2), recomputed),
    "tp 2, cp 2": (DECODER, Layout(dp_shard=1, cp=2, tp=2), tensor_first),
    "ep 2, cp 2": (EXPERTS, Layout(dp_shard=2, cp=2, ep=2), experts_first),
}


def loop(
    config: DecoderConfig, layout: Layout, lay_out: Callable, loss_of: Callable = by_sum, inside: bool = True, **options
) -> float:
    mesh = init_distributed(DistributedConfig(**vars(layout)))
    model = decoder(config)
    batch = batch_of(config.vocab_size, **options)
    expected = whole_gradients(copy.deepcopy(model), batch)
    model = lay_out(model, mesh)
    step(model, mesh, batch, loss_of, inside=inside)
    return worst(model, expected)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "behind"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_a_loop_give_the_gradients_of_one_process(spmd, name, inside):
    config, layout, lay_out = FUNCTIONS[name]
    assert max(spmd(layout.resolve(layout.world).world, loop, config, layout, lay_out, by_sum, inside)) < 1e-10


def chain(*names: str) -> Callable:
    configs = {"activation_checkpoint": {}, "ddp": {}, "fully_shard": {}, "tensor_parallel": {}}
    configs |= {"context_parallel": {"method": "ring"}, "compile": {"compile_kwargs": {"backend": "aot_eager"}}}
    return lambda model, mesh: apply_model_transforms(model, {name: configs[name] for name in names}, device_mesh=mesh)


TRANSFORMS = {
    "fully_shard": (Layout(dp_shard=2, cp=2), ("fully_shard", "activation_checkpoint", "context_parallel")),
    "compiled": (Layout(dp_shard=1, cp=2), ("fully_shard", "compile", "context_parallel")),
    "ddp": (Layout(dp_replicate=2, dp_shard=1, cp=2), ("ddp", "context_parallel")),
    "ddp on one replica": (Layout(dp_shard=1, cp=2), ("ddp", "context_parallel", "activation_checkpoint")),
    "ddp and tensor_parallel": (Layout(dp_shard=1, cp=2, tp=2), ("ddp", "context_parallel", "tensor_parallel")),
}


def transformed(layout: Layout, names: tuple[str, ...]) -> float:
    return loop(DECODER, layout, chain(*names), by_sum, False)


@pytest.mark.first("ddp on one replica")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_and_a_loop_give_the_gradients_of_one_process(spmd, name):
    layout, names = TRANSFORMS[name]
    assert max(spmd(layout.world, transformed, layout, names)) < 1e-10


def refusal(lay_out: Callable, layout: Layout) -> str:
    mesh = init_distributed(DistributedConfig(**vars(layout)))
    try:
        lay_out(mesh)
    except MeshwrightError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["ddp", "fully_shard"])
@ranks(2)
def test_a_chain_that_cuts_no_rows_on_such_a_mesh_is_refused(name):
    said = refusal(lambda mesh: chain(name)(decoder(), mesh), Layout(dp_shard=1, cp=2))
    assert said == (
        "the mesh has cp = 2, and nothing cuts rows over it: put the transform context_parallel into the chain, or"
        " make the mesh with cp = 1"
    )


# --- NeMo AutoModel's


def nemo_mesh(*sizes: int) -> Any:
    """The mesh as its users build it: five axes, and three names for several of them together."""
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    mesh["dp_replicate", "dp_shard"]._flatten(mesh_dim_name="dp")
    mesh["dp_shard", "cp"]._flatten(mesh_dim_name="dp_shard_cp")
    mesh["dp_replicate", "dp_shard", "cp"]._flatten(mesh_dim_name="dp_cp")
    return mesh


def older_mesh(*sizes: int) -> Any:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data_parallel", "context_parallel", "tensor_parallel"))
    mesh["data_parallel", "context_parallel"]._flatten(mesh_dim_name="dp_cp")
    return mesh


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 61}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).double()


def no_shard(model: nn.Module, mesh: Any) -> nn.Module:
    made = nvfsdp_strategy_parallelize(model, mesh, data_parallel_sharding_strategy="no_shard")
    assert isinstance(made, nn.Module)
    return made


def checkpointed(model: Any, mesh: Any) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return fsdp2_strategy_parallelize(model, mesh, PLAIN)


HUGGING_FACE: dict[str, tuple] = {
    "cp 2": (nemo_mesh, (1, 1, 1, 2, 1), lambda model, mesh: fsdp2_strategy_parallelize(model, mesh, PLAIN)),
    "fsdp 2, cp 2": (nemo_mesh, (1, 1, 2, 2, 1), lambda model, mesh: fsdp2_strategy_parallelize(model, mesh, PLAIN)),
    "cp 2, tp 2": (nemo_mesh, (1, 1, 1, 2, 2), lambda model, mesh: fsdp2_strategy_parallelize(model, mesh, PLAIN)),
    "cp 2, recomputed by the model": (nemo_mesh, (1, 1, 1, 2, 1), checkpointed),
    "nvfsdp 2, cp 2": (nemo_mesh, (1, 1, 2, 2, 1), nvfsdp_strategy_parallelize),
    "nvfsdp without shards": (nemo_mesh, (1, 2, 1, 2, 1), no_shard),
    "older names": (older_mesh, (2, 2, 1), lambda model, mesh: fsdp2_strategy_parallelize(model, mesh, PLAIN)),
}


@pytest.mark.all
@pytest.mark.parametrize("name", HUGGING_FACE)
@ranks(lambda name: math.prod(HUGGING_FACE[name][1]))
def test_a_mesh_and_a_loop_of_automodel_give_the_gradients_of_one_process(name):
    build, sizes, lay_out = HUGGING_FACE[name]
    init_distributed(Layout())
    mesh = build(*sizes)
    model = llama()
    batch = batch_of(61, key="input_ids")
    expected = whole_gradients(copy.deepcopy(model), batch)
    model = lay_out(model, mesh)
    rows = mesh["data_parallel"] if build is older_mesh else mesh["dp"]
    index, ranks = rows.get_local_rank(), rows.size()
    share = len(batch["labels"]) // ranks
    mine = {key: value[index * share : (index + 1) * share] for key, value in batch.items()}
    with context_parallel_rows(model, mine) as own:
        labels = own.pop("labels")
        count = torch.tensor([(batch["labels"] != -100).sum()])
        loss = by_sum(model(**own).logits, labels, mesh["dp_cp"].size(), int(count))
    loss.backward()
    assert worst(model, expected) < 1e-6, "computed in fp32 inside"


# --- the composition


@pytest.mark.all
@ranks(4)
def test_the_whole_composition_gives_the_gradients_of_one_process():
    mesh = init_distributed(DistributedConfig(dp_shard=1, cp=2, tp=2))
    policy = MixedPrecisionPolicy(torch.float64, torch.float64)
    options: dict[str, Any] = {"ac_mode": "full", "mp_policy": policy}
    model = build_parallel_model(DECODER, "cpu", mesh, **options)
    names = dict(model.named_parameters())
    whole = Decoder(DECODER)
    whole.load_state_dict({clean(name): p.full_tensor().float() for name, p in names.items()}, strict=False)
    batch = batch_of(61)
    expected = whole_gradients(whole.double(), batch)
    step(model, mesh, batch)
    assert worst(model, expected) < 1e-6, "parameters rest in fp32"


@ranks(4)
def test_meshes_of_such_a_layout():
    mesh = init_distributed(DistributedConfig(dp_replicate=2, dp_shard=1, cp=2))
    fsdp, cp = get_fsdp_mesh(mesh), get_cp_mesh(mesh)
    whole = init_distributed(DistributedConfig(dp_shard=2, cp=2))
    both = get_fsdp_mesh(whole)
    assert fsdp is not None and cp is not None and both is not None
    found = {
        "cp": (cp.mesh_dim_names, cp.size()),
        "fsdp of one shard": (fsdp.mesh_dim_names, fsdp.size()),
        "fsdp": (both.mesh_dim_names, both.size()),
        "dp": (get_dp_mesh(mesh).mesh_dim_names, get_dp_mesh(mesh).size()),
    }
    assert found == {
        "cp": (("cp",), 2),
        "fsdp of one shard": (("cp",), 2),
        "fsdp": (("dp_shard_cp",), 4),
        "dp": (("dp_replicate",), 2),
    }


# --- the loss


@pytest.mark.all
def test_the_mean_of_means_is_the_mean_where_every_rank_has_as_many_labels(spmd):
    case = (DECODER, Layout(dp_shard=1, cp=2), fsdp2)
    assert max(spmd(2, loop, *case, by_mean, True)) > 1e-3, "the last token of a row has no label"
    assert max(spmd(2, mean_of_all, *case)) < 1e-10


def mean_of_all(config: DecoderConfig, layout: Layout, lay_out: Callable) -> float:
    mesh = init_distributed(DistributedConfig(**vars(layout)))
    model = decoder(config)
    batch = batch_of(config.vocab_size)
    batch["labels"] = batch["labels"].clamp(min=0)
    expected = whole_gradients(copy.deepcopy(model), batch)
    model = lay_out(model, mesh)
    step(model, mesh, batch, by_mean)
    return worst(model, expected)


@pytest.mark.all
@pytest.mark.parametrize("length", [22, 23])
@ranks(4)
def test_rows_that_do_not_divide_are_weighed_by_their_labels(length):
    assert loop(DECODER, Layout(dp_shard=1, cp=4), fsdp2, by_sum, False, length=length) < 1e-10


@pytest.mark.all
@ranks(2)
def test_float8_comes_before_rows_are_cut():
    mesh = init_distributed(DistributedConfig(**vars(Layout(dp_shard=1, cp=2))))
    config = replace(DECODER, dim=32, hidden_dim=32)
    torch.manual_seed(0)
    plain = Decoder(config)
    batch = batch_of(61)
    expected = whole_gradients(copy.deepcopy(plain), batch)
    model = fsdp2(apply_float8(plain, False), mesh)
    step(model, mesh, batch)
    error, layers = worst(model, expected), sum(type(module).__name__ == "Float8Linear" for module in model.modules())
    assert 1e-4 < error < 0.5 and layers == 14
