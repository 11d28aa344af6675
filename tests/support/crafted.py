"""Folders as a stranger would craft them: each is a whole run, model or source with one thing in it that reaches for
code or files outside.

A craft is given a ``Place`` to write into and returns the words of the command that meets it.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.comparison.trace import FORMAT

CANARY = 'import os\nopen(os.environ["CANARY"], "w").close()\n'
OWN_MODEL = f"""{CANARY}
from transformers import PretrainedConfig, PreTrainedModel
class OwnConfig(PretrainedConfig):
    model_type = "own"
class OwnModel(PreTrainedModel):
    config_class = OwnConfig
"""
AUTO_MAP = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Place:
    """Where a craft works: two runs with a checkpoint, a model of Hugging Face and an empty folder.

    Nothing of ``outside`` may be read.
    """

    root: Path

    @property
    def run(self) -> Path:
        return self.root / "folder" / "run"

    @property
    def hf_run(self) -> Path:
        return self.root / "folder" / "hf_run"

    @property
    def hf(self) -> Path:
        return self.root / "folder" / "hf"

    @property
    def data(self) -> Path:
        return self.root / "folder" / "data"

    @property
    def outside(self) -> Path:
        return self.root / "outside"

    def checkpoint(self, run: Path | None = None) -> Path:
        return next((run or self.run).glob("checkpoints/step-*"))

    def move_out(self, path: Path) -> Path:
        """Put a file or folder outside; its new place."""
        return Path(shutil.move(path, self.outside / path.name))

    def link_out(self, path: Path) -> None:
        """The same, with a link in its place."""
        path.symlink_to(os.path.relpath(self.move_out(path), path.parent))

    def edit_json(self, path: Path, **changes: Any) -> None:
        path.write_text(json.dumps({**(json.loads(path.read_text()) if path.is_file() else {}), **changes}))

    def edit_manifest(self, change: Callable[[dict[str, Any]], object], run: Path | None = None) -> None:
        """Change a checkpoint's manifest, and renew its checksum."""
        path = self.checkpoint(run) / "manifest.json"
        said = json.loads(path.read_text())
        said.pop("crc32")
        change(said)
        path.write_text(json.dumps({**said, "crc32": zlib.crc32(json.dumps(said).encode())}))

    def edit_header(self, change: Callable[[dict[str, Any]], object], path: Path) -> None:
        """Change the header of a safetensors file."""
        shard = path
        data = shard.read_bytes()
        length = int.from_bytes(data[:8], "little")
        said = json.loads(data[8 : 8 + length])
        change(said)
        text = json.dumps(said).encode()
        text += b" " * (-len(text) % 8)
        data = len(text).to_bytes(8, "little") + text + data[8 + length :]
        shard.write_bytes(data)

    def edit_config(self, *lines: str, run: Path | None = None) -> None:
        """Change keys of a run's config: each line replaces the one of its key, in its section."""
        path = (run or self.run) / "config.toml"
        text = path.read_text()
        for line in lines:
            section, _, assignment = line.rpartition("|")
            name = assignment.partition(" =")[0]
            found = text.split("\n")
            begin = found.index(f"[{section}]") + 1 if section else 0
            end = next((i for i in range(begin, len(found)) if found[i].startswith("[")), len(found))
            kept = [row for row in found[begin:end] if not row.startswith(f"{name} =")]
            text = "\n".join([*found[:begin], assignment, *kept, *found[end:]])
        path.write_text(text)


Craft = Callable[[Place], list[str]]
CRAFTS: dict[str, tuple[Craft, str]] = {}
"""Name -> (the craft, a part of the sentence that answers it)."""


def answered(said: str) -> Callable[[Craft], Craft]:
    def note(craft: Craft) -> Craft:
        assert craft.__name__ not in CRAFTS
        CRAFTS[craft.__name__] = craft, said
        return craft

    return note


def several(said: str, **crafts: Craft) -> None:
    CRAFTS.update({name: (craft, said) for name, craft in crafts.items()})


def done(_: object, *words: object) -> list[str]:
    """The words, after something was done."""
    return [str(word) for word in words]


# --- code that a config asks to be run


def own_code(place: Place) -> Path:
    """A run whose model is code of its own."""
    run = place.hf_run
    (run / "model/own.py").write_text(OWN_MODEL)
    place.edit_json(run / "model/config.json", model_type="own", auto_map=AUTO_MAP)
    place.edit_config(f'model|hf = "{run / "model"}"', "model|trust_remote_code = true", run=run)
    return run


def own_function(place: Place) -> Path:
    """A run whose config names a function that lies beside it."""
    (place.run / "canary.py").write_text(CANARY + "def keep(*_): ...\n")
    place.edit_config(
        'techniques|activation_checkpointing = "selective_op"',
        'techniques|checkpoint_keep = ["canary:keep"]',
        run=place.run,
    )
    os.chdir(place.run)
    return place.run


def own_file(place: Place, text: str) -> Path:
    """A config file beside some Python, in the current folder."""
    (place.data / "canary.py").write_text(CANARY + "def keep(*_): ...\n")
    (place.data / "my.toml").write_text(text)
    os.chdir(place.data)
    return place.data / "my.toml"


KEEP = '[techniques]\nactivation_checkpointing = "selective_op"\ncheckpoint_keep = ["canary:keep"]\n'
SETUP = '[slurm]\nsetup = ["touch $CANARY"]\n'
several(
    "add --trust",
    generate_a_run_with_code=lambda at: ["generate", str(own_code(at))],
    train_a_run_with_code=lambda at: ["train", str(own_code(at)), "--process.count=1"],
    plan_a_run_with_code=lambda at: ["plan", str(own_code(at))],
    plan_the_config_of_a_run_with_code=lambda at: ["plan", str(own_code(at) / "config.toml")],
    verify_the_config_of_a_run_with_code=lambda at: [
        "verify",
        str(own_code(at) / "config.toml"),
        "--layout",
        "dp_shard=1",
    ],
    convert_a_run_with_code=lambda at: ["convert", str(own_code(at)), "--to", "hf", str(at.data / "out")],
    launch_a_run_with_code=lambda at: ["launch", str(own_code(at)), "--dry-run"],
    train_a_run_with_a_function=lambda at: ["train", str(own_function(at)), "--process.count=1"],
    plan_a_run_with_a_function=lambda at: ["plan", str(own_function(at))],
    plan_a_file_with_a_function=lambda at: ["plan", str(own_file(at, KEEP))],
    train_a_file_with_a_function=lambda at: ["train", str(own_file(at, KEEP)), "--process.count=1"],
    verify_a_file_with_a_function=lambda at: ["verify", str(own_file(at, KEEP)), "--layout", "dp_shard=1"],
    inspect_the_data_of_a_file_with_a_function=lambda at: ["inspect", str(own_file(at, KEEP))],
    launch_a_file_with_shell=lambda at: ["launch", str(own_file(at, SETUP)), "--dry-run"],
    launch_a_file_with_an_environment=lambda at: [
        "launch",
        str(own_file(at, '[slurm]\nextra = ["export=LD_PRELOAD=x"]\n')),
        "--dry-run",
    ],
)


@answered("add --trust")
def launch_a_run_whose_job_has_shell(at: Place) -> list[str]:
    (at.run / "slurm").mkdir()
    (at.run / "slurm/config.toml").write_text(SETUP)
    return ["launch", str(at.run), "--dry-run"]


def with_code(at: Place, **config: Any) -> str:
    (at.hf / "own.py").write_text(OWN_MODEL)
    at.edit_json(at.hf / "config.json", **config)
    return str(at.hf)


OWN = {"model_type": "own", "auto_map": AUTO_MAP}
several(
    "allow it with model.trust_remote_code = true",
    plan_a_model_with_code=lambda at: ["plan", f"--model.hf={with_code(at, **OWN)}"],
    inspect_a_model_with_code=lambda at: ["inspect", with_code(at, **OWN)],
    generate_a_run_with_code_that_it_does_not_confess=lambda at: done(
        [own_code(at), at.edit_config("model|trust_remote_code = false", run=at.hf_run)], "generate", at.hf_run
    ),
)
several(
    "names code in another repository",
    code_in_another_repository=lambda at: [
        *("plan", f"--model.hf={with_code(at, model_type='own', auto_map={'AutoConfig': 'who/repo--own.OwnConfig'})}"),
        "--model.trust_remote_code=true",
    ],
)
several(
    "names code to be fetched",
    a_kernel_to_be_fetched=lambda at: ["plan", f"--model.hf={with_code(at, attn_implementation='who/kernel')}"],
    a_kernel_of_an_inner_config=lambda at: [
        "inspect",
        with_code(at, vision={"_attn_implementation": {"text": "who/kernel"}}),
    ],
)
several(
    "names other files for itself",
    other_config_files=lambda at: [
        "inspect",
        with_code(at, configuration_files=["config.4.0.0.json", "../../outside/config.json"]),
    ],
)
several(
    "a text and a table were expected",
    an_auto_map_that_is_a_list=lambda at: ["inspect", with_code(at, auto_map=["own.OwnConfig"])],
    a_model_type_that_is_a_list=lambda at: ["inspect", with_code(at, model_type=["llama"])],
)


# --- models


def without_index(at: Place, weight_map: object) -> list[str]:
    (at.hf / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return ["inspect", str(at.hf)]


def mapped_to(at: Place, file: str) -> list[str]:
    at.move_out(at.hf / "model.safetensors")
    return without_index(at, {"lm_head.weight": file.format(outside=at.outside)})


def linked_cache(at: Place, *, other: bool = False, blobs: bool = False, name: str = "a" * 64) -> list[str]:
    """A repository in Hugging Face's cache whose link leads to another one's blob, or whose blobs are elsewhere."""
    repository = at.data / "models--who--model"
    snapshot = repository / "snapshots" / ("0" * 40)
    shutil.copytree(at.hf, snapshot)
    home = (at.data / "models--who--other" / "blobs") if other else repository / "blobs"
    home.parent.mkdir(exist_ok=True)
    if blobs:
        home.symlink_to(at.outside)
        shutil.move(snapshot / "model.safetensors", at.outside / name)
    else:
        home.mkdir()
        shutil.move(snapshot / "model.safetensors", home / name)
    (snapshot / "model.safetensors").symlink_to(os.path.relpath(home, snapshot) + f"/{name}")
    return ["inspect", str(snapshot)]


several(
    "which is no file in",
    an_index_that_goes_up=lambda at: mapped_to(at, "../../outside/model.safetensors"),
    an_index_with_an_absolute_name=lambda at: mapped_to(at, "{outside}/model.safetensors"),
    an_index_with_a_way_back=lambda at: mapped_to(at, "x/../../../outside/model.safetensors"),
    an_index_with_no_name=lambda at: mapped_to(at, ""),
)
several(
    "is a link to",
    weights_that_are_a_link=lambda at: done(at.link_out(at.hf / "model.safetensors"), "inspect", at.hf),
    an_index_that_is_a_link=lambda at: done([without_index(at, {}), at.link_out(at.hf / INDEX)], "inspect", at.hf),
    a_config_that_is_a_link=lambda at: done(at.link_out(at.hf / "config.json"), "inspect", at.hf),
    a_blob_of_another_repository=lambda at: linked_cache(at, other=True),
    blobs_that_are_elsewhere=lambda at: linked_cache(at, blobs=True),
    a_blob_of_no_hash=lambda at: linked_cache(at, name="secret"),
)


@answered("is a link to")
def a_folder_of_weights_that_is_a_link(at: Place) -> list[str]:
    (at.hf / "part").symlink_to(at.outside)
    return mapped_to(at, "part/model.safetensors")


def weights(at: Place, change: Callable[[dict[str, Any]], object]) -> list[str]:
    at.edit_header(change, at.hf / "model.safetensors")
    return ["inspect", str(at.hf)]


DEEP = "[" * 100_000
several(
    "is damaged",
    an_index_that_is_a_list=lambda at: without_index(at, ["a"]),
    an_index_of_numbers=lambda at: without_index(at, {"lm_head.weight": 7}),
    a_shape_below_zero=lambda at: weights(at, lambda said: said["lm_head.weight"].update(shape=[-8, -(10**6)])),
    a_shape_that_is_text=lambda at: weights(at, lambda said: said["lm_head.weight"].update(shape="no")),
    a_tensor_without_a_dtype=lambda at: weights(at, lambda said: said["lm_head.weight"].pop("dtype")),
    a_shape_of_other_bytes=lambda at: weights(at, lambda said: said["lm_head.weight"].update(shape=[10**15])),
)
several(
    "is no whole safetensors file",
    a_tensor_that_is_a_number=lambda at: weights(at, lambda said: said.update({"lm_head.weight": 7})),
    a_pickle_of_that_name=lambda at: done(
        (at.hf / "model.safetensors").write_bytes(pickle.dumps(Bomb())), "inspect", at.hf
    ),
)
several(
    "pickled weights are not read",
    pickled_weights=lambda at: done(
        [at.move_out(at.hf / "model.safetensors"), (at.hf / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))],
        "inspect",
        at.hf,
    ),
)
several(
    "is no JSON",
    a_deep_config=lambda at: done((at.hf / "config.json").write_text(DEEP), "inspect", at.hf),
    a_deep_index=lambda at: done((at.hf / INDEX).write_text('{"weight_map":' + DEEP), "inspect", at.hf),
)
several(
    "an object with keys was expected",
    a_config_that_is_a_list=lambda at: done((at.hf / "config.json").write_text("[]"), "inspect", at.hf),
)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (CANARY,)


# --- tokenizers and chat templates


def chat(at: Place, **files: Any) -> list[str]:
    """Look at conversations with the model's tokenizer, with files of it changed: keys of tokenizer_config.json, or
    whole files.
    """
    (at.data / "talk.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    )
    if files:
        at.edit_json(at.hf / "tokenizer_config.json", **files)
    return ["inspect", str(at.data / "talk.jsonl"), f"--data.tokenizer={at.hf}"]


TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
several(
    "is a link to",
    a_tokenizer_that_is_a_link=lambda at: done(at.link_out(at.hf / "tokenizer.json"), *chat(at)),
    settings_of_a_tokenizer_that_are_a_link=lambda at: done(
        [chat(at), at.link_out(at.hf / "tokenizer_config.json")], *chat(at)
    ),
    a_template_that_is_a_link=lambda at: done(
        [
            (at.outside / "secret").write_text("SECRET"),
            (at.hf / "chat_template.jinja").symlink_to(at.outside / "secret"),
        ],
        *chat(at),
    ),
    a_kept_file_that_is_a_link=lambda at: done(
        [(at.outside / "id_rsa").write_text("SECRET"), (at.hf / "x.json").symlink_to(at.outside / "id_rsa")],
        *("train", f"--model.hf={at.hf}", f"--run={at.data / 'run'}", f"--data.source={write(at, 'a.txt')}", *SMALL),
    ),
)
several(
    "the chat template refuses it",
    a_template_that_climbs=lambda at: chat(
        at, chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}" + TEMPLATE
    ),
    a_template_that_imports=lambda at: chat(
        at, chat_template="{{ cycler.__init__.__globals__.os.popen('touch $CANARY').read() }}" + TEMPLATE
    ),
    a_template_that_includes=lambda at: chat(at, chat_template="{% include '../../outside/secret' %}" + TEMPLATE),
)
several("chat_template that is a int", a_template_that_is_a_number=lambda at: chat(at, chat_template=7))
several(
    "an object with keys was expected",
    settings_of_a_tokenizer_that_are_a_list=lambda at: done(
        (at.hf / "tokenizer_config.json").write_text("[1]"), *chat(at)
    ),
)
several(
    "is no JSON", settings_that_are_deep=lambda at: done((at.hf / "tokenizer_config.json").write_text(DEEP), *chat(at))
)
several(
    "is not a tokenizer.json",
    a_tokenizer_that_is_none=lambda at: done((at.hf / "tokenizer.json").write_text("{}"), *chat(at)),
)
several(
    "has eos_token = '<no>', which tokenizer.json lacks",
    an_end_that_is_not_there=lambda at: chat(at, chat_template=TEMPLATE, eos_token="<no>"),
)


# --- checkpoints


def shard_of(at: Place) -> Path:
    return next(at.checkpoint().glob("*.safetensors"))


def generate(at: Place, _: object = None) -> list[str]:
    return ["generate", str(at.run), "--tokens=1"]


def renamed(at: Place, name: str) -> list[str]:
    shard = shard_of(at)
    at.move_out(shard)
    written = name.format(outside=at.outside, shard=shard.name)

    def rename(said: dict[str, Any]) -> None:
        said["files"][written] = said["files"].pop(shard.name)
        for row in said["tensors"].values():
            row["pieces"] = [[written if word == shard.name else word for word in piece] for piece in row["pieces"]]

    at.edit_manifest(rename)
    return generate(at)


several(
    "which is no file of this checkpoint or its run",
    a_manifest_that_goes_up=lambda at: renamed(at, "../../../../outside/{shard}"),
    a_manifest_with_an_absolute_name=lambda at: renamed(at, "{outside}/{shard}"),
)
several(
    "which is no file of this checkpoint or its run",
    a_manifest_with_a_folder=lambda at: renamed(at, "part/{shard}"),
)
several(
    "is a link to",
    a_shard_that_is_a_link=lambda at: generate(at, at.link_out(shard_of(at))),
    a_manifest_that_is_a_link=lambda at: generate(at, at.link_out(at.checkpoint() / "manifest.json")),
    a_step_that_is_a_link=lambda at: generate(at, at.link_out(at.checkpoint())),
    checkpoints_that_are_a_link=lambda at: generate(at, at.link_out(at.run / "checkpoints")),
)


def lacking(at: Place, key: str = "model.norm.weight", *, half: bool = False) -> list[str]:
    """A checkpoint whose manifest places less of a tensor than it says."""

    def cut(said: dict[str, Any]) -> None:
        offset, shape, pack, begin, end, _ = said["tensors"][key]["pieces"][0]
        part = [offset, [shape[0] // 2, *shape[1:]], pack, begin, (begin + end) // 2, ""]
        said["tensors"][key]["pieces"] = [part] if half else []

    at.edit_manifest(cut)
    return generate(at)


several("hold nothing of model.norm.weight", a_shard_without_a_tensor=lambda at: lacking(at))
several("hold only a part of", a_shard_with_a_part_of_a_tensor=lambda at: lacking(at, half=True))


def piece(at: Place, place: int, value: Any) -> list[str]:
    def change(said: dict[str, Any]) -> None:
        said["tensors"]["model.norm.weight"]["pieces"][0][place] = value

    at.edit_manifest(change)
    return generate(at)


several(
    "cannot be trusted",
    a_piece_beside_its_tensor=lambda at: piece(at, 0, [10**6]),
    a_piece_under_zero=lambda at: piece(at, 0, [-1]),
    a_piece_of_another_size=lambda at: piece(at, 1, [1]),
    a_piece_of_another_file=lambda at: piece(at, 2, "pieces-00000000-00000.safetensors"),
    a_piece_after_the_end=lambda at: piece(at, 4, 10**12),
)


def entry(at: Place, **changes: Any) -> list[str]:
    return generate(at, at.edit_manifest(lambda said: said["tensors"]["model.norm.weight"].update(changes)))


several(
    "cannot be trusted",
    a_dtype_that_is_a_function=lambda at: entry(at, dtype="load"),
    a_dtype_that_is_a_number=lambda at: entry(at, dtype=7),
    a_shape_of_text=lambda at: entry(at, shape="long"),
    a_shape_under_zero=lambda at: entry(at, shape=[-1]),
    files_that_are_a_list=lambda at: generate(at, at.edit_manifest(lambda said: said.update(files=["a"]))),
    groups_that_are_numbers=lambda at: generate(at, at.edit_manifest(lambda said: said.update(groups=[1]))),
    a_deep_manifest=lambda at: generate(at, (at.checkpoint() / "manifest.json").write_text(DEEP)),
)
several("is a checkpoint of another model", a_shape_that_is_huge=lambda at: entry(at, shape=[10**15], pieces=[]))


# --- the other files of a run

SMALL = (
    *(
        "--process.count=1",
        "--steps=2",
        "--data.seq_len=16",
        "--batch.global_batch=2",
        "--validation.every=0",
        "--sample.tokens=0",
    ),
    *("--logging.tensorboard=off",),
)


def again(at: Place, _: object = None) -> list[str]:
    return ["train", str(at.run), "--process.count=1"]


several(
    "is a link to",
    a_config_of_a_run_that_is_a_link=lambda at: generate(at, at.link_out(at.run / "config.toml")),
    metrics_that_are_a_link=lambda at: again(at, at.link_out(at.run / "metrics.jsonl")),
    metrics_that_are_a_link_on_a_page=lambda at: done(
        at.link_out(at.run / "metrics.jsonl"), "inspect", at.run, "--html"
    ),
    an_identity_that_is_a_link=lambda at: again(at, at.link_out(at.run / "identity.json")),
    a_plan_that_is_a_link=lambda at: done(at.link_out(at.run / "plan.json"), "inspect", at.run),
    a_tokenizer_of_a_run_that_is_a_link=lambda at: done(at.link_out(at.hf_run / "tokenizer"), "generate", at.hf_run),
    a_model_of_a_run_that_is_a_link=lambda at: done(
        at.link_out(at.hf_run / "model/config.json"), "convert", at.hf_run, "--to", "hf", at.data / "x"
    ),
    a_small_file_of_a_model_that_is_a_link=lambda at: done(
        [
            (at.outside / "id_rsa").write_text("SECRET"),
            (at.hf_run / "model/vocab.txt").symlink_to(at.outside / "id_rsa"),
        ],
        *("convert", at.hf_run, "--to", "hf", at.data / "x"),
    ),
    a_run_that_is_only_named=lambda at: done(
        at.link_out(at.run / "identity.json"), "train", f"--run={at.run}", f"--data.source={write(at, 'a.txt')}", *SMALL
    ),
    times_that_are_a_link=lambda at: done(
        [(at.outside / "x").write_text("{}"), (at.run / "schedule_times.json").symlink_to(at.outside / "x")],
        "inspect",
        "--schedule",
        at.run,
    ),
)
several(
    "is not its own",
    a_model_that_a_run_does_not_keep=lambda at: done(
        [shutil.rmtree(at.hf_run / "model"), at.edit_config(f'model|hf = "{at.outside}"', run=at.hf_run)],
        "generate",
        at.hf_run,
    ),
    a_tokenizer_that_a_run_does_not_keep=lambda at: done(
        at.edit_config(f'data|tokenizer = "{at.outside}"'), "generate", at.run
    ),
)
several(
    "too deep in each other",
    a_deep_run_config=lambda at: generate(at, (at.run / "config.toml").write_text("a = " + "[" * 10_000)),
)
several(
    "is damaged",
    an_identity_that_is_a_list=lambda at: again(at, (at.run / "identity.json").write_text("[1]")),
    an_identity_that_is_deep=lambda at: again(at, (at.run / "identity.json").write_text(DEEP)),
    an_identity_that_is_deep_to_look_at=lambda at: done((at.run / "identity.json").write_text(DEEP), "inspect", at.run),
)
several(
    "'device' is missing",
    a_plan_that_is_none=lambda at: done((at.run / "plan.json").write_text('{"model": 7}'), "inspect", at.run),
)
several(
    "one JSON object",
    metrics_that_are_none=lambda at: done(
        (at.run / "metrics.jsonl").write_text('{"loss": "x"}\n[1]\n'), "inspect", at.run
    ),
)
several(
    "does not say how far",
    a_state_that_is_not_there=lambda at: again(at, at.edit_manifest(lambda said: said["extra"].pop("state"))),
    a_state_of_text=lambda at: again(at, at.edit_manifest(lambda said: said["extra"].update(state={"step": "x"}))),
)
several(
    "holds no times",
    times_that_are_none=lambda at: done(
        (at.run / "schedule_times.json").write_text('{"ranks": [7]}'), "inspect", "--schedule", at.run
    ),
)
several(
    "neither a word nor an operator",
    an_operator_that_is_none=lambda at: done(
        at.edit_config(
            'techniques|activation_checkpointing = "selective_op"',
            'techniques|checkpoint_keep = ["loaded_libraries.add"]',
        ),
        *("plan", at.run),
    ),
)


# --- data


def write(at: Place, name: str, data: bytes = b"def f(x): return x\n" * 200) -> Path:
    (at.data / name).write_bytes(data)
    return at.data / name


def look(at: Place, _: object = None, *words: str) -> list[str]:
    return ["inspect", str(at.data), "--data.tokenizer=bytes", *words]


def secret(at: Place, name: str) -> Path:
    (at.outside / name).write_bytes(b"SECRET\n" * 9)
    return at.outside / name


def megatron(at: Place, lengths: list[int], documents: list[int], ids: int = 8) -> None:
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(documents))
    body = (
        np.array(lengths, "<i4").tobytes()
        + np.zeros(len(lengths), "<i8").tobytes()
        + np.array(documents, "<i8").tobytes()
    )
    write(at, "a.idx", header + body)
    write(at, "a.bin", np.zeros(ids, "<u2").tobytes())


def dataset(at: Place, **columns: Any) -> Path:
    import datasets

    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(str(at.data))
    if columns:
        shutil.rmtree(at.data)
        datasets.Dataset.from_dict({"text": ["a"], **columns["rows"]}, features=columns["features"]).save_to_disk(
            str(at.data)
        )
    return at.data


def moved_table(at: Place) -> list[str]:
    table = next(dataset(at).glob("*.arrow"))
    at.move_out(table)
    at.edit_json(at.data / "state.json", _data_files=[{"filename": f"../../outside/{table.name}"}])
    return look(at)


several(
    "is a link to",
    a_text_that_is_a_link=lambda at: look(
        at, [write(at, "a.txt"), (at.data / "b.txt").symlink_to(secret(at, "b.txt"))]
    ),
    a_folder_of_texts_that_is_a_link=lambda at: look(
        at, [write(at, "a.txt"), secret(at, "b.txt"), (at.data / "sub").symlink_to(at.outside)]
    ),
    ids_beside_an_index_that_are_a_link=lambda at: done(
        [megatron(at, [8], [0, 1]), at.link_out(at.data / "a.bin")],
        "inspect",
        at.data / "a.idx",
        "--data.tokenizer=bytes",
    ),
    a_dataset_with_a_link=lambda at: look(at, [dataset(at), [at.link_out(path) for path in at.data.glob("*.arrow")]]),
)
several("which is no file in", a_dataset_that_goes_up=moved_table)
several(
    "is damaged",
    an_index_of_documents_that_are_not_there=lambda at: look(at, megatron(at, [8], [0, 99])),
    an_index_of_lengths_below_zero=lambda at: look(at, megatron(at, [16, -8], [0, 2])),
)


def saved(at: Place, save: Callable[..., object], array: Any) -> list[str]:
    with open(at.data / "a.npy", "wb") as file:
        save(file, array)
    return look(at)


several(
    "is no .npy file",
    pickled_objects=lambda at: saved(
        at, lambda file, array: np.save(file, array, allow_pickle=True), np.array([Bomb()], dtype=object)
    ),
    an_archive_of_that_name=lambda at: saved(at, np.savez, np.arange(3)),
    a_pickle_instead_of_an_array=lambda at: look(at, write(at, "a.npy", pickle.dumps(Bomb()))),
    an_array_larger_than_its_file=lambda at: look(
        at,
        write(
            at,
            "a.npy",
            b"\x93NUMPY\x01\x00"
            + struct.pack("<H", 118)
            + b"{'descr': '<u2', 'fortran_order': False, 'shape': (1000000000000000,)}".ljust(118),
        ),
    ),
)
several(
    "is no Parquet file",
    a_table_that_is_none=lambda at: look(at, write(at, "a.parquet", b"PAR1" + b"\xff" * 40 + b"PAR1")),
)
several(
    "is no whole gzip file",
    an_archive_cut_short=lambda at: look(at, write(at, "a.jsonl.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xab")),
)
several(
    "does not list the splits",
    splits_that_are_none=lambda at: look(at, write(at, "dataset_dict.json", DEEP.encode())),
)
several(
    "cannot read",
    a_dataset_without_a_state=lambda at: look(at, [dataset(at), (at.data / "state.json").write_text("[]")]),
    a_dataset_of_no_table=lambda at: look(
        at, [dataset(at), [path.write_bytes(b"x") for path in at.data.glob("*.arrow")]]
    ),
)


# --- a trace to compare with


def trace(at: Place, said: object) -> list[str]:
    from safetensors.numpy import save_file

    save_file({"0/parameter": np.zeros(1)}, at.run / "trace", {"trace": json.dumps(said)})
    at.edit_config(f'|check_trace = "{at.run / "trace"}"')
    return again(at)


several(
    "no trace can be read from it",
    a_trace_that_is_a_list=lambda at: trace(at, [1]),
    a_trace_without_steps=lambda at: trace(at, {"format": FORMAT}),
    a_trace_of_no_shapes=lambda at: trace(
        at,
        {
            "format": FORMAT,
            "facts": {},
            "drawn_on": "cpu",
            "shapes": 7,
            "floors": {},
            "steps": [{"names": {"parameter": ["a"]}}],
        },
    ),
)
