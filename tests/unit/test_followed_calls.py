"""Calls, arguments and settings that messages print are made, and the refusal or the notice does not come again."""

from __future__ import annotations

import ast
import json
from dataclasses import make_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from support.advice import advices, is_followed, value_of, ways
from support.families import config_of, on_cpu
from support.followed import found_in, said, snippet
from support.tokenizers_made import save_way
from test_rules import MODELS, of_images
from torch import nn
from torch.nn import functional as F

import meshwright
from meshwright import Batch, Cluster, Layout, Loss, PreferenceLoss, Techniques, parallelize, plan
from meshwright.data import SourceOptions, load_tokenizer, open_corpus, prepare
from meshwright.data.loader import Loader
from meshwright.data.mixture import Samples
from meshwright.distributed.averaging import ScheduleFreeAdamW
from meshwright.distributed.loss.preference import without_reference
from meshwright.distributed.optimizer import low_bit
from meshwright.distributed.optimizer.muon import Muon
from meshwright.distributed.optimizer.parameter_groups import refuse_unused, split_by_role
from meshwright.distributed.optimizer.step import check as check_optimizer
from meshwright.distributed.parallelize import single_process_mesh
from meshwright.distributed.parallelizer import nvfsdp_strategy_parallelize
from meshwright.distributed.pipeline.stage_module import decoder_config
from meshwright.distributed.pipeline_parallel import PipelineStageModule
from meshwright.distributed.setup import destroy_distributed
from meshwright.integrations.training_arguments import SFT_CONFIG, TRAINING_ARGUMENTS, _precision, refuse
from meshwright.introspection.source import read_causal_lm
from meshwright.models.decoder_config import SIZES, MoEConfig
from meshwright.planning.rules import check_data
from meshwright.planning.techniques import Precision
from meshwright.simulation.foresee import foresee
from meshwright.training.recording import check_recordings
from meshwright.verification.of_config import check_size
from meshwright.verification.problem import Problem, RandomBatches
from meshwright.verification.routes import refuse_unseen

DEBUG = SIZES["debug"]
ONE, H100 = Layout(dp_shard=1), Cluster(2, gpu="h100")
CP2, TP2, PP2 = Layout(dp_shard=1, cp=2), Layout(dp_shard=1, tp=2), Layout(dp_shard=1, pp=2)
FOUR = replace(DEBUG, n_layers=4)
DDP2 = Layout(dp_replicate=2, dp_shard=1)
ODD, NARROW = replace(DEBUG, n_heads=3, n_kv_heads=3, dim=48), replace(DEBUG, hidden_dim=112)
MODULES = {"activation_checkpointing": "modules", "checkpoint_modules": ["layers.*", "layers.*.attention"]}
ASYNC = {"activation_checkpointing": "selective_op", "checkpoint_keep": ["collectives"], "async_tensor_parallel": True}
FLOAT8 = {"float8": "tensorwise"}
ROWS = {"tokens": torch.arange(8).view(2, 4) % 7, "labels": torch.arange(8).view(2, 4) % 7}


class Chain(nn.Module):
    """An embedding, two layers and a head, in blocks or under names of their own."""

    def __init__(self, blocks: bool = True):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)
        if blocks:
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        else:
            self.layer_0, self.layer_1 = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in getattr(self, "layers", None) or (self.layer_0, self.layer_1):
            x = layer(x).relu()
        return self.head(x)


def step(model=DEBUG, **given):
    model = parallelize(model, ONE, **given)
    return model.forward_backward(ROWS)


def mean(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def fn(output, batch):
    return mean(output, batch["labels"])


def of_rows(output, batch):
    rows = zip(output, batch["labels"], strict=True)
    return torch.stack([F.cross_entropy(logits, labels) for logits, labels in rows]).mean()


def foreseen(**given):
    return foresee(DEBUG, **{"batch": Batch(2, 16), "cluster": H100, **given})


def of_experts(**config):
    model = on_cpu(config_of("qwen3_moe"))
    model.config = SimpleNamespace(**config)  # type: ignore[assignment]
    return foresee(model, batch=Batch(2, 16), cluster=H100)


def of_folder(techniques: dict[str, Any], **more):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    Path("config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 96, **sizes, **more}))
    return parallelize(read_causal_lm("."), ONE, techniques=techniques)


def on_one_card(techniques: dict[str, Any]):
    layers = replace(SIZES["1B"], n_layers=24)
    return foresee(layers, batch=Batch(8, 2048), cluster=Cluster(1, gpu="rtx4090"), techniques=techniques)


def verified(**changes):
    techniques = {"float8": "tensorwise", "compile": True, **changes}
    moe = replace(DEBUG, moe=MoEConfig(n_experts=4, top_k=2))
    refuse_unseen(Problem(moe, RandomBatches(61), techniques=techniques))
    return planned(moe, DDP2, techniques)


def in_4_bits(**changes):
    adapters = {"rank": 4, "targets": ["w_up"]}
    return parallelize(DEBUG, ONE, techniques={"adapters": adapters, "quantize_frozen": "nf4", **changes})


GROUPS = [{"params": [nn.Parameter(torch.ones(2, 2))], "lr_scale": 1.0}]
CALLS = [
    (
        ["forward_backward()", "loss_fn="],
        lambda: parallelize(Chain(), ONE)(ROWS["tokens"]).sum().backward(),
        lambda text: parallelize(Chain(), ONE, loss_fn=Loss(fn, reduction="mean")).forward_backward(ROWS),
    ),
    (
        ["model.config"],
        lambda: of_experts(),
        lambda text: of_experts(**vars(eval(found_in(r"which may be types\.(.*\))", text)))),
    ),
    (
        ["techniques.optimizer_state = 8bit"],
        lambda: on_one_card({}),
        lambda text: on_one_card(asked(text)),
    ),
    (
        ["techniques.float8 = rowwise", "techniques.compile = false"],
        lambda: verified(),
        lambda text: [verified(**{key.removeprefix("techniques."): value}) for ((key, value),) in ways(text)],
    ),
    (
        ["techniques.quantize_frozen = nf4"],
        lambda: of_folder({}, quantization_config={"quant_method": "fp8"}),
        lambda text: of_folder({"freeze": ["layers"], **asked(text)}).plan.quantize.modules[0],
    ),
    (
        ["techniques.quantize_frozen, by 'it'"],
        lambda: plan(in_4_bits().parts[0], ONE, techniques={"quantize_frozen": "nf4"}),
        lambda text: (plan(in_4_bits().parts[0], ONE), in_4_bits()),
    ),
    (
        ["Cluster()", "gpu="],
        lambda: foreseen(cluster=Cluster(2)),
        lambda text: foreseen(cluster=snippet(text, "Cluster")),
    ),
    (
        ["gpu="],
        lambda: Cluster(2, link="ib400"),
        lambda text: Cluster(2, link="ib400", gpu=found_in('gpu="(.*?)"', text)),
    ),
    (
        ["Batch()", "batch="],
        lambda: foreseen(batch=None),
        lambda text: foreseen(batch=snippet(text, "Batch", global_rows=2, seq_len=16)),
    ),
    (
        ["tp="],
        lambda: foreseen(layout=Layout(tp=2, dp_shard=1), pins=["pp=1"]),
        lambda text: foreseen(pins=[found_in(r"such as (tp=\d+)", text)]),
    ),
    (
        ["Hints()", "hints="],
        lambda: plan(Chain(blocks=False), ONE, techniques={"activation_checkpointing": "full"}),
        lambda text: plan(
            Chain(blocks=False),
            ONE,
            techniques={"activation_checkpointing": "full"},
            hints=snippet(text, "meshwright.Hints"),
        ),
    ),
    (
        ["Loss()", "reduction=", "loss_fn=", "ignore_index="],
        lambda: step(loss_fn=mean),
        lambda text: (
            step(loss_fn=snippet(text, "meshwright.Loss", fn=fn)),
            step(loss_fn=lambda logits, labels: snippet(text, "F.cross_entropy", F=F, logits=logits, labels=labels)),
        ),
    ),
    (
        ["techniques.loss_chunks, by 'it'"],
        lambda: step(loss_fn=mean, techniques={"loss_chunks": 2}),
        lambda text: (step(techniques={"loss_chunks": 2}), step(loss_fn=Loss(fn, reduction="mean"))),
    ),
    (
        ["PreferenceLoss()"],
        lambda: parallelize(Chain(), ONE, loss_fn={"a": PreferenceLoss()}),  # type: ignore[dict-item]
        lambda text: parallelize(Chain(), ONE, loss_fn=PreferenceLoss()),
    ),
    (
        ["techniques.loss_chunks = …"],
        lambda: parallelize(DEBUG, ONE, loss_fn=PreferenceLoss(), techniques={"loss_chunks": 2}),
        lambda text: parallelize(DEBUG, ONE, loss_fn=PreferenceLoss(), techniques=asked(text)),
    ),
    (
        ["batch.microbatch"],
        lambda: without_reference({"tokens": torch.ones(3, 2, dtype=torch.long)}, may_lack=True),
        lambda text: without_reference({"tokens": torch.ones(4, 2, dtype=torch.long)}, may_lack=True),
    ),
    (
        ["MoEConfig()", "moe=", "top_k="],
        lambda: decoder_config(SimpleNamespace(**vars(DEBUG), ffn_hidden_dim=8, tie_embeddings=True, num_experts=4)),
        lambda text: decoder_config(replace(DEBUG, moe=MoEConfig(n_experts=4, top_k=2))),
    ),
    (
        ["model.tied_embeddings = false"],
        lambda: PipelineStageModule(replace(DEBUG, tied_embeddings=True), 0, 2, (0, 1)),
        lambda text: PipelineStageModule(replace(DEBUG, **asked(text)), 0, 2, (0, 1)),
    ),
    (
        ["make_optimizer()", "lr=", "plan=", "model.plan.optimizer", "named_parameters=", "named_parameters()"],
        lambda: Muon(GROUPS),
        lambda text: made_by(text, parallelize(DEBUG, ONE, techniques={"optimizer": "muon"})),
    ),
    (
        ["plan=", "model.plan.optimizer"],
        lambda: split_by_role(GROUPS, [], ()),
        lambda text: split_by_role(
            [], [], snippet(text.replace("…", "DEBUG"), "parallelize", DEBUG=DEBUG).plan.optimizer.matrices
        ),
    ),
    (
        ["make_optimizer()"],
        lambda: check_optimizer(
            torch.optim.AdamW(GROUPS), plan(DEBUG, ONE, techniques={"optimizer_state": "8bit"}).optimizer
        ),
        lambda text: made_by(text, parallelize(DEBUG, ONE, techniques={"optimizer_state": "8bit"}), check=True),
    ),
    (
        ["batch.global_batch = …", "batch.microbatch"],
        lambda: plan(FOUR, PP2, batch=Batch(3, 16, 1), techniques={"pipeline_schedule": "interleaved_1f1b"}),
        lambda text: plan(
            FOUR,
            PP2,
            batch=Batch(int(found_in(r"global_batch to (\d+)", text)), 16, 1),
            techniques={"pipeline_schedule": "interleaved_1f1b"},
        ),
    ),
    (
        ["optimizer.overrides, by 'it'"],
        lambda: refuse_unused(["a*", "ab"], ["ab", "ac"]),
        lambda text: (refuse_unused(["ab", "a*"], ["ab", "ac"]), refuse_unused(["a*"], ["ab", "ac"])),
    ),
    (
        ["techniques.cpu_offload, by 'it'"],
        lambda: low_bit.step(SimpleNamespace(), torch.device("cpu")),  # type: ignore[arg-type]
        lambda text: low_bit.step(torch.optim.AdamW(GROUPS), torch.device("cpu")),
    ),
    (
        ["model.max_seq_len"],
        lambda: check_data(facts(DEBUG), Batch(1, 9999)),
        lambda text: check_data(facts(replace(DEBUG, max_seq_len=9999)), Batch(1, 9999)),
    ),
    (
        ["model.vocab_size = …"],
        lambda: check_data(facts(DEBUG), Batch(1, 8, vocab_size=9999)),
        lambda text: check_data(facts(replace(DEBUG, **asked(text))), Batch(1, 8, vocab_size=9999)),
    ),
    (
        ["count=", "reduction="],
        lambda: step(loss_fn=Loss(of_rows, reduction="mean", count="labels")),
        lambda text: step(loss_fn=snippet(text, "meshwright.Loss", fn=of_rows)),
    ),
    (
        ["parallelize()", "techniques="],
        lambda: parallelize(DEBUG, ONE).half(),
        lambda text: snippet(text.replace("...", "DEBUG, ONE"), "parallelize", DEBUG=DEBUG, ONE=ONE),
    ),
    (
        ["averaged()", "train()"],
        lambda: averaged_step(averages=True),
        lambda text: averaged_step(averages=False),
    ),
    (
        ["optimizer="],
        lambda: saved_with({"note": 3}),
        lambda text: (saved_with({"note": torch.tensor(3)}), meshwright.save(parallelize(Chain(), ONE), "c")),
    ),
    (
        ["restore_options="],
        lambda: loaded(),
        lambda text: loaded(restore_options=False),
    ),
    (
        ["reset_parameters()"],
        lambda: parallelize(on_meta(Table), ONE),
        lambda text: parallelize(on_meta(Reset), ONE),
    ),
    (
        ["parameters()"],
        lambda: zero(optimizer=torch.optim.AdamW(Chain().parameters())),
        lambda text: zero(),
    ),
    (
        ["device()"],
        lambda: zero(Chain(), init_nvfsdp_with_meta_device=True),
        lambda text: zero(on_meta(Chain), init_nvfsdp_with_meta_device=True),
    ),
    (
        ["techniques.precision.compute, by 'it'"],
        lambda: _precision(
            SimpleNamespace(mixed_precision="bf16"), Techniques(precision=Precision(compute="float16")), ""
        ),
        lambda text: _precision(SimpleNamespace(mixed_precision="bf16"), Techniques(), ""),
    ),
    *(
        (names, lambda field=field, value=value, table=table: handled(field, value, table), after)
        for names, field, value, table, after in (
            (
                ["Layout()", "layout="],
                "fsdp",
                "full_shard",
                TRAINING_ARGUMENTS,
                lambda text: parallelize(Chain(), Layout()),
            ),
            (["loss_fn="], "label_smoothing_factor", 0.1, TRAINING_ARGUMENTS, lambda text: step(loss_fn=smoothed)),
            (
                ["techniques="],
                "activation_offloading",
                True,
                SFT_CONFIG,
                lambda text: parallelize(DEBUG, ONE, techniques=braces(text)),
            ),
            (
                ["techniques="],
                "fp16_full_eval",
                True,
                TRAINING_ARGUMENTS,
                lambda text: parallelize(DEBUG, ONE, techniques={"precision": {"compute": "bfloat16"}}),
            ),
        )
    ),
    (
        ["logging.memory_snapshot, by 'it'"],
        lambda: check_recordings(SimpleNamespace(memory_snapshot="a"), "cpu"),
        lambda text: check_recordings(SimpleNamespace(memory_snapshot=""), "cpu"),
    ),
    (
        ["model.n_layers"],
        lambda: check_size(replace(DEBUG, n_layers=64), too_many(), "it"),
        lambda text: check_size(replace(DEBUG, n_layers=1), too_many(), "it"),
    ),
    (
        ["prepare()"],
        lambda: corpus({"a.txt": "some text"}, damage=True),
        lambda text: corpus({"a.txt": "some text"}),
    ),
    (
        ["seek()"],
        lambda: closed_loader(),
        lambda text: loader_at(int(found_in(r"seek\((\d+)\)", text))),
    ),
    (
        ["data.cache"],
        lambda: corpus({"a.txt": "some text", "file": ""}, cache="file/cache"),
        lambda text: corpus({"a.txt": "some text"}, cache="cache"),
    ),
    (
        ["data.learn = answers"],
        lambda: corpus({"a.jsonl": TALK, "t.jinja": TEMPLATE}, learn="all", template="t.jinja"),
        lambda text: corpus({"a.jsonl": TALK, "t.jinja": TEMPLATE}, template="t.jinja", **asked(text)),
    ),
    (
        ["data.template"],
        lambda: corpus({"a.jsonl": TALK, "t.jinja": TEMPLATE}),
        lambda text: corpus({"a.jsonl": TALK, "t.jinja": TEMPLATE}, template="t.jinja"),
    ),
    (
        ["data.template, by 'it'"],
        lambda: corpus({"a.jsonl": '{"text": "some text"}', "t.jinja": TEMPLATE}, template="t.jinja"),
        lambda text: corpus({"a.jsonl": '{"text": "some text"}'}),
    ),
    (
        ["data.mixture"],
        lambda: corpus({"a.txt": "some text", "a.jsonl": PAIR}),
        lambda text: (corpus({"a.txt": "some text"}), corpus({"a.jsonl": PAIR})),
    ),
    (
        ["data.source", "data.validation_fraction"],
        lambda: corpus({"a.txt": "some text of words"}, fraction=0.2).validation.n_samples(9),
        lambda text: (
            corpus({"a.txt": "some text of words"}, fraction=0.6).validation.n_samples(9),
            corpus({"a.txt": "some text of words" * 4}, fraction=0.2).validation.n_samples(9),
        ),
    ),
    (
        ["data.tokenizer"],
        lambda: corpus({"a.npy": np.array([1, 599])}),
        lambda text: corpus({"a.npy": np.array([1, 599])}, tokenizer="ids:600:1"),
    ),
    (
        ["data.tokenizer = folder"],
        lambda: load_tokenizer("owner/name"),
        lambda text: (save_way("begins", Path("folder")), load_tokenizer(asked(text)["tokenizer"])),
    ),
]
PLANS = [
    (["techniques.compile = true"], DEBUG, ONE, {"activation_checkpointing": "memory_budget"}, [...]),
    (
        ["techniques.context_parallel_method, by 'it'"],
        DEBUG,
        ONE,
        {"context_parallel_method": "ring"},
        [{"context_parallel_method": "auto"}, CP2],
    ),
    (["techniques.context_parallel_method = ring"], ODD, CP2, {"context_parallel_method": "ulysses"}, [...]),
    (
        ["techniques.reshard_after_forward, by 'it'"],
        DEBUG,
        DDP2,
        {"data_parallel": "ddp", "reshard_after_forward": 2},
        [...],
    ),
    (["techniques.checkpoint_modules, by 'it'"], DEBUG, ONE, MODULES, [{"checkpoint_modules": ["layers.*"]}]),
    (
        ["techniques.checkpoint_keep"],
        DEBUG,
        TP2,
        ASYNC,
        [{"checkpoint_keep": ["attention"]}, {"async_tensor_parallel": False}],
    ),
    (["techniques.cpu_offload = false"], DEBUG, ONE, {"optimizer": "adafactor", "cpu_offload": "optimizer"}, [...]),
    (["techniques.stochastic_rounding = false"], DEBUG, ONE, {"optimizer": "sgd", "optimizer_state": "8bit"}, [...]),
    (["layout.pp"], DEBUG, ONE, {"pipeline_cuts": (1,)}, [PP2]),
    (["layout.dp_replicate"], DEBUG, Layout(pp=2, dp_replicate=2, dp_shard=1), {"data_parallel": "ddp"}, [...]),
    (
        ["techniques.freeze"],
        DEBUG,
        ONE,
        {"quantize_frozen": "nf4"},
        [{"quantize_frozen": "nf4", "freeze": ["layers.*"]}],
    ),
    (
        ["techniques.activation_checkpointing, by 'it'"],
        MODELS["WarmBlocks"],
        ONE,
        {"activation_checkpointing": "full"},
        [...],
    ),
    (
        ["adapters.targets"],
        DEBUG,
        TP2,
        {"adapters": {"kind": "dora", "targets": ["head", "wq"]}},
        [{"adapters": {"kind": "dora", "targets": ["wq"]}}],
    ),
    (["techniques.float8_filter = …", "layout.tp"], NARROW, TP2, FLOAT8, [{**FLOAT8, "float8_filter": "printed"}, ONE]),
    (["layout.tp", "techniques.sequence_parallel"], of_images, CP2, {}, [TP2]),
]
"""Requests that are refused, and what their advice leaves of them: printed settings (...), techniques, or a layout."""
CALLS += [
    (
        names,
        lambda model=model, layout=layout, asks=asks: planned(model, layout, asks),
        lambda text, model=model, layout=layout, asks=asks, changes=changes: [
            planned(model, change, asks)
            if isinstance(change, Layout)
            else planned(model, layout, {**asks, **(asked(text) if change is ... else listed(text, change))})
            for change in changes
        ],
    )
    for names, model, layout, asks, changes in PLANS
]
FOLLOWED = {name for names, *_ in CALLS for name in names}


TALK = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0},' + (
    ' {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}'
)
PAIR = '{"prompt": "a", "completion": "b"}'
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def corpus(files, *, cache="cache", fraction=0.0, tokenizer="bytes", damage=False, **options):
    """The corpus of files of the current folder."""
    for name, held in files.items():
        np.save(name, held) if isinstance(held, np.ndarray) else Path(name).write_text(held)
    source = tuple(name for name in files if name.startswith("a."))
    made = prepare(SourceOptions(source, **options), load_tokenizer(tokenizer), fraction, Path(cache))
    if damage:
        next(made.folder.glob("training.tokens")).write_bytes(b"")
    return open_corpus(made.folder)


def loader_at(consumed: int):
    split = corpus({"a.txt": "some text of words"}).training
    loader = Loader(Samples.of([split], 2, 0), 1)
    loader.seek(consumed)
    next(loader)
    return loader


def closed_loader():
    loader = loader_at(1)
    loader.close()
    next(loader)


def smoothed(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.1)


def braces(text: str):
    """What a message prints behind ``techniques=``."""
    return ast.literal_eval(found_in(r"techniques=(\{.*\})", text))


def handled(field: str, value: object, table) -> None:
    refuse(make_dataclass("Arguments", [(field, object, None)])(value), table, "Arguments")


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.empty(7, 7))

    def forward(self, tokens):
        return self.table[tokens]


class Reset(Table):
    def reset_parameters(self):
        nn.init.normal_(self.table)


def on_meta(kind):
    with torch.device("meta"):
        return kind()


def zero(model=None, optimizer=None, **options):
    model = model or Chain()
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    return nvfsdp_strategy_parallelize(model, single_process_mesh("cpu"), optimizer=optimizer, **options)


def averaged_step(averages: bool):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = ScheduleFreeAdamW([parameter], lr=0.1)
    optimizer.step()
    with optimizer.averaged():
        if averages:
            optimizer.step()
    optimizer.eval()
    optimizer.train()
    optimizer.step()


def saved_with(state):
    model = parallelize(Chain(), ONE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[next(iter(model.parameters()))] = state
    meshwright.save(model, "saved", optimizer=optimizer)


def loaded(**options):
    model = parallelize(Chain(), ONE)
    first, *others = model.parameters()
    meshwright.save(
        model, "groups", optimizer=torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": others}], lr=0.1)
    )
    meshwright.load(model, "groups", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **options)


def too_many() -> int:
    """Bytes of each parameter, of which 64 layers have twice as many as fit here."""
    return 2 * psutil.virtual_memory().available // facts(replace(DEBUG, n_layers=64)).numel


def planned(model, layout, techniques):
    device = "cuda" if {"float8", "async_tensor_parallel"} & {*techniques} else "cpu"
    return plan(model, layout, techniques=techniques, cluster=Cluster(layout.world, layout.world, device))


def listed(text: str, changes: dict) -> dict:
    """Changes, of which one is the list that a message prints."""
    found = {
        key: value_of(found_in(rf"{key} = (\[.*?\])", text)) for key, value in changes.items() if value == "printed"
    }
    return changes | found


def facts(model):
    from meshwright.introspection.facts import model_facts
    from meshwright.introspection.source import as_module

    return model_facts(as_module(model))


def asked(text: str) -> dict[str, Any]:
    """The first change of settings that a message asks for, by the last words of its keys."""
    return {key.rpartition(".")[2]: value for key, value in ways(text)[0]}


def made_by(text: str, model, check: bool = False) -> None:
    words = text.replace("lr=…", "lr=0.1")
    made = snippet(
        words, "meshwright.training.optimizer.make_optimizer", groups=model.make_parameter_groups(), model=model
    )
    optimizer = getattr(made, found_in(r"named_parameters\(\)\)\.(\w+)", text))
    if check:
        check_optimizer(optimizer, model.plan.optimizer)


@pytest.fixture
def _ends_its_group():
    yield
    destroy_distributed()


@pytest.mark.first("logging.memory_snapshot, by 'it'")
@pytest.mark.usefixtures("_ends_its_group")
@pytest.mark.parametrize(("names", "before", "after"), CALLS, ids=[", ".join(names) for names, *_ in CALLS])
def test_advice_of_a_call_is_followed(names, before, after, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = said(before)
    assert all(is_followed(name, advices(text)) for name in names), f"{advices(text)}: {text}"
    assert (again := said(lambda: after(text), "simulation.foresee._Question.answer")) == "", f"{text}\n{again}"
