"""Adapters by a request (``techniques = {"adapters": …}``): equal to LoRA by hand and to one process with peft, on
every layout; begun alike, read beside files, saved alone, or refused by name.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from support import families
from support.laid_out import own_rows
from test_tensor_parallel import Way, assert_all_estimated, batch_of, one_warm_step
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.checkpoint import load, pretrained, save
from meshwright.core.errors import ConfigError
from meshwright.distributed.parallelize import parallelize
from meshwright.introspection.adapter_request import Adapters
from meshwright.introspection.constructor import built
from meshwright.introspection.source import CausalLM, with_adapters
from meshwright.models.decoder_config import SIZES
from meshwright.planning.build import plan
from meshwright.planning.layout import Layout
from meshwright.verification.verify import verify

ONE, DATA2, TP2, PP2 = Layout(dp_shard=1), Layout(dp_shard=2), Layout(dp_shard=1, tp=2), Layout(dp_shard=1, pp=2)
SHARDED = Layout(dp_shard=2, tp=2)
KINDS = ("all_gather", "reduce_scatter")
LORA = {"rank": 4, "alpha": 6.0}
QV = LORA | {"targets": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}


llama = partial(families.config_of, "llama", use_cache=False)


WAYS = {
    "llama, FSDP 2": (llama, DATA2, LORA),
    "llama, FSDP 2 x tp 2": (llama, SHARDED, LORA),
    "llama, pp 2": (llama, PP2, LORA),
    "llama, cp 2": (llama, Layout(dp_shard=1, cp=2), LORA),
    "llama, q, v and the head, tp 2": (llama, TP2, QV),
    "llama, rslora": (llama, DATA2, LORA | {"kind": "rslora"}),
    "qwen3_moe, attention, ep 2": (
        lambda: families.config_of("qwen3_moe", use_cache=False),
        Layout(dp_shard=2, ep=2),
        LORA | {"targets": ["self_attn.*"]},
    ),
    "our decoder, FSDP 2": (lambda: SIZES["debug"], DATA2, LORA),
}


@pytest.mark.all
@pytest.mark.parametrize("name", WAYS)
def test_a_request_is_equal_to_one_process(pool, name):
    factory, layout, adapters = WAYS[name]
    report = verify(factory(), layout, steps=2, dtypes=("float64",), techniques={"adapters": adapters}, pool=pool)
    assert report, report
    compared = report.comparisons[0].of("gradient")
    assert all("lora_" in d.name or "modules_to_save" in d.name for d in compared) and len(compared) > 8
    assert max(d.error for d in compared) <= 1e-10


@pytest.mark.all
@pytest.mark.parametrize("layout", [DATA2, SHARDED], ids=["FSDP 2", "FSDP 2 x tp 2"])
def test_the_plan_estimates_every_byte(spmd, layout):
    """Frozen weights are gathered and never reduced: what is reduced is as large as the adapters."""
    way = Way(layout, (("adapters", LORA),))
    counted = spmd(layout.world, one_warm_step, llama(), way, families.VOCABULARY)
    assert_all_estimated(counted, layout.tp)
    sent = counted[0][1]
    moved = {name: sum(size for (kind, _), (_, size) in sent.items() if kind == name) for name in KINDS}
    assert layout.tp > 1 or 0 < moved["reduce_scatter"] < moved["all_gather"] / 4


# --- an oracle that knows nothing of peft


class ByHand(nn.Module):
    """A linear layer whose weight is W + factor · B A."""

    def __init__(self, host: nn.Linear, first: Tensor, second: Tensor, factor: float):
        super().__init__()
        self.weight = nn.Parameter(host.weight.detach().clone(), requires_grad=False)
        self.first, self.second, self.factor = nn.Parameter(first.clone()), nn.Parameter(second.clone()), factor

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.factor * self.second @ self.first)


def by_hand(base: nn.Module, trained: dict[str, Tensor], factor: float) -> nn.Module:
    """Replace each layer with an adapter in ``trained`` (full tensors, by name)."""
    model = copy.deepcopy(base).requires_grad_(False)
    for name, first in trained.items():
        path, found, _ = name.partition(".lora_A")
        if found:
            second = trained[name.replace("lora_A", "lora_B")]
            owner, _, leaf = path.rpartition(".")
            host = model.get_submodule(path)
            setattr(model.get_submodule(owner), leaf, ByHand(host, first, second, factor))  # type: ignore[arg-type]
    return model


def laid_out_gradients(layout: Layout, kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """Return adapters before the step (their second matrices not zero), gradients, and the loss."""
    requested = {"adapters": LORA | {"kind": kind}, "precision": {"master": "float64", "reduce": "float64"}}
    model = parallelize(llama(), layout, techniques=requested, seed=3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            with torch.no_grad():
                parameter.add_(0.1)
    before = whole(model, "value")
    loss = model.forward_backward(own_rows(model, batch_of(4, 9, families.VOCABULARY, 0)))
    return before, whole(model, "grad"), float(loss.loss)


def whole(model: Any, what: str) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            tensor = parameter.detach() if what == "value" else parameter.grad
            found[name] = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()
    return found


@pytest.mark.all
@pytest.mark.parametrize(("kind", "factor"), [("lora", 6 / 4), ("rslora", 6 / math.sqrt(4))])
def test_losses_and_gradients_are_those_of_lora_by_hand(spmd, kind, factor):
    adapters, gradients, loss = spmd(2, laid_out_gradients, DATA2, kind)[0]
    base = built(CausalLM(llama()), 3).double()
    model = by_hand(base, adapters, factor)
    batch = batch_of(4, 9, families.VOCABULARY, 0)
    logits = model(input_ids=batch["tokens"]).logits.flatten(0, 1)
    labels = batch["labels"].masked_fill(~batch["loss_mask"].bool(), -100).flatten()
    mean = F.cross_entropy(logits, labels)
    mean.backward()
    assert loss == pytest.approx(float(mean.detach()), rel=1e-6)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            which = "lora_A" if name.endswith("first") else "lora_B"
            ours = gradients[f"{name.rpartition('.')[0]}.{which}.default.weight"]
            # transformers' norms compute in fp32
            assert (ours - parameter.grad).norm() <= 1e-6 * parameter.grad.norm(), name  # type: ignore[operator,union-attr]


# --- how they begin


def begun(layout: Layout, adapters: dict[str, Any], folder: str | None, dtype: str = "float32") -> dict[str, Tensor]:
    weights = pretrained(folder) if folder else None
    made = CausalLM(llama(), dtype)
    model = parallelize(made, layout, techniques={"adapters": adapters}, seed=3, weights=weights)
    return {
        name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone()  # type: ignore[operator]
        for name, p in model.named_parameters()
    }


@pytest.mark.all
def test_adapters_begin_as_the_constructor_and_peft_make_them(spmd):
    reference = built(
        with_adapters(llama(), Adapters(rank=4, targets=("q_proj", "v_proj"), modules_to_save=("lm_head",))), 3
    )
    ours = spmd(2, begun, DATA2, {"rank": 4, "targets": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}, None)[0]
    assert ours.keys() == dict(reference.named_parameters()).keys()
    for name, parameter in reference.named_parameters():
        assert torch.equal(ours[name], parameter), name


@pytest.mark.first("pp 2")
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [(TP2, "float32"), (PP2, "float32"), (PP2, "bfloat16"), (DATA2, "float64")],
    ids=["tp 2", "pp 2", "pp 2 bfloat16", "data 2 float64"],
)
def test_beside_weights_from_files_adapters_begin_as_peft_makes_them_from_the_seed(spmd, tmp_path, layout, dtype):
    from peft import LoraConfig, get_peft_model

    base = families.saved(tmp_path, "llama", seed=7).to(getattr(torch, dtype))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
        reference: Any = get_peft_model(copy.deepcopy(base), config, autocast_adapter_dtype=False)  # type: ignore[arg-type]
    ours = {name: p for found in spmd(2, begun, layout, QV, str(tmp_path), dtype) for name, p in found.items()}
    theirs = {name.removeprefix("base_model.model."): p for name, p in reference.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        assert torch.equal(ours[name], parameter), name


# --- checkpoints


def trained_and_saved(layout: Layout, folder: str, techniques: dict[str, Any]) -> dict[str, Tensor]:
    model = parallelize(llama(), layout, techniques=techniques, seed=3)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(2):
        model.forward_backward(own_rows(model, batch_of(4, 9, families.VOCABULARY, step)))
        model.optimizer_step(optimizer, 1.0)
    save(model, folder, optimizer=optimizer, only_trained=True)
    return whole(model, "value")


def loaded(layout: Layout, folder: str, seed: int, techniques: dict[str, Any]) -> dict[str, Tensor]:
    model = parallelize(llama(), layout, techniques=techniques, seed=seed)
    load(model, folder)
    return whole(model, "value")


@pytest.mark.all
def test_what_is_trained_is_saved_alone_and_read_by_another_layout(spmd, tmp_path):
    folder = tmp_path / "checkpoint"
    written = spmd(2, trained_and_saved, DATA2, str(folder), {"adapters": QV})[0]
    read = spmd(2, loaded, TP2, str(folder), 3, {"adapters": QV})[0]
    assert written.keys() == read.keys() and all(torch.equal(written[name], read[name]) for name in written)
    with pytest.raises(ConfigError, match="holds tensors of adapters, and the model here has no adapters"):
        loaded(ONE, str(folder), 3, {})


@pytest.mark.parametrize("frozen", ["model.embed_tokens", "lm_head", "model.layers.1"])
def test_stages_that_leave_nothing_out_save_with_those_that_do(spmd, tmp_path, frozen):
    folder, techniques = str(tmp_path / "checkpoint"), {"freeze": [frozen]}
    written = spmd(2, trained_and_saved, PP2, folder, techniques)
    (read,) = spmd(1, loaded, ONE, folder, 3, techniques)
    for name, tensor in (written[0] | written[1]).items():
        assert torch.equal(read[name], tensor), name


# --- refusals


@pytest.mark.parametrize(
    ("adapters", "words"),
    [
        ({"targets": ["q_prj"]}, ["'q_prj' matches no layer", "Did you mean 'q_proj'", "techniques.adapters.targets"]),
        ({"targets": ["mlp"]}, ["'mlp' is a LlamaMLP, no linear layer", "down_proj"]),
        ({"modules_to_save": ["lm_haed"]}, ["'lm_haed' matches no module", "Did you mean 'lm_head'"]),
        ({"modules_to_save": ["mlp"]}, ["trained whole (modules_to_save), and targets too"]),
        ({"rank": 0}, ["rank = 0", "1 or more"]),
    ],
)
def test_requests_that_fit_no_layer_are_refused_by_name(adapters, words):
    with pytest.raises(ConfigError) as refused:
        plan(llama(), ONE, techniques={"adapters": adapters})
    assert all(word in str(refused.value) for word in words), refused.value


def test_tied_weights_take_no_adapter_of_their_own():
    tied = families.config_of("llama", use_cache=False, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="shares its weight with"):
        plan(tied, ONE, techniques={"adapters": {"targets": ["embed_tokens"]}})


def test_a_module_that_is_built_takes_adapters_only_with_its_weights():
    with torch.device("meta"):
        blank = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="give the function"):
        parallelize(blank, ONE, techniques={"adapters": {"targets": ["0"]}})
    with pytest.raises(ConfigError, match="not to be changed here"):
        plan(nn.Sequential(nn.Linear(4, 4)), ONE, techniques={"adapters": {"targets": ["0"]}})


def test_a_second_request_is_refused():
    model = families.on_cpu(llama())
    with_adapters(model, Adapters(rank=2))
    with pytest.raises(ConfigError, match="has adapters already"):
        with_adapters(model, Adapters(rank=2))


def test_peft_is_named_where_it_is_missing(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"pip install .*peft"):
        plan(llama(), ONE, techniques={"adapters": LORA})
