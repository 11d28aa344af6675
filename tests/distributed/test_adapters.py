"""Adapters and frozen subsets under tensor parallelism: equal to one process, sends what the plan said, or refused by
name.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support import families
from support.adapters import adapted
from support.laid_out import Held, assert_same, held, own_rows
from support.ranks import ranks, refusal
from test_tensor_parallel import DATA4, SHARDED, TP2, TP4, Way, assert_all_estimated, batch_of, one_warm_step
from torch.distributed.fsdp import MixedPrecisionPolicy

from meshwright.checkpoint import load, save
from meshwright.core.errors import UnsupportedError
from meshwright.distributed import doors as functions
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.parallelize import parallelize
from meshwright.distributed.parallelizer import fsdp2_strategy_parallelize
from meshwright.distributed.transforms import apply_model_transforms
from meshwright.planning.layout import Layout
from meshwright.planning.tensor.plan import TensorPlan
from meshwright.verification.problem import RandomBatches
from meshwright.verification.verify import verify

pytestmark = pytest.mark.all

QV = ["q_proj", "v_proj"]


llama = partial(adapted, "llama")
llama_qv = partial(adapted, "llama", QV)
llama_rows_only = partial(adapted, "llama", ["o_proj", "down_proj"])


def llama_and_hosts() -> torch.nn.Module:
    """Hosts are trained, adapters are not."""
    model = adapted("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" not in name)
    return model


def llama_inner() -> torch.nn.Module:
    """The model without the wrapper around it."""
    return adapted("llama").base_model.model  # type: ignore[union-attr,return-value]


def llama_two_adapters() -> torch.nn.Module:
    from peft import LoraConfig

    model: Any = adapted("llama")
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model.add_adapter("other", LoraConfig(r=2, target_modules=QV, init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])
    return model


llama_ends = partial(adapted, "llama", ["embed_tokens", "lm_head", "q_proj", "down_proj"])
llama_dropping = partial(adapted, "llama", lora_dropout=0.2)
llama_biases = partial(adapted, "llama", bias="all", model_attention_bias=True, model_mlp_bias=True)
gpt2 = partial(adapted, "gpt2", model_resid_pdrop=0, model_embd_pdrop=0, model_attn_pdrop=0)
phi3 = partial(adapted, "phi3")
gpt_neox = partial(adapted, "gpt_neox")


WAYS: dict[str, tuple[Any, Layout, dict[str, Any]]] = {
    "llama": (llama, TP2, {}),
    "llama, key heads on two ranks each": (llama, TP4, {}),
    "llama, sharded": (llama, SHARDED, {"activation_checkpointing": "full"}),
    "llama, whole sequences": (llama, TP2, {"sequence_parallel": False}),
    "llama, q and v": (llama_qv, SHARDED, {}),
    "llama, o and down": (llama_rows_only, TP2, {}),
    "llama, hosts trained": (llama_and_hosts, TP2, {}),
    "llama, dropout": (llama_dropping, TP2, {}),
    "llama, biases trained": (llama_biases, TP2, {}),
    "llama without the wrapper": (llama_inner, TP2, {}),
    "llama, two adapters": (llama_two_adapters, TP2, {}),
    "llama, embedding and head": (llama_ends, TP2, {}),
    "gpt2": (gpt2, SHARDED, {}),
    "phi3": (phi3, SHARDED, {}),
    "gpt_neox": (gpt_neox, TP2, {}),
}


@pytest.mark.parametrize("name", WAYS)
def test_adapters_are_equal_to_one_process(pool, name):
    factory, layout, techniques = WAYS[name]
    report = verify(factory, layout, steps=2, dtypes=("float64",), techniques=techniques, max_norm=0.03, pool=pool)
    assert report, report
    compared = report.comparisons[0].of("gradient")
    assert len(compared) == 2 * sum(p.requires_grad for p in factory().parameters())  # in each step
    assert 0 < max(d.error for d in compared) <= 1e-10


@pytest.mark.parametrize("name", WAYS)
def test_the_plan_estimates_every_byte(spmd, name):
    factory, layout, techniques = WAYS[name]
    way = Way(layout, tuple(techniques.items()), rows=1 if layout is SHARDED else 0)
    assert_all_estimated(spmd(layout.world, one_warm_step, factory, way, families.VOCABULARY), layout.tp)


# --- the other doors


def by_one_call(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    return fsdp2_strategy_parallelize(model, mesh, mp_policy=MixedPrecisionPolicy())


def by_transforms(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    return apply_model_transforms(model, {"fully_shard": {}, "tensor_parallel": {}}, device_mesh=mesh)


@pytest.mark.parametrize("door", [by_one_call, by_transforms], ids=lambda door: door.__name__)
@pytest.mark.parametrize("factory", [llama, gpt2], ids=["llama", "gpt2"])
def test_other_doors_take_the_wrapper_too(pool, door, factory):
    even = RandomBatches(families.VOCABULARY, 4, 9, ())
    report = verify(
        factory,
        SHARDED,
        partial(without_labels_missing, even),
        parallelize_fn=door,
        steps=2,
        dtypes=("float64",),
        pool=pool,
    )
    assert report, report
    assert len(report.comparisons[0].of("gradient")) > 10


def without_labels_missing(batches: RandomBatches, step: int) -> dict[str, torch.Tensor]:
    """Every token has a loss: the mean of ranks' means is the mean."""
    batch = dict(batches(step))
    return {"tokens": batch["tokens"], "labels": batch["labels"].clamp(min=0)}


# --- a mutant in real processes, checkpoints, refusals


def without_the_sum_of(part: str, model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    """The gradients of some whole matrices stay each rank's own."""
    whole = TensorPlan.is_summed
    with (
        patch.object(TensorPlan, "is_summed", lambda self, name: part not in name and whole(self, name)),
        patch.object(functions, "prove", lambda *args, **options: None),
    ):
        return by_one_call(model, mesh)


@pytest.mark.kills("tensor", "part")
@pytest.mark.parametrize("part", ["q_proj.lora_A", "down_proj.lora_B"])
def test_a_matrix_whose_gradient_is_not_summed_is_caught(pool, part):
    even = partial(without_labels_missing, RandomBatches(families.VOCABULARY, 4, 9, ()))
    mutant = partial(without_the_sum_of, part)
    report = verify(llama, TP2, even, parallelize_fn=mutant, steps=1, dtypes=("float64",), pool=pool)
    wrong = {d.name for d in report.comparisons[0].of("gradient") if d.error > 1e-2}
    assert not report and len(wrong) == 2 and all(part in name for name in wrong)


def laid_out(layout: Layout, seed: int) -> tuple[ParallelModel, torch.optim.Optimizer]:
    model = parallelize(adapted("phi3", seed=seed), layout)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def trained(layout: Layout, folder: str) -> Held:
    model, optimizer = laid_out(layout, 1)
    for step in range(2):
        model.forward_backward(own_rows(model, batch_of(4, 9, families.VOCABULARY, step)))
        model.optimizer_step(optimizer, 1.0)
    save(model, folder, optimizer=optimizer)
    return held(model, optimizer)


def loaded(layout: Layout, folder: str) -> Held:
    model, optimizer = laid_out(layout, 2)
    load(model, folder, optimizer=optimizer)
    return held(model, optimizer)


@pytest.mark.parametrize(("wrote", "reads"), [(SHARDED, (DATA4, TP4)), (DATA4, (SHARDED,))], ids=["sharded", "data"])
def test_a_checkpoint_with_adapters_is_read_by_every_other_layout_bit_by_bit(spmd, tmp_path, wrote, reads):
    written = spmd(wrote.world, trained, wrote, str(tmp_path / "checkpoint"))[0]
    assert sum("lora_" in name for name in written[0]) == 16 and len(written[1]) == 3 * 16
    for layout in reads:
        read = spmd(layout.world, loaded, layout, str(tmp_path / "checkpoint"))[0]
        assert_same(read, written, layout)


@ranks(2)
def test_adapters_without_weights_are_refused_by_name():
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(families.config_of("llama", use_cache=False))
        model = get_peft_model(made, LoraConfig(r=4, target_modules=QV, task_type="CAUSAL_LM"))
    said = refusal(lambda: parallelize(model, TP2), UnsupportedError)
    assert (
        "layers.0.self_attn.q_proj" in said and "Build the model on the CPU with its weights, adapters included" in said
    )
