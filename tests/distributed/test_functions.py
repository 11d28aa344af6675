"""One function per technique: signatures as published, torch's averaging, and no request that is dropped silently."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import get_args

import pytest
import test_pipeline_doors
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.heard import heard
from support.odd import LAYOUTS, VOCAB, Odd, whole
from support.ranks import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import meshwright.distributed as public
from meshwright import ConfigError, Layout, Techniques, UnsupportedError
from meshwright.core.config.schema import field_types
from meshwright.distributed import (
    ActivationCheckpointing,
    apply_ac,
    apply_fsdp2,
    build_parallel_model,
    clip_grad_norm_,
    default_mp_policy,
    init_distributed,
)
from meshwright.distributed.mesh import build_mesh, data_position
from meshwright.distributed.order import applied
from meshwright.distributed.parallelize import single_process_mesh
from meshwright.distributed.process.absent_peers import WireCounter
from meshwright.models.decoder import Attention, Decoder
from meshwright.models.decoder_config import DecoderConfig

KEPT = MixedPrecisionPolicy()
SMALL = DecoderConfig(
    vocab_size=VOCAB, dim=16, n_layers=3, n_heads=2, n_kv_heads=1, hidden_dim=24, max_seq_len=16, qk_norm=True
)
ROWS, SEQ = 8, 5


# --- the published signatures

SIGNATURES = {
    "init_distributed": "(config, seed=42)",
    "destroy_distributed": "()",
    "get_world_info": "()",
    "is_rank_zero": "()",
    "get_dp_mesh": "(device_mesh)",
    "get_tp_mesh": "(device_mesh)",
    "get_pp_mesh": "(device_mesh)",
    "get_cp_mesh": "(device_mesh)",
    "get_ep_mesh": "(device_mesh)",
    "get_fsdp_mesh": "(device_mesh)",
    "get_pp_rank": "(device_mesh)",
    "get_pp_size": "(device_mesh)",
    "has_dp_mesh": "(device_mesh)",
    "default_mp_policy": "(param_dtype=torch.bfloat16)",
    "apply_tensor_parallel": "(model, device_mesh)",
    "apply_fsdp2": "(model, device_mesh, mp_policy=None, reshard_after_forward=True)",
    "apply_ac": "(model, mode)",
    "apply_float8": "(model, enable_fsdp_float8_all_gather=True)",
    "apply_expert_parallel": "(model, device_mesh)",
    "apply_context_parallel": "(model, device_mesh, method='auto')",
    "context_parallel_rows": "(model, batch)",
    "clip_grad_norm_": "(model, max_norm, foreach=True)",
    "build_parallel_model": "(model_config, device, device_mesh=None, *, ac_mode='none', mp_policy=None,"
    " param_dtype=torch.bfloat16,"
    " compile_model=False, fp8=False)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signature_is_the_published_one(name):
    """Further arguments may come, by keyword and with a default."""
    found = inspect.signature(getattr(public, name)).parameters.values()
    wanted = SIGNATURES[name]
    published = [p for p in found if p.kind is not p.KEYWORD_ONLY or f" {p.name}=" in wanted]
    assert str(inspect.Signature([p.replace(annotation=p.empty) for p in published])) == wanted
    more = [p for p in found if p not in published]
    assert all(p.default is not p.empty for p in more), more


def test_the_config_has_the_published_fields():
    config = public.DistributedConfig()
    wanted = {
        "dp_shard": -1,
        "dp_replicate": 1,
        "tp": 1,
        "pp": 1,
        "pp_schedule": "1f1b",
        "cp": 1,
        "ep": 1,
        "nccl_timeout_sec": 1800,
    }
    assert {name: getattr(config, name) for name in wanted} == wanted and config.backend == "cpu:gloo,cuda:nccl"
    assert isinstance(config, Layout)
    assert public.DistributedConfig(dp_shard=2, ep=2, dp_replicate=3).world == 6, "ep does not multiply the world"


def test_every_published_name_is_there():
    others = {"DistributedConfig", "ActivationCheckpointing", *test_pipeline_doors.SIGNATURES}
    assert {*SIGNATURES, *others} == set(public.__all__) == set(dir(public)) & set(public.__all__)
    assert all(hasattr(public, name) for name in public.__all__) and not hasattr(public, "apply_everything")


def test_the_default_policy():
    policy, narrow = default_mp_policy(), default_mp_policy(torch.float32)
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16, torch.float32, None)
    assert policy.cast_forward_inputs and (narrow.param_dtype, narrow.reduce_dtype) == (torch.float32, torch.float32)


# --- what jobs share


def built(make: Callable[[], nn.Module] = Odd, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def mesh_of(layout: str):
    """The mesh of a layout by name, over a process group of its world (of one process too)."""
    mesh = init_distributed(LAYOUTS[layout][1])
    return mesh if mesh is not None else single_process_mesh("cpu")


def batch(rank: int = 0, ranks: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(5))
    own = words[rank * ROWS // ranks : (rank + 1) * ROWS // ranks]
    return own[:, :-1], own[:, 1:]


def mean_loss(model: nn.Module, rank: int = 0, ranks: int = 1) -> torch.Tensor:
    """What users of these functions bring: the mean over this rank's tokens."""
    tokens, labels = batch(rank, ranks)
    return F.cross_entropy(model(tokens).double().flatten(0, 1), labels.flatten())


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def worst(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Largest error of a tensor, in its own norm or a millionth of the whole."""
    assert found.keys() == wanted.keys()
    floor = 1e-6 * torch.stack([w.double().norm() for w in wanted.values()]).norm()
    return max(
        ((found[n].double() - w.double()).norm() / torch.maximum(w.double().norm(), floor)).item()
        for n, w in wanted.items()
    )


def refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


# --- apply_fsdp2


def average_job(layout: str, reshard: bool | int) -> dict:
    reference = built()
    mean_loss(reference).backward()
    mesh = mesh_of(layout)
    model = apply_fsdp2(built(), mesh, KEPT, reshard)
    with WireCounter() as wire:
        mean_loss(model, *data_position(mesh)).backward()
    return {
        "error": worst(gradients(model), gradients(reference)),
        "units": sorted(name for name, module in model.named_modules() if isinstance(module, FSDPModule)),
        "local": {n: p.to_local().shape[0] for n, p in model.named_parameters() if isinstance(p, DTensor)},
        "wire": Counter((sent.op, sent.ranks) for sent in wire.sent),
        "tied": model.head.weight is model.embed.weight,
        "twice": refusal(lambda: apply_fsdp2(model, mesh, KEPT)),
        "too late": refusal(lambda: apply_ac(model, "full")),
    }


@pytest.mark.first("fsdp2-False-wire1")
@pytest.mark.parametrize(
    ("layout", "reshard", "wire"),
    [
        # three units: the root and the last block stay gathered, the first block is gathered again where it reshards
        ("fsdp2", True, {("all_gather", 2): 4, ("reduce_scatter", 2): 3}),
        ("fsdp2", False, {("all_gather", 2): 3, ("reduce_scatter", 2): 3}),
        ("fsdp4", 2, {("all_gather", 4): 3, ("all_gather", 2): 1, ("reduce_scatter", 4): 3}),
        ("hsdp2x2", True, {("all_gather", 2): 4, ("reduce_scatter", 2): 3, ("all_reduce", 2): 3}),
    ],
)
def test_gradients_are_averaged_over_data_ranks(spmd, layout, reshard, wire):
    for rank, found in enumerate(spmd(LAYOUTS[layout][0], average_job, layout, reshard)):
        assert found["error"] < 1e-10, rank
        assert found["units"] == ["", "blocks.0", "blocks.1"], "each repeated block is a unit, then the root"
        shards = {"fsdp2": 2, "fsdp4": 4, "hsdp2x2": 2}[layout]
        assert len(found["local"]) == 13 and found["local"]["embed.weight"] <= -(-VOCAB // shards)
        assert found["wire"] == wire
        assert found["tied"]
        assert found["twice"] == "ConfigError: fully_shard is on this FSDPOdd already; apply it once"
        assert "ConfigError: activation_checkpoint must come before fully_shard" in found["too late"]


def dtype_seen(model: nn.Module) -> list[torch.dtype]:
    seen: list[torch.dtype] = []
    inner = next(module for module in model.modules() if isinstance(module, nn.Linear))
    inner.register_forward_hook(
        lambda module, args, output: seen.extend([module.weight.dtype, args[0].dtype, output.dtype])
    )
    return seen


def dtype_job(layout: str, policy: MixedPrecisionPolicy | None) -> dict:
    mesh = mesh_of(layout)
    model = built(lambda: Odd(dtype=torch.float32))
    with heard() as said:
        same = apply_fsdp2(model, mesh, policy)
    seen = dtype_seen(model)
    mean_loss(model, *data_position(mesh)).backward()
    return {
        "seen": set(seen),
        "rest": {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters()},
        "is sharded": isinstance(model, FSDPModule),
        "said": said,
        "same": same is model,
    }


def test_no_policy_means_the_default_one(spmd):
    for found in spmd(2, dtype_job, "fsdp2", None):
        assert found["seen"] == {torch.bfloat16} and found["rest"] == {torch.float32} and found["same"]


def test_without_a_data_axis_there_is_nothing_to_do_and_that_is_said(spmd):
    (found,) = spmd(1, dtype_job, "one", None)
    assert not found["is sharded"] and found["seen"] == {torch.float32} and found["same"]
    assert (
        len(found["said"]) == 1 and "has no data axis larger than 1, so there is nothing to shard" in found["said"][0]
    )


def test_an_explicit_policy_acts_over_a_mesh_of_one(spmd):
    (found,) = spmd(1, dtype_job, "one", default_mp_policy())
    assert found["is sharded"] and found["seen"] == {torch.bfloat16} and found["rest"] == {torch.float32}
    notes = [line.removeprefix("apply_fsdp2: ") for line in found["said"]]
    assert "dp_shard = 1: nothing is sharded; fully_shard acts for its precision or offload only" in notes


@pytest.mark.all
@ranks(4)
def test_refusals_leave_the_model_as_it_was():
    mesh = mesh_of("fsdp4")
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    replicas = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_replicate",))
    pipeline = build_mesh(Layout(pp=2, dp_shard=2), "cpu")
    models = {name: built() for name in ("reshard", "names", "replicas", "pipeline", "half", "double")}
    found = {
        "reshard": refusal(lambda: apply_fsdp2(models["reshard"], mesh, KEPT, 3)),
        "names": refusal(lambda: apply_fsdp2(models["names"], other, KEPT)),
        "replicas": refusal(lambda: apply_fsdp2(models["replicas"], replicas, KEPT)),
        "pipeline": refusal(lambda: build_parallel_model(SMALL, "cpu", pipeline)),
        "half": refusal(lambda: apply_fsdp2(models["half"], mesh, MixedPrecisionPolicy(torch.bfloat16, torch.float16))),
        "device": refusal(lambda: build_parallel_model(SMALL, "cuda", mesh)),
        "no mesh": refusal(lambda: build_parallel_model(SMALL, "cpu")),
        "mode": refusal(lambda: build_parallel_model(SMALL, "cpu", mesh, ac_mode="selektive")),
    }
    untouched = [not any(isinstance(m, FSDPModule) for m in model.modules()) for model in models.values()]
    found = found | {"untouched": str(all(untouched))}
    assert "reshard_after_forward = 3: as a number it must divide layout.dp_shard = 4" in found["reshard"]
    assert found["names"].startswith(
        "ConfigError: the mesh has the axes ['data']; legal names are pp, dp_replicate, dp_shard, cp, tp"
    )
    assert found["replicas"].startswith("ConfigError: fully_shard needs a mesh axis named dp_shard (size 1 will do)")
    assert found["pipeline"].startswith(
        "UnsupportedError: the mesh has a pp axis of 2 ranks, and build_parallel_model returns one module"
    )
    assert found["half"].startswith(
        "UnsupportedError: techniques.precision.reduce = float16 would lose small gradients"
    )
    assert found["device"] == "ConfigError: device = cuda but the mesh is on cpu: give both the same kind"
    assert found["no mesh"].startswith("ConfigError: device_mesh = None means one process")
    assert (
        "'selektive' is not a mode. Did you mean 'selective'? Legal: none, full, selective, every_n, " in found["mode"]
    )
    assert found["untouched"] == "True"


# --- apply_ac


class Noisy(nn.Module):
    """Blocks around a submodule (called attention) with dropout; counts the forwards of each."""

    def __init__(self, attention: str = "attention", blocks: int = 3):
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.embed = nn.Embedding(VOCAB, 8)
        self.layers = nn.ModuleList(Layer(attention, self.counts) for _ in range(blocks))
        self.head = nn.Linear(8, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Mixer(nn.Module):
    def __init__(self, counts: Counter):
        super().__init__()
        self.counts = counts
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        self.counts["mixer"] += 1
        return F.dropout(self.linear(x), 0.5, self.training)


class Layer(nn.Module):
    def __init__(self, attention: str, counts: Counter):
        super().__init__()
        self.counts = counts
        self.add_module(attention, Mixer(counts))
        self.name = attention
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        self.counts["layer"] += 1
        return x + torch.tanh(self.out(self.get_submodule(self.name)(x)))


def one_step(mode: str | None) -> tuple[dict, dict, list[str]]:
    model = built(Noisy)
    if mode is not None:
        assert apply_ac(model, mode) is model
    torch.manual_seed(3)
    mean_loss(model).backward()
    return dict(model.counts), gradients(model), list(model.state_dict())


@pytest.mark.parametrize(
    ("mode", "layers", "mixers"),
    [
        *(
            ("none", 3, 3),
            ("full", 6, 6),
            ("selective", 3, 6),
            ("every_n", 4, 4),
            ("selective_op", 6, 6),
            ("offload", 3, 3),
        ),
        *((ActivationCheckpointing.FULL, 6, 6), (ActivationCheckpointing.selective, 3, 6)),
    ],
)
def test_recomputation_repeats_what_the_mode_says_and_changes_no_gradient(mode, layers, mixers):
    counts, found, names = one_step(mode)
    _, wanted, plain_names = one_step(None)
    assert counts == {"layer": layers, "mixer": mixers}
    assert all(torch.equal(found[name], wanted[name]) for name in wanted), "dropout draws the same mask again"
    assert found.keys() == wanted.keys() and names == plain_names, "names stay as they are"


def test_nothing_is_recomputed_without_gradients():
    model = apply_ac(built(Noisy), "full")
    with torch.no_grad():
        mean_loss(model)
    assert model.counts == {"layer": 3, "mixer": 3}


@pytest.mark.parametrize(
    ("model", "mode", "words"),
    [
        (lambda: nn.Linear(4, 4), "full", "acts on repeated blocks, and none was found in Linear"),
        (
            lambda: Noisy("mixer"),
            "selective",
            "selective recomputes attention, but no module of Noisy inside a repeated block is called attention",
        ),
        (
            Noisy,
            "ful",
            "activation checkpointing 'ful' is not a mode. Did you mean 'full'? Legal: none, full, selective,"
            " every_n, modules, ",
        ),
        (
            Noisy,
            "modules",
            "recomputes the modules of techniques.checkpoint_modules, and none is named. Name some, such as layers.*.",
        ),
        (Noisy, "memory_budget", "compiled blocks are needed. Set techniques.compile = true, or use selective_op."),
        (Noisy, "", "activation checkpointing '' is not a mode"),
        (
            lambda: apply_ac(Noisy(), "full"),
            "selective",
            "activation_checkpoint is on this Noisy already; apply it once",
        ),
    ],
)
def test_a_mode_that_matches_nothing_is_an_error(model, mode, words):
    with pytest.raises(ConfigError) as caught:
        apply_ac(model(), mode)
    assert words in str(caught.value)


def test_the_modes_are_words():
    assert tuple(str(mode) for mode in ActivationCheckpointing) == get_args(
        field_types(Techniques)["activation_checkpointing"]
    )
    assert issubclass(UnsupportedError, NotImplementedError)


# --- clip_grad_norm_


def test_a_norm_of_narrow_gradients_is_wide():
    model = nn.Linear(200, 200, dtype=torch.bfloat16)
    for p in model.parameters():
        p.grad = torch.full_like(p, 300.0)
    norm = clip_grad_norm_(model, 1.0)
    assert norm.dtype == torch.float32 and norm.dim() == 0
    assert norm.item() == pytest.approx(300.0 * 40_200**0.5, rel=2e-4), "no bfloat16 number is as near"
    assert torch.stack([p.grad.float().norm() for p in model.parameters()]).norm() == pytest.approx(1.0, rel=1e-2)
    assert clip_grad_norm_(nn.Linear(2, 2), 1.0).item() == 0.0, "no gradients, no norm"


# --- build_parallel_model


def compose_job(layout: str) -> dict:
    mesh = init_distributed(LAYOUTS[layout][1])
    wide = {"mp_policy": MixedPrecisionPolicy(torch.float64, torch.float64)}
    counts: Counter[str] = Counter()
    model = build_parallel_model(SMALL, "cpu", mesh, ac_mode="selective", seed=3, **wide)
    for module in model.modules():
        if isinstance(module, Attention):
            module.core.register_forward_hook(lambda *_: counts.update(["core"]))
    weights = {name: whole(p) for name, p in model.named_parameters()}
    loss = mean_loss(model, *data_position(mesh))
    loss.backward()
    found = {
        "weights": weights,
        "gradients": gradients(model),
        "applied": applied(model),
        "rest": {p.dtype for p in model.parameters()},
        "cores": counts["core"],
        "names": [name for name, _ in model.named_parameters()],
    }
    compiled = build_parallel_model(lambda: Decoder(SMALL), torch.device("cpu"), mesh, compile_model=True)
    found["compiled"] = [name for name, module in compiled.named_modules() if module._compiled_call_impl is not None]
    found["compiled applied"] = applied(compiled)
    default = build_parallel_model(SMALL, "cpu", mesh)
    seen = dtype_seen(default)
    default(batch()[0])
    found["default"] = set(seen)
    narrow = build_parallel_model(SMALL, "cpu", mesh, param_dtype=torch.float32)
    seen = dtype_seen(narrow)
    narrow(batch()[0])
    found["narrow"] = set(seen)
    return found


@pytest.mark.all
def test_the_whole_composition(spmd):
    every = {layout: spmd(LAYOUTS[layout][0], compose_job, layout) for layout in ("one", "fsdp2", "hsdp2x2")}
    one = every["one"][0]
    with torch.device("meta"):
        plain = Decoder(SMALL)
    assert one["names"] == [name for name, _ in plain.named_parameters()]
    for layout, runs in every.items():
        for found in runs:
            assert all(torch.equal(found["weights"][n], w) for n, w in one["weights"].items()), (
                f"{layout}: every layout starts alike"
            )
            assert worst(found["gradients"], one["gradients"]) < 1e-6, layout
            assert found["applied"] == ("activation_checkpoint", "fully_shard", "weights")
            assert found["rest"] == {torch.float32} and found["cores"] == 2 * SMALL.n_layers
            assert found["compiled"] == [f"layers.{i}" for i in range(SMALL.n_layers)]
            assert found["compiled applied"] == ("compile", "fully_shard", "weights")
            assert found["default"] == {torch.bfloat16} and found["narrow"] == {torch.float32}
    assert one["weights"]["embedding.weight"].std().item() == pytest.approx(0.02, rel=0.1)


@ranks(1)
def test_one_process_needs_no_mesh():
    build_parallel_model(SMALL, "cpu")
    assert dist.get_world_size() == 1
