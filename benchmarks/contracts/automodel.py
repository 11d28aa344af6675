"""NeMo AutoModel's ``distributed.parallelizer``: FSDP2 and tensor parallelism of models of transformers."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from tried import (
    BFLOAT16,
    IDS,
    TOKENS,
    Here,
    Items,
    against_one,
    gradients,
    llama,
    loss_of,
    refused,
    rows_of,
    same,
    worst,
)

from meshwright.distributed import apply_ac, apply_fsdp2, apply_tensor_parallel, destroy_distributed
from meshwright.distributed.parallelizer import (
    HAVE_NVFSDP,
    fsdp2_strategy_parallelize,
    get_hf_tp_shard_plan,
    import_classes_from_paths,
    to_cpu,
    translate_to_torch_parallel_style,
)

ITEMS = Items("N", "NeMo AutoModel distributed.parallelizer")
FP32 = MixedPrecisionPolicy()
LAYER = "transformers.models.llama.modeling_llama.LlamaDecoderLayer"
NAMES = ("data_parallel", "tensor_parallel")


def of(family: str, kind: str = "AutoModelForCausalLM", **changes: Any) -> nn.Module:
    """A tiny model of a family of transformers, the same on every rank."""
    import transformers

    sizes = {
        "vocab_size": IDS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes |= {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "use_cache": False,
        "tie_word_embeddings": False,
    }
    config = transformers.AutoConfig.for_model(family, **sizes | changes)
    torch.manual_seed(0)
    return getattr(transformers, kind).from_config(config, attn_implementation="sdpa").float()


@cache
def _llava_parts() -> tuple[Any, Any]:
    from transformers import CLIPVisionConfig, LlamaConfig

    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 8,
        "patch_size": 4,
    }
    text = {
        "vocab_size": IDS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return CLIPVisionConfig(**vision), LlamaConfig(**text, num_key_value_heads=2, use_cache=False)


def llava() -> nn.Module:
    """A tiny model with a vision tower."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    vision, text = _llava_parts()
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=IDS - 1, image_seq_length=4)
    )


def vision_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Of rows that begin with an image's four places."""
    rows = torch.cat([torch.full((len(rows), 4), IDS - 1), rows], dim=1)
    pixels = torch.linspace(-1, 1, 3 * 64).reshape(1, 3, 8, 8) * (1 + rows[:, -1:, None, None].float() / 61)
    logits = model(input_ids=rows, pixel_values=pixels, use_cache=False).logits
    return F.cross_entropy(logits[:, 4:-1].flatten(0, 1), rows[:, 5:].flatten())


def nemo_plan(sequence: bool = False) -> dict[str, Any]:
    """The plan that AutoModel has for Llama, in torch's styles."""
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "model.layers.*.self_attn.q_proj": ColwiseParallel(),
        "model.layers.*.self_attn.k_proj": ColwiseParallel(),
        "model.layers.*.self_attn.v_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    if sequence:
        plan |= {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "model.norm": SequenceParallel(),
            "model.layers.*.input_layernorm": SequenceParallel(),
            "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
            "model.layers.*.post_attention_layernorm": SequenceParallel(),
            "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
    return plan


def laid(model: nn.Module, mesh: Any, *given: Any, plain: nn.Module | None = None, **options: Any) -> float:
    """Error of gradients behind ``fsdp2_strategy_parallelize`` in fp32 (where no policy is given)."""
    fsdp2_strategy_parallelize(model, mesh, *(given or (() if options else (FP32,))), **options)
    return against_one(model, plain or llama(), mesh)


@ITEMS(1, "HAVE_NVFSDP says whether nvFSDP can be used")
def have():
    same(HAVE_NVFSDP, True)
    return "HAVE_NVFSDP = True: this library's engine answers the call, with CUDA and without"


@ITEMS(2, "fsdp2_strategy_parallelize(model, device_mesh, mp_policy, tp_shard_plan, offload_policy)", world=4)
def signature(here: Here):
    same(
        list(inspect.signature(fsdp2_strategy_parallelize).parameters),
        "model device_mesh mp_policy tp_shard_plan offload_policy".split(),
    )
    mesh = here.mesh(dp_shard=2, tp=2)
    return max(
        laid(llama(), mesh, FP32, None, None),
        laid(llama(), mesh, mp_policy=FP32, tp_shard_plan=None, offload_policy=None),
    )


@ITEMS(3, "returns the model", world=2)
def returns(here: Here):
    model = llama()
    assert fsdp2_strategy_parallelize(model, here.mesh(dp_shard=2)) is model


@ITEMS(4, "the model may be on meta", world=4)
def on_meta(here: Here):
    mesh = here.mesh(dp_shard=2, tp=2)
    with torch.device("meta"):
        model = llama()
    fsdp2_strategy_parallelize(model, mesh, FP32)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    for p, value in zip(model.parameters(), llama().parameters(), strict=True):
        made = distribute_tensor(value.detach(), p.device_mesh, [Replicate()] * p.device_mesh.ndim)
        p.data.copy_(made.redistribute(placements=p.placements))
    buffers = dict(llama().named_buffers())
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return against_one(model, llama(), mesh)


@ITEMS(5, "mp_policy None: bfloat16, fp32 reduction, beside tensor parallelism alone too", world=4)
def policy(here: Here):
    mesh = here.mesh(dp_shard=2, tp=2)
    fsdp2_strategy_parallelize(model := llama(), mesh)
    error = against_one(model, llama(), mesh, bound=BFLOAT16)
    fsdp2_strategy_parallelize(alone := llama(), here.mesh(tp=4))
    errors = [error, against_one(alone, llama(), None, bound=BFLOAT16)]
    same([m(input_ids=TOKENS).logits.dtype for m in (model, alone)], [torch.bfloat16, torch.bfloat16])
    return max(errors)


@ITEMS(6, "axes data_parallel and tensor_parallel", world=4)
def axes(here: Here):
    assert here.known
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    fsdp2_strategy_parallelize(model := llama(), mesh, FP32)
    plain = llama()
    loss_of(plain, TOKENS).backward()
    rank = mesh.get_local_rank("data_parallel")
    loss_of(model, TOKENS[2 * rank : 2 * rank + 2]).backward()
    refused(
        lambda: fsdp2_strategy_parallelize(llama(), init_device_mesh("cpu", (4,), mesh_dim_names=("mine",))), "dp_shard"
    )
    return worst(gradients(model), gradients(plain))


@ITEMS(7, "tp_shard_plan of ColwiseParallel and RowwiseParallel, the embedding's too", world=4)
def plan_of_styles(here: Here):
    return laid(llama(), here.mesh(dp_shard=2, tp=2), FP32, nemo_plan())


@ITEMS(8, "a plan with SequenceParallel and layouts cut over the sequence", world=4)
def plan_by_sequence(here: Here):
    return laid(llama(), here.mesh(dp_shard=2, tp=2), FP32, nemo_plan(sequence=True))


@ITEMS(
    9,
    "any plan is applied as it is given",
    world=2,
    reason="a plan is checked before it is used: what does not add up is refused",
)
def plan_checked(here: Here):
    mesh = here.mesh(tp=2)
    refused(
        lambda: fsdp2_strategy_parallelize(llama(), mesh, None, {"model.layers.0.mlp.up_proj": ColwiseParallel()}),
        "model.layers",
    )
    refused(
        lambda: fsdp2_strategy_parallelize(llama(), mesh, None, {"model.layers.*.nothing": ColwiseParallel()}),
        "nothing",
    )
    whole_input = {"model.norm": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))}
    text = refused(lambda: fsdp2_strategy_parallelize(llama(), mesh, None, whole_input), "Leave the pattern out")
    styles = {
        f"model.layers.{i}.mlp.{n}_proj": translate_to_torch_parallel_style(w) for i in (0,) for n, w in MLP.items()
    }
    parallelize_module(model := llama(), mesh["tp"], styles)
    against_one(model, llama(), None)
    return text


MLP = {"gate": "colwise", "up": "colwise", "down": "rowwise"}


@ITEMS(10, "tensor parallelism without a plan", world=4)
def plan_measured(here: Here):
    return max(
        laid(llama(), here.mesh(dp_shard=2, tp=2)), laid(of("qwen3"), here.mesh(dp_shard=2, tp=2), plain=of("qwen3"))
    )


@ITEMS(11, "offload_policy", world=2)
def offload(here: Here):
    error = laid(llama(), mesh := here.mesh(dp_shard=2), FP32, None, CPUOffloadPolicy(pin_memory=False))
    refused(lambda: fsdp2_strategy_parallelize(llama(), mesh, None, None, object()), "offload_policy")
    return error


@ITEMS(12, "every block is a unit; the last keeps its parameters behind its forward", world=2)
def units(here: Here):
    fsdp2_strategy_parallelize(model := llama(), mesh := here.mesh(dp_shard=2), FP32)
    same([n for n, m in model.named_modules() if isinstance(m, FSDPModule)], ["", "model.layers.0", "model.layers.1"])
    model(input_ids=rows_of(mesh))
    same([isinstance(layer.mlp.up_proj.weight, DTensor) for layer in model.model.layers], [True, False])


@ITEMS(13, "beside activation checkpointing", world=4)
def recomputed(here: Here):
    apply_ac(model := llama(), "full")
    error = laid(model, here.mesh(dp_shard=4))
    apply_tensor_parallel(model := llama(), mesh := here.mesh(dp_shard=2, tp=2))
    apply_ac(model, "full")
    apply_fsdp2(model, mesh, FP32)
    return max(error, against_one(model, llama(), mesh))


@ITEMS(14, "replicas of shards", world=4)
def hybrid(here: Here):
    return laid(llama(), here.mesh(dp_replicate=2, dp_shard=2))


@ITEMS(15, "an axis of context parallelism: a loop that cuts no rows is right too", world=4)
def context(here: Here):
    mesh = here.mesh(cp=2, dp_shard=2)
    return against_one(fsdp2_strategy_parallelize(llama(), mesh, FP32), llama(), mesh)


@ITEMS(16, "import_classes_from_paths(class_paths)")
def imported():
    same([c.__name__ for c in import_classes_from_paths(["torch.nn.Linear", LAYER])], ["Linear", "LlamaDecoderLayer"])
    return refused(lambda: import_classes_from_paths(["torch.nn.Lineer"]), "torch.nn.Lineer", kind=ImportError)


@ITEMS(34, "get_hf_tp_shard_plan(model)", world=2)
def own_plan(here: Here):
    found = get_hf_tp_shard_plan(llama())
    assert "model.layers.*.self_attn.q_proj" in found and "lm_head" in found
    assert any(name.startswith("model.language_model.layers") for name in get_hf_tp_shard_plan(llava()))
    refused(lambda: get_hf_tp_shard_plan(nn.Linear(2, 2)), "tp_shard_plan = None", kind=ValueError)
    return laid(llama(), here.mesh(tp=2), FP32, found)


@ITEMS(36, "translate_to_torch_parallel_style: five words, ValueError for others")
def translated():
    for word in ("colwise", "rowwise", "colwise_rep", "rowwise_rep", "sequence_parallel"):
        assert translate_to_torch_parallel_style(word) is not None
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    words = [word for word in ALL_PARALLEL_STYLES._global_mapping if translate_to_torch_parallel_style(word) is None]
    same(words, [])
    return refused(lambda: translate_to_torch_parallel_style("colwize"), "colwise", kind=ValueError)


@ITEMS(37, "they are torch's types of styles", world=2)
def styles(here: Here):
    kinds = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "sequence_parallel": SequenceParallel,
        "rowwise_rep": RowwiseParallel,
    }
    assert all(isinstance(translate_to_torch_parallel_style(word), kind) for word, kind in kinds.items())
    same(translate_to_torch_parallel_style("colwise_rep").output_layouts, (Replicate(),))  # type: ignore[attr-defined]
    made = {f"model.layers.*.mlp.{name}_proj": translate_to_torch_parallel_style(word) for name, word in MLP.items()}
    parallelize_module(model := llama(), here.mesh(tp=2)["tp"], made)
    return against_one(model, llama(), None)


@ITEMS(38, "to_cpu(v): DTensors, tensors, other values", world=2)
def moved(here: Here):
    mesh = here.mesh(dp_shard=2)["dp_shard"]
    made = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    same(to_cpu(made).tolist(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    same((to_cpu(torch.ones(1)).device.type, to_cpu(3), to_cpu("x")), ("cpu", 3, "x"))
    return refused(
        lambda: to_cpu(DTensor.from_local(torch.ones(1, device="meta"), mesh, [Shard(0)])), "meta", kind=ValueError
    )


@ITEMS(42, "norms on queries and keys: gradients right under tensor parallelism at once", world=4)
def normed(here: Here):
    return laid(of("qwen3"), here.mesh(dp_shard=2, tp=2), plain=of("qwen3"))


@ITEMS(43, "the process group can be destroyed", world=2)
def destroyed():
    destroy_distributed()
    same(dist.is_initialized(), False)
