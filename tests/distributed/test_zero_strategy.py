"""nvFSDP's one call on our engine: every strategy equals one process, every switch does what it says or is refused by
name.
"""

from __future__ import annotations

import copy
import inspect
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.families import config_of, on_cpu, some_tokens
from support.heard import heard
from support.ranks import ranks
from support.ranks import told as first_error
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwright import ConfigError, Layout
from meshwright.core.errors import NonFiniteError
from meshwright.distributed import init_distributed
from meshwright.distributed.data import fully_sharded
from meshwright.distributed.mesh import axis_sizes, data_position
from meshwright.distributed.parallelize import single_process_mesh
from meshwright.distributed.parallelizer import nvfsdp_strategy_parallelize, to_cpu
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig

pytestmark = pytest.mark.all

FP32_INSIDE = 1e-6
"""Their norms compute in fp32 whatever the dtype."""

DEFAULTS = {
    "optimizer": None,
    "nvfsdp_unit_modules": None,
    "tp_shard_plan": None,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "init_nvfsdp_with_meta_device": False,
    "grad_reduce_in_fp32": False,
    "preserve_fp32_weights": False,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "check_for_nan_in_grad": True,
    "average_in_collective": False,
    "disable_bucketing": False,
    "calculate_per_token_loss": False,
    "keep_fp8_transpose_cache_when_using_custom_fsdp": False,
    "nccl_ub": False,
    "fsdp_double_buffer": False,
}
DP2, HSDP, CUT = Layout(dp_shard=2), Layout(dp_replicate=2, dp_shard=2), Layout(dp_shard=2, tp=2)


@pytest.mark.first
def test_the_signature_is_the_published_one():
    found = inspect.signature(nvfsdp_strategy_parallelize).parameters
    assert list(found) == ["model", "device_mesh", *DEFAULTS]
    assert {name: p.default for name, p in found.items() if p.default is not p.empty} == DEFAULTS


# --- equal to one process


@cache
def built() -> nn.Module:
    return on_cpu(config_of("qwen3")).double()


def mean_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).logits
    return F.cross_entropy(logits.double().flatten(0, 1), tokens[:, 1:].flatten())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int = 0, ranks: int = 1) -> None:
    """Two microbatches of this rank's rows, as a loop of the user's own takes them."""
    rows = some_tokens(16, 9)[8 * number : 8 * (number + 1)][rank * 8 // ranks : (rank + 1) * 8 // ranks]
    pieces = rows.chunk(2)
    for index, piece in enumerate(pieces):
        loss = mean_loss(model, piece) / len(pieces)
        if ranks > 1:
            with model.accumulation_context(index == len(pieces) - 1):
                loss.backward()
        else:
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@cache
def trained_alone() -> dict[str, torch.Tensor]:
    model = copy.deepcopy(built())
    optimizer = sgd(model)
    for number in range(2):
        step(model, optimizer, number)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def worst_error(layout: Layout, options: dict[str, Any]) -> float:
    """Of every parameter after two steps, relative to what they moved."""
    mesh = init_distributed(layout)
    assert mesh is not None
    whole = copy.deepcopy(built())
    start = {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}
    model, optimizer = nvfsdp_strategy_parallelize(whole, mesh, sgd(whole), **options)
    assert optimizer is not None
    for number in range(2):
        step(model, optimizer, number, *data_position(mesh))
    wanted, found = trained_alone(), {name: to_cpu(parameter.detach()) for name, parameter in model.named_parameters()}
    assert found.keys() == wanted.keys()
    return max(
        ((found[name] - w).norm() / (w - start[name]).norm()).item()
        for name, w in wanted.items()
        if (w - start[name]).norm() > 1e-9
    )


STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params", "grads_params", "params")
WAYS: list[tuple[Layout, dict[str, Any]]] = [
    *((DP2, {"data_parallel_sharding_strategy": strategy}) for strategy in STRATEGIES),
    (DP2, {"average_in_collective": True}),
    (DP2, {"overlap_grad_reduce": False, "overlap_param_gather": False}),
    (DP2, {"disable_bucketing": True, "data_parallel_sharding_strategy": "optim"}),
    *((layout, {"data_parallel_sharding_strategy": strategy}) for layout in (HSDP, CUT) for strategy in STRATEGIES[:4]),
    (Layout(dp_shard=1, tp=2, dp_replicate=2), {"data_parallel_sharding_strategy": "no_shard"}),
    (HSDP, {"average_in_collective": True}),
]


@pytest.mark.parametrize(("layout", "options"), WAYS, ids=str)
def test_two_steps_equal_one_process(spmd, measured, layout, options):
    for error in spmd(layout.world, worst_error, layout, options):
        assert error <= FP32_INSIDE
        measured(f"{layout}, {options}"[:48], "strategy, fp64", {"parameters": error})


# --- what is applied

DECODER = DecoderConfig(64, 16, 3, 2, 2, 24, 16)


def decoder(dtype: torch.dtype = torch.float32) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(DECODER).to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1) if parameter.dim() > 1 else nn.init.ones_(parameter)
    return model


def loss_of(model: nn.Module, scale: float = 1.0) -> torch.Tensor:
    tokens = torch.arange(16).view(2, 8)
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()) * scale


def units(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


@ranks(2)
def test_what_is_applied():
    mesh = init_distributed(DP2)
    assert mesh is not None
    found: dict[str, Any] = {}
    for strategy in STRATEGIES[:4]:
        model = nvfsdp_strategy_parallelize(decoder(), mesh, data_parallel_sharding_strategy=strategy)
        first = next(model.parameters())
        assert isinstance(first, DTensor)
        shard, held, kept = first._local_tensor.numel() / first.numel(), [], []
        for last in (False, True):
            with model.accumulation_context(last):
                loss = loss_of(model)
                held.append(sum(group.is_unsharded for group in fully_sharded.parameter_groups(model)))
                loss.backward()
            kept.append(sum(group.is_unsharded for group in fully_sharded.parameter_groups(model)))
        found[strategy] = shard, held, kept, axis_sizes(first.device_mesh)
    in_half = nvfsdp_strategy_parallelize(
        decoder(torch.bfloat16), mesh, preserve_fp32_weights=True, grad_reduce_in_fp32=True
    )
    loss_of(in_half).backward()
    policy = in_half._get_fsdp_state()._mp_policy
    found["preserved"] = (
        policy.param_dtype,
        policy.reduce_dtype,
        {p.dtype for p in in_half.parameters()},
        in_half.head.weight.grad.dtype,
    )
    plain = nvfsdp_strategy_parallelize(decoder(torch.bfloat16), mesh)
    found["plain"] = plain._get_fsdp_state()._mp_policy.param_dtype, {p.dtype for p in plain.parameters()}
    named = nvfsdp_strategy_parallelize(
        decoder(), mesh, nvfsdp_unit_modules=["meshwright.models.decoder.Attention", nn.Embedding]
    )
    alone = nvfsdp_strategy_parallelize(decoder(), mesh, disable_bucketing=True)
    found["units"] = units(named), units(alone)
    quiet = nvfsdp_strategy_parallelize(decoder(), mesh, overlap_grad_reduce=False, overlap_param_gather=False)
    states = [module._get_fsdp_state() for module in fully_sharded.sharded_modules(quiet)]
    found["quiet"] = all(
        state._states_to_backward_prefetch == [state] and not state._states_to_forward_prefetch for state in states
    )
    found["waits"] = {type(group._reduce_scatter_comm).__name__ for group in fully_sharded.parameter_groups(quiet)}
    found["default"] = {type(group._reduce_scatter_comm).__name__ for group in fully_sharded.parameter_groups(plain)}
    gradients = {}
    for switch in ({}, {"average_in_collective": True}, {"calculate_per_token_loss": True}):
        model = nvfsdp_strategy_parallelize(decoder(), mesh, **switch)
        loss_of(model).backward()
        group = fully_sharded.parameter_groups(model)[0]
        divides = group.force_sum_reduction_for_comms, group.gradient_divide_factor
        gradients[next(iter(switch), "")] = to_cpu(model.head.weight.grad), divides
    found["gradients"] = gradients
    assert found["no_shard"][0] == 1.0 and found["no_shard"][3]["dp_replicate"] == 2
    assert [found[strategy][0] for strategy in STRATEGIES[1:4]] == [0.5] * 3
    units_in_all = 4
    for strategy in ("optim", "optim_grads"):
        assert found[strategy][1:3] == ([units_in_all] * 2, [units_in_all, 0]), (
            "kept until the last microbatch's backward, no longer"
        )
    assert found["optim_grads_params"][1:3] == ([2, 2], [0, 0]), "root and last block stay between forward and backward"
    assert found["preserved"] == (torch.bfloat16, torch.float32, {torch.float32}, torch.float32)
    assert found["plain"] == (None, {torch.bfloat16})
    named, alone = found["units"]
    assert named == ["", "embedding", *(f"layers.{n}.attention" for n in range(3))]
    assert "layers.1.feed_forward.w_down" in alone and "layers.1.attention_norm" in alone and "layers.1" not in alone
    assert found["quiet"] and found["waits"] == {"_Waiting"} and "_Waiting" not in found["default"]
    mean, divided = found["gradients"][""]
    averaged, inside = found["gradients"]["average_in_collective"]
    summed, factor = found["gradients"]["calculate_per_token_loss"]
    assert torch.allclose(mean, averaged, rtol=1e-6, atol=0) and (divided, inside) == ((True, None), (False, None))
    assert torch.allclose(2 * mean, summed, rtol=1e-6, atol=0) and factor == (True, 1.0)


@ranks(2)
def test_a_model_on_meta_gets_weights_and_the_optimizer_its_shards():
    mesh = init_distributed(DP2)
    assert mesh is not None
    with torch.device("meta"):
        model = Decoder(DECODER)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    before = torch.optim.AdamW([{"params": matrices, "lr": 0.25}, {"params": vectors, "weight_decay": 0.0}], lr=0.5)
    laid, optimizer = nvfsdp_strategy_parallelize(model, mesh, before, init_nvfsdp_with_meta_device=True)
    assert optimizer is before
    loss_of(laid).backward()
    weights = [p._local_tensor.detach().clone() for p in laid.parameters()]
    optimizer.step()
    moved = all(
        not torch.equal(p._local_tensor, w) for p, w in zip(laid.parameters(), weights, strict=True) if w.numel()
    )
    plain = [
        {key: value for key, value in group.items() if key in ("lr", "weight_decay")}
        for group in optimizer.param_groups
    ]
    sharded = sum(state["exp_avg"]._local_tensor.numel() for state in optimizer.state.values())
    extra = sharded * 2 - sum(p.numel() for p in laid.parameters())
    assert moved and extra == 0
    assert plain == [{"lr": 0.25, "weight_decay": 0.01}, {"lr": 0.5, "weight_decay": 0.0}]


# --- gradients that are not finite


class Root(torch.autograd.Function):
    """The square root's gradient at zero: finite forward, infinite backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.inf


def checked(layout: Layout, options: dict[str, Any]) -> tuple[str, bool, str, list[bool]]:
    """What is raised where the last rank's gradients of one block are not finite.

    Whether weights moved; what a healthy step raises.
    """
    mesh = init_distributed(layout)
    assert mesh is not None
    whole = decoder()
    model, optimizer = nvfsdp_strategy_parallelize(whole, mesh, torch.optim.SGD(whole.parameters(), lr=1.0), **options)
    assert optimizer is not None
    rank, ranks = data_position(mesh)
    bad = rank == ranks - 1
    trap = model.get_submodule("layers.1.feed_forward").register_forward_hook(
        lambda m, i, out: Root.apply(out) if bad else out
    )
    before = [p._local_tensor.detach().clone() for p in model.parameters()]
    said = healthy = ""
    try:
        loss_of(model).backward()
        optimizer.step()
    except NonFiniteError as error:
        said = str(error)
    moved = any(not torch.equal(p._local_tensor, b) for p, b in zip(model.parameters(), before, strict=True))
    trap.remove()
    optimizer.zero_grad()
    try:
        loss_of(model).backward()
    except NonFiniteError as error:
        healthy = str(error)
    return said, moved, healthy, [bool(p.grad._local_tensor.isfinite().all()) for p in model.parameters()]


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [(DP2, "optim_grads_params"), (DP2, "no_shard"), (HSDP, "optim"), (CUT, "optim_grads_params")],
    ids=str,
)
def test_a_gradient_that_is_not_finite_is_named_on_all_ranks(spmd, layout, strategy):
    for said, moved, healthy, finite in spmd(
        layout.world, checked, layout, {"data_parallel_sharding_strategy": strategy}
    ):
        assert "the gradient of embedding.weight" in said and "layers.2" not in said and "head" not in said
        assert not moved and healthy == "" and all(finite)


def test_the_check_can_be_switched_off(spmd):
    for said, moved, *_ in spmd(2, checked, DP2, {"check_for_nan_in_grad": False}):
        assert said == "" and moved


@ranks(2)
def test_a_model_that_was_frozen_since_has_nothing_to_check():
    model = nvfsdp_strategy_parallelize(nn.Linear(4, 4), init_distributed(DP2))
    model.requires_grad_(False)
    inputs = torch.ones(2, 4, requires_grad=True)
    model(inputs).sum().backward()
    assert inputs.grad is not None and bool(inputs.grad.isfinite().all())


class Silent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return {4: str(self.layer(x).sum())}


# --- refusals


WORDS = {
    "strategy": "ConfigError: data_parallel_sharding_strategy = 'optim_grad': legal are no_shard, optim, optim_grads,"
    " optim_grads_params,",
    "sums": "ConfigError: calculate_per_token_loss = True sums gradients over data ranks, and average_in_collective ="
    " True averages",
    "both units": "ConfigError: disable_bucketing = True makes every module with parameters a unit",
    "state": "ConfigError: optimizer: this SGD has the state of",
    "other model": "ConfigError: optimizer: its group 0 holds a parameter that is not one of this Decoder's",
    "class": "ConfigError: nvfsdp_unit_modules: Decoder has no module of the class torch.nn.modules.conv.Conv1d",
    "path": "ImportError: cannot import the class 'torch.nn.Conv9'",
    "nested": "ConfigError: nvfsdp_unit_modules: layers.0.attention.wq is inside layers.0.attention, and both are"
    " named",
    "meta": "ConfigError: init_nvfsdp_with_meta_device = False, but the Decoder is on meta. Set it to True.",
    "not meta": "ConfigError: init_nvfsdp_with_meta_device = True, but the Decoder is not on meta. Set it to False,"
    " or build",
    "replicas": "ConfigError: data_parallel_sharding_strategy = optim shards over dp_shard, which is 1 on this mesh",
    "silent": "ConfigError: check_for_nan_in_grad = True: FSDPSilent returns a dict, in which no tensor is found",
    "nccl_ub": "UnsupportedError: nccl_ub = True is about buffers of megatron-fsdp",
    "fsdp_double_buffer": "UnsupportedError: fsdp_double_buffer = True is about buffers of megatron-fsdp",
    list(DEFAULTS)[
        13
    ]: "UnsupportedError: keep_fp8_transpose_cache_when_using_custom_fsdp = True is about buffers of megatron-fsdp",
}


@ranks(2)
def test_what_cannot_be_is_refused_in_words():
    mesh = init_distributed(DP2)
    assert mesh is not None
    replicas = init_distributed(Layout(dp_replicate=2, dp_shard=1))
    assert replicas is not None
    model, used = decoder(), decoder()
    stepped = torch.optim.SGD(used.parameters(), lr=0.1, momentum=0.9)
    loss_of(used).backward()
    stepped.step()
    with torch.device("meta"):
        meta = Decoder(DECODER)
    silent = nvfsdp_strategy_parallelize(Silent(), mesh)
    jobs = {
        "strategy": lambda: nvfsdp_strategy_parallelize(model, mesh, data_parallel_sharding_strategy="optim_grad"),
        "sums": lambda: nvfsdp_strategy_parallelize(
            model, mesh, calculate_per_token_loss=True, average_in_collective=True
        ),
        "both units": lambda: nvfsdp_strategy_parallelize(
            model, mesh, disable_bucketing=True, nvfsdp_unit_modules=[nn.Linear]
        ),
        "state": lambda: nvfsdp_strategy_parallelize(used, mesh, stepped),
        "other model": lambda: nvfsdp_strategy_parallelize(model, mesh, torch.optim.SGD(used.parameters(), lr=0.1)),
        "class": lambda: nvfsdp_strategy_parallelize(model, mesh, nvfsdp_unit_modules=[nn.Conv1d]),
        "path": lambda: nvfsdp_strategy_parallelize(model, mesh, nvfsdp_unit_modules=["torch.nn.Conv9"]),
        "nested": lambda: nvfsdp_strategy_parallelize(
            model, mesh, nvfsdp_unit_modules=["meshwright.models.decoder.Attention", nn.Linear]
        ),
        "meta": lambda: nvfsdp_strategy_parallelize(meta, mesh),
        "not meta": lambda: nvfsdp_strategy_parallelize(model, mesh, init_nvfsdp_with_meta_device=True),
        "replicas": lambda: nvfsdp_strategy_parallelize(model, replicas, data_parallel_sharding_strategy="optim"),
        "silent": lambda: silent(torch.ones(1, 4)),
        **{
            key: lambda key=key: nvfsdp_strategy_parallelize(model, mesh, **{key: True})
            for key in ("nccl_ub", "fsdp_double_buffer", list(DEFAULTS)[13])
        },
    }
    found = {name: first_error(job) for name, job in jobs.items()}
    assert not any(isinstance(p, DTensor) for p in model.parameters()), "a refusal leaves the model as it was"
    assert found.keys() == WORDS.keys()
    assert {name: found[name] for name, words in WORDS.items() if not found[name].startswith(words)} == {}


def cut_by_module() -> list[str]:
    mesh = init_distributed(CUT)
    assert mesh is not None
    return [
        first_error(lambda o=o: nvfsdp_strategy_parallelize(copy.deepcopy(built()), mesh, **o))
        for o in ({"disable_bucketing": True},)
    ]


def test_units_of_single_modules_do_not_go_with_a_tensor_axis(spmd):
    assert spmd(4, cut_by_module)[0][0].startswith(
        "UnsupportedError: disable_bucketing: beside tensor or expert parallelism the units are"
    )


# --- one process


def alone() -> tuple[list[str], bool, str]:
    whole, plain = decoder(), decoder()
    with heard() as said:
        model = nvfsdp_strategy_parallelize(
            whole, single_process_mesh("cpu"), data_parallel_sharding_strategy="optim_grads"
        )
    loss_of(model).backward()
    loss_of(plain).backward()
    same = all(torch.equal(to_cpu(p.grad), q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    model.get_submodule("layers.1").register_forward_hook(lambda m, i, out: Root.apply(out))
    raised = ""
    try:
        loss_of(model).backward()
    except NonFiniteError as error:
        raised = str(error)
    return said, same, raised


@pytest.mark.first
def test_one_process_says_that_nothing_is_sharded_and_does_the_rest(spmd):
    ((said, same, raised),) = spmd(1, alone)
    assert any("there is one data rank, so optim_grads shards nothing" in line for line in said)
    assert same and "check_for_nan_in_grad: the gradient of embedding.weight" in raised


# --- the older order, each argument one place earlier


@pytest.mark.first
@ranks(2)
def test_the_older_order_is_read_whole():
    mesh = init_distributed(DP2)
    model = nvfsdp_strategy_parallelize(copy.deepcopy(built()), mesh, ["torch.nn.Linear"], None, "optim_grads")
    said = []
    for wrong in (("optim_grads", True), (7,), (None, 3)):
        try:
            nvfsdp_strategy_parallelize(copy.deepcopy(built()), mesh, ["torch.nn.Linear"], None, *wrong)
        except ConfigError as refusal:
            said.append(str(refusal))
    is_sharded = isinstance(next(model.parameters()), torch.distributed.tensor.DTensor)
    assert isinstance(is_sharded, bool) and len(said) == 3
    assert "given by name, and here True stands there" in said[0]
    assert said[1].startswith("tp_shard_plan is a int") and said[2].startswith("data_parallel_sharding_strategy is")
