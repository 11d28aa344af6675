"""NeMo AutoModel's ``nvfsdp_strategy_parallelize``, and models with towers, adapters and other heads."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from automodel import FP32, LAYER, NAMES, laid, llava, nemo_plan, of, vision_loss
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from tried import CLOSE, TOKENS, Here, Items, against_one, llama, loss_of, refused, rows_of, same

from meshwright import NonFiniteError
from meshwright.distributed.parallelizer import (
    fsdp2_strategy_parallelize,
    get_hf_tp_shard_plan,
    nvfsdp_strategy_parallelize,
)

ITEMS = Items("N", "NeMo AutoModel distributed.parallelizer")


def zero(here: Here, *given: Any, plain: nn.Module | None = None, sums: bool = False, **options: Any) -> float:
    """Error of gradients behind ``nvfsdp_strategy_parallelize``."""
    mesh = here.mesh(dp_shard=4)
    made = nvfsdp_strategy_parallelize(llama(), mesh, *given, **options)
    model = made if isinstance(made, nn.Module) else made[0]
    loss = (lambda m, rows: loss_of(m, rows) * (1 if len(rows) == 4 else 0.25)) if sums else loss_of
    return against_one(model, plain or llama(), mesh, loss=loss)


@ITEMS(17, "third by position: nvfsdp_unit_modules, then tp_shard_plan", world=4)
def by_position(here: Here):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    model = nvfsdp_strategy_parallelize(llama(), mesh, [LAYER], nemo_plan())
    rank = mesh.get_local_rank("data_parallel")
    plain = llama()
    loss_of(plain, TOKENS).backward()
    loss_of(model, TOKENS[2 * rank : 2 * rank + 2]).backward()
    from tried import gradients, worst

    refused(lambda: nvfsdp_strategy_parallelize(llama(), mesh, 3.0), "third argument")
    return max(worst(gradients(model), gradients(plain)), zero(here, [LAYER]))


@ITEMS(18, "returns the model", world=4)
def returns(here: Here):
    model = llama()
    assert nvfsdp_strategy_parallelize(model, here.mesh(dp_shard=4)) is model
    other = llama()
    made, optimizer = nvfsdp_strategy_parallelize(
        other, here.mesh(dp_shard=4), torch.optim.SGD(other.parameters(), lr=0.1)
    )
    same((isinstance(made, nn.Module), isinstance(optimizer, torch.optim.SGD)), (True, True))
    return "the model; with an optimizer both"


@ITEMS(
    19,
    "nvfsdp_unit_modules None: the whole model is one unit",
    world=4,
    reason="each block is a unit: less memory, equal results",
)
def one_unit(here: Here):
    model = nvfsdp_strategy_parallelize(llama(), here.mesh(dp_shard=4), nvfsdp_unit_modules=None)
    same([n for n, m in model.named_modules() if isinstance(m, FSDPModule)], ["", "model.layers.0", "model.layers.1"])
    return zero(here)


@ITEMS(20, "nvfsdp_unit_modules as paths of classes", world=4)
def by_path(here: Here):
    refused(lambda: zero(here, nvfsdp_unit_modules=["no.such.Class"]), "no.such.Class", kind=ImportError)
    return zero(here, nvfsdp_unit_modules=[LAYER])


@ITEMS(21, "tp_shard_plan", world=4)
def by_plan(here: Here):
    mesh, errors = here.mesh(dp_shard=2, tp=2), []
    for plan in (nemo_plan(), get_hf_tp_shard_plan(llama()), None):
        model = nvfsdp_strategy_parallelize(llama(), mesh, nvfsdp_unit_modules=[LAYER], tp_shard_plan=plan)
        errors.append(against_one(model, llama(), mesh))
    return max(errors)


@ITEMS(22, "data_parallel_sharding_strategy optim_grads_params, optim_grads, optim, no_shard", world=4)
def strategies(here: Here):
    words = ("optim_grads_params", "optim_grads", "optim", "no_shard")
    same(inspect.signature(nvfsdp_strategy_parallelize).parameters["data_parallel_sharding_strategy"].default, words[0])
    refused(lambda: zero(here, data_parallel_sharding_strategy="optim_grad"), "optim_grads")
    return max(zero(here, data_parallel_sharding_strategy=word) for word in words)


@ITEMS(
    23,
    "strategies params and grads_params",
    world=4,
    reason="both mean optim_grads_params: with parameters all else is sharded",
)
def older_strategies(here: Here):
    return max(zero(here, data_parallel_sharding_strategy=word) for word in ("params", "grads_params"))


@ITEMS(24, "init_nvfsdp_with_meta_device", world=4)
def from_meta(here: Here):
    refused(lambda: zero(here, init_nvfsdp_with_meta_device=True), "init_nvfsdp_with_meta_device", "meta")
    with torch.device("meta"):
        model = llama()
    nvfsdp_strategy_parallelize(model, mesh := here.mesh(dp_shard=4), init_nvfsdp_with_meta_device=True)
    sums = [float(p.full_tensor().double().abs().sum()) for p in model.parameters()]
    assert all(0 < total < 1e4 for total in sums), sums
    loss_of(model, rows_of(mesh)).backward()
    return f"{len(sums)} parameters made by share"


def switched(number: int, text: str, **options: Any) -> None:
    """An option that changes how, and not what, is computed."""

    @ITEMS(number, text, world=4)
    def check(here: Here):
        return zero(here, **options)


switched(25, "grad_reduce_in_fp32", grad_reduce_in_fp32=True)
switched(26, "preserve_fp32_weights", preserve_fp32_weights=True)
switched(27, "overlap_grad_reduce=False", overlap_grad_reduce=False)
switched(28, "overlap_param_gather=False", overlap_param_gather=False)
switched(30, "average_in_collective", average_in_collective=True)
switched(31, "disable_bucketing", disable_bucketing=True)


@ITEMS(29, "check_for_nan_in_grad", world=4)
def not_a_number(here: Here):
    model = nvfsdp_strategy_parallelize(llama(), mesh := here.mesh(dp_shard=4), check_for_nan_in_grad=True)
    loss = loss_of(model, rows_of(mesh)) * (torch.nan if mesh.get_local_rank("dp_shard") == 1 else 1)
    return refused(loss.backward, "layers", kind=NonFiniteError)


@ITEMS(32, "calculate_per_token_loss: gradients are sums", world=4)
def per_token(here: Here):
    return zero(here, calculate_per_token_loss=True, sums=True)


@ITEMS(33, "keep_fp8_transpose_cache_when_using_custom_fsdp, nccl_ub, fsdp_double_buffer", world=4)
def elsewhere(here: Here):
    keys = ("keep_fp8_transpose_cache_when_using_custom_fsdp", "nccl_ub", "fsdp_double_buffer")
    return [refused(lambda key=key: zero(here, **{key: True}), key, "megatron-fsdp") for key in keys][-1]


def adapted() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    base = llama()
    torch.manual_seed(1)
    return get_peft_model(
        base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    )


@ITEMS(35, "get_hf_tp_shard_plan of a model with adapters", world=4)
def plan_of_adapted(here: Here):
    plan = get_hf_tp_shard_plan(adapted())
    return laid(adapted(), here.mesh(dp_shard=2, tp=2), FP32, plan, plain=adapted())


@ITEMS(39, "models with a vision tower, on a tensor axis too", world=4)
def vision(here: Here):
    errors = []
    for mesh in (here.mesh(dp_shard=4), here.mesh(dp_shard=2, tp=2)):
        fsdp2_strategy_parallelize(model := llava(), mesh, FP32)
        errors.append(against_one(model, llava(), mesh, loss=vision_loss, bound=1e-3))
    return max(errors)


@ITEMS(40, "LoRA under tensor parallelism and FSDP", world=4)
def lora(here: Here):
    mesh = here.mesh(dp_shard=2, tp=2)
    error = laid(model := adapted(), mesh, plain=adapted())
    assert all(("lora" in name) == p.requires_grad for name, p in model.named_parameters())
    made = nvfsdp_strategy_parallelize(adapted(), mesh)
    return max(error, against_one(made, adapted(), mesh))


def classified(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(input_ids=rows).logits.float(), rows[:, 0] % 2)


def filled(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(input_ids=rows).logits.float().flatten(0, 1), rows.flatten())


@ITEMS(41, "sequence classification and encoders under tensor parallelism", world=4)
def other_heads(here: Here):
    mesh, errors = here.mesh(dp_shard=2, tp=2), []
    cases = {
        "llama": (lambda: of("llama", "AutoModelForSequenceClassification", num_labels=2, pad_token_id=0), classified),
        "bert": (
            lambda: of("bert", "AutoModelForMaskedLM", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
            filled,
        ),
    }
    for make, loss in cases.values():
        fsdp2_strategy_parallelize(model := make(), mesh, FP32)
        errors.append(against_one(model, make(), mesh, loss=loss, bound=CLOSE))
    return max(errors)
