"""Transforms from config: strict, in the one order, and equal to one process with torch's averaging."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.odd import LAYOUTS, VOCAB, Mix, Odd, whole
from support.ranks import ranks
from test_functions import refusal, worst
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshwright import ConfigError, Layout, UnsupportedError
from meshwright.distributed import init_distributed
from meshwright.distributed.mesh import axis_sizes, data_position
from meshwright.distributed.order import NAMES
from meshwright.distributed.process.absent_peers import WireCounter
from meshwright.distributed.transform_registry import in_order
from meshwright.distributed.transforms import (
    ActivationCheckpointTransformConfig,
    DDPTransformConfig,
    FullyShardTransformConfig,
    MixedPrecisionConfig,
    ModelTransform,
    apply_model_transforms,
    build_model_transform,
    register_model_transform,
)

ROWS, SEQ = 4, 5


@dataclass(frozen=True)
class LabelConfig:
    """Config of the transforms that the tests register."""

    text: str = "label"
    size: int = 1
    tags: tuple[str, ...] = field(default=())


class Label(ModelTransform):
    """Writes its text on the model."""

    def apply(self, model: nn.Module) -> nn.Module:
        model.__dict__.setdefault("labels", []).append(self.config.text)
        return model


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args)


def registered(name: str, *, kind: type[ModelTransform] = Label, **requested) -> None:
    register_model_transform(name, LabelConfig, **requested)(type(f"{name.title()}Transform", (kind,), {}))


@register_model_transform("wrap", LabelConfig, after=("ddp", "fully_shard"))
class Wrap(ModelTransform):
    def apply(self, model: nn.Module) -> nn.Module:
        return Wrapper(model)


registered("first")
registered("late", after=["fully_shard"])
registered("between", after=["activation_checkpoint"], before=["compile"])
registered("before_late", before=["late"])

BUILT_IN = ["tensor_parallel", "activation_checkpoint", "compile", "fully_shard", "ddp"]


# --- the registry


MISNAMED = {"mixed_precision": {"param_type": "bf16"}}
DDP, SHARD = (
    DDPTransformConfig(),
    "transform 'fully_shard' takes a FullyShardTransformConfig or a dict of it, not DDPTransformConfig",
)


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("fully_shards", {}, "'fully_shards' is not a registered model transform. Did you mean 'fully_shard'?"),
        ("x", {}, "'x' is not a registered model transform. Registered: activation_checkpoint, "),
        (
            "ddp",
            {"find_unused": True},
            "ddp: unknown key 'find_unused'. Did you mean 'find_unused_parameters'? Keys here: find_unused_",
        ),
        ("ddp", {"static_graph": 1}, "ddp: static_graph = 1 is a whole number; expected true or false"),
        (
            "fully_shard",
            MISNAMED,
            "unknown key 'mixed_precision.param_type'. Did you mean 'mixed_precision.param_dtype'?",
        ),
        (
            "fully_shard",
            {"sync_grad_accum": "shards"},
            'sync_grad_accum = "shards" is text; expected true or false, or "shard".',
        ),
        ("fully_shard", {"reshard_after_forward": "2"}, "Write it without quotes: reshard_after_forward = 2"),
        ("fully_shard", {"offload": True}, "fully_shard: offload = true is true or false; expected a table"),
        ("fully_shard", DDP, SHARD),
        ("first", {"text": 3}, "first: text = 3 is a whole number; expected text"),
        ("compile", [], "transform 'compile' takes a CompileTransformConfig or a dict of it, not list"),
        (DDPTransformConfig(), None, "one config with its name under _name, not DDPTransformConfig("),
        ({"_name": "ddp"}, {}, "takes a name and its config, or one config with its name"),
        ({"_name": "dpd"}, None, "'dpd' is not a registered model transform. Did you mean 'ddp'"),
    ],
)
def test_a_config_that_is_wrong_is_refused(name, config, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        build_model_transform(name, config)


def test_a_config_is_an_instance_a_dict_or_nothing():
    for config in (None, {}, DDPTransformConfig()):
        assert build_model_transform("ddp", config).config == DDPTransformConfig(False, True, False)
    assert build_model_transform("ddp", {"static_graph": True}, seed=3).context == {"seed": 3}
    for config in ({"_name": "ddp", "static_graph": True}, DDPTransformConfig(_name="ddp", static_graph=True)):
        assert build_model_transform(config).config == DDPTransformConfig(static_graph=True)
    default = build_model_transform("fully_shard").config
    assert default == FullyShardTransformConfig(False, None, None, True, False)
    mixed = build_model_transform(
        "fully_shard", {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}
    ).config.mixed_precision
    assert mixed == MixedPrecisionConfig("bf16", "fp32", None, True)


@pytest.mark.parametrize("key", ["param_dtype", "reduce_dtype", "output_dtype"])
def test_a_dtype_that_is_none_is_refused_at_once(key):
    values = {"param_dtype": "bf16", "reduce_dtype": "bf16"} | {key: "float23"}
    legal = "Legal: float32/fp32, float16/fp16/half, bfloat16/bf16, float64/double/fp64."
    with pytest.raises(
        ConfigError,
        match=re.escape(f"mixed_precision.{key} = 'float23' is not a dtype that meshwright knows.") + ".*" + legal,
    ):
        build_model_transform("fully_shard", {"mixed_precision": values})


def test_registering_refuses_what_would_go_wrong_later():
    with pytest.raises(ConfigError, match="must be a dataclass"):
        register_model_transform("odd", dict)
    with pytest.raises(
        ConfigError, match="'fully_sharded' is not a registered model transform. Did you mean 'fully_shard'"
    ):
        register_model_transform("odd", LabelConfig, after=["fully_sharded"])
    with pytest.raises(
        ConfigError, match="the transform name 'ddp' is taken by meshwright.distributed.transforms.DDPTransform"
    ):
        register_model_transform("ddp", LabelConfig)(Label)
    with pytest.raises(ConfigError, match="the transform name 'ddp' is taken"):
        register_model_transform("ddp", LabelConfig)(type("DDPTransform", (Label,), {}))
    # the same class again, as a notebook does
    register_model_transform("wrap", LabelConfig, after=("ddp", "fully_shard"))(Wrap)
    with pytest.raises(ConfigError, match="'odd' is not a registered"):
        build_model_transform("odd")


# --- the order


def test_built_in_ones_come_in_the_one_order_however_they_are_listed():
    assert [name for name in NAMES if name in BUILT_IN] == BUILT_IN
    for number in range(len(BUILT_IN) + 1):
        for names in itertools.permutations(BUILT_IN, number):
            assert in_order(names) == [name for name in BUILT_IN if name in names]


@pytest.mark.parametrize(
    ("names", "pairs"),
    [
        (["first", *BUILT_IN], [("first", "activation_checkpoint")]),
        (["late", *BUILT_IN], [("fully_shard", "late")]),
        (["between", *BUILT_IN], [("activation_checkpoint", "between"), ("between", "compile")]),
        (["late", "before_late", "fully_shard"], [("fully_shard", "late"), ("before_late", "late")]),
        (["between", "ddp"], []),
    ],
)
def test_a_users_own_come_where_they_say(names, pairs):
    for permuted in itertools.islice(itertools.permutations(names), 60):
        found = in_order(permuted)
        assert sorted(found) == sorted(names)
        assert all(found.index(before) < found.index(after) for before, after in pairs), found
        assert [name for name in found if name in BUILT_IN] == [name for name in BUILT_IN if name in names]


def test_requests_that_contradict_each_other_are_refused():
    registered("impossible", after=["ddp"], before=["compile"])
    assert in_order(["impossible", "ddp"]) == ["ddp", "impossible"], "what is not there is in nobody's way"
    with pytest.raises(
        ConfigError, match="cannot be ordered: their before= and after= wishes contradict each other"
    ) as caught:
        in_order(["impossible", "ddp", "compile", "first"])
    assert "impossible" in str(caught.value)


def test_all_configs_are_read_before_the_model_is_touched():
    model = Odd()
    with pytest.raises(ConfigError, match="unknown key 'stray'"):
        apply_model_transforms(model, {"first": {}, "late": {"stray": 1}})
    assert not hasattr(model, "labels")


def test_users_transforms_run_with_their_typed_config():
    model = apply_model_transforms(
        Odd(), {"late": {"text": "b", "tags": ["x"]}, "before_late": LabelConfig("a"), "first": None}
    )
    assert model.labels.index("a") < model.labels.index("b") and sorted(model.labels) == ["a", "b", "label"]
    assert build_model_transform("late", {"tags": ["x"]}).config.tags == ("x",)


# --- what jobs share


def built(seed: int = 0, make: Callable[[], nn.Module] = Odd) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def up(layout: str) -> Layout:
    init_distributed(LAYOUTS[layout][1])
    return LAYOUTS[layout][1]


def microbatches(rank: int, ranks: int, number: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    words = torch.randint(0, VOCAB, (number, ROWS, SEQ + 1), generator=torch.Generator().manual_seed(5))
    own = words[:, rank * ROWS // ranks : (rank + 1) * ROWS // ranks]
    return [(piece[:, :-1], piece[:, 1:]) for piece in own]


def mean_loss(model: nn.Module, piece: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(piece[0]).double().flatten(0, 1), piece[1].flatten())


def accumulate(model: nn.Module, pieces: list) -> None:
    """A loop of a user's own."""
    for number, piece in enumerate(pieces):
        with model.accumulation_context(is_last_microbatch=number == len(pieces) - 1):
            (mean_loss(model, piece) / len(pieces)).backward()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: whole(p.grad) for name, p in inner.named_parameters() if p.grad is not None}


def oracle(make: Callable[[], nn.Module] = Odd) -> dict[str, torch.Tensor]:
    """Mean of the microbatches' means, in one process and without any of this."""
    model = built(make=make)
    pieces = microbatches(0, 1)
    for piece in pieces:
        (mean_loss(model, piece) / len(pieces)).backward()
    return gradients(model)


def position(layout: Layout) -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


# --- equality, and when gradients travel


def travel_job(layout: str, name: str, config: dict) -> dict:
    model = apply_model_transforms(built(), {name: config}, layout=up(layout))
    pieces = microbatches(*position(LAYOUTS[layout][1]))
    sent = []
    for number, piece in enumerate(pieces):
        with WireCounter() as wire, model.accumulation_context(number == len(pieces) - 1):
            (mean_loss(model, piece) / len(pieces)).backward()
        sent.append(Counter(s.op for s in wire.sent if s.op not in ("all_gather", "broadcast_")))  # ddp's buffers
    once = worst(gradients(model), oracle())
    # and again, after the state that the first round left
    model.zero_grad()
    accumulate(model, pieces)
    return {
        "error": once,
        "again": worst(gradients(model), oracle()),
        "sent": sent,
        "kind": [kind.__name__ for kind in type(model).__mro__],
    }


NOTHING: dict[str, int] = {}
OFFLOAD = {"offload": {"cpu_offload": True, "pin_memory": False}}


@pytest.mark.parametrize(
    ("layout", "name", "config", "sent"),
    [
        ("ddp2", "ddp", {}, [NOTHING, NOTHING, {"all_reduce": 1}]),
        (
            "ddp2",
            "ddp",
            {"find_unused_parameters": True, "gradient_as_bucket_view": False},
            [NOTHING, NOTHING, {"all_reduce": 2}],
        ),
        ("ddp2", "ddp", {"static_graph": True}, None),
        ("fsdp2", "ddp", {}, [NOTHING, NOTHING, {"all_reduce": 1}]),
        ("hsdp2x2", "ddp", {}, [NOTHING, NOTHING, {"all_reduce": 1}]),
        ("fsdp2", "fully_shard", {}, [NOTHING, NOTHING, {"reduce_scatter": 3}]),
        ("fsdp2", "fully_shard", {"sync_grad_accum": True, "reshard_after_forward": True}, [{"reduce_scatter": 3}] * 3),
        ("hsdp2x2", "fully_shard", {}, [NOTHING, NOTHING, {"reduce_scatter": 3, "all_reduce": 3}]),
        (
            "hsdp2x2",
            "fully_shard",
            {"sync_grad_accum": "shard"},
            [{"reduce_scatter": 3}] * 2 + [{"reduce_scatter": 3, "all_reduce": 3}],
        ),
        ("hsdp2x2", "fully_shard", {"sync_grad_accum": True}, [{"reduce_scatter": 3, "all_reduce": 3}] * 3),
        ("fsdp4", "fully_shard", OFFLOAD | {"reshard_after_forward": 2}, [NOTHING, NOTHING, {"reduce_scatter": 3}]),
    ],
)
def test_gradients_equal_one_process_and_travel_when_they_should(spmd, layout, name, config, sent):
    for rank, found in enumerate(spmd(LAYOUTS[layout][0], travel_job, layout, name, config)):
        assert found["error"] < 1e-10 and found["again"] < 1e-10, rank
        assert sent is None or found["sent"] == sent
        assert ("DistributedDataParallel" if name == "ddp" else "FSDPModule") in found["kind"]


def first_piece() -> dict[str, torch.Tensor]:
    model = built()
    mean_loss(model, microbatches(0, 1)[0]).backward()
    return gradients(model)


@pytest.mark.all
@pytest.mark.parametrize(("layout", "name"), [("ddp2", "ddp"), ("fsdp2", "fully_shard"), ("hsdp2x2", "fully_shard")])
@ranks(lambda layout: LAYOUTS[layout][0])
def test_all_is_restored_after_an_exception(layout, name):
    model = apply_model_transforms(built(), {name: {}}, layout=up(layout))
    pieces = microbatches(*position(LAYOUTS[layout][1]))
    errors = []
    for stage in ("before forward", "after forward", "after backward"):
        for last in (False, True):
            try:
                with model.accumulation_context(last):
                    if stage != "before forward":
                        loss = mean_loss(model, pieces[0])
                    if stage == "after backward":
                        loss.backward()
                    raise ValueError("the body raised")
            except ValueError as error:
                assert "the body raised" in str(error)
            model.zero_grad()
            # outside any context a backward is synced, as by default
            mean_loss(model, pieces[0]).backward()
            single = gradients(model)
            model.zero_grad()
            accumulate(model, pieces)
            errors += [worst(gradients(model), oracle()), worst(single, first_piece())]
            model.zero_grad()
    assert len(errors) == 12 and max(errors) < 1e-10, errors


# --- sharding


@pytest.mark.all
@pytest.mark.parametrize(
    ("per_node", "config", "layout", "sizes"),
    [
        ("2", {}, None, {"dp_replicate": 2, "dp_shard": 2}),
        ("4", {}, None, {"dp_shard": 4}),
        (None, {}, None, {"dp_shard": 4}),
        ("2", {"use_hybrid_sharding": False}, None, {"dp_shard": 4}),
        ("2", {}, Layout(dp_shard=4), {"dp_shard": 4}),
        ("4", {}, Layout(dp_replicate=2, dp_shard=-1), {"dp_replicate": 2, "dp_shard": 2}),
    ],
)
@ranks(4)
def test_hybrid_sharding_chooses_sizes_only_where_the_layout_left_both_open(per_node, config, layout, sizes):
    init_distributed(Layout(dp_shard=4))
    os.environ.pop("LOCAL_WORLD_SIZE")
    if per_node:
        os.environ["LOCAL_WORLD_SIZE"] = per_node
    context = {} if layout is None else {"layout": layout}
    model = build_model_transform("fully_shard", config, **context).apply(built())
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    weight = model.embed.weight
    assert isinstance(weight, DTensor)
    assert (axis_sizes(weight.device_mesh), weight.to_local().numel() < weight.numel()) == (sizes, True)


@ranks(2)
def test_mixed_precision_acts_and_sums_in_float16_are_refused():
    model = built(make=lambda: Odd(dtype=torch.float32))
    config = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32", "output_dtype": "double"}}
    half = {"mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "half"}}
    said = refusal(lambda: apply_model_transforms(model, {"fully_shard": half}, layout=up("fsdp2")))
    untouched = not isinstance(model, FSDPModule)
    model = apply_model_transforms(model, {"fully_shard": config}, layout=LAYOUTS["fsdp2"][1])
    seen: list[torch.dtype] = []
    model.blocks[0].inner.register_forward_hook(
        lambda module, args, output: seen.extend([module.weight.dtype, args[0].dtype])
    )
    output = model(microbatches(0, 2)[0][0])
    output.sum().backward()
    found = {
        "said": said,
        "untouched": untouched,
        "seen": set(seen),
        "output": output.dtype,
        "grad": model.embed.weight.grad.dtype,
    }
    assert (
        found["said"].startswith("UnsupportedError: ")
        and "reduce = float16 would lose" in found["said"]
        and found["untouched"]
    )
    assert found["seen"] == {torch.bfloat16} and found["output"] == torch.float64 and found["grad"] == torch.float32


@pytest.mark.parametrize("data", ["ddp", "fully_shard"])
@ranks(2)
def test_a_chain_in_any_listing_is_one_model(data):
    configs = {data: {}, "activation_checkpoint": {"layer_classes": ["support.odd.Mix"]}, "first": {}, "wrap": {}}
    layout = "ddp2" if data == "ddp" else "fsdp2"
    calls: Counter[str] = Counter()
    model = built()
    forward = Mix.forward
    try:
        Mix.forward = lambda self, x: (calls.update(["mix"]), forward(self, x))[1]  # type: ignore[method-assign]
        model = apply_model_transforms(model, configs, layout=up(layout))
        calls.clear()  # of the small copy, on which the layout was tried
        accumulate(model, microbatches(*position(LAYOUTS[layout][1])))
    finally:
        Mix.forward = forward  # type: ignore[method-assign]
    while isinstance(model, (Wrapper, DistributedDataParallel)):
        model = model.inner if isinstance(model, Wrapper) else model.module
    groups = model.make_parameter_groups(weight_decay=0.3, overrides=[("gain", {"lr": 7.0})])
    names = {id(p): name for name, p in model.named_parameters()}
    found = {
        "error": worst(gradients(model), oracle()),
        "mix": calls["mix"],
        "labels": model.__dict__.get("labels", model.__dict__.get("labels")),
        "groups": [
            ({names[id(p)] for p in g["params"]}, {k: v for k, v in g.items() if k != "params"}) for g in groups
        ],
        "compiled": [module._compiled_call_impl is not None for module in model.blocks],
    }
    assert found["error"] < 1e-10
    assert found["mix"] == 2 * 2 * 3, "each of two blocks, twice, for each microbatch"
    assert found["labels"] == ["label"]
    matrices = {"embed.weight", *(f"blocks.{i}.{w}.weight" for i in (0, 1) for w in ("inner", "outer"))}
    vectors = {"norm.weight", "norm.bias", *(f"blocks.{i}.outer.bias" for i in (0, 1))}
    gains = {f"blocks.{i}.gain.{n}" for i in (0, 1) for n in ("one", "three")}
    wanted = [
        (matrices, {"weight_decay": 0.3}),
        (vectors, {"weight_decay": 0.0}),
        (gains, {"weight_decay": 0.0, "lr": 7.0}),
    ]
    assert len(found["groups"]) == 3 and all(group in found["groups"] for group in wanted)


class OwnGroups(Odd):
    def make_parameter_groups(self, *, rate: float):
        return [{"params": [p], "lr": rate} for p in self.parameters()]


@ranks(2)
def test_a_models_own_groups_are_reached_through_every_wrapper():
    layout = up("ddp2")
    found = []
    for name, chosen in (("ddp", layout), ("fully_shard", LAYOUTS["fsdp2"][1])):
        model = apply_model_transforms(built(make=OwnGroups), {name: {}}, layout=chosen)
        groups = model.make_parameter_groups(rate=0.5)
        own = {id(p) for p in model.parameters()}
        assert all(id(p) in own for g in groups for p in g["params"]), (
            "the parameters that will be trained, not those before sharding"
        )
        found.append((len(groups), groups[0]["lr"]))
    assert found == [(13, 0.5), (13, 0.5)]


@ranks(1)
def test_compile_acts_on_the_blocks():
    model = apply_model_transforms(built(), {"compile": {"compile_kwargs": {"backend": "eager", "dynamic": False}}})
    compiled = [module._compiled_call_impl is not None for module in model.blocks]
    accumulate(model, microbatches(0, 1))
    found = {"compiled": compiled, "error": worst(gradients(model), oracle())}
    assert found["compiled"] == [True, True] and found["error"] < 1e-10


# --- weights that a user brings


@pytest.mark.all
@ranks(2)
def test_unequal_weights_are_made_equal_by_ddp_and_refused_on_sharded_replicas():
    layout = up("ddp2")
    model = apply_model_transforms(built(seed=dist.get_rank()), {"ddp": {}}, layout=layout)
    reference = built(seed=0)
    inner = dict(model.module.named_parameters())
    found = {
        "ddp": all(torch.equal(inner[name], p) for name, p in reference.named_parameters()),
        "fully_shard": refusal(
            lambda: build_model_transform("fully_shard", layout=LAYOUTS["fsdp2"][1]).apply(built(seed=dist.get_rank()))
        ),
        "hybrid": refusal(
            lambda: build_model_transform("fully_shard", layout=Layout(dp_replicate=2, dp_shard=1)).apply(
                built(seed=dist.get_rank())
            )
        ),
    }
    assert found["ddp"], "those of the first replica, as torch does"
    for kind in ("fully_shard", "hybrid"):
        assert (
            found[kind].startswith("IntegrityError")
            and "differs between ranks that should hold the same values" in found[kind]
        )


@ranks(2)
def test_a_model_on_meta_gets_the_same_weights_on_every_layout():
    layout = up("ddp2")
    with torch.device("meta"):
        replicated, sharded = Odd(), Odd()
    replicated = apply_model_transforms(replicated, {"ddp": {}}, layout=layout, seed=4).module
    sharded = apply_model_transforms(sharded, {"fully_shard": {}}, layout=LAYOUTS["fsdp2"][1], seed=4)
    other = {name: whole(p) for name, p in sharded.named_parameters()}
    equal = all(torch.equal(other[name], p) for name, p in replicated.named_parameters())
    assert (equal, replicated.head.weight is replicated.embed.weight) == (True, True)


# --- one process, and no process group


@ranks(1)
def test_one_process_is_served_too():
    found = {}
    for name in ("ddp", "fully_shard"):
        model = apply_model_transforms(built(), {name: {}})
        with WireCounter() as wire:
            accumulate(model, microbatches(0, 1))
        found[name] = (worst(gradients(model), oracle()), type(model).__name__, sum(s.bytes for s in wire.sent))
    model = apply_model_transforms(built(), {})
    accumulate(model, microbatches(0, 1))
    found["plain"] = (
        worst(gradients(model), oracle()),
        type(model).__name__,
        float(len(model.make_parameter_groups())),
    )
    assert found["ddp"] == found["fully_shard"] == (0.0, "Odd", 0) and found["plain"] == (0.0, "Odd", 2.0)


@pytest.mark.follows("device_mesh=", "mesh_dim_names=")
@ranks(2)
def test_several_processes_without_a_group_are_told_what_to_call():
    wanted = (
        "ConfigError: there are 2 processes and no process group: call init_distributed before the transforms,"
        " or give them device_mesh="
    )
    found = [refusal(lambda name=name: apply_model_transforms(built(), {name: {}})) for name in ("ddp", "fully_shard")]
    assert found == [wanted] * 2
    init_distributed(Layout(dp_shard=2))
    nameless, mesh = (init_device_mesh("cpu", (2,), mesh_dim_names=names) for names in (None, ("dp_shard",)))
    said = refusal(lambda: apply_model_transforms(built(), {"fully_shard": {}}, device_mesh=nameless))
    assert "(2,) has no axis names: give mesh_dim_names=, of pp, dp_replicate" in said
    for options in ({}, {"device_mesh": mesh}):
        assert apply_model_transforms(built(), {"fully_shard": {}}, **options).embed.weight.device_mesh.size() == 2


@ranks(2)
def test_what_does_not_fit_is_refused():
    up("fsdp2")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    own = apply_model_transforms(built(), {"fully_shard": {}}, device_mesh=mesh)
    assert own.embed.weight.device_mesh.size() == 2 and data_position(mesh)[1] == 2
    both, beside, world, late = [
        refusal(lambda: apply_model_transforms(built(), {"ddp": {}, "fully_shard": {}}, layout=Layout(dp_shard=2))),
        refusal(lambda: apply_model_transforms(own, {"ddp": {}}, device_mesh=mesh)),
        refusal(lambda: apply_model_transforms(built(), {"fully_shard": {}}, layout=Layout(dp_shard=4))),
        refusal(lambda: apply_model_transforms(own, {"activation_checkpoint": {}}, device_mesh=mesh)),
    ]
    for found in (both, beside):
        assert found.startswith("ConfigError: ddp keeps whole parameters on every rank, and fully_shard has sharded")
    assert "dp_shard = 4 does not divide the world size 2" in world
    assert "activation_checkpoint must come before fully_shard" in late


@pytest.mark.parametrize(
    ("name", "config", "kind", "words"),
    [
        (
            "activation_checkpoint",
            {"layer_classes": ["torch.nn.Conv2d"]},
            ConfigError,
            "['torch.nn.Conv2d']: no module of Odd is one",
        ),
        (
            "activation_checkpoint",
            {"layer_classes": ["support.odd.Mux"]},
            ImportError,
            "cannot import the class 'support.odd.Mux'",
        ),
        (
            "activation_checkpoint",
            {"use_reentrant": True},
            UnsupportedError,
            "activation_checkpoint.use_reentrant = true",
        ),
        (
            "activation_checkpoint",
            {"ops_to_save": ["aten.mn"]},
            ConfigError,
            "activation_checkpoint.ops_to_save: 'aten.mn' is neither",
        ),
        (
            "activation_checkpoint",
            {"ops_to_save": ["aten.t"]},
            UnsupportedError,
            "'aten.t' writes into its inputs or gives a view",
        ),
        (
            "compile",
            {"activation_memory_budget": 1.5},
            ConfigError,
            "activation_memory_budget = 1.5 is out of range",
        ),
    ],
)
def test_options_that_cannot_be_met_are_refused(name, config, kind, words):
    with pytest.raises(kind, match=re.escape(words)):
        apply_model_transforms(built(), {name: config})


def test_recomputation_without_classes_takes_the_blocks():
    model = apply_model_transforms(built(), {"activation_checkpoint": ActivationCheckpointTransformConfig()})
    assert [hasattr(block.forward, "__wrapped__") for block in model.blocks] == [True, True]
    with pytest.raises(ConfigError, match="acts on repeated blocks, and none was found in Linear"):
        apply_model_transforms(nn.Linear(2, 2), {"activation_checkpoint": {}})
