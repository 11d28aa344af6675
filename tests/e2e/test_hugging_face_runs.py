"""Runs of Hugging Face models: from a folder, through every verb, and back into a folder that transformers reads."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from e2e_runs import Job, losses, tree
from safetensors.torch import load_file
from support.families import save_tokenizer, saved, some_tokens
from support.followed import found_in
from support.tokenizers_made import ENDLESS

from meshwright import ConfigError
from meshwright.checkpoint.tensor_files import INDEX, TensorFiles
from meshwright.cli.arguments import open_run
from meshwright.training.run.opened import Opened

pytestmark = pytest.mark.all


@pytest.fixture(scope="module")
def base(tiny) -> dict:
    return tiny | {"steps": 3, "checkpoint.every": 2}


def beginning(folder: Path) -> Path:
    """A folder as people download it: weights of experts one by one, a tokenizer, settings of generation."""
    saved(folder, "qwen3_moe")
    save_tokenizer(folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "do_sample": true}')
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return beginning(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def told(pool, base, model, tmp_path_factory):
    """A fine-tuning on two ranks, as rank 0 told it."""
    config = base | {"model.hf": str(model), "out": str(tmp_path_factory.mktemp("out")), "optimizer.lr": 1e-3}
    return pool.run(Job(config), world=2, timeout=60)[0]


@pytest.fixture(scope="module")
def decoders(pool, base, tmp_path_factory) -> dict[str, Path]:
    """Short runs of our own decoder: the size debug, one with scaled rotary positions and tied embeddings, and
    mixtures of experts.
    """
    scaled = {
        "model.n_kv_heads": 2,
        "model.tied_embeddings": True,
        "model.rope_scaling.original_max_seq_len": 128,
        "model.qk_norm": False,
    }
    softmax = {"model.moe.n_experts": 4, "model.moe.hidden_dim": 40, "model.moe.sequence_loss": 0.01, "layout.ep": 2}
    sigmoid = {
        "model.moe.router": "sigmoid",
        "model.moe.n_experts": 8,
        "model.moe.n_groups": 2,
        "model.moe.hidden_dim": 40,
    }
    biased = {"model.moe.bias_rate": 0.01, "model.moe.n_shared": 2, "model.moe.first_dense": 1, "model.moe.scale": 2.5}
    changed = {"debug": {}, "scaled": scaled, "softmax": softmax, "sigmoid": sigmoid, "biased": sigmoid | biased}
    found = {}
    for name, changes in changed.items():
        config = base | {"model.size": "debug", "out": str(tmp_path_factory.mktemp("out"))} | changes
        found[name] = pool.run(Job(config), world=changes.get("layout.ep", 1), timeout=60)[0].folder
    return found


@pytest.fixture
def run(told, tmp_path) -> Path:
    """A copy of its folder."""
    return shutil.copytree(told.folder, tmp_path / "run")


def ours(run: Path, step: int | None = None) -> torch.Tensor:
    """The logits of a run's model."""
    model = Opened.of_run(*open_run(str(run)), step).model().parts[0].eval()
    with torch.no_grad():
        made = model(some_tokens())
    return made if isinstance(made, torch.Tensor) else made.logits


def theirs(folder: Path) -> tuple[torch.Tensor, torch.dtype]:
    """The logits of what transformers reads, after it had nothing to complain of."""
    from transformers import AutoModelForCausalLM

    model, said = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(said.values()), said
    with torch.no_grad():
        return model(input_ids=some_tokens()).logits, model.dtype


@pytest.mark.follows("meshwright convert")
def test_a_run_begins_from_the_weights_and_the_tokenizer_of_the_folder(told, model, ask, tmp_path):
    assert told.status == 0 and f"weights  read from {model}" in told.out and "vocabulary 96" in told.out
    text = (told.folder / "config.toml").read_text()
    assert f'hf = "{model}"' in text and f'tokenizer = "{model}"' in text and 'master = "float32"' in text
    assert losses(told.folder)[0] > losses(told.folder)[-1]
    printed = shlex.split(found_in("write it for transformers with: (.*)", told.out))
    assert ask(*printed[printed.index("convert") : -1], tmp_path / "out")[0] == 0 and printed[-1] == "FOLDER"
    assert torch.equal(theirs(tmp_path / "out")[0], ours(told.folder))


def test_what_is_converted_is_what_was_trained(ask, run, tmp_path, model):
    out = tmp_path / "out"
    status, said, err = ask("convert", run, "--to", "hf", out)
    assert (status, err) == (0, "") and f"from_pretrained('{out}')" in said
    logits, dtype = theirs(out)
    assert dtype == torch.float32 and torch.equal(logits, ours(run))
    assert TensorFiles(out).tensors.keys() == TensorFiles(model).tensors.keys()
    assert not torch.equal(
        load_file(out / "model.safetensors")["lm_head.weight"], load_file(model / "model.safetensors")["lm_head.weight"]
    )
    for name in ("tokenizer.json", "generation_config.json"):
        assert (out / name).read_bytes() == (model / name).read_bytes()
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"


def test_a_run_and_its_export_have_the_chat_template_that_it_trained_with(pool, base, model, tmp_path, ask):
    from transformers import AutoTokenizer

    talk = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "four"}]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for _ in range(40)))
    (tmp_path / "mine.jinja").write_text(ENDLESS)
    data = {"data.source": [str(tmp_path / "talks.jsonl")], "data.template": str(tmp_path / "mine.jinja")}
    config = base | data | {"model.hf": str(model), "out": str(tmp_path / "out"), "steps": 2, "sample.tokens": 2}
    told = pool.run(Job(config), world=1, timeout=60)[0]
    assert told.status == 0 and "40 of 40 answers have no special token at their end" in told.out
    (tmp_path / "mine.jinja").unlink()
    assert ask("generate", told.folder, "--chat", "--prompt=two", "--tokens=2")[0] == 0
    assert ask("convert", told.folder, "--to", "hf", tmp_path / "hf")[0] == 0
    for folder in (told.folder / "tokenizer", tmp_path / "hf"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.chat_template == ENDLESS and tokenizer("two")["input_ids"] == own_ids(model, "two")


def own_ids(folder: Path, text: str) -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)(text)["input_ids"]


def test_other_steps_and_dtypes_can_be_converted(ask, run, tmp_path):
    (tmp_path / "early").mkdir()  # an empty folder is as good as none
    assert ask("convert", run, "--to=hf", tmp_path / "early", "--step", "2")[0] == 0
    logits, _ = theirs(tmp_path / "early")
    assert torch.equal(logits, ours(run, 2)) and not torch.equal(logits, ours(run))
    assert ask("convert", run, "--to=hf", tmp_path / "half", "--dtype=bf16")[0] == 0
    logits, dtype = theirs(tmp_path / "half")
    assert dtype == torch.bfloat16 and torch.allclose(logits.float(), ours(run), atol=0.1, rtol=0.1)


def test_a_large_model_is_written_into_several_files(run, tmp_path, monkeypatch):
    from meshwright.training.run import convert
    from meshwright.training.run.folder import RunFolder

    folder, config = open_run(str(run))
    whole = convert.convert(folder, RunFolder(folder).checkpoint(), config, tmp_path / "one")
    monkeypatch.setattr(convert, "export_tensors", lambda *args: export(*args, file_bytes=60_000))
    from meshwright.checkpoint.export import export_tensors as export

    parts = convert.convert(folder, RunFolder(folder).checkpoint(), config, tmp_path / "several")
    index = json.loads((tmp_path / "several" / INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 2 and index["metadata"]["total_size"] == parts.bytes == whole.bytes
    assert all(path.stat().st_size < 70_000 for path in (tmp_path / "several").glob("*.safetensors"))
    assert torch.equal(theirs(tmp_path / "several")[0], theirs(tmp_path / "one")[0])


@pytest.mark.first('words1-expected one of "hf", "merged", "adapter"')
@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["{run}", "{out}"], "--to is missing. Legal: hf"),
        (["{run}", "--to", "hg", "{out}"], 'expected one of "hf", "merged", "adapter"'),
        (["{run}", "--to=hf"], "needs the folder of a run and a new folder"),
        (["{run}", "--to=hf", "{out}", "more"], "does not know 'more'"),
        (["{run}", "--to=hf", "{out}", "--dtype=fp8"], "--dtype = 'fp8' is not a dtype"),
        (["{run}", "--to=hf", "{out}", "--step=9"], "has no checkpoint of step 9; steps that are there: 2, 3"),
        (["{run}", "--to=hf", "{run}"], "is there and not empty"),
        (["{run}", "--to=hf", "{out}", "--like=llama"], "is a Hugging Face model already; leave --like out"),
        (["nowhere", "--to=hf", "{out}"], "nowhere does not exist"),
        (["{empty}", "--to=hf", "{out}"], "has no checkpoint; steps that are there: none"),
        (["{debug}", "--to=hf", "{out}"], "say with --like NAME"),
        (["{debug}", "--to=hf", "{out}", "--like=lama"], "Did you mean 'llama'?"),
    ],
)
def test_convert_refuses_what_it_cannot_do(ask, run, decoders, tmp_path, words, complaint):
    empty = shutil.copytree(run, tmp_path / "empty", ignore=shutil.ignore_patterns("checkpoints"))
    before = tree(tmp_path)
    places = {"run": run, "out": tmp_path / "out", "empty": empty, "debug": decoders["debug"]}
    status, out, err = ask("convert", *(word.format(**places) for word in words))
    assert (
        (status, out) == (2, "") and err.startswith("meshwright: ") and complaint in err and len(err.splitlines()) == 1
    )
    assert tree(tmp_path) == before


def test_of_a_damaged_checkpoint_the_one_before_is_converted_and_the_log_says_so(ask, run, tmp_path, caplog):
    file = next((run / "checkpoints" / "step-00000003").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    status, _, err = ask("convert", run, "--to=hf", "--step=3", tmp_path / "out")
    assert status == 1 and "the checkpoint is damaged" in err and not list(tmp_path.glob("out*"))
    status, said, _ = ask("convert", run, "--to=hf", tmp_path / "out")
    assert status == 0 and "step-00000002" in said and "this checkpoint is not used" in caplog.text


@pytest.mark.first("scaled-llama")
@pytest.mark.parametrize(("name", "like"), [("debug", "qwen3"), ("scaled", "llama"), ("scaled", "mistral")])
def test_our_decoder_is_converted_into_a_proven_counterpart(ask, decoders, tmp_path, name, like):
    status, said, err = ask("convert", decoders[name], "--to=hf", tmp_path / "out", "--like", like)
    assert (status, err) == (0, "") and "no tokenizer is there: the run's data.tokenizer is 'bytes'" in said
    logits, _ = theirs(tmp_path / "out")
    assert torch.allclose(logits, ours(decoders[name]), rtol=1e-5, atol=1e-5)


def saved_again(out: Path, folder: Path) -> dict[str, tuple]:
    """What transformers' own ``save_pretrained`` writes of the model in ``out``: shapes and dtypes."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(out).save_pretrained(folder)
    return stored(folder)


def stored(folder: Path) -> dict[str, tuple]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in TensorFiles(folder).tensors.items()}


@pytest.mark.first
@pytest.mark.parametrize(("name", "like"), [("softmax", "qwen3_moe"), ("sigmoid", "glm4_moe"), ("biased", "glm4_moe")])
def test_mixtures_of_experts_are_converted_as_transformers_saves_them(ask, decoders, tmp_path, monkeypatch, name, like):
    monkeypatch.setattr("meshwright.checkpoint.export.CHUNK_BYTES", 50_000)
    status, _, err = ask("convert", decoders[name], "--to=hf", tmp_path / "out", "--like", like)
    assert (status, err) == (0, "")
    logits, _ = theirs(tmp_path / "out")
    assert torch.allclose(logits, ours(decoders[name]), rtol=1e-5, atol=1e-5)
    assert stored(tmp_path / "out") == saved_again(tmp_path / "out", tmp_path / "again")


def test_a_routers_bias_is_as_wide_as_it_was_trained_in_files_of_any_dtype(ask, decoders, tmp_path):
    for dtype in ("float32", "bfloat16"):
        assert (
            ask("convert", decoders["biased"], "--to=hf", tmp_path / dtype, "--like=glm4_moe", f"--dtype={dtype}")[0]
            == 0
        )
    wide, narrow = (load_file(tmp_path / dtype / "model.safetensors") for dtype in ("float32", "bfloat16"))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert (
        wide[name].any() and torch.equal(wide[name], narrow[name]) and narrow["lm_head.weight"].dtype == torch.bfloat16
    )
    assert stored(tmp_path / "bfloat16") == saved_again(tmp_path / "bfloat16", tmp_path / "again")
    assert theirs(tmp_path / "bfloat16")[1] == torch.bfloat16


@pytest.mark.first
@pytest.mark.parametrize(
    ("name", "like", "status", "complaint"),
    [
        (
            "debug",
            "llama",
            3,
            "and the run's model qk_norm = True. Of llama, mistral, qwen3, mixtral, qwen3_moe, glm4_moe fit: qwen3",
        ),
        ("scaled", "gpt2", 2, "is none of llama, mistral, qwen3, mixtral, qwen3_moe, glm4_moe"),
        ("scaled", "mistral", 3, "the logits are"),
    ],
)
def test_a_model_that_computes_something_else_is_refused(
    ask, decoders, tmp_path, monkeypatch, name, like, status, complaint
):
    from transformers.models.mistral.modeling_mistral import MistralMLP

    right = MistralMLP.forward
    monkeypatch.setattr(MistralMLP, "forward", lambda self, x: 0.5 * right(self, x))
    found, _, err = ask("convert", decoders[name], "--to=hf", tmp_path / "out", "--like", like)
    assert found == status and complaint in err and not list(tmp_path.glob("out*"))


def test_a_run_goes_on_and_writes_without_the_folder_that_it_began_from(train, base, ask, tmp_path, spmd):
    gone = beginning(tmp_path / "gone")
    config = base | {"model.hf": str(gone), "out": str(tmp_path / "runs"), "steps": 2}
    folder = spmd(2, Job(config))[0].folder
    shutil.rmtree(gone)
    (result,) = train(1, {"steps": 4, "layout.dp_shard": 1}, folder=folder)
    assert result.error is None and result.status == 0 and "weights  of the run's checkpoint" in result.out
    status, said, err = ask("generate", folder, "--prompt=the", "--tokens=3")
    assert (status, err) == (0, "") and said.startswith("the")
    assert ask("convert", folder, "--to=hf", tmp_path / "out")[0] == 0
    assert torch.equal(theirs(tmp_path / "out")[0], ours(folder))


def test_another_model_does_not_continue_a_run(train, run, tmp_path):
    saved(tmp_path / "other", "qwen3_moe", num_experts=2)
    save_tokenizer(tmp_path / "other")
    (result,) = train(1, {"model.hf": str(tmp_path / "other"), "layout.dp_shard": 1, "steps": 5}, folder=run)
    assert isinstance(result.error, ConfigError) and "model.num_local_experts was 4 and is now 2" in str(result.error)


@pytest.mark.first
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model.hf": "{model}x"}, "is neither a folder with a config.json nor such a file. Did you mean"),
        (
            {"model.hf": "{model}", "model.dim": 64, "model.qk_norm": True},
            "model.dim, model.qk_norm and model.hf are both given",
        ),
        ({"model.trust_remote_code": True}, "model.hf names no model whose code could be run"),
        ({"model.hf": "{bare}"}, "has weights and no tokenizer.json"),
        ({"model.hf": "{model}", "data.tokenizer": "bytes"}, "the tokenizer has 257 token ids, the model only"),
        ({"model.hf": "{model}", "data.seq_len": 65}, "data.seq_len = 65 is longer than the model's maximum"),
        ({"model.hf": "{other}"}, "they lack"),
    ],
)
def test_runs_that_cannot_begin(train, model, tmp_path, changes, complaint):
    bare = shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer.json"))
    other = shutil.copytree(model, tmp_path / "other", ignore=shutil.ignore_patterns("config.json"))
    said = json.loads((model / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(said | {"num_hidden_layers": 3, "layer_types": None}))
    places = {"model": model, "bare": bare, "other": other}
    changes = {key: value.format(**places) if isinstance(value, str) else value for key, value in changes.items()}
    try:
        (result,) = train(1, changes | {"model.size": "demo"})
        error = result.error
    except Exception as refusal:
        error = getattr(refusal, "error", refusal)
    assert isinstance(error, ConfigError) and complaint in str(error) and not (tmp_path / "runs").exists()


def test_a_config_alone_is_trained_from_drawn_weights_with_bytes(train, tmp_path):
    saved(tmp_path / "model", "llama", vocab_size=257)
    config = {"model.hf": str(tmp_path / "model" / "config.json"), "model.size": "demo", "steps": 1}
    (result,) = train(1, config)
    assert result.status == 0 and "weights  drawn from seed 0" in result.out and "vocabulary 257" in result.out


def test_plan_inspect_and_verify_take_the_model_too(ask, model, base):
    status, said, _ = ask("plan", f"--model.hf={model}", "--world=8", "--data.seq_len=32")
    assert status == 0 and "model.layers.*.mlp.experts.gate_up_proj" in said
    for what in (model, model / "config.json"):
        status, said, _ = ask("inspect", what)
        assert status == 0 and "longest sequence: 64" in said and "repeated blocks: model.layers.* (2)" in said
        assert ("weights: 45 tensors, float32" if what is model else "weights: none beside the config") in said
    status, said, _ = ask("verify", f"--model.hf={model}", "--layout=dp_shard=2", "--dtypes=fp64", "--steps=1")
    assert status == 0 and said.startswith("dp_shard=2: equal within rounding")
    status, _, err = ask("verify", f"--model.hf={model}", "--layout=dp_shard=2", "--shrink")
    assert status == 3 and "write a smaller config.json" in err
