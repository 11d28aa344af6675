"""KempnerForge's ``distributed``: recomputation, FSDP2, tensor parallelism, pipelines and clipping as its documents
call them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from tried import (
    BFLOAT16,
    SMALL,
    TOKENS,
    Forge,
    Here,
    Items,
    against_one,
    gradients,
    llama,
    logits_of,
    loss_of,
    near,
    refused,
    same,
    worst,
)

from meshwright import Layout
from meshwright.distributed import (
    ActivationCheckpointing,
    apply_ac,
    apply_expert_parallel,
    apply_fsdp2,
    apply_tensor_parallel,
    clip_grad_norm_,
    init_distributed,
)
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig, MoEConfig

ITEMS = Items("K", "KempnerForge distributed")
FP32 = MixedPrecisionPolicy()


def decoder(config: DecoderConfig = SMALL) -> nn.Module:
    torch.manual_seed(0)
    return Decoder(config)


def units(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def recomputed(mode: object, make: Callable[[], nn.Module] = decoder) -> float:
    model, plain = make(), make()
    apply_ac(model, mode)
    return against_one(model, plain, None, bound=0.0 if make is decoder else 1e-5)


@ITEMS(3, "apply_ac(model, mode) works in place")
def ac_signature():
    same(list(inspect.signature(apply_ac).parameters), ["model", "mode"])
    return recomputed("full")


@ITEMS(4, "modes none, full, selective, as text and as enum")
def ac_modes():
    errors = [
        recomputed(mode, make)
        for make in (decoder, llama, Forge)
        for m in ("none", "full", "selective")
        for mode in (m, _enum(m))
    ]
    refused(lambda: apply_ac(decoder(), "ful"), "Did you mean 'full'?")
    return max(errors)


def _enum(name: str) -> ActivationCheckpointing:
    return ActivationCheckpointing(name)


@ITEMS(5, "full: every block")
def ac_full():
    return refused(lambda: apply_ac(nn.Sequential(nn.Linear(4, 4)), "full"), "full")


@ITEMS(6, "selective: attention alone")
def ac_selective():
    model = llama()
    apply_ac(model, ActivationCheckpointing.SELECTIVE)
    seen = {"q_proj": 0, "gate_proj": 0}
    for name, module in model.named_modules():
        for key in seen:
            if name.endswith(key):
                module.register_forward_hook(lambda *a, key=key: seen.update({key: seen[key] + 1}))
    loss_of(model, TOKENS).backward()
    same(seen, {"q_proj": 4, "gate_proj": 2})
    refused(lambda: apply_ac(nn.Sequential(nn.Linear(4, 4)), "selective"), "selective")
    return "projections of attention run twice, the others once"


@ITEMS(7, "apply_ac before apply_fsdp2", world=4)
def ac_before(here: Here):
    mesh = here.mesh(dp_shard=4)
    apply_ac(model := decoder(), "full")
    apply_fsdp2(model, mesh, FP32)
    error = against_one(model, decoder(), mesh)
    apply_fsdp2(late := decoder(), mesh, FP32)
    refused(lambda: apply_ac(late, "full"), "activation_checkpoint must come before fully_shard")
    return error


@ITEMS(8, "apply_tensor_parallel, apply_ac, apply_fsdp2 in this order", world=4)
def pasted_order(here: Here):
    mesh, errors = here.mesh(dp_shard=2, tp=2), []
    for make, mode in (
        (decoder, "none"),
        (decoder, "full"),
        (decoder, "selective"),
        (llama, "full"),
        (Forge, "selective"),
    ):
        model = make()
        apply_tensor_parallel(model, mesh)
        apply_ac(model, mode)
        apply_fsdp2(model, mesh, mp_policy=FP32)
        errors.append(against_one(model, make(), mesh))
    return max(errors)


@ITEMS(9, "apply_fsdp2(model, device_mesh, mp_policy=None, reshard_after_forward=True)", world=4)
def fsdp(here: Here):
    parameters = inspect.signature(apply_fsdp2).parameters
    same([(p.name, p.default) for p in parameters.values()][2:], [("mp_policy", None), ("reshard_after_forward", True)])
    errors = []
    for sizes in ({"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_replicate": 4}):
        apply_fsdp2(model := decoder(), mesh := here.mesh(**sizes), FP32)
        errors.append(against_one(model, decoder(), mesh))
    return max(errors)


@ITEMS(10, "each block a unit, the rest in the root", world=4)
def fsdp_units(here: Here):
    apply_fsdp2(model := decoder(), here.mesh(dp_shard=4), FP32)
    same(units(model), ["", "layers.0", "layers.1", "layers.2", "layers.3"])
    apply_fsdp2(model := Forge(), here.mesh(dp_shard=4), FP32)
    same(units(model), ["", "layers.0", "layers.1"])


@ITEMS(11, "the full mesh may be given, or its data part", world=4)
def fsdp_mesh(here: Here):
    mesh = here.mesh(dp_replicate=2, dp_shard=2)
    apply_fsdp2(model := decoder(), mesh["dp_replicate", "dp_shard"], FP32)
    own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    apply_tensor_parallel(other := decoder(), own)
    apply_fsdp2(other, own, FP32)
    return max(against_one(model, decoder(), mesh), against_one(other, decoder(), own))


@ITEMS(12, "a mesh in which no data axis is known is an error", world=4)
def fsdp_strange(here: Here):
    named = lambda *names: init_device_mesh("cpu", (4,), mesh_dim_names=names or None)  # noqa: E731
    for names in (("dp",), ("data_parallel",), ("mine",), ()):
        refused(lambda names=names: apply_fsdp2(decoder(), named(*names)), "dp_shard", kind=ValueError)
    return refused(lambda: apply_fsdp2(decoder(), named("dp")), "dp is dp_shard here")


@ITEMS(13, "mp_policy None: bfloat16, gradients summed in fp32", world=4)
def fsdp_policy(here: Here):
    apply_fsdp2(model := decoder(), mesh := here.mesh(dp_shard=4))
    same(next(model.parameters()).dtype, torch.float32)
    same(logits_of(model, TOKENS[:1]).dtype, torch.bfloat16)
    return against_one(model, decoder(), mesh, bound=BFLOAT16)


@ITEMS(14, "reshard_after_forward True or False", world=4)
def fsdp_reshard(here: Here):
    errors = []
    for request in (True, False):
        apply_fsdp2(model := decoder(), mesh := here.mesh(dp_shard=4), FP32, reshard_after_forward=request)
        errors.append(against_one(model, decoder(), mesh))
        logits_of(model, TOKENS)
        same(isinstance(model.layers["0"].attention.wq.weight, DTensor), request)
    return max(errors)


@ITEMS(
    15,
    "a number for reshard_after_forward",
    world=4,
    reason="ranks to keep sharded over, as torch means it; no limit on gathers",
)
def fsdp_number(here: Here):
    apply_fsdp2(model := decoder(), mesh := here.mesh(dp_shard=4), FP32, 2)
    error = against_one(model, decoder(), mesh)
    refused(lambda: apply_fsdp2(decoder(), here.mesh(dp_replicate=2, dp_shard=2), FP32, 3), "dp_shard")
    return error


MOE = DecoderConfig(64, 32, 2, 4, 2, 48, 32, moe=MoEConfig(n_experts=4, top_k=2))


@ITEMS(16, "experts: attention and experts are units of their own, nothing deadlocks", world=4)
def experts(here: Here):
    mesh, errors = init_distributed(Layout(dp_shard=4, ep=2)), []
    for mode in ("none", "full", "selective"):
        model = decoder(MOE)
        apply_expert_parallel(model, mesh)
        apply_ac(model, mode)
        apply_fsdp2(model, mesh, FP32)
        plain = decoder(MOE)
        errors.append(against_one(model, plain, mesh))
        loss_of(plain, TOKENS).backward()
        near(float(clip_grad_norm_(model, 1.0)), float(nn.utils.clip_grad_norm_(plain.parameters(), 1.0)), 1e-5)
    refused(lambda: apply_fsdp2(decoder(MOE), mesh, FP32), "expert")
    return max(errors)


@ITEMS(17, "apply_tensor_parallel(model, device_mesh)", world=4)
def tensor(here: Here):
    mesh, errors = here.mesh(dp_shard=2, tp=2), []
    bare = Forge()
    del bare.config
    for made, plain in ((decoder(), decoder()), (llama(), llama()), (Forge(), Forge()), (bare, Forge())):
        apply_tensor_parallel(made, mesh)
        apply_fsdp2(made, mesh, FP32)
        errors.append(against_one(made, plain, mesh))
    return max(errors)


@ITEMS(
    19,
    "the token embedding stays whole",
    world=2,
    reason="it is cut over the vocabulary, which saves memory; results are equal",
)
def tensor_embedding(here: Here):
    apply_tensor_parallel(model := Forge(), here.mesh(tp=2))
    same(model.token_embedding.weight.placements, (Shard(0),))
    return against_one(model, Forge(), None)


@ITEMS(
    21,
    "tied weights: no sequence parallelism",
    world=2,
    reason="sequences stay cut, and the tie is kept; results are equal",
)
def tensor_tied(here: Here):
    apply_tensor_parallel(model := Forge(tied=True), here.mesh(tp=2))
    assert model.output_head.weight is model.token_embedding.weight
    return against_one(model, Forge(tied=True), None)


@ITEMS(22, "apply_tensor_parallel before apply_fsdp2", world=4)
def tensor_before(here: Here):
    apply_fsdp2(model := decoder(), mesh := here.mesh(dp_shard=2, tp=2), FP32)
    return refused(lambda: apply_tensor_parallel(model, mesh), "tensor_parallel must come before fully_shard")


@ITEMS(31, "clip_grad_norm_(model, max_norm, foreach=True)")
def clip():
    same([p.name for p in inspect.signature(clip_grad_norm_).parameters.values()][:3], ["model", "max_norm", "foreach"])
    errors = []
    for foreach in (True, False):
        model, plain = decoder(), decoder()
        loss_of(model, TOKENS).backward()
        loss_of(plain, TOKENS).backward()
        near(
            float(clip_grad_norm_(model, 0.5, foreach=foreach)),
            float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5)),
        )
        errors.append(worst(gradients(model), gradients(plain)))
    return max(errors)


@ITEMS(32, "one norm over weights on other meshes (tensor parallelism beside FSDP)", world=4)
def clip_mixed(here: Here):
    mesh, plain = here.mesh(dp_shard=2, tp=2), decoder()
    apply_tensor_parallel(model := decoder(), mesh)
    apply_fsdp2(model, mesh, FP32)
    against_one(model, plain, mesh)
    loss_of(plain, TOKENS).backward()
    text = near(float(clip_grad_norm_(model, 0.1)), float(nn.utils.clip_grad_norm_(plain.parameters(), 0.1)), 1e-5)
    worst(gradients(model), gradients(plain))
    return text


@ITEMS(33, "one mesh, or none: as torch")
def clip_plain():
    model = decoder()
    same(float(clip_grad_norm_(model, 1.0)), 0.0)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    return near(float(clip_grad_norm_(model, 1.0)), float(sum(p.numel() for p in model.parameters())) ** 0.5)


@ITEMS(34, "returns the norm before clipping, a tensor")
def clip_returns():
    model = decoder()
    loss_of(model, TOKENS).backward()
    norm = clip_grad_norm_(model, 1e-3)
    assert isinstance(norm, torch.Tensor) and norm.dim() == 0
    near(float(clip_grad_norm_(model, 1.0)), 1e-3, 1e-2)
    return f"{float(norm):.4g} before, 0.001 behind"


@ITEMS(18, "a model or a stage module", world=4)
def tensor_of_stage(here: Here):
    from kempner_pipeline import by_stages

    return by_stages(here.mesh(pp=2, tp=2), tensor=True)


@ITEMS(20, "stages: no sequence parallelism", world=4, reason="sequences are cut in stages too; results are equal")
def tensor_of_stage_by_sequence(here: Here):
    from kempner_pipeline import by_stages

    return by_stages(here.mesh(pp=2, tp=2), tensor=True, check=True)
