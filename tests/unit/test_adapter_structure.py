"""Adapters beside linear layers: found by what they compute, rehearsed in every family, what is broken or strange is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.adapters import adapted
from support.cutting import cut, measured
from torch import nn

from meshwright.core.errors import UnsupportedError
from meshwright.core.parts import FusedPart
from meshwright.distributed.tensor import layers as running
from meshwright.distributed.tensor import parallel
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.introspection.signature import Signature
from meshwright.introspection.structure import regions
from meshwright.planning.tensor.plan import TensorPlan

pytestmark = pytest.mark.all

EXACT = 1e-10
FAMILIES = ["llama", "gpt2", "phi3", "gpt_neox", "opt"]


def errors_of(facts: ModelFacts, **requested: Any) -> dict[str, float]:
    plan, _ = cut(facts, **requested)
    assert plan.sequence_parallel == requested.get("sequence_parallel", True)
    sample = measured(facts, plan.ranks).sample
    found: dict[str, float] = {}
    for inputs, logits in parallel._performances(sample, plan.ranks):
        for name, error in parallel.rehearse(sample.model, plan.only(sample.blocks), inputs, logits=logits).items():
            found[name] = max(found.get(name, 0.0), torch.inf if error != error else error)
    return found


@pytest.mark.parametrize("whole", [False, True], ids=["cut", "whole"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_beside_all_linear_layers_are_equal_to_one_process(family, whole):
    model = adapted(family)
    errors = errors_of(model_facts(model), sequence_parallel=not whole)
    names = [name for name in errors if "lora_" in name]
    assert len(names) == sum(p.requires_grad for p in model.parameters())
    assert max(errors.values()) <= EXACT, sorted(errors.items(), key=lambda e: -e[1])[:3]


def test_an_adapter_lies_as_its_host_does():
    plan, notes = cut(model_facts(adapted("phi3")))
    block = "base_model.model.model.layers.0"
    qkv, out = f"{block}.self_attn.qkv_proj", f"{block}.self_attn.o_proj"
    host = plan.cut_of(f"{qkv}.base_layer.weight", (64, 32))
    assert host is not None and len(host[1]) == 3
    assert plan.cut_of(f"{qkv}.lora_B.default.weight", (64, 4)) == host
    assert plan.cut_of(f"{qkv}.lora_A.default.weight", (4, 32)) is None and plan.is_summed(
        f"{qkv}.lora_A.default.weight"
    )
    ends = plan.cut_of(f"{out}.base_layer.weight", (32, 32))
    assert ends is not None and ends[0] == 1 and plan.cut_of(f"{out}.lora_A.default.weight", (4, 32)) == ends
    assert plan.cut_of(f"{out}.lora_B.default.weight", (32, 4)) is None and plan.is_summed(
        f"{out}.lora_B.default.weight"
    )
    assert not [note for note in notes if "own plan" in note and "proj" in note]


@pytest.mark.fast
def test_the_wrapper_takes_what_the_model_inside_takes():
    takes = Signature.of(adapted("llama")).takes
    assert takes["tokens"] == "input_ids" and takes["positions"] == "position_ids"


def test_a_large_model_is_measured_on_a_small_copy_with_small_adapters():
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        large = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3))
        model = get_peft_model(large, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    facts = model_facts(model)
    sample = measured(facts).sample.model
    assert sum(p.numel() for p in sample.parameters()) < 100_000 and facts.numel > 10**8
    plan, _ = cut(facts)
    parallel.prove(facts, plan)
    name = "base_model.model.model.layers.2.mlp.down_proj.lora_A.default.weight"
    assert plan.cut_of(name, (16, 11008)) == (1, (FusedPart(11008, 11008),))
    assert all(p.is_meta for p in model.parameters())


# --- mutants: of the plan, and of the code


def first_matrix_not_summed(plan: TensorPlan) -> Any:
    whole = TensorPlan.is_summed
    return patch.object(TensorPlan, "is_summed", lambda self, name: "lora_A" not in name and whole(self, name))


def second_matrix_not_summed(plan: TensorPlan) -> Any:
    whole = TensorPlan.is_summed
    return patch.object(TensorPlan, "is_summed", lambda self, name: "lora_B" not in name and whole(self, name))


def input_gradient_not_summed(plan: TensorPlan) -> Any:
    return patch.object(running.functions, "gathered", running.functions.gathered_alike)


def summands_not_reduced(plan: TensorPlan) -> Any:
    def own(summand: torch.Tensor, sequence: Any) -> torch.Tensor:
        return running.functions.own_part(summand, sequence)

    return patch.object(running.functions, "reduced", own)


@pytest.mark.kills("plans", "fault")
@pytest.mark.parametrize(
    "fault",
    [first_matrix_not_summed, second_matrix_not_summed, input_gradient_not_summed, summands_not_reduced],
    ids=lambda f: f.__name__,
)
def test_broken_sums_are_refused(fault: Callable[[TensorPlan], Any]):
    facts = model_facts(adapted("llama", ["q_proj", "down_proj"]))
    plan, _ = cut(facts)
    with fault(plan), pytest.raises(UnsupportedError, match=r"the (gradient of base_model\S+|loss) is wrong"):
        parallel.prove(facts, plan)
    parallel.prove(facts, plan)


def test_a_second_matrix_that_is_cut_by_other_rows_than_its_host_is_refused():
    right = regions._cuts_of_adapters

    def in_one_part(*args: Any) -> list[Any]:
        return [replace(c, parts=(FusedPart(sum(part.size for part in c.parts), 2),)) for c in right(*args)]

    facts = model_facts(adapted("phi3"))
    with patch.object(regions, "_cuts_of_adapters", in_one_part):
        plan, _ = cut(facts)
    with pytest.raises(UnsupportedError, match=r"was rehearsed .* and (the loss|the gradient|its forward)"):
        parallel.prove(facts, plan)


# --- what cannot be cut is named


def test_an_adapter_with_parameters_of_its_own_is_refused_by_name():
    facts = model_facts(adapted("llama", ["q_proj", "down_proj"], use_dora=True))
    with pytest.raises(
        UnsupportedError, match=r"self_attn\.q_proj, mlp\.down_proj stay whole: lengths of whole rows .*\(DoRA"
    ):
        cut(facts)


def test_an_adapter_beside_the_head_leaves_it_whole_and_says_so():
    facts = model_facts(adapted("llama", ["lm_head", "q_proj"]))
    plan, notes = cut(facts)
    parallel.prove(facts, plan)
    assert plan.head == "" and "the head was not recognised and stays whole on every rank" in notes


@pytest.mark.fast
def test_an_adapter_that_was_switched_off_cannot_be_used_later():
    host, idle = nn.Linear(2, 2), nn.Linear(2, 2)
    running.refuse_idle(idle, "layers.0.q_proj.other")
    with pytest.raises(UnsupportedError, match=r"layers\.0\.q_proj\.other is an adapter that was switched off"):
        idle(torch.zeros(1, 2))
    assert host(torch.zeros(1, 2)).shape == (1, 2)
