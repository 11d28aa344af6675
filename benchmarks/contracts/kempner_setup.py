"""KempnerForge's ``distributed``: names, process group, meshes, configs."""

from __future__ import annotations

import inspect
import random
from importlib import import_module

import numpy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from tried import IDS, SMALL, Here, Items, against_one, environment, refused, same, whole

import meshwright.distributed as distributed
from meshwright import parallelize
from meshwright.distributed import (
    DistributedConfig,
    PipelineStageModule,
    apply_fsdp2,
    build_parallel_model,
    build_stage_module,
    compute_layer_assignment,
    default_mp_policy,
    destroy_distributed,
    get_dp_mesh,
    get_pp_mesh,
    get_pp_rank,
    get_pp_size,
    get_tp_mesh,
    get_world_info,
    has_dp_mesh,
    init_distributed,
    is_rank_zero,
)
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig

ITEMS = Items("K", "KempnerForge distributed")
NAMES = """apply_ac apply_fsdp2 apply_tensor_parallel build_pipeline_schedule build_pipeline_stage build_stage_module
clip_grad_norm_
        compute_layer_assignment default_mp_policy destroy_distributed get_dp_mesh get_pp_mesh get_pp_rank get_pp_size
    get_tp_mesh
    get_world_info init_distributed is_rank_zero""".split()
PLACES = {
    "expert_parallel": ("apply_expert_parallel",),
    "parallel": ("apply_ac", "apply_fsdp2", "build_parallel_model", "default_mp_policy", "get_dp_mesh", "has_dp_mesh"),
    "pipeline_parallel": (
        "PipelineStageModule",
        "build_pipeline_schedule",
        "build_pipeline_stage",
        "build_stage_module",
        "get_pp_mesh",
    ),
    "setup": ("destroy_distributed", "get_dp_mesh", "get_world_info", "init_distributed", "is_rank_zero"),
    "tensor_parallel": ("apply_tensor_parallel", "get_tp_mesh"),
    "utils": ("clip_grad_norm_",),
}


@ITEMS(1, "18 names come from one package")
def names():
    missing = [name for name in NAMES if not callable(getattr(distributed, name, None))]
    same(missing, [])
    return f"{len(NAMES)} names"


@ITEMS(2, "modules expert_parallel, parallel, pipeline_parallel, setup, tensor_parallel, utils")
def modules():
    missing = [
        (m, n)
        for m, names in PLACES.items()
        for n in names
        if not hasattr(import_module(f"meshwright.distributed.{m}"), n)
    ]
    same(missing, [])
    return f"{len(PLACES)} modules"


@ITEMS(36, "compute_layer_assignment(10, 3) deals the rest to the first stages")
def assignment():
    same(compute_layer_assignment(10, 3), [(0, 4), (4, 7), (7, 10)])


@ITEMS(37, "default_mp_policy(param_dtype=bfloat16): reduction in fp32, inputs cast")
def policy():
    for made, dtype in (
        (default_mp_policy(), torch.bfloat16),
        (default_mp_policy(param_dtype=torch.float16), torch.float16),
    ):
        same((made.param_dtype, made.reduce_dtype, made.cast_forward_inputs), (dtype, torch.float32, True))


@ITEMS(38, "destroy_distributed() ends the process group; twice and alone too", world=3)
def destroyed():
    assert dist.is_initialized()
    destroy_distributed()
    assert not dist.is_initialized()
    destroy_distributed()


@ITEMS(39, "get_dp_mesh: 1-D, 2-D with replicas, ValueError without", world=4)
def data_mesh(here: Here):
    same(get_dp_mesh(here.mesh(dp_shard=4)).mesh_dim_names, ("dp_shard",))
    same(get_dp_mesh(here.mesh(dp_replicate=2, dp_shard=2)).mesh_dim_names, ("dp_replicate", "dp_shard"))
    own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
    same(get_dp_mesh(own).mesh_dim_names, ("dp_replicate",))
    return refused(
        lambda: get_dp_mesh(init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))), "no data axis", kind=ValueError
    )


@ITEMS(40, "get_dp_mesh: ValueError for a mesh of tensor parallelism alone", world=4)
def tensor_alone(here: Here):
    return refused(lambda: get_dp_mesh(here.mesh(tp=4)), "has_dp_mesh", kind=ValueError)


@ITEMS(41, "has_dp_mesh says whether get_dp_mesh gives one", world=4)
def asks(here: Here):
    meshes = [here.mesh(dp_shard=4), here.mesh(dp_replicate=4), here.mesh(dp_shard=2, tp=2)]
    same([has_dp_mesh(mesh) for mesh in meshes], [True, True, True])
    same([get_dp_mesh(mesh).ndim for mesh in meshes], [1, 1, 1])
    same(has_dp_mesh(here.mesh(tp=4)), False)
    refused(lambda: get_dp_mesh(here.mesh(tp=4)), kind=ValueError)


@ITEMS(42, "get_tp_mesh: None without tensor parallelism", world=4)
def tensor_mesh(here: Here):
    same(get_tp_mesh(here.mesh(dp_shard=2, tp=2)).size(), 2)
    same(get_tp_mesh(here.mesh(dp_shard=4)), None)
    same(get_tp_mesh(init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))), None)


@ITEMS(43, "get_pp_mesh: None without a pipeline", world=4)
def pipeline_mesh(here: Here):
    same(get_pp_mesh(here.mesh(pp=2, dp_shard=2)).size(), 2)
    same(get_pp_mesh(here.mesh(dp_shard=4)), None)


@ITEMS(44, "get_pp_rank and get_pp_size: 0 and 1 without a pipeline", world=4)
def pipeline_place(here: Here):
    same([(get_pp_rank(mesh), get_pp_size(mesh)) for mesh in (here.mesh(dp_shard=4), None)], [(0, 1), (0, 1)])
    same(
        (get_pp_rank(here.mesh(pp=2, dp_shard=2)), get_pp_size(here.mesh(pp=2, dp_shard=2))), (dist.get_rank() // 2, 2)
    )


TORCHRUN = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
SRUN = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "1234"}
SRUN |= {
    "SLURM_STEP_NODELIST": "n[03-04]",
    "SLURM_JOB_NODELIST": "n[03-04]",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_SRUN_COMM_HOST": "n03",
}


@ITEMS(45, "get_world_info: torchrun's variables, else srun's, else one process")
def world():
    with environment(**TORCHRUN | dict.fromkeys(SRUN)):
        same(get_world_info(), (0, 0, 1))
        with environment(RANK="3", LOCAL_RANK="1", WORLD_SIZE="4"):
            same(get_world_info(), (3, 1, 4))
        with environment(**SRUN):
            same(get_world_info(), (5, 1, 8))


@ITEMS(46, "under srun torch's variables are set")
def exported():
    import os

    with environment(**TORCHRUN | SRUN):
        get_world_info()
        same([os.environ.get(n) for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")], ["5", "1", "8", "n03"])
        return f"MASTER_PORT {int(os.environ['MASTER_PORT'])}"


@ITEMS(47, "init_distributed(config, seed=42) gives a mesh, and None for one process")
def alone():
    same(init_distributed(DistributedConfig(), seed=42), None)
    same(str(inspect.signature(init_distributed).parameters["seed"].default), "42")
    return refused(lambda: init_distributed(DistributedConfig(backend="cpu:nonsense")), "nonsense")


@ITEMS(48, "seed: the same numbers again, of torch, numpy and Python")
def seeded():
    def drawn(seed: int) -> tuple[float, float, float]:
        init_distributed(DistributedConfig(), seed=seed)
        return float(torch.rand(())), float(numpy.random.rand()), random.random()

    same(drawn(42), drawn(42))
    assert drawn(42) != drawn(43)


@ITEMS(49, "data ranks that build a model behind init_distributed train one model", world=4)
def one_model(here: Here):
    mesh = init_distributed(DistributedConfig(dp_replicate=2, dp_shard=2, nccl_timeout_sec=20), seed=42)
    Decoder(SMALL)  # draws from streams that differ by data rank
    text = refused(lambda: apply_fsdp2(Decoder(SMALL), mesh), "bring different models", "seed every rank alike")
    torch.manual_seed(7)
    apply_fsdp2(Decoder(SMALL), mesh)
    with torch.device("meta"):
        apply_fsdp2(Decoder(SMALL), mesh)
    sums = [None] * 4
    dist.all_gather_object(sums, [float(whole(p).sum()) for p in parallelize(SMALL, mesh).parameters()])
    same(sums, [sums[0]] * 4)
    return text


@ITEMS(50, "is_rank_zero()", world=4)
def zero():
    same(is_rank_zero(), dist.get_rank() == 0)


@ITEMS(51, "DistributedConfig: its fields, the time limit acts", world=2)
def config():
    made = DistributedConfig(dp_shard=-1, dp_replicate=1, tp=1, pp=1, pp_schedule="1f1b", cp=1, ep=1)
    same((made.nccl_timeout_sec, made.backend), (1800, "cpu:gloo,cuda:nccl"))
    limits = []
    for request in (77, 20):
        init_distributed(DistributedConfig(dp_shard=2, nccl_timeout_sec=request))
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        limits.append(backend.options._timeout.total_seconds())
    same(limits, [77.0, 20.0])
    return "77 s, then 20 s"


@ITEMS(30, "build_stage_module takes KempnerForge's ModelConfig, and its field names are known")
def model_config():
    made = build_stage_module(forge_config(), 0, 2)
    assert isinstance(made, PipelineStageModule)
    same((made.config.hidden_dim, made.config.tied_embeddings, tuple(made.layers)), (48, False, ("0", "1")))
    plain = {"vocab_size": IDS, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": 16}
    refused(lambda: DecoderConfig(**plain, hidden_dim=48, tie_embeddings=True), "tied_embeddings", kind=ValueError)
    refused(lambda: DecoderConfig(**plain, ffn_hidden_dim=48), "hidden_dim", kind=ValueError)
    refused(lambda: build_stage_module(forge_config(activation="gelu"), 0, 2), "activation", "silu")
    return refused(lambda: build_stage_module(forge_config(norm_type="layernorm"), 0, 2), "norm_type", "rmsnorm")


def forge_config(**changes: object) -> object:
    """An object with the fields of KempnerForge's ModelConfig."""
    fields = {
        "dim": 32,
        "n_layers": 4,
        "n_heads": 4,
        "n_kv_heads": 2,
        "vocab_size": IDS,
        "ffn_dim_multiplier": 1.0,
        "ffn_hidden_dim": 48,
    }
    fields |= {"norm_type": "rmsnorm", "norm_eps": 1e-5, "activation": "silu", "max_seq_len": 32, "rope_theta": 10000.0}
    fields |= {
        "tie_embeddings": False,
        "qk_norm": False,
        "init_std": 0.02,
        "model_type": "transformer",
        "num_experts": 0,
    }
    return type("ModelConfig", (), fields | changes)()


@ITEMS(52, "apply_fsdp2 of models with a vision tower", world=4)
def vision(here: Here):
    from automodel import llava, vision_loss

    mesh = here.mesh(dp_shard=4)
    apply_fsdp2(model := llava(), mesh, MixedPrecisionPolicy())
    error = against_one(model, llava(), mesh, loss=vision_loss, bound=1e-4)
    config = type("VLMConfig", (), vars(type(forge_config())) | {"vision_config": object()})()
    refused(lambda: build_parallel_model(config, torch.device("cpu"), mesh), "vision_config", "apply_fsdp2")
    return error
