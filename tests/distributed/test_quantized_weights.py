"""Frozen weights in 4 bits (``quantize_frozen``): codes of the definition and of bitsandbytes, gradients of one process
with plain torch on every layout, bytes at rest and on the wire as planned; read, saved, exported, or refused by name.
"""

from __future__ import annotations

import re
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support import families
from support.laid_out import own_rows
from support.ranks import ranks
from test_tensor_parallel import Way, assert_all_estimated, batch_of, one_warm_step
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.checkpoint import load, pretrained, save
from meshwright.core.errors import ConfigError, IntegrityError, UnsupportedError
from meshwright.distributed import nf4
from meshwright.distributed.nf4 import pack, unpack
from meshwright.distributed.parallelize import parallelize
from meshwright.distributed.weights import constructed
from meshwright.models.decoder_config import SIZES
from meshwright.planning.build import plan
from meshwright.planning.layout import Layout
from meshwright.planning.memory import plan_memory
from meshwright.verification.verify import verify

ONE, DATA2, TP2, PP2 = Layout(dp_shard=1), Layout(dp_shard=2), Layout(dp_shard=1, tp=2), Layout(dp_shard=1, pp=2)
SHARDED = Layout(dp_shard=2, tp=2)
LORA = {"rank": 4, "alpha": 6.0}
QLORA: dict[str, Any] = {"adapters": LORA, "quantize_frozen": "nf4"}


def config(model_type: str = "llama", **changes: Any) -> Any:
    """Return a config whose columns are a multiple of 64 on two tensor ranks."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    if model_type == "llama":
        sizes["intermediate_size"] = 256
    return families.config_of(model_type, use_cache=False, **(sizes | changes))


# --- the codes


PAPER = """-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334
-0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224
0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0"""
"""The 16 levels as arXiv 2305.14314 prints them, appendix E."""


def levels() -> Tensor:
    return torch.tensor([float(level) for level in PAPER.split()], dtype=torch.float64)


def test_the_levels_are_quantiles_of_a_normal_distribution():
    ends = 0.9677083
    above = torch.special.ndtri(torch.linspace(ends, 0.5, 9, dtype=torch.float64)[:-1])
    below = -torch.special.ndtri(torch.linspace(ends, 0.5, 8, dtype=torch.float64)[:-1])
    found = torch.cat([below, torch.zeros(1, dtype=torch.float64), above]).sort().values
    torch.testing.assert_close(levels(), found / found.max(), rtol=0, atol=2e-7)


def by_definition(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes, values) of a weight, in float64: the nearest level times the largest magnitude of 64 weights."""
    blocks = weight.double().unflatten(1, (-1, 64))
    scales = blocks.abs().amax(-1, keepdim=True)
    codes = (blocks.unsqueeze(-1) - scales.unsqueeze(-1) * levels()).abs().argmin(-1)
    return codes.flatten(1), (levels()[codes] * scales).flatten(1)


def test_codes_are_the_nearest_levels_of_the_definition():
    torch.manual_seed(0)
    weight = torch.randn(48, 256) * torch.logspace(-4, 3, 48).unsqueeze(1)
    codes, values = by_definition(weight)
    halves = pack(weight).view(48, 4, 36)[..., :32]
    assert torch.equal(torch.stack([halves >> 4, halves & 15], dim=-1).view(48, 256).long(), codes)
    torch.testing.assert_close(unpack(pack(weight), torch.float64), values, rtol=1e-7, atol=0)


def test_codes_scales_and_values_are_those_of_bitsandbytes():
    """Checksums of what bitsandbytes 0.50.2 gave: quantize_4bit(weight, blocksize=64, quant_type="nf4")."""
    numbers = torch.arange(48 * 256)
    weight = (((numbers * 7919) % 10007).float() / 10007 - 0.5).view(48, 256) * 2.0 ** torch.arange(-24, 24)[:, None]
    weight[3, 64:128] = 0  # a block of zeros
    weight[5] = -weight[5].abs()
    blocks = pack(weight).view(48, 4, 36)
    found = (blocks[..., :32], blocks[..., 32:], unpack(pack(weight), torch.float32))
    sums = [zlib.crc32(part.contiguous().view(torch.uint8).numpy().tobytes()) for part in found]
    assert sums == [1242801170, 4137490087, 2961216887]
    assert pack(weight).numel() * 8 == 4.5 * weight.numel()


def test_rounding_again_changes_nothing_and_a_part_is_rounded_as_the_whole_is(monkeypatch):
    weight = torch.randn(40, 192)
    packed = pack(weight)
    assert torch.equal(pack(unpack(packed, torch.float32)), packed)
    assert torch.equal(pack(weight[7:19, 64:]), packed[7:19, 36:])
    monkeypatch.setattr(nf4, "CHUNK", 500)  # several rows at a time
    assert torch.equal(pack(weight), packed)


def test_bytes_that_something_cast_are_refused():
    with pytest.raises(IntegrityError, match="stored as uint8, and was cast to bfloat16"):
        unpack(pack(torch.randn(2, 64)).bfloat16(), torch.bfloat16)


def test_products_and_gradients_are_those_of_the_plain_weight_and_only_bytes_are_saved():
    torch.manual_seed(0)
    weight, bias, x = torch.randn(24, 128).double(), torch.randn(24).double(), torch.randn(3, 5, 128).double()
    packed = pack(weight)
    plain = unpack(packed, torch.float64)
    saved: list[Tensor] = []
    results = []
    for compute in (lambda x, b: nf4.linear(x, packed, b), lambda x, b: F.linear(x, plain, b)):
        mine, b = x.clone().requires_grad_(), bias.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            output = compute(mine, b)
        (output * torch.arange(24)).sum().backward()
        results.append((output.detach(), mine.grad, b.grad))
        if len(results) == 1:
            assert [t.dtype for t in saved] == [torch.uint8]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


# --- equal to one process

WAYS: dict[str, tuple[Any, Layout, dict[str, Any]]] = {
    "FSDP 2": (config(), DATA2, {}),
    "FSDP 2 x tp 2": (config(), SHARDED, {}),
    "tp 2, recomputed": (config(), TP2, {"activation_checkpointing": "full"}),
    "pp 2": (config(), PP2, {}),
    "pp 2, split backward": (config(), PP2, {"pipeline_schedule": "interleaved_zero_bubble"}),
    "cp 2": (config(), Layout(dp_shard=1, cp=2), {}),
    "DDP 2": (config(), Layout(dp_shard=1, dp_replicate=2), {}),
    "HSDP": (config(), Layout(dp_replicate=2, dp_shard=2), {}),
    "ZeRO-1": (config(), DATA2, {"zero_stage": 1}),
    "ZeRO-2": (config(), DATA2, {"zero_stage": 2}),
    "in host memory": (config(), DATA2, {"cpu_offload": True}),
    "gathered again over two of four": (config(), Layout(dp_shard=4), {"reshard_after_forward": 2}),
    "compiled": (config(), DATA2, {"compile": True, "compile_backend": "aot_eager"}),
    "experts, ep 2": (config("qwen3_moe"), Layout(dp_shard=2, ep=2), {"adapters": LORA | {"targets": ["self_attn.*"]}}),
    "fused queries, keys and values, tp 2": (config("phi3", intermediate_size=256), TP2, {}),
    "one key head on two ranks": (config(num_key_value_heads=1), TP2, {}),
    "our decoder, frozen by name": (SIZES["debug"], DATA2, {"adapters": None, "freeze": ["layers.0"]}),
}


@pytest.mark.all
@pytest.mark.parametrize("name", WAYS)
def test_a_layout_is_equal_to_one_process_with_the_plain_rounded_weights(pool, name):
    source, layout, others = WAYS[name]
    techniques = {key: value for key, value in (QLORA | others).items() if value is not None}
    report = verify(source, layout, steps=2, dtypes=("float64",), techniques=techniques, pool=pool)
    assert report, report
    assert max(d.error for d in report.comparisons[0].of("gradient")) <= 1e-10


@pytest.mark.all
def test_in_bfloat16_a_layout_differs_no_more_than_one_process(pool):
    report = verify(config(), SHARDED, steps=2, dtypes=("bfloat16",), techniques=QLORA, pool=pool)
    assert report, report


class ByHand(nn.Module):
    """A linear layer with the weight that its rounding gives back by definition, and an adapter."""

    def __init__(self, weight: Tensor, first: Tensor, second: Tensor, factor: float):
        super().__init__()
        self.weight = by_definition(weight)[1]
        self.first, self.second, self.factor = nn.Parameter(first.clone()), nn.Parameter(second.clone()), factor

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + self.factor * F.linear(F.linear(x, self.first), self.second)


def losses_and_gradients(layout: Layout, folder: str) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    requested = QLORA | {"precision": {"master": "float64", "reduce": "float64"}}
    model = parallelize(config(), layout, techniques=requested, seed=3, weights=pretrained(folder))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            with torch.no_grad():
                parameter.add_(0.1)
    before = trained(model, grad=False)
    loss = model.forward_backward(own_rows(model, batch_of(4, 9, families.VOCABULARY, 0)))
    return float(loss.loss), before, trained(model, grad=True)


def trained(model: Any, *, grad: bool) -> dict[str, Tensor]:
    found = {name: p.grad if grad else p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for name, t in found.items()}


def by_hand(folder: Path, adapters: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of plain transformers, beside weights that were rounded by definition."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder).double().requires_grad_(False)
    for name, first in adapters.items():
        if "lora_A" in name:
            path = name.partition(".lora_A")[0]
            host, second = model.get_submodule(path), adapters[name.replace("lora_A", "lora_B")]
            owner, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(owner), leaf, ByHand(host.weight, first, second, 6 / 4))
    batch = batch_of(4, 9, families.VOCABULARY, 0)
    labels = batch["labels"].masked_fill(~batch["loss_mask"].bool(), -100).flatten()
    loss = F.cross_entropy(model(input_ids=batch["tokens"]).logits.flatten(0, 1), labels)
    loss.backward()
    names = {"first": "lora_A.default.weight", "second": "lora_B.default.weight"}
    gradients = {
        f"{name.rpartition('.')[0]}.{names[name.rpartition('.')[2]]}": p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    return float(loss.detach()), gradients


def assert_as_by_hand(found: tuple, folder: Path) -> None:
    loss, adapters, gradients = found
    expected, theirs = by_hand(folder, adapters)
    assert loss == pytest.approx(expected, rel=1e-6)  # transformers' norms compute in fp32
    assert gradients.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (gradients[name] - gradient).norm() <= 1e-6 * gradient.norm(), name


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(7)
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config()).save_pretrained(folder)
    return folder


@pytest.mark.all
@pytest.mark.parametrize("layout", [DATA2, TP2], ids=["FSDP 2", "tp 2"])
def test_weights_from_files_compute_as_those_rounded_by_definition(spmd, base, layout):
    assert_as_by_hand(spmd(2, losses_and_gradients, layout, str(base))[0], base)


# --- mutants


@contextmanager
def scale_of_the_next_block():
    """Blocks are unpacked with their neighbours' scales."""
    whole = unpack

    def shifted(packed: Tensor, dtype: torch.dtype) -> Tensor:
        blocks = packed.unflatten(1, (-1, 36)).clone()
        blocks[..., 32:] = blocks[..., 32:].roll(1, dims=1)
        return whole(blocks.flatten(1), dtype)

    with patch.object(nf4, "unpack", shifted):
        yield


@contextmanager
def halves_swapped():
    """The two codes of a byte change places."""
    whole = unpack

    def swapped(packed: Tensor, dtype: torch.dtype) -> Tensor:
        blocks = packed.unflatten(1, (-1, 36)).clone()
        blocks[..., :32] = blocks[..., :32] >> 4 | blocks[..., :32] << 4
        return whole(blocks.flatten(1), dtype)

    with patch.object(nf4, "unpack", swapped):
        yield


@contextmanager
def never_packed():
    """Values from files are written beside the bytes, and not into them."""
    with patch.object(constructed, "pack", lambda values: torch.zeros((values.shape[0], values.shape[1] // 64 * 36))):
        yield


@contextmanager
def gradient_of_plain_rounding():
    """The backward multiplies with a weight that lost its scales."""

    def lost(gradient: Tensor, packed: Tensor) -> Tensor:
        return gradient @ unpack(packed, gradient.dtype).sign()

    with patch("meshwright.distributed.nf4.gradient_of_input", lost):
        yield


MUTANTS = [scale_of_the_next_block, halves_swapped, never_packed, gradient_of_plain_rounding]


@pytest.mark.all
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutants_differ_from_what_is_computed_by_hand(base, mutant):
    with mutant():
        found = losses_and_gradients(ONE, str(base))
    with pytest.raises(AssertionError):
        assert_as_by_hand(found, base)


# --- bytes


@pytest.mark.all
@pytest.mark.parametrize("layout", [DATA2, SHARDED], ids=["FSDP 2", "FSDP 2 x tp 2"])
def test_the_plan_estimates_every_byte_on_the_wire(spmd, layout):
    """Codes travel, not weights: the gathered bytes are those of the plan, a fraction of the plain ones."""
    way = Way(layout, tuple(QLORA.items()))
    counted = spmd(layout.world, one_warm_step, config(), way, families.VOCABULARY)
    assert_all_estimated(counted, layout.tp)
    plain = plan(config(), layout, techniques={"adapters": LORA})
    units = [[unit for unit in found.units if unit.name] for found in (plain, planned())]
    gathered = [sum(unit.bytes_gathered for unit in found) for found in units]
    assert layout.tp > 1 or gathered[1] < gathered[0] / 4


def planned(layout: Layout = DATA2) -> Any:
    return plan(config(), layout, techniques=QLORA)


@pytest.mark.parametrize("layout", [ONE, DATA2, TP2, SHARDED], ids=["one", "FSDP 2", "tp 2", "FSDP 2 x tp 2"])
@ranks(lambda layout: layout.world)
def test_at_rest_a_weight_takes_four_and_a_half_bits_and_the_plan_says_so(layout):
    """Return a rank's bytes of parameters, those of weights in 4 bits, and how many weights these are."""
    foreseen = plan_memory(planned(layout)).parameters
    model = parallelize(config(), layout, techniques=QLORA, seed=3)
    local = [(p, p.to_local() if hasattr(p, "to_local") else p) for p in model.parameters()]
    packed = [here for _, here in local if here.dtype == torch.uint8]
    whole, packed, weights = (
        sum(here.numel() * here.element_size() for _, here in local),
        sum(here.numel() for here in packed),
        sum(here.numel() // 36 * 64 for here in packed),
    )
    assert packed * 8 == 4.5 * weights
    assert whole == foreseen


@pytest.mark.all
def test_the_plan_names_the_layers_and_their_bytes():
    text = str(planned())
    assert "4-bit weights   nf4, 4.5 bits each, 14 frozen linear layers" in text
    row = next(line for line in text.splitlines() if "gate_proj.base_layer.weight" in line)
    assert "nf4" in row and "36 KiB" in row  # two of 256 × 128


# --- checkpoints and exports


def trained_and_saved(layout: Layout, folder: str, only_trained: bool) -> Tensor:
    model = parallelize(config(), layout, techniques=QLORA, seed=3, weights=pretrained(f"{folder}/base"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(2):
        model.forward_backward(own_rows(model, batch_of(4, 9, families.VOCABULARY, step)))
        model.optimizer_step(optimizer, 1.0)
    save(model, f"{folder}/saved", optimizer=optimizer, only_trained=only_trained)
    return model(torch.arange(8)[None]).logits.detach()


def continued(layout: Layout, folder: str) -> Tensor:
    model = parallelize(config(), layout, techniques=QLORA, seed=5, weights=pretrained(f"{folder}/base"))
    load(model, f"{folder}/saved")
    return model(torch.arange(8)[None]).logits.detach()


@pytest.mark.all
@pytest.mark.parametrize("only_trained", [True, False], ids=["adapters alone", "bytes too"])
def test_another_layout_reads_it_and_the_merged_model_computes_the_same(spmd, base, tmp_path, only_trained):
    """Adapters are merged with the rounded weights, beside which they were trained."""
    from transformers import AutoModelForCausalLM

    from meshwright.cli.main import main

    (tmp_path / "base").symlink_to(base)
    ours = spmd(2, trained_and_saved, DATA2, str(tmp_path), only_trained)[0]
    torch.testing.assert_close(spmd(2, continued, TP2, str(tmp_path))[0], ours, rtol=1e-5, atol=1e-5)
    assert main(["convert", str(tmp_path / "saved"), "--to", "merged", str(tmp_path / "out"), "--base", str(base)]) == 0
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(merged(torch.arange(8)[None]).logits, ours, rtol=1e-5, atol=1e-5)


@pytest.mark.all
def test_bytes_are_not_read_into_plain_weights(spmd, base, tmp_path):
    (tmp_path / "base").symlink_to(base)
    spmd(2, trained_and_saved, DATA2, str(tmp_path), False)
    plain = parallelize(config(), ONE, techniques={"adapters": LORA})
    with pytest.raises(ConfigError, match=r"uint8.* there \(in 4 bits, by techniques\.quantize_frozen = nf4"):
        load(plain, tmp_path / "saved")


# --- other code around the layers


class Net(nn.Module):
    """Two residual blocks of one class, embedding and head."""

    def __init__(self, block: type[nn.Module]):
        super().__init__()
        self.embedding = nn.Embedding(96, 64)
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(64, 96)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Plainly(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class ByItsDtype(Plainly):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)).to(self.down.weight.dtype))


class ByItsShape(Plainly):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))) * self.down.weight.shape[1] ** -0.5


class ByItself(Plainly):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(self.up(x)), self.down.weight, self.down.bias)


class InPlace(Plainly):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x), inplace=True))


class OfOneToken(Plainly):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x.mean((0, 1))))).expand_as(x)


def own(block: type[nn.Module], *freeze: str) -> Any:
    torch.manual_seed(0)
    return parallelize(Net(block), ONE, techniques={"quantize_frozen": "nf4", "freeze": freeze or ("weight$",)})


ROWS = {"tokens": torch.arange(24).view(2, 12), "labels": torch.arange(24).view(2, 12)}


class WithMore(Net):
    """Its forward takes what no small copy can be called with."""

    def forward(self, tokens: Tensor, factor: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens) * factor[:, None, None]


READERS = pytest.mark.parametrize("block", [ByItsDtype, ByItsShape, ByItself], ids=lambda block: block.__name__)


@READERS
def test_layers_whose_weights_other_code_reads_are_left_as_they_are(block):
    """A dtype, a shape or a product of the bytes would be silently another model's."""
    model = own(block, "layers.*weight")
    assert model.plan.quantize is not None and model.plan.quantize.modules == ("layers.0.up", "layers.1.up")
    assert any(
        re.search(r"layers\.\*\.down stays as it is .*: .*: forward reads its weight", n) for n in model.plan.notes
    )
    assert float(model.forward_backward(ROWS)) == pytest.approx(rounded_by_hand(block, ("up",)), rel=1e-6)


@pytest.mark.follows("state_dict()")
@READERS
def test_code_that_reads_the_bytes_is_refused_where_no_copy_could_be_called(block):
    torch.manual_seed(0)
    techniques = {"quantize_frozen": "nf4", "freeze": ["layers.*weight"]}
    model, batch = parallelize(WithMore(block), ONE, techniques=techniques), ROWS | {"factor": torch.ones(2)}
    with pytest.raises(UnsupportedError, match=r"layers\.0\.down\.weight rests in 4 bits, and .*: forward") as refused:
        model.forward_backward(batch)
    assert "only the layer's own forward can compute with its bytes. Train that layer" in str(refused.value)
    assert model.state_dict()["layers.0.down.weight"].dtype == torch.uint8
    for change in ({"freeze": ["layers.*up.weight"]}, {"quantize_frozen": "none"}):
        assert parallelize(WithMore(block), ONE, techniques=techniques | change).forward_backward(batch).loss > 0


def rounded_by_hand(block: type[nn.Module], layers: tuple[str, ...]) -> float:
    torch.manual_seed(0)
    plain = Net(block)
    for layer in plain.layers:
        for linear in (getattr(layer, name) for name in layers):
            linear.weight = nn.Parameter(by_definition(linear.weight)[1].float(), requires_grad=False)
    return float(F.cross_entropy(plain(ROWS["tokens"]).flatten(0, 1), ROWS["labels"].flatten()).detach())


@pytest.mark.parametrize("block", [InPlace, OfOneToken], ids=lambda block: block.__name__)
def test_outputs_may_be_changed_in_place_and_inputs_have_one_dim(block):
    model = own(block, "layers.*weight")
    loss = model.forward_backward(ROWS)
    torch.manual_seed(0)
    plain = Net(block)
    for layer in plain.layers:
        for linear in (layer.up, layer.down):  # type: ignore[union-attr]
            linear.weight = nn.Parameter(by_definition(linear.weight)[1].float(), requires_grad=False)  # type: ignore[union-attr,arg-type]
    expected = F.cross_entropy(plain(ROWS["tokens"]).flatten(0, 1), ROWS["labels"].flatten())
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-6)
    ours = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(ours[name].grad, parameter.grad, rtol=1e-4, atol=1e-7)


def test_frozen_adapters_stay_as_they_are():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    wanted = LoraConfig(r=64, lora_alpha=8, target_modules=["up", "down"])
    adapted: Any = get_peft_model(Net(Plainly), wanted)  # type: ignore[arg-type]
    adapted.requires_grad_(False)
    adapted.base_model.model.head.requires_grad_(True)
    found = parallelize(adapted, ONE, techniques={"quantize_frozen": "nf4"}).plan.quantize
    assert found is not None and len(found.modules) == 4 and all("base_layer" in path for path in found.modules)


class Overwriting(Plainly):
    """Its initialiser overwrites a part of what the layers inside wrote."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.up.weight[:, 0] = 0


def test_weights_that_several_initialisers_write_are_rounded_once():
    with torch.device("meta"):
        packed, plain = Net(Overwriting), Net(Overwriting)
    ours = parallelize(packed, ONE, techniques={"quantize_frozen": "nf4", "freeze": ["layers.*up.weight"]}, seed=3)
    theirs = dict(parallelize(plain, ONE, seed=3).named_parameters())
    for name, parameter in ours.named_parameters():
        if name.endswith("up.weight"):
            torch.testing.assert_close(
                unpack(parameter.detach(), torch.float64), by_definition(theirs[name].detach())[1], rtol=1e-7, atol=0
            )


def test_adapters_are_not_read_beside_another_rounding(base, tmp_path):
    made = {}
    for kind, asked in {"nf4": QLORA, "none": {"adapters": LORA}}.items():
        made[kind] = parallelize(config(), ONE, techniques=asked, weights=pretrained(base))
        save(made[kind], tmp_path / kind, only_trained=True)
    for kind, other in (("nf4", "none"), ("none", "nf4")):
        with pytest.raises(ConfigError, match=rf"beside the same values\. Set techniques\.quantize_frozen = {kind}"):
            load(made[other], tmp_path / kind)


def test_another_base_of_the_same_embedding_is_refused(base, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    from meshwright.cli.main import main

    save(parallelize(config(), ONE, techniques=QLORA, weights=pretrained(base)), tmp_path / "saved", only_trained=True)
    other: Any = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[0, :8] += 0.5
    other.save_pretrained(tmp_path / "other")
    words = ["convert", tmp_path / "saved", "--to", "merged", tmp_path / "out", "--base", tmp_path / "other"]
    assert main([str(word) for word in words]) == 2
    assert "layers.1.mlp.up_proj.weight holds other numbers" in capsys.readouterr().err


@pytest.mark.parametrize("layout", [ONE, DATA2], ids=["one", "FSDP 2"])
@ranks(lambda layout: layout.world)
def test_an_average_computes_with_the_frozen_bytes_and_not_with_their_mean(layout):
    """Return how far the outputs of an average of one model, and its state, are from the model's."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = parallelize(config(), layout, techniques=QLORA, seed=3)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(3):
        average.update_parameters(model)
    x, ours, theirs = torch.arange(8)[None], model.state_dict(), average.module.state_dict()
    apart = max((float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours), default=0.0)
    assert float((average(x).logits - model(x).logits).abs().max()) <= 1e-6 and apart <= 1e-6


# --- refusals


@pytest.mark.first("float8")
@pytest.mark.parametrize(
    ("source", "layout", "techniques", "error", "words"),
    [
        (config(), ONE, {"quantize_frozen": "nf4"}, ConfigError, ["no nn.Linear", "is frozen (", "[adapters]"]),
        (
            config(),
            ONE,
            QLORA | {"quantize_frozen": "nf3"},
            ConfigError,
            ['"nf3"', '"none", "nf4"', "Did you mean 'nf4'"],
        ),
        (
            families.config_of("llama", intermediate_size=48),
            ONE,
            QLORA,
            ConfigError,
            ["32 columns are no multiple of 64"],
        ),
        (config(), Layout(dp_shard=1, tp=4), QLORA, ConfigError, ["o_proj", "128 columns", "64 × tp = 256"]),
        (config(), ONE, QLORA | {"float8": "rowwise"}, UnsupportedError, ["float8 = rowwise", "Set one of them"]),
    ],
    ids=["nothing frozen", "a typo", "narrow layers", "cut inside a block", "float8"],
)
def test_what_cannot_rest_in_4_bits_is_refused_by_name(source, layout, techniques, error, words):
    with pytest.raises(error) as refused:
        plan(source, layout, techniques=techniques)
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_model_is_rounded_once():
    laid_out = parallelize(config(), ONE, techniques=QLORA)
    with pytest.raises(ConfigError, match="hold their weights in 4 bits already"):
        plan(laid_out.parts[0], ONE, techniques={"quantize_frozen": "nf4"})


def test_layers_that_cannot_are_left_as_they_are_and_named():
    mixed = plan(config(intermediate_size=80), ONE, techniques=QLORA)
    assert mixed.quantize is not None and not any("down_proj" in path for path in mixed.quantize.modules)
    assert any("down_proj.base_layer stays as it is (2 of them): its 80 columns" in note for note in mixed.notes)
