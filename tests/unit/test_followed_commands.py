"""Flags and commands that messages print are typed, and the command does its work, or begins it."""

from __future__ import annotations

import inspect
import json
import os
import shlex
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from support.advice import advices
from support.followed import Reached, command, found_in, printed, said

from meshwright.comparison.trace import TraceFile
from meshwright.data.scan import scan_sources
from meshwright.distributed.process.workers import WorkerPool
from meshwright.distributed.process.world import check_nodes_in_use
from meshwright.introspection.source import read_causal_lm
from meshwright.training.config import Config
from meshwright.training.fine_tuning import with_base
from meshwright.training.rehearsal import Rehearsal, to_json

SMALL = (
    "--model.dim=16 --model.n_layers=1 --model.n_heads=2 --model.n_kv_heads=2 --data.seq_len=16"
    " --batch.global_batch=2 --steps=1 --schedule.warmup_steps=0 --data.source=farmyard --data.cache=cache"
)
ON_CPUS = "plan --profile=xeon-2-cores --gpus=1"
COMMANDS = [
    ("verify --max-world=4", "verify --max-world=4 --all", ["--all"], "verification.verify.verify"),
    ("verify", "verify {--layout}", ["--layout", "--all", "dp_replicate="], "verification.verify.verify"),
    (
        "verify --trace-steps=2",
        "verify --trace-steps=2 --write-trace=t",
        ["--write-trace"],
        "verification.of_config.write_trace",
    ),
    (
        "generate run --template=t.jinja",
        "generate run --template=t.jinja --chat",
        ["--chat"],
        "training.run.opened.Sampler.of",
    ),
    (
        "generate run --chat",
        "generate run --chat --template=t.jinja",
        ["--chat", "--template"],
        "training.run.opened.Sampler.of",
    ),
    ("generate run --chat", "generate run --prompt=a", ["--chat"], "training.run.opened.Sampler.of"),
    (
        "evaluate run --data.seq_len=8",
        "evaluate run --data.seq_len=8 --data=farmyard",
        ["--data"],
        "cli.evaluate.on_ranks",
    ),
    ("evaluate hf", "evaluate hf {--tokenizer} --data=farmyard", ["--tokenizer"], "cli.evaluate.on_ranks"),
    (
        "evaluate hf --tokenizer=bytes",
        "evaluate hf --tokenizer=bytes --data=farmyard",
        ["--data"],
        "cli.evaluate.on_ranks",
    ),
    (
        "convert run out --to=adapter",
        "convert run out {--to} --like=llama",
        ["--to"],
        "verification.counterpart.of_decoder",
    ),
    (
        "convert run out --to=hf --base=hf",
        "convert run out --to=hf --like=llama",
        ["--base"],
        "verification.counterpart.of_decoder",
    ),
    (
        "convert run out --to=hf",
        "convert run out --to=hf --like=llama",
        ["--like"],
        "verification.counterpart.of_decoder",
    ),
    ("inspect run --live", "inspect run --live --html=x.html", ["--html"], "cli.inspect._live_page"),
    (
        "inspect code",
        "inspect code --trust",
        ["--trust", "--model.trust_remote_code"],
        "training.run.folder.describe_model",
    ),
    (
        "plan --model.hf=code",
        "plan --model.hf=code {--model.trust_remote_code}",
        ["--model.trust_remote_code", "model.trust_remote_code = true"],
        "training.build.plan_run",
    ),
    (
        "rehearse --rank=0 --link=ib400",
        "rehearse --rank=0 --link=ib400 --gpu=h100 --gpus=2",
        ["--gpu"],
        "training.rehearsal.cast",
    ),
    ("rehearse --rank=0", "rehearse --rank=0 {--gpus}", ["--gpus"], "training.rehearsal.cast"),
    (
        "rehearse --rank=0 --gpus=1 --device=cuda",
        "rehearse --rank=0 --gpus=1 {--device}",
        ["--device"],
        "training.rehearsal.model_source",
    ),
    (
        "plan --link=ib400",
        "plan --link=ib400 --gpus=2 --gpu=h100",
        ["--gpu", "--gpus"],
        "simulation.foresee.foresee",
    ),
    (
        "plan --gpus=12 --gpu=h100",
        "plan --gpus=12 --gpu=h100 --per-node=6",
        ["--per-node"],
        "simulation.foresee.foresee",
    ),
    (f"{ON_CPUS} --gpu=h100 --link=ib400", ON_CPUS, ["--gpu", "--link"], "simulation.foresee.foresee"),
    ("plan --profile=absent.json --gpus=1", "{measure}", ["meshwright measure"], "training.machine.measure"),
    ("measure", "measure FILE --ranks=2", ["--ranks"], "training.machine.measure_here"),
    ("launch", "launch --dry-run", ["--dry-run"], ""),
    (
        "launch --dry-run --data.tokenizer=absent.json",
        "launch --dry-run --data.tokenizer=absent.json --model.vocab_size=300",
        ["--model.vocab_size", "model.vocab_size"],
        "",
    ),
    (
        f"{ON_CPUS} --with=none.json {SMALL}",
        "{rehearse}",
        ["--json", "meshwright rehearse"],
        "training.rehearsal.rehearse_each",
    ),
    (
        f"plan --gpu=h100 --gpus=1 --layout.dp_shard=1 --with=other.json {SMALL}",
        "{rehearse}",
        ["--json", "--gpus", "--each-kind", "meshwright rehearse"],
        "training.rehearsal.rehearse_each",
    ),
    (
        "verify --write-trace=t --techniques.float8=tensorwise",
        "verify --write-trace=t --techniques.float8=none",
        ["techniques.float8, by 'it'"],
        "verification.of_config.model_source",
    ),
    (
        f"plan --gpu=v100 --gpus=1 --layout.dp_shard=1 --techniques.precision.compute=bfloat16 {SMALL}",
        "plan --gpu=v100 --gpus=1 --techniques.precision.compute=float16",
        ["techniques.precision.compute"],
        "simulation.foresee.foresee",
    ),
]
"""A command that is refused, one that follows its message, the advices, and where the work begins."""
LLAMA = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 300}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 2}
CODE = """from transformers import LlamaConfig, LlamaForCausalLM
class Mine(LlamaConfig):
    model_type = "mine"
class Model(LlamaForCausalLM):
    config_class = Mine
"""
MAP = {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Model"}
FILES = {
    "run": {"config.toml": '[data]\nsource = ["farmyard"]\n'},
    "hf": {"config.json": LLAMA, "model.safetensors": ""},
    "code": {"config.json": {**LLAMA, "model_type": "mine", "auto_map": MAP}, "mine.py": CODE},
}
FOLLOWED = {name for *_, names, _ in COMMANDS for name in names} | {"--nodes", "meshwright train", "meshwright verify"}
FOLLOWED |= {"meshwright launch", "process.count = …"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run, models of transformers without a tokenizer, and files."""
    made = tmp_path_factory.mktemp("commands")
    for name, files in FILES.items():
        (made / name).mkdir()
        for file, text in files.items():
            (made / name / file).write_text(text if isinstance(text, str) else json.dumps(text))
    (made / "t.jinja").write_text("{{ messages }}")
    (made / "none.json").write_text("{}")
    (made / "other.json").write_text(to_json([Rehearsal(0, 1, device="NVIDIA H100", step_seconds=(1.0,))]))
    (made / "small.toml").write_text("[data]\nsource = ['farmyard']\n")
    with pytest.MonkeyPatch.context() as here:
        here.chdir(made)
        here.setattr("meshwright.training.rehearsal.local_device", lambda: "cpu")
        here.setattr("meshwright.training.run.opened.checkpoint_of", lambda run, *rest: run / "step-1")
        here.setattr("meshwright.training.run.folder.RunFolder.checkpoint", lambda self, *rest: self.path / "step-1")
        yield made


@pytest.mark.first
@pytest.mark.parametrize(
    ("words", "followed", "names", "stop"),
    COMMANDS,
    ids=[f"{words[:30]}: {names[-1]}" for words, _, names, _ in COMMANDS],
)
def test_advice_of_a_command_is_followed(words, followed, names, stop, folder):
    text = said(command(words))
    assert advices(text) >= set(names), f"{words}: {text}"
    assert (again := said(command(printed(followed, text)), *filter(None, [stop]))) == "", (
        f"{text}\n{followed}: {again}"
    )


def test_a_job_of_several_nodes_is_begun_as_its_message_says(monkeypatch):
    for name, value in {"SLURM_JOB_NUM_NODES": "2", "ENVIRONMENT": "BATCH"}.items():
        monkeypatch.setenv(name, value)
    text = said(check_nodes_in_use)
    assert advices(text) >= {"--nodes", "meshwright train"} and "srun meshwright train" in text
    with patch.dict(os.environ, {"SLURM_STEP_ID": "0"}):  # as srun has it
        assert said(check_nodes_in_use) == ""
    with patch.dict(os.environ, {"SLURM_JOB_NUM_NODES": found_in(r"--nodes=(\d+)", text)}):
        assert said(check_nodes_in_use) == ""


def test_too_many_processes_are_planned_rehearsed_launched_or_insisted_on(folder):
    text = said(lambda: WorkerPool(4096))
    assert advices(text) >= {"meshwright launch", "process.count = …"}
    many = "--layout.dp_shard=4096 --batch.global_batch=4096"
    job = "--slurm.nodes=512 --slurm.gpus_per_node=8"
    for verb, more, stop in (
        ("plan", "", "training.build.plan_run"),
        ("rehearse", "--rank=0", "training.rehearsal.rehearse_each"),
        ("launch", f"--dry-run {job}", "cli.launch.batch_script"),
    ):
        assert f"'meshwright {verb}'" in text
        assert said(command(f"{verb} {many} {more}"), stop) == ""
    count = found_in(r"process\.count = (\d+)", text)
    with patch("meshwright.training.launch.WorkerPool", side_effect=Reached) as pool:
        said(command(f"train {many} --process.count={count} --run=r {SMALL}"))
    assert pool.call_args.args[0] == 4096 and pool.call_args.kwargs["oversubscribe"]


@pytest.mark.follows("--local-dir", "--repo-type", "--revision")
def test_what_the_hub_has_is_fetched_by_its_own_command(folder, tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub.cli.download", reason="needs the extra 'hf'")
    from huggingface_hub import snapshot_download
    from huggingface_hub.cli.hf import app

    def fetched(**given):
        """Lay files where the hub's client would."""
        inspect.signature(snapshot_download).bind(**given)
        asked.append((given["repo_id"], given["repo_type"], given["revision"]))
        place = Path(given["local_dir"] or "hub/datasets--some--rows/snapshots/1")
        place.mkdir(parents=True, exist_ok=True)
        (place / "a.jsonl").write_text('{"text": "a"}')
        (place / "config.json").write_text(json.dumps(LLAMA))
        return str(place)

    def fetch(text: str) -> None:
        words = shlex.split(found_in(r"hf (download [^'),]*)", text))
        with pytest.raises(SystemExit) as ended:
            app(words)
        assert not ended.value.code

    asked = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.cli.download.snapshot_download", fetched)
    lora = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    lora |= {"base_model_name_or_path": "some/base", "revision": "abc"}
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora/adapter_config.json").write_text(json.dumps(lora))
    weights = {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{ab}.weight": torch.ones(4, 4) for ab in "AB"}
    save_file(weights, tmp_path / "lora/adapter_model.safetensors")
    of_rows, of_model = said(lambda: scan_sources("some/rows")), said(lambda: read_causal_lm("some/model"))
    of_base = said(lambda: with_base(Config.from_dict({"model": {"hf": "lora"}})))
    assert "Nothing is downloaded: fetch it with 'hf download --repo-type dataset" in of_rows
    assert "fetch this one with 'hf download some/model --local-dir" in of_model
    assert "(to fetch it: hf download some/base --revision abc" in of_base
    for text in (of_rows, of_model, of_base):
        fetch(text)
    assert asked == [("some/rows", "dataset", None), ("some/model", "model", None), ("some/base", "model", "abc")]
    named = Config.from_dict({"model": {"hf": "BASE", "adapter": "lora"}})
    assert "with --model.hf=BASE --model.adapter=lora" in of_base and with_base(named).model == named.model
    assert scan_sources("some/rows").files and read_causal_lm("FOLDER").config.vocab_size == 300


def test_a_trace_that_cannot_be_read_is_written_as_its_message_says(folder):
    text = said(lambda: TraceFile("none.json"))
    assert "meshwright verify" in advices(text)
    assert said(command(printed("{verify}", text)), "verification.of_config.write_trace") == ""
