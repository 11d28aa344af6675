"""The keys that users write down, frozen: a new one is a decision, and a renamed one breaks somebody's file."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
from dataclasses import replace
from itertools import pairwise

import pytest

from meshwright.core.config import field_doc, from_dict, public_keys
from meshwright.core.config.ranges import Range, limits
from meshwright.core.config.schema import default_of, field_types, sections, union_arms
from meshwright.core.errors import ConfigError
from meshwright.data import options
from meshwright.planning import layout, techniques
from meshwright.planning.layout import Layout
from meshwright.training import config
from meshwright.training.config import Config, ModelConfig, check

KEYS = """
name out run seed steps epochs check_trace
model.hf model.adapter model.trust_remote_code
model.size model.vocab_size model.dim model.n_layers model.n_heads model.n_kv_heads model.hidden_dim model.max_seq_len
model.rope_theta
model.qk_norm model.tied_embeddings
model.rope_scaling.factor model.rope_scaling.low_freq_factor model.rope_scaling.high_freq_factor
model.rope_scaling.original_max_seq_len
model.moe.n_experts model.moe.top_k model.moe.hidden_dim model.moe.n_shared model.moe.first_dense model.moe.router
model.moe.n_groups
model.moe.top_groups model.moe.normalise model.moe.scale model.moe.bias_rate model.moe.sequence_loss
model.moe.batch_loss
model.moe.z_loss
model.moe.capacity_factor
adapters.kind adapters.rank adapters.alpha adapters.dropout adapters.targets adapters.modules_to_save
data.source data.format data.task data.column data.dtype data.template data.learn data.ignore data.end_of_answer
data.on_bad_row data.too_long data.streaming
data.max_epochs
data.mixture[].source data.mixture[].format data.mixture[].task data.mixture[].column data.mixture[].dtype
data.mixture[].template data.mixture[].learn data.mixture[].ignore data.mixture[].end_of_answer
data.mixture[].on_bad_row data.mixture[].too_long data.mixture[].streaming data.mixture[].max_epochs
data.mixture[].name data.mixture[].weight
data.curriculum[].from_step data.curriculum[].weights
data.tokenizer data.seq_len data.validation_fraction data.cache data.workers
batch.global_batch batch.microbatch
layout.pp layout.dp_replicate layout.dp_shard layout.cp layout.tp layout.ep
techniques.data_parallel techniques.zero_stage techniques.reshard_after_forward techniques.blocks_per_unit
techniques.sync_grad_accum techniques.cpu_offload
techniques.optimizer_state techniques.stochastic_rounding
techniques.activation_checkpointing techniques.checkpoint_every techniques.checkpoint_modules techniques.checkpoint_keep
techniques.checkpoint_keep_every techniques.activation_memory_budget
techniques.sequence_parallel techniques.regather techniques.async_tensor_parallel
techniques.context_parallel_method
techniques.tensor_plan[].pattern techniques.tensor_plan[].style techniques.loss_chunks
techniques.pipeline_schedule techniques.layers_per_stage techniques.pipeline_cuts
techniques.compile techniques.compile_backend techniques.freeze techniques.quantize_frozen
techniques.precision.master techniques.precision.compute techniques.precision.reduce techniques.precision.output
techniques.precision.loss_scale
techniques.float8 techniques.float8_filter techniques.float8_all_gather
optimizer.kind optimizer.lr optimizer.beta1 optimizer.beta2 optimizer.eps optimizer.weight_decay optimizer.max_norm
optimizer.max_skipped_steps optimizer.max_loss_deviation optimizer.loss_window
optimizer.overrides[].pattern optimizer.overrides[].lr_scale optimizer.overrides[].weight_decay
dpo.beta dpo.label_smoothing
schedule.kind schedule.warmup_steps schedule.tokens schedule.warmup_tokens schedule.final_ratio schedule.decay_fraction
validation.every validation.samples
checkpoint.every checkpoint.keep_last checkpoint.asynchronous checkpoint.host_memory checkpoint.when_busy
checkpoint.folder checkpoint.memory_every checkpoint.memory_folder
logging.every logging.tensorboard logging.wandb logging.wandb_project logging.profile logging.memory_snapshot
process.count process.backend process.startup_timeout_sec process.step_timeout_sec process.audit process.check_memory
process.max_restarts
sample.prompt sample.chat sample.tokens sample.temperature
""".split()

LEGAL = {
    "data.mixture": [{}],
    "data.curriculum": [{"from_step": 1, "weights": [1.0]}],
    "optimizer.overrides": [{"pattern": "norm"}],
    "model.rope_scaling": {},
    "model.moe": {},
    "techniques.freeze": ["norm"],
    "techniques.float8_filter": ["down"],
    "techniques.tensor_plan": [{"pattern": "layers.*.feed_forward.up", "style": "colwise"}],
}
ELSEWHERE = {f"layout.{axis}" for axis in field_types(Layout)} | {"techniques.reshard_after_forward"}
"""Numbers whose legality depends on the mesh: planning decides it."""


def with_value(key: str, value: object) -> Config:
    """The default config with one key changed, its optional sections and lists present; not checked."""
    data: dict = {}
    for path, held in LEGAL.items():
        section, name = path.split(".")
        data.setdefault(section, {})[name] = (
            [dict(row) if isinstance(row, dict) else row for row in held] if isinstance(held, list) else {}
        )
    node = data
    *path, leaf = key.replace("[]", ".0").split(".")
    for name in path:
        node = node[int(name)] if isinstance(node, list) else node.setdefault(name, {})
    node[int(leaf) if isinstance(node, list) else leaf] = value
    return from_dict(Config, data)


def types_of(key: str) -> tuple:
    path, _, name = key.rpartition(".")
    return union_arms(field_types(dict(sections(Config))[path])[name])


def test_the_keys_are_these():
    assert public_keys(Config) == KEYS


def test_the_tree_stays_small_enough_to_read():
    repeated = [key for key in KEYS if key.replace("mixture[].", "") in KEYS and "mixture" in key]
    # of models that are one of a kind
    kinds = [key for key in KEYS if key.startswith(("model.rope_scaling.", "model.moe."))]
    assert len(public_keys(Config)) - len(repeated) - len(kinds) <= 141


def test_every_key_has_a_doc_of_its_own():
    docs = {key: field_doc(Config, key) for key in KEYS}
    assert [key for key, doc in docs.items() if not doc] == []
    said = {}
    for key, doc in docs.items():  # the same key of two sections may say the same
        said.setdefault((key.rpartition(".")[2], doc), key)
    assert len({doc for _, doc in said}) == len(said), "two keys have one doc"


@pytest.mark.parametrize("module", [config, layout, options, techniques], ids=lambda module: module.__name__)
def test_the_help_of_a_key_is_one_paragraph(module):
    """The command line prints the strings below fields as they stand: a blank line would tear a sentence apart."""
    classes = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ClassDef)]
    pairs = [pair for node in classes for pair in pairwise(node.body) if isinstance(pair[0], ast.AnnAssign)]
    texts = [ast.literal_eval(doc.value) for _, doc in pairs if isinstance(doc, ast.Expr)]
    assert len(texts) > 5 and [text for text in texts if "\n\n" in text] == []


def test_every_section_has_its_doc_and_can_leave_out_what_may_be_none():
    for path, section in sections(Config):
        assert section.__doc__ and not section.__doc__.startswith(f"{section.__name__}("), path
        for field in dataclasses.fields(section):
            if type(None) in union_arms(field_types(section)[field.name]):
                assert default_of(field) is None, f"{path}.{field.name}: TOML cannot say none"


def test_the_defaults_are_legal():
    check(Config())


def test_every_number_has_a_range():
    for key in [key for key in KEYS if {int, float} & set(types_of(key)) and key not in ELSEWHERE]:
        for value in [-1] if int in types_of(key) else [-1.0, math.nan, math.inf]:
            with pytest.raises(ConfigError) as caught:
                check(with_value(key, value))
            concrete = key.replace("[]", "[0]")
            legal = limits(Config)[key]
            assert isinstance(legal, Range)
            assert str(caught.value).startswith(f"{concrete} = {value!r} is out of range: it must be {legal.words}")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("steps", 0, "1 or more"),
        ("epochs", 0.0, "above 0"),
        ("name", "a/b", "letters, digits"),
        ("name", "..", "letters, digits"),
        ("name", "", "letters, digits"),
        ("seed", 2**63, "2**63 - 1"),
        ("data.source", [], "not empty"),
        ("data.validation_fraction", 1.0, "0 or more and below 1"),
        ("optimizer.lr", 0.0, "above 0"),
        ("optimizer.beta2", 1.0, "below 1"),
        ("model.size", "demoo", "Did you mean 'demo'?"),
        ("model.rope_scaling.low_freq_factor", 4.0, "must be above model.rope_scaling.low_freq_factor"),
        ("techniques.freeze[]", "(", "techniques.freeze[0] = '(' is no regular expression"),
        ("optimizer.overrides[].pattern", "*", "optimizer.overrides[0].pattern = '*' is no regular expression"),
        ("techniques.precision.compute", "fp8", "techniques.precision.compute = 'fp8' is not a dtype"),
        ("techniques.precision.output", "auto", "techniques.precision.output = 'auto' is not a dtype"),
    ],
)
def test_values_that_no_run_could_use_are_refused(key, value, says):
    with pytest.raises(ConfigError) as caught:
        check(with_value(key, value))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("techniques.precision.compute", "bf16"),
        ("optimizer.max_norm", 0.0),
        ("validation.every", 0),
        ("sample.tokens", 0),
        ("data.workers", 0),
        ("schedule.final_ratio", 1.0),
    ],
)
def test_values_that_switch_something_off_are_legal(key, value):
    check(with_value(key, value))


def test_types_are_checked_also_when_the_tree_was_built_in_python():
    with pytest.raises(ConfigError, match="steps = true is true or false"):
        check(Config(steps=True))
    with pytest.raises(ConfigError, match=r"model\.dim = \"64\""):
        check(Config(model=replace(ModelConfig(), dim="64")))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"Config\.from_dict"):
        check(Config(layout={"tp": 2}))  # pyright: ignore[reportArgumentType]


def test_a_plain_dict_and_a_file_do_the_same(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("steps = 3\n[layout]\ntp = 2\n")
    assert (
        Config.from_toml(path)
        == Config.from_dict({"steps": 3, "layout": {"tp": 2}})
        == Config(steps=3, layout=Layout(tp=2))
    )
    for load in (lambda: Config.from_dict({"steps": 0}), lambda: Config.from_toml(tmp_path / "zero.toml")):
        (tmp_path / "zero.toml").write_text("steps = 0\n")
        with pytest.raises(ConfigError, match="steps = 0 is out of range"):
            load()
