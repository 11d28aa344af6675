"""KempnerForge's ``distributed.tensor_parallel``: what is cut, what is not, and in which order."""

from __future__ import annotations

import torch
from kempner_pipeline import by_stages
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from tried import IDS, TOKENS, Forge, Here, Items, against_one, llama, logits_of, same, whole

from meshwright.distributed import apply_ac, apply_fsdp2
from meshwright.distributed.tensor_parallel import apply_tensor_parallel, get_tp_mesh

ITEMS = Items("T", "KempnerForge distributed.tensor_parallel")


def cut(here: Here, model: nn.Module | None = None) -> nn.Module:
    apply_tensor_parallel(made := model or Forge(), here.mesh(tp=2))
    return made


def _placed(model: nn.Module, placement: object, *names: str) -> None:
    for block in model.layers.values():
        for name in names:
            same((name, block.get_submodule(name).weight.placements), (name, (placement,)))


@ITEMS(1, "the module and its names")
def names():
    assert callable(apply_tensor_parallel) and callable(get_tp_mesh)


@ITEMS(2, "get_tp_mesh(device_mesh)", world=4)
def mesh(here: Here):
    same((get_tp_mesh(here.mesh(dp_shard=2, tp=2)).size(), get_tp_mesh(here.mesh(dp_shard=4))), (2, None))


@ITEMS(3, "apply_tensor_parallel(model, device_mesh) in place", world=4)
def applied(here: Here):
    errors = []
    for make in (Forge, llama):
        apply_tensor_parallel(model := make(), here.mesh(tp=4) if make is Forge else here.mesh(tp=2, dp_replicate=2))
        errors.append(against_one(model, make(), None))
    return max(errors)


@ITEMS(
    4,
    "the token embedding stays whole",
    world=2,
    reason="cut over the vocabulary, which saves memory; results are equal",
)
def embedding(here: Here):
    same((model := cut(here)).token_embedding.weight.placements, (Shard(0),))
    return against_one(model, Forge(), None)


@ITEMS(5, "q, k, v by heads", world=2)
def heads(here: Here):
    _placed(cut(here), Shard(0), "attention.q_proj", "attention.k_proj", "attention.v_proj")
    apply_tensor_parallel(few := llama(num_key_value_heads=1), here.mesh(tp=2))  # fewer key heads than ranks
    shape = tuple(whole(few.model.layers[0].self_attn.k_proj.weight).shape)
    same(shape, (8, 32))
    return against_one(few, llama(num_key_value_heads=1), None)


@ITEMS(6, "the attention's output row by row, summed over the sequence's parts", world=2)
def output(here: Here):
    _placed(model := cut(here), Shard(1), "attention.o_proj")
    return against_one(model, Forge(), None)


@ITEMS(7, "gate and up by columns, down by rows", world=2)
def feed_forward(here: Here):
    _placed(model := cut(here), Shard(0), "mlp.gate_proj", "mlp.up_proj")
    _placed(model, Shard(1), "mlp.down_proj")


@ITEMS(8, "norms act on parts of the sequence, their gradients are summed", world=2)
def norms(here: Here):
    seen: list[int] = []
    model = cut(here)
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.register_forward_pre_hook(lambda m, args: seen.append(args[0].shape[1]))
    error = against_one(model, Forge(), None)
    same(set(seen), {6})
    return error


@ITEMS(9, "the head by columns, logits whole", world=2)
def head(here: Here):
    model = cut(here)
    same(model.output_head.weight.placements, (Shard(0),))
    logits = logits_of(model, TOKENS)
    same((type(logits), tuple(logits.shape)), (torch.Tensor, (4, 12, IDS)))
    return float((logits - Forge()(TOKENS)).detach().norm() / logits.detach().norm())


@ITEMS(10, "between blocks each rank has its part of the sequence, whatever its length", world=2)
def between(here: Here):
    seen: list[int] = []
    model = cut(here)
    model.layers["1"].register_forward_pre_hook(lambda m, args: seen.append(args[0].shape[1]))
    error = against_one(model, Forge(), None, tokens=TOKENS[:, :5])
    assert seen[0] in (2, 3), seen
    return error


@ITEMS(
    11,
    "tied embeddings: no sequence parallelism",
    world=2,
    reason="sequences stay cut, the tie is kept; results are equal",
)
def tied(here: Here):
    model = cut(here, Forge(tied=True))
    assert model.output_head.weight is model.token_embedding.weight
    return against_one(model, Forge(tied=True), None)


@ITEMS(12, "stages: no sequence parallelism", world=4, reason="sequences are cut there too; results are equal")
def stages(here: Here):
    return by_stages(here.mesh(pp=2, tp=2), tensor=True, check=True)


@ITEMS(13, "before apply_ac", world=2)
def before_recomputation(here: Here):
    errors = []
    for mode in ("full", "selective"):
        model = cut(here)
        apply_ac(model, mode)
        errors.append(against_one(model, Forge(), None))
    return max(errors)


@ITEMS(14, "before apply_fsdp2", world=4)
def before_sharding(here: Here):
    mesh = here.mesh(dp_shard=2, tp=2)
    apply_tensor_parallel(model := Forge(), mesh)
    apply_fsdp2(model, mesh, MixedPrecisionPolicy())
    assert Replicate() not in model.layers["0"].mlp.up_proj.weight.placements
    return against_one(model, Forge(), mesh)
