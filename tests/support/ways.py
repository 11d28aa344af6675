"""Ways: a model, a layout and techniques, as one value per factor. Each is laid out once and asked every question."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from meshwright.checkpoint import load, save
from meshwright.checkpoint.manifest import Manifest
from meshwright.core.errors import MeshwrightError
from meshwright.core.names import clean
from meshwright.distributed.memory.live import stored, tensors_in
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.parallelize import parallelize
from meshwright.distributed.process import agree
from meshwright.distributed.process.absent_peers import WireCounter
from meshwright.distributed.process.world import get_world_info
from meshwright.distributed.weights.shards import whole_on_first
from meshwright.introspection.cluster import Cluster
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.introspection.source import as_module
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig, MoEConfig
from meshwright.planning.build import plan
from meshwright.planning.collectives import resolved
from meshwright.planning.context.plan import KINDS as METHODS
from meshwright.planning.explain import host_waits
from meshwright.planning.layout import Layout
from meshwright.planning.memory import plan_memory
from meshwright.planning.pipeline.orders import KINDS
from meshwright.planning.pipeline.stages import pipeline_collectives
from meshwright.planning.plan import Plan
from meshwright.planning.values import Batch

from . import families
from .covering import cheapest_cover
from .laid_out import Figures, counted, estimated, own_rows
from .oracle import Outcome
from .problems import SEED, Data, Problem, make_optimizer
from .train import local, mutated

FILE = Path(__file__).resolve().parents[1] / "ways.txt"
"""A line for each way of the array: written by scripts/ways.py, which covers every pair of values that the rules
allow.
"""

# Heads for two ranks; 257 tokens divide by nothing.
UNTIED = DecoderConfig(257, 24, 2, n_heads=4, n_kv_heads=2, hidden_dim=20, max_seq_len=16, qk_norm=True)
SOFTMAX = MoEConfig(n_experts=4, hidden_dim=12, sequence_loss=0.05, z_loss=0.01)
SIGMOID = MoEConfig(
    n_experts=4,
    top_k=2,
    hidden_dim=6,
    n_shared=1,
    first_dense=1,
    router="sigmoid",
    n_groups=2,
    top_groups=1,
    scale=2.5,
    bias_rate=0.01,
)
OURS: dict[str, DecoderConfig] = {
    "untied": UNTIED,
    "tied": replace(UNTIED, tied_embeddings=True),
    "softmax": replace(UNTIED, moe=SOFTMAX),
    "sigmoid": replace(UNTIED, moe=SIGMOID),
    "uneven": replace(UNTIED, moe=replace(SOFTMAX, n_experts=3)),
}
DEEP = {name: replace(model, n_layers=4) for name, model in OURS.items()}
"""For pipelines: two stages on each of two ranks."""
LAYERS = {"alone": 2, "auto": 8, "two": 3}
"""For units of several blocks: two of eight by their bytes; two of three by request, so that the last unit has one."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "phi3": {},
    "gpt_neox": {},
    "gemma2": {"final_logit_softcapping": 0.7},
    "deepseek_v3": {"first_k_dense_replace": 1},
}
"""One of each structure: separate projections.

Fused ones in Conv1D; packed ones; a parallel residual; a cap behind the head; latent attention with experts.
"""

FACTORS: dict[str, tuple[str, ...]] = {
    "dp": ("one", "ddp", "fsdp", "hsdp"),
    "tp": ("1", "2", "4"),
    "pp": ("1", "2"),
    "ep": ("1", "2", "4"),
    "cp": ("1", "2", "4"),
    "model": (*OURS, *FAMILIES),
    "schedule": ("-", *KINDS),
    "sequence": ("-", "cut", "whole", "kept"),
    "method": ("-", "auto", *METHODS),
    "microbatches": ("one", "rows"),
    "shards": ("auto", "kept", "synced", "postponed", "zero0", "zero1", "zero2", "zero3"),
    "units": ("alone", "auto", "two"),
    "recompute": ("none", "full", "selective", "every_n", "modules", "selective_op", "offload"),
    "memory": ("device", "offload", "optimizer"),
    "freeze": ("none", "start"),
    "dtypes": ("one", "two"),
    "compile": ("no", "yes"),
    "loss": ("whole", "chunks"),
    "clip": ("yes", "no"),
}
SAID_OF = {"schedule": "pp", "sequence": "tp", "method": "cp"}
"""Factors that are said of an axis, and nothing where it is not there."""
AXES = ("tp", "pp", "ep", "cp", "model")
"""What a family of transformers meets all of; techniques meet our own decoder."""

DATA = {"one": (1, 1), "ddp": (2, 1), "fsdp": (1, 2), "hsdp": (2, 2)}
"""Replicas and shards."""
SHARDS: dict[str, dict[str, Any]] = {
    "auto": {},
    "kept": {"reshard_after_forward": False},
    "synced": {"sync_grad_accum": True},
    "postponed": {"sync_grad_accum": "shard"},
    **{f"zero{stage}": {"zero_stage": stage} for stage in range(4)},
}
START = {"gpt2": (r"wte", r"\.h\.0\."), "gpt_neox": (r"embed_in", r"layers\.0\.")}


@dataclass(frozen=True)
class Way:
    """One value of each factor; as text, those that are not the factor's first."""

    dp: str = "one"
    tp: str = "1"
    pp: str = "1"
    ep: str = "1"
    cp: str = "1"
    model: str = "untied"
    schedule: str = "-"
    sequence: str = "-"
    method: str = "-"
    microbatches: str = "one"
    shards: str = "auto"
    units: str = "alone"
    recompute: str = "none"
    memory: str = "device"
    freeze: str = "none"
    dtypes: str = "one"
    compile: str = "no"
    loss: str = "whole"
    clip: str = "yes"

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in asdict(self).items() if value != FACTORS[name][0])

    @classmethod
    def of(cls, text: str) -> Way:
        return cls(**dict(word.split("=") for word in text.split()))

    @property
    def layout(self) -> Layout:
        replicas, shards = DATA[self.dp]
        sizes = {axis: int(getattr(self, axis)) for axis in ("pp", "tp", "ep", "cp")}
        return Layout(dp_replicate=replicas, dp_shard=shards, **sizes)

    @property
    def is_ours(self) -> bool:
        return self.model in OURS

    @property
    def is_exact(self) -> bool:
        """Whether float64 is everywhere."""
        return self.is_ours and self.dtypes == "one"

    @property
    def rows(self) -> int:
        """Of a microbatch; 0: all that a rank has at once."""
        return 1 if self.microbatches == "rows" else 0

    @property
    def steps(self) -> int:
        """The last sends what every later one sends: DDP settles its buckets in two."""
        return 3 if self.dp == "ddp" or self.shards == "zero0" else 2

    @property
    def global_rows(self) -> int:
        """As few as there are microbatches to be of each rank: two, and in a pipeline four."""
        return self.layout.dp_replicate * self.layout.dp_shard * (4 if self.pp == "2" else 2)

    @property
    def length(self) -> int:
        """Tokens of a row: as many for each rank of cp, for which the plan counts the bytes."""
        return 11 if self.cp == "1" else 12

    @property
    def rows_of(self) -> dict[str, Any]:
        """What rows have beside tokens: where the method may change with their documents, none."""
        return {"arguments": ()} if self.method == "auto" else {}

    @property
    def meetings(self) -> list[str]:
        """Every value, and every two axes of two ranks: `make test` has each in some way, `make test-all` all other
        pairs too.
        """
        values = [f"{name}={value}" for name, value in asdict(self).items() if value != "4"]
        axes = [axis for axis in values if axis[:2] in ("dp", "tp", "pp", "ep", "cp")]
        return [*values, *map(" ".join, combinations(axes, 2))]

    @property
    def price(self) -> float:
        """About the CPU seconds of it; each rank compiles for itself, and the more pieces, the more."""
        ranks = self.layout.world
        compiling = 3 * ranks if self.compile == "yes" else 1
        return ranks * compiling * (1 if self.pp == self.tp == self.cp == "1" else 1.5)

    @property
    def source(self) -> Any:
        if not self.is_ours:
            return partial(family, self.model)
        config = (DEEP if self.pp == "2" else OURS)[self.model]
        config = replace(config, n_layers=max(config.n_layers, LAYERS[self.units]))
        return partial(with_narrow_norms, config) if self.dtypes == "two" else config

    @property
    def problem(self) -> Problem:
        """Families compute norms in float32 inside, and weights in float32 are rounded at each step: AdamW would
        amplify that without bound, so both have SGD.
        """
        common: dict[str, Any] = {"max_norm": 0.03 if self.clip == "yes" else None, "steps": self.steps}
        if self.is_ours:
            frozen = ("embedding", r"layers\.0") if self.freeze == "start" else ()
            if self.dtypes == "two":
                common |= {"dtype": "", "optimizer": "sgd"}
            return Problem(
                self.source, freeze=frozen, data=Data(self.global_rows, self.length, **self.rows_of), **common
            )
        frozen = START.get(self.model, (r"embed_tokens", r"layers\.0\.")) if self.freeze == "start" else ()
        data = Data(self.global_rows, self.length, families.VOCABULARY, arguments=())
        return Problem(self.source, freeze=frozen, data=data, optimizer="sgd", **common)

    @property
    def techniques(self) -> dict[str, Any]:
        found: dict[str, Any] = {"freeze": self.problem.freeze, **SHARDS[self.shards]}
        found["blocks_per_unit"] = {"alone": 1, "auto": 0, "two": 2}[self.units]
        if self.dtypes == "one":
            found["precision"] = {"master": "float64"}
        if self.schedule != "-":
            found["pipeline_schedule"] = self.schedule
        if self.method != "-":
            found["context_parallel_method"] = self.method
        if self.sequence in ("whole", "kept"):
            found |= {"sequence_parallel": False} if self.sequence == "whole" else {"regather": False}
        if self.recompute != "none":
            found["activation_checkpointing"] = self.recompute
        if self.recompute == "modules":
            found["checkpoint_modules"] = ("layers.*.feed_forward",)
        if self.memory != "device":
            found["cpu_offload"] = True if self.memory == "offload" else "optimizer"
        if self.compile == "yes":
            found |= {"compile": True, "compile_backend": "aot_eager"}
        if self.loss == "chunks":
            found["loss_chunks"] = 3
        return found

    def refusal(self) -> str:
        """Why the rules refuse it, or why it says nothing that another way does not; empty where neither is so."""
        layout = self.layout
        if any((getattr(self, axis) == "1") != (getattr(self, said) == "-") for said, axis in SAID_OF.items()):
            return "a schedule is a pipeline's, the sequence is cut over tp, and a method is of cp"
        if not 2 <= layout.world <= 4:
            return "two to four ranks"
        if self.ep != "1" and layout.dp_shard * layout.tp * layout.cp < layout.ep:
            return "no axis to take ep from"
        if not self.is_ours and (self.compile == "yes" or self.recompute == "modules" or self.dtypes == "two"):
            return "said of our own decoder"
        batch = Batch(self.problem.data.rows, self.problem.data.seq, self.rows)
        try:
            made = plan(
                facts_of(self.model, self.pp, self.dtypes, self.units),
                layout,
                batch=batch,
                cluster=Cluster(layout.world),
                techniques=self.techniques,
            )
        except MeshwrightError as error:
            return str(error).splitlines()[0].split(". ")[0]
        if self.units == "auto" and all(len(unit.blocks) < 2 for unit in made.units):
            return "each block is a unit anyway"
        return ""


def family(name: str) -> nn.Module:
    """On the CPU with random weights, norms and biases too.

    Experts one by one, since grouped products know no float64.
    """
    config = families.config_of(name, use_cache=False, **FAMILIES[name])
    config._experts_implementation = "eager"
    with torch.device("cpu"):
        return families.on_cpu(config)


def with_narrow_norms(config: DecoderConfig) -> nn.Module:
    """On the CPU in float64, its norms' weights in float32."""
    torch.manual_seed(SEED)
    with torch.device("cpu"):
        model = Decoder(config).double()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
        parameter.data = parameter.data.to(torch.float32 if "norm" in name else torch.float64)
    return model


@cache
def facts_of(model: str, pp: str, dtypes: str, units: str) -> ModelFacts:
    return model_facts(as_module(Way(model=model, pp=pp, dtypes=dtypes, units=units).source))


def ways() -> list[Way]:
    return [Way.of(line) for line in FILE.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]


def of_make_test(known: list[Way], things: Callable[[Way], list[str]]) -> list[Any]:
    """Return the ways as cases: `make test` has a cheapest cover of their things, `make test-all` has all."""
    kept = cheapest_cover(known, lambda way: way.price, things)
    return [pytest.param(way, marks=pytest.mark.fast if way in kept else pytest.mark.all) for way in known]


# --- what a way comes to


@dataclass
class Record:
    """What one rank saw of a way; tensors on rank 0 only.

    Attributes:
        outcome: losses, norms, and the whole tensors.
        planned, sent: what the plan says that this rank sends in a step, and what the last step sent.
        held: bytes held at rest: name -> (found, planned).
        went_on: names of what is not the same, bit by bit, when the last step is taken from a checkpoint by a model
            laid out anew.
        elsewhere: names of parameters that torch's own state dict gives otherwise.
        device: where it was computed.
        waits: how often the plan says that the last step waits for the device.
        strangers: parameters, buffers and optimizer state that lie elsewhere than the plan says.
        seen: what was seen in the last step, where that was watched.
        unlike: names of tensors that a save beside the last step stores otherwise than one before it.
    """

    outcome: Outcome
    planned: Figures
    sent: Figures
    held: dict[str, tuple[int, int]]
    went_on: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    device: str = "cpu"
    waits: int = 0
    strangers: list[str] = field(default_factory=list)
    seen: Any = None
    unlike: list[str] = field(default_factory=list)


def record(way: Way, folder: str, mutant: str = "", watching: Callable[[], Any] = nullcontext) -> Record:
    """Train a few steps; the checkpoint before the last is loaded into a second model, which takes that step again.

    Args:
        folder: of this way alone; every rank's is the same.
        mutant: a name in support.mutants; empty: none.
        watching: a context for the last step, whose value is the record's ``seen``.
    """
    with mutated(mutant):
        return _record(way, folder, watching)


def _record(way: Way, folder: str, watching: Callable[[], Any]) -> Record:
    problem = way.problem
    torch._dynamo.reset()  # earlier jobs of this worker count towards the limit of recompilations
    model, optimizer = _lay_out(way)
    differ = model.plan.pipeline is not None
    outcome = Outcome([], [], _copies(whole_on_first(dict(model.named_parameters()), differ=differ)), {}, {})
    for step in range(way.steps):
        if step == way.steps - 1:
            save(model, f"{folder}-at-once", optimizer=optimizer)
            handle = save(model, folder, optimizer=optimizer, asynchronous=True)
        is_last, rows = step == way.steps - 1, own_rows(model, problem.data.step(step))
        with WireCounter() if is_last else nullcontext() as wire, watching() if is_last else nullcontext() as seen:
            loss = model.forward_backward(rows)
            if step == 0:
                found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
                outcome.gradients = _copies(whole_on_first(found, differ=differ))
            outcome.norms.append(model.optimizer_step(optimizer, problem.max_norm).grad_norm)
        outcome.losses.append(float(loss))
    outcome.parameters = whole_on_first(dict(model.named_parameters()), differ=differ)
    model.audit(optimizer)
    handle.wait()
    unlike = _unlike(f"{folder}-at-once", folder)
    assert wire is not None
    sent = counted(wire)
    held, elsewhere = _held(way, model, optimizer), _elsewhere(way, model, outcome.parameters)
    went_on = _went_on(way, folder, model)
    planned = _planned(way, model)
    waits = sum(host_waits(_own_plan(model), _microbatches(way, model)).values())
    where = (model.device.type, waits, _strangers(model, optimizer))
    return Record(outcome, planned, sent, held, went_on, elsewhere, *where, seen, unlike)


def _unlike(at_once: str, beside: str) -> list[str]:
    """Names of tensors of which two checkpoints have other bytes."""
    found = []
    for folder in (at_once, beside):
        rows = Manifest.read(Path(folder)).tensors.items()
        found.append({key: (row.shape, row.dtype, {(p.offset, p.hash) for p in row.pieces}) for key, row in rows})
    return sorted(key for key in found[0].keys() | found[1].keys() if found[0].get(key) != found[1].get(key))


def _lay_out(way: Way) -> tuple[ParallelModel, torch.optim.Optimizer]:
    problem = way.problem
    model = parallelize(problem.model, way.layout, techniques=way.techniques, seed=SEED, microbatch_rows=way.rows)
    return model, make_optimizer(problem.optimizer, model.parameters())


def _own_plan(model: ParallelModel) -> Plan:
    """Return the plan with the experts and the number of trained parameters that this rank's stages have."""
    if model.plan.pipeline is None:
        return model.plan
    experts = model.plan.experts
    if experts is not None:
        here = {clean(name) for part in model.parts for name, _ in part.named_modules()}
        experts = replace(experts, stacks=tuple(stack for stack in experts.stacks if stack.path in here))
    trained = sum(p.requires_grad for part in model.parts for p in part.parameters())
    one = next(p for p in model.plan.parameters if p.trainable)
    return replace(model.plan, experts=experts, parameters=(replace(one, count=trained),))


def _microbatches(way: Way, model: ParallelModel) -> int:
    batch = Batch(way.problem.data.rows, way.problem.data.seq, way.rows)
    return resolved(model.plan, batch).microbatches(model.plan.data_ranks)


def _strangers(model: ParallelModel, optimizer: torch.optim.Optimizer) -> list[str]:
    offloads, here = model.plan.data.cpu_offload, model.device.type
    found = {name: (p, "cpu" if offloads else here) for name, p in model.named_parameters()}
    found |= {name: (buffer, here) for part in model.parts for name, buffer in part.named_buffers()}
    rests = "cpu" if offloads or model.plan.optimizer.in_host_memory else here
    for name, p in model.named_parameters():
        moments = {key: value for key, value in optimizer.state[p].items() if isinstance(value, Tensor) and value.dim()}
        found |= {f"{name} {key}": (value, rests) for key, value in moments.items()}
    return [f"{name} on {t.device.type}" for name, (t, wanted) in found.items() if t.device.type != wanted]


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _planned(way: Way, model: ParallelModel) -> Figures:
    """Of a pipeline what this rank's stages send."""
    made = model.plan
    if made.pipeline is not None:
        assert model.mesh is not None
        planned = (
            pipeline_collectives(model.facts, made) if get_world_info()[0] == 0 else []
        )  # it has measured the model
        stage = model.mesh.get_local_rank("pp")
        made = replace(made, collectives=agree.from_rank_zero(planned)[stage])
    return estimated(made, Batch(way.problem.data.rows, way.problem.data.seq, way.rows))


def _held(way: Way, model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, tuple[int, int]]:
    state = [value for state in optimizer.state.values() for value in state.values()]
    planned = plan_memory(model.plan, state_tensors_per_parameter=2 if way.problem.optimizer == "adamw" else 1)
    found = {"parameters": model.parameters(), "optimizer": state}
    return {
        name: (sum(stored(tensors_in(tuple(tensors))).values()), getattr(planned, name))
        for name, tensors in found.items()
    }


def _went_on(way: Way, folder: str, trained: ParallelModel) -> list[str]:
    """This rank's parameters, and buffers, that are not what ``trained`` has."""
    model, optimizer = _lay_out(way)
    load(model, folder, optimizer=optimizer)
    with WireCounter():  # as the step was counted: beside a dispatch mode torch may run a compiled block uncompiled
        model.forward_backward(own_rows(model, way.problem.data.step(way.steps - 1)))
        model.optimizer_step(optimizer, way.problem.max_norm)
    there = dict(trained.named_parameters()) | dict(trained.named_buffers())
    here = dict(model.named_parameters()) | dict(model.named_buffers())
    assert here.keys() == there.keys()
    return [name for name, tensor in here.items() if not torch.equal(local(tensor), local(there[name]))]


def _elsewhere(way: Way, model: ParallelModel, whole: Mapping[str, Tensor]) -> list[str]:
    """Asked of our own decoder, none of whose weights is fused: torch's state dict is known to give fused ones
    permuted under tp.
    """
    if not way.is_ours:
        return []
    found, options = [], StateDictOptions(full_state_dict=True)
    for part in model.parts:
        state = {clean(name): tensor for name, tensor in get_model_state_dict(part, options=options).items()}
        assert {clean(name) for name, _ in part.named_parameters()} <= state.keys()
        # a tied weight has one name in the whole model, and two on the stages of a pipeline
        if get_world_info()[0] == 0:
            found += [
                name for name in whole.keys() & state.keys() if not torch.equal(state[name].cpu(), whole[name].cpu())
            ]
    return found
