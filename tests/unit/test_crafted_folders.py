"""Folders of strangers: whatever lies in a run, a model or a source, none of its code runs and no byte outside it is
read.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.crafted import AUTO_MAP, CANARY, CRAFTS, OWN_MODEL, Place, own_code, own_function

import meshwright
from meshwright.checkpoint.loading import covers, load_model_tensors
from meshwright.checkpoint.manifest import Manifest
from meshwright.cli.main import main
from meshwright.core.config import public_keys
from meshwright.core.errors import IntegrityError
from meshwright.data.tokenizers import FileTokenizer
from meshwright.training.run.request import RUNS_CODE
from meshwright.training.slurm import LaunchConfig

pytestmark = pytest.mark.all

pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")

OPENED: list[str] = []
WATCHED: list[str] = []
"""The folder of which nothing may be opened, while there is one."""


def _watch(event: str, args: tuple[object, ...]) -> None:
    if WATCHED and event == "open" and isinstance(args[0], str | bytes | os.PathLike):
        real = os.path.realpath(os.fsdecode(args[0]))
        OPENED.extend([real] if any(real.startswith(f"{folder}{os.sep}") for folder in WATCHED) else [])


sys.addaudithook(_watch)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """What the crafts change copies of: a run of the own decoder, a model of transformers, and a run of it."""
    import tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("folders")
    (folder / "a.txt").write_text("def f(x): return x\n" * 200)
    (folder / "data").mkdir()
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).save_pretrained(folder / "hf")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["</s>"])
    made.save(str(folder / "hf/tokenizer.json"))
    (folder / "hf/tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    small = [
        "--process.count=1",
        "--steps=1",
        "--data.seq_len=16",
        "--batch.global_batch=2",
        "--validation.every=0",
        "--sample.tokens=0",
    ]
    small += [f"--data.source={folder / 'a.txt'}", f"--data.cache={folder / 'cache'}", "--logging.tensorboard=off"]
    assert main(["train", f"--run={folder / 'run'}", "--model.size=debug", *small]) == 0
    assert main(["train", f"--run={folder / 'hf_run'}", f"--model.hf={folder / 'hf'}", *small]) == 0
    return folder


@pytest.fixture
def place(folders, tmp_path, monkeypatch) -> Iterator[Place]:
    """Copies in a folder of their own, the way out of it watched, and a canary that crafted code would let out."""
    for name in ("run", "hf", "hf_run", "data"):
        shutil.copytree(folders / name, tmp_path / "folder" / name)
    (tmp_path / "outside").mkdir()
    monkeypatch.setenv("CANARY", str(tmp_path / "canary"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    opened = safetensors.safe_open

    def safe_open(filename, *args, **options):  # Rust tells no audit hook
        _watch("open", (filename,))
        return opened(filename, *args, **options)

    monkeypatch.setattr(safetensors, "safe_open", safe_open)
    where, path = os.getcwd(), list(sys.path)
    yield Place(tmp_path)
    WATCHED.clear()
    OPENED.clear()
    os.chdir(where)
    sys.path[:] = path
    for name in ("canary", "own"):
        sys.modules.pop(name, None)


def met(place: Place, argv: list[str]) -> tuple[int, list[str], bool]:
    """The exit status of a command, what was opened outside, and whether crafted code ran."""
    WATCHED.append(str(place.outside.resolve()))
    try:
        status = main(argv)
    finally:
        WATCHED.clear()
    return status, list(OPENED), (place.root / "canary").exists()


def trouble(place: Place, name: str, capfd) -> str:
    """What is wrong with the answer to a crafted folder; empty: one sentence of ours, and nothing was reached."""
    craft, sentence = CRAFTS[name]
    argv = craft(place)
    capfd.readouterr()
    status, opened, ran = met(place, argv)
    said = re.findall(r"^meshwright: .*(?:\n- .*)*", capfd.readouterr().err, re.MULTILINE)
    if ran:
        return "its code ran"
    if opened:
        return f"{opened} was read"
    return "" if status != 0 and len(said) == 1 and sentence in said[0] else f"status {status}: {said}"


@pytest.mark.parametrize("name", CRAFTS)
def test_a_crafted_folder_is_answered_by_a_sentence_and_reaches_nothing(name, place, capfd):
    assert trouble(place, name, capfd) == ""


NO_FILE_IS_REFUSED = {
    f"meshwright.{module}.inside": lambda folder, name, by="": folder / name
    for module in (
        "checkpoint.store",
        "checkpoint.tensor_files",
        "data.tokenizers",
        "data.mapped",
        "introspection.source",
    )
}
MUTANTS: list[tuple[dict[str, Any], str, str]] = [
    *(
        ({"meshwright.cli.arguments.refuse_code": lambda *_, **__: None}, f"{verb}_a_run_with_code", "ran")
        for verb in ("plan", "generate", "train")
    ),
    ({"meshwright.cli.arguments.refuse_code": lambda *_, **__: None}, "plan_a_run_with_a_function", "ran"),
    (
        {"meshwright.cli.arguments.refuse_links_out": lambda *_, **__: None},
        "metrics_that_are_a_link_on_a_page",
        "was read",
    ),
    (NO_FILE_IS_REFUSED, "an_index_that_goes_up", "was read"),
    (NO_FILE_IS_REFUSED, "weights_that_are_a_link", "was read"),
    (NO_FILE_IS_REFUSED, "a_config_that_is_a_link", "was read"),
    (NO_FILE_IS_REFUSED, "a_template_that_is_a_link", "was read"),
    ({"meshwright.data.scan._inside_source": lambda *_: None}, "a_text_that_is_a_link", "was read"),
    ({"meshwright.core.files._is_blob": lambda *_: True}, "a_blob_of_another_repository", "status 0"),
    ({"meshwright.checkpoint.loading.covers": lambda *_: True}, "a_shard_with_a_part_of_a_tensor", "status 0"),
]


@pytest.mark.first("a_text_that_is_a_link-meshwright.data.scan._inside_source")
@pytest.mark.parametrize(
    ("guards", "name", "said"), MUTANTS, ids=[f"{name}-{next(iter(guards))}" for guards, name, _ in MUTANTS]
)
def test_without_its_guard_a_crafted_folder_reaches_something(guards, name, said, place, capfd, monkeypatch):
    for guard, broken in guards.items():
        module, _, attribute = guard.rpartition(".")
        monkeypatch.setattr(importlib.import_module(module), attribute, broken)
    assert said in trouble(place, name, capfd)


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        (lambda at: ["plan", own_code(at)], ["--trust"]),
        (lambda at: ["plan", own_code(at)], ["--model.trust_remote_code=true"]),
        (lambda at: ["generate", own_code(at)], ["--trust"]),
        (lambda at: ["inspect", own_code(at) / "model"], ["--trust"]),
        (lambda at: ["plan", own_function(at)], ["--trust"]),
        (lambda at: ["plan", own_function(at)], ["--techniques.checkpoint-keep", "matmuls", "canary:keep"]),
    ],
)
def test_code_runs_where_this_command_line_allows_it(words, allowed, place):
    assert met(place, [*map(str, words(place)), *allowed])[2]


def test_a_value_that_runs_no_code_needs_no_trust(place):
    assert met(place, ["plan", str(own_function(place)), "--techniques.checkpoint_keep=matmuls"]) == (0, [], False)


def test_a_job_takes_the_trust_of_its_launch_along(place, capsys):
    pytest.importorskip("submitit")
    assert met(place, ["launch", str(own_function(place)), "--dry-run", "--trust"])[0] == 0
    assert f"--run={place.run} --trust" in capsys.readouterr().out
    assert met(place, ["launch", str(place.run), "--dry-run", "--techniques.checkpoint_keep=matmuls"])[0] == 0
    assert "--trust" not in capsys.readouterr().out


def test_code_beside_a_model_that_transformers_knows_is_passed_over(place):
    (place.hf / "own.py").write_text(OWN_MODEL)
    place.edit_json(place.hf / "config.json", auto_map=AUTO_MAP)
    assert met(place, ["inspect", str(place.hf)]) == (0, [], False)


def test_links_of_hugging_faces_cache_and_links_inside_a_folder_are_followed(place):
    repository = place.data / "models--who--model"
    snapshot = repository / "snapshots" / ("0" * 40)
    shutil.copytree(place.hf, snapshot)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        blob = repository / "blobs" / f"{number:040x}"
        shutil.move(path, blob)
        path.symlink_to(f"../../blobs/{blob.name}")
    assert main(["inspect", str(snapshot)]) == 0 and FileTokenizer(snapshot).end_token == "</s>"
    shutil.move(place.hf / "model.safetensors", place.hf / "other.safetensors")
    (place.hf / "model.safetensors").symlink_to("other.safetensors")
    (place.root / "linked").symlink_to(place.hf)
    assert main(["inspect", str(place.root / "linked")]) == 0


def test_a_checkpoint_that_is_read_by_itself_follows_no_link(place):
    """Where no run is opened, each of its files is looked at alone."""
    checkpoint = place.checkpoint()
    entries = Manifest.read(checkpoint).tensors.items()
    model = {
        key: torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype))
        for key, entry in entries
        if key.startswith("model.")
    }
    load_model_tensors(model, checkpoint)
    place.link_out(next(checkpoint.glob("*.safetensors")))
    with pytest.raises(IntegrityError, match="is a link to"):
        load_model_tensors(model, checkpoint)


@pytest.mark.fast
def test_the_boxes_that_are_read_cover_a_tensor():
    whole = [((0, 2), (0, 3)), ((2, 4), (0, 1)), ((2, 4), (1, 3))]
    assert covers(whole, (4, 3)) and covers([()], ()) and covers([], (0, 3))
    assert not covers(whole[:2], (4, 3)) and not covers([], ()) and not covers([((0, 2), (0, 3))] * 2, (4, 3))


def test_a_picture_that_names_a_file_elsewhere_is_not_opened(place, monkeypatch):
    datasets = pytest.importorskip("datasets")
    (place.outside / "secret.png").write_bytes(b"SECRET")
    rows = datasets.Dataset.from_dict(
        {"text": ["a b"], "image": [{"path": str(place.outside / "secret.png"), "bytes": None}]}
    )
    rows.cast_column("image", datasets.Image()).save_to_disk(str(place.data))
    assert met(place, ["inspect", str(place.data), "--data.tokenizer=bytes"]) == (0, [], False)
    monkeypatch.setattr("meshwright.data.formats._opens_files", lambda *_: False)
    with pytest.raises(Exception, match=r"identify image|Pillow|PIL"):  # it is opened, and is no picture
        main(["inspect", str(place.data), "--data.tokenizer=bytes"])


def test_a_page_shows_names_as_text(place):
    with open(place.run / "metrics.jsonl", "a") as file:
        file.write(
            '{"event": "<script>alert(1)</script>", "step": 1, "time": 0.0, "what": "<img src=x onerror=alert(1)>"}\n'
        )
    assert met(place, ["inspect", str(place.run), "--html"]) == (0, [], False)
    page = (place.run / "report.html").read_text()
    assert "<script>alert" not in page and "<img src=x" not in page


@pytest.mark.fast
def test_every_door_that_imports_by_name_is_known():
    """A new one needs its key in ``training.trust``, or its name from the command line."""
    house = Path(meshwright.__file__).parent
    doors = {path.relative_to(house).as_posix() for path in house.rglob("*.py") if "import_object(" in path.read_text()}
    assert doors == {"core/errors.py", "planning/recompute.py", "verification/problem.py", "cli/inspect.py"}
    keys = [key for key in public_keys(LaunchConfig) if key in RUNS_CODE]
    assert len(keys) == len(RUNS_CODE)


MODEL = """
import json
import os
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

open(os.environ["CANARY"], "w").close()

class OwnConfig(PretrainedConfig):
    model_type = "own"
    vocab_size = 64

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.post_init()
    def forward(self, input_ids, **_):
        return CausalLMOutput(logits=self.head(self.embed(input_ids)))
"""


def test_a_run_with_code_of_its_own_asks_for_trust_each_time(place, capsys):
    (place.hf / "own.py").write_text(MODEL)
    (place.hf / "model.safetensors").unlink()
    (place.hf / "config.json").write_text(json.dumps({"model_type": "own", "vocab_size": 64, "auto_map": AUTO_MAP}))
    (place.data / "a.txt").write_text("a b " * 400)
    run, canary = place.root / "folder/new", place.root / "canary"
    small = [
        f"--data.source={place.data / 'a.txt'}",
        "--steps=1",
        "--data.seq_len=16",
        "--batch.global_batch=2",
        "--validation.every=0",
    ]
    small += ["--sample.tokens=0", "--logging.tensorboard=off", "--process.count=1", f"--run={run}"]
    assert main(["train", f"--model.hf={place.hf}", "--model.trust_remote_code=true", *small]) == 0 and canary.exists()
    for words in (
        ["train", str(run), "--steps=2"],
        ["generate", str(run), "--tokens=1"],
        ["convert", str(run), "--to", "hf", str(place.data / "x")],
    ):
        canary.unlink(missing_ok=True)
        sys.modules.pop("transformers_modules.model.own", None)
        assert main(words) == 2 and not canary.exists() and "add --trust to this command" in capsys.readouterr().err
        assert main([*words, "--trust"]) == 0


POOL = """
import json
import os
from contextlib import nullcontext
from meshwright.distributed.process import workers as local
{}
if __name__ == "__main__":
    with local.WorkerPool(1) as pool:
        pool.run(os.getpid)
"""


@pytest.mark.first("local.with_variables = nullcontext")
@pytest.mark.parametrize("guard", ["", "local.with_variables = nullcontext"])
def test_processes_import_nothing_from_the_current_folder(guard, tmp_path):
    (tmp_path / "here").mkdir()
    for name in ("socket", "selectors", "multiprocessing", "torch"):
        (tmp_path / f"here/{name}.py").write_text(CANARY + "raise SystemExit\n")
    (tmp_path / "pool.py").write_text(POOL.format(guard))
    environment = {**os.environ, "CANARY": str(tmp_path / "canary")}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "pool.py")], cwd=tmp_path / "here", env=environment, capture_output=True
    )
    assert ((tmp_path / "canary").exists(), done.returncode != 0) == (bool(guard), bool(guard)), done.stderr.decode()
