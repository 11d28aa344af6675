"""What ``save`` wrote in a loop of the user's own is converted for transformers and peft, or refused by name."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support import families
from support.families import save_tokenizer, saved, some_tokens
from torch import Tensor, nn

from meshwright import Layout, parallelize, pretrained, save
from meshwright.distributed.parallel_model import ParallelModel

ONE, DATA2, SHARDED = Layout(dp_shard=1), Layout(dp_shard=2), Layout(dp_shard=2, tp=2)
LORA = {"rank": 4, "alpha": 6.0, "targets": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]}
FACTOR = 6 / 4


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """``bases(family)``: a folder with a model and a tokenizer."""
    known: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in known:
            known[family] = tmp_path_factory.mktemp(family)
            saved(known[family], family)
            save_tokenizer(known[family])
        return known[family]

    return of


@pytest.fixture(scope="module")
def base(bases) -> Path:
    return bases("llama")


def trained(layout: Layout, source: str, folder: Path, out: Path, options: dict[str, Any]) -> dict[str, Tensor]:
    """Train two steps of a loop as its owner writes it, save, and return this rank's whole tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    techniques: dict[str, Any] = {"adapters": options["adapters"]} if options.get("adapters") else {}
    if options.get("frozen"):
        techniques["freeze"] = options["frozen"]
    if source == "module":  # with weights in place
        model = parallelize(AutoModelForCausalLM.from_pretrained(folder), layout, techniques=techniques)
    else:
        config = AutoConfig.from_pretrained(folder)
        model = parallelize(config, layout, techniques=techniques, weights=pretrained(folder), seed=3)
    step(model, 2)
    save(model, out, only_trained=options.get("only_trained", False))
    return model.state_dict()


def step(model: ParallelModel, steps: int) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for i in range(steps):
        tokens = torch.randint(0, families.VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(i))
        model.forward_backward({"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
        model.optimizer_step(optimizer)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=some_tokens()).logits


def by_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, said = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(said.values()), said
    return model


def by_hand(state: dict[str, Tensor], like: Any) -> Any:
    """The model of a training's tensors, with B A added to each weight by plain products."""
    plain: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if "lora_" in name or ".original_module." in name:
            continue
        bare = name.replace(".base_layer", "").replace(".modules_to_save.default", "")
        host = name.removesuffix(".base_layer.weight")
        first = state.get(f"{host}.lora_A.default.weight")
        plain[bare] = tensor if first is None else tensor + FACTOR * state[f"{host}.lora_B.default.weight"] @ first
    like.load_state_dict(plain, strict=True)
    return like


WAYS = {
    "whole, FSDP 2": (DATA2, "config", {}, "hf"),
    "whole, FSDP 2 x tp 2, a module": (SHARDED, "module", {}, "hf"),
    "whole, pp 2": (Layout(dp_shard=1, pp=2), "config", {}, "hf"),
    "frozen embedding left out, FSDP 2": (DATA2, "config", {"frozen": ["embed_tokens"], "only_trained": True}, "hf"),
    "adapters alone, FSDP 2": (DATA2, "config", {"adapters": LORA, "only_trained": True}, "merged"),
    "adapters alone, pp 2": (Layout(dp_shard=1, pp=2), "config", {"adapters": LORA, "only_trained": True}, "merged"),
    "adapters alone, FSDP 2 x tp 2, a module": (SHARDED, "module", {"adapters": LORA, "only_trained": True}, "merged"),
    "experts, the router frozen, ep 2": (
        Layout(dp_shard=2, ep=2),
        "config",
        {"family": "qwen3_moe", "frozen": ["mlp.gate."], "only_trained": True},
        "hf",
    ),
    "adapters with their base, tp 2": (Layout(dp_shard=1, tp=2), "config", {"adapters": LORA}, "merged"),
}


@pytest.mark.first("frozen embedding left out, FSDP 2")
@pytest.mark.parametrize("name", WAYS)
def test_the_result_computes_in_transformers_what_was_trained(spmd, ask, bases, tmp_path, name):
    layout, source, options, form = WAYS[name]
    base = bases(options.get("family", "llama"))
    folder, out = tmp_path / "saved", tmp_path / "out"
    held = spmd(layout.world, trained, layout, source, base, folder, options)
    state = {key: tensor for part in held for key, tensor in part.items()}
    needs_base = ["--base", base] if options.get("only_trained") else []
    status, said, complaint = ask("convert", folder, "--to", form, out, *needs_base)
    assert (status, complaint) == (0, "") and f"ForCausalLM.from_pretrained('{out}')" in said
    assert ("no tokenizer is there" in said) == (not needs_base) == (not (out / "tokenizer.json").is_file())
    found, begun = logits(by_transformers(out)), logits(by_transformers(base))
    expected = logits(by_hand(state, by_transformers(base)))
    assert (found - expected).abs().max() < 1e-5 < 1e-3 < (found - begun).abs().max()


def test_peft_reads_the_adapters_beside_the_base(spmd, ask, base, tmp_path):
    from peft import PeftModel

    folder, out = tmp_path / "saved", tmp_path / "adapter"
    options = {"adapters": LORA, "only_trained": True}
    state = spmd(2, trained, DATA2, "module", base, folder, options)[0]
    status, said, _ = ask("convert", folder, "--to=adapter", out, "--base", base)
    assert status == 0 and f"beside {base}" in said
    beside = PeftModel.from_pretrained(by_transformers(base), out)
    assert (logits(beside) - logits(by_hand(state, by_transformers(base)))).abs().max() < 1e-5
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert (out / "tokenizer.json").is_file() and not (out / "config.json").exists()
    assert ask("convert", folder, "--to=adapter", tmp_path / "without")[0] == 0  # a base is no need


def in_one(model: Any, out: Path, *, only_trained: bool = True, techniques: Any = None) -> Path:
    save(parallelize(model, ONE, techniques=techniques), out, only_trained=only_trained)
    return out


@pytest.fixture(scope="module")
def adapters(spmd_once, base, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "saved"
    spmd_once(1, trained, ONE, "config", base, folder, {"adapters": LORA, "only_trained": True})
    return folder


@pytest.fixture(scope="module")
def spmd_once(pool):
    return lambda world, job, *args: pool.run(job, *args, world=world, timeout=120)


def test_another_base_is_refused(ask, adapters, tmp_path):
    for name, changes, words in (
        ("other numbers", {"seed": 5}, "is not the model that .* was trained from: .* holds other numbers"),
        ("other sizes", {"intermediate_size": 32}, "is not the model that .* was trained from: .*down_proj"),
    ):
        other, out = tmp_path / name.replace(" ", "-"), tmp_path / "out"
        saved(other, "llama", **changes)
        for form in ("merged", "adapter"):
            status, _, complaint = ask("convert", adapters, "--to", form, out, "--base", other)
            assert status == 2 and re.search(words, complaint), complaint
            assert len(complaint.splitlines()) == 1 and not out.exists()


def test_one_changed_number_of_a_frozen_weight_is_another_base(ask, adapters, base, tmp_path):
    other = shutil.copytree(base, tmp_path / "other")
    model = by_transformers(base)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 3] += 1e-3
    model.save_pretrained(other)
    status, _, complaint = ask("convert", adapters, "--to", "merged", tmp_path / "out", "--base", other)
    assert status == 2 and "layers.1.mlp.up_proj.weight holds other numbers (1 of" in complaint


@pytest.mark.all
def test_a_base_in_another_dtype_or_other_files_is_the_same_base(ask, spmd, tmp_path):
    half, again, folder = tmp_path / "half", tmp_path / "again", tmp_path / "saved"
    model: Any = saved(half, "llama").bfloat16()
    model.save_pretrained(half)
    model.save_pretrained(again, max_shard_size="20KB")
    spmd(2, trained, DATA2, "config", half, folder, {"adapters": LORA, "only_trained": True})
    assert ask("convert", folder, "--to", "merged", tmp_path / "out", "--base", again)[0] == 0


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


@pytest.mark.all
def test_what_cannot_be_built_again_is_refused_by_name(ask, base, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    own = in_one(Own(), tmp_path / "own", only_trained=False)
    status, _, complaint = ask("convert", own, "--to=hf", tmp_path / "out")
    assert status == 3 and "holds a Own, which is no model of transformers' own" in complaint
    by_peft = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules=["q_proj"]))
    hand = in_one(by_peft, tmp_path / "hand")
    status, _, complaint = ask("convert", hand, "--to=adapter", tmp_path / "out")
    assert status == 3 and "save_pretrained(FOLDER)" in complaint and 'techniques={"adapters"' in complaint
    assert not (tmp_path / "out").exists()


@pytest.mark.first("words5-2-does not know '--bsae=x'")
@pytest.mark.parametrize(
    ("words", "status", "complaint"),
    [
        (["{adapters}", "--to=hf", "{out}"], 2, "--to merged writes it with the adapters added, --to adapter"),
        (
            ["{adapters}", "--to=merged", "{out}"],
            2,
            "give the folder of the model that training began from with --base",
        ),
        (["{adapters}", "--to=merged", "{out}", "--base=nowhere"], 2, "--base nowhere: the folder is not there"),
        (["{adapters}", "--to=mreged", "{out}"], 2, "Did you mean 'merged'?"),
        (["{adapters}", "--to=adapter", "{out}", "--step=2"], 2, "--step is for a run's folder"),
        (["{adapters}", "--to=adapter", "{out}", "--bsae=x"], 2, "does not know '--bsae=x'"),
        (["{half}", "--to=adapter", "{out}"], 1, "its writing was never finished"),
        (["{partial}", "--to=adapter", "{out}"], 1, "is what an unfinished save left"),
        (["{absent}", "--to=adapter", "{out}"], 2, "{absent} does not exist or is no folder"),
        (["{cut}", "--to=adapter", "{out}"], 1, "the checkpoint is damaged"),
        (["{base}", "--to=hf", "{out}"], 2, "is a folder of Hugging Face already"),
        (
            ["{empty}", "--to=hf", "{out}"],
            2,
            "neither the folder of a run (config.toml) nor one that meshwright.save wrote",
        ),
    ],
)
def test_other_folders_and_flags_are_refused_in_a_sentence(ask, adapters, base, tmp_path, words, status, complaint):
    places = {name: tmp_path / name for name in ("out", "half", "absent", "cut", "empty")}
    places |= {"adapters": adapters, "base": base, "partial": tmp_path / "absent.partial"}
    places["empty"].mkdir()
    for name in ("half", "partial", "cut"):
        shutil.copytree(adapters, places[name])
    (places["half"] / "manifest.json").unlink()
    cut = next(places["cut"].glob("*.safetensors"))
    cut.write_bytes(cut.read_bytes()[:-1])
    found, said, complained = ask("convert", *(word.format(**places) for word in words))
    assert (found, said) == (status, "") and complaint.format(**places) in complained, complained
    assert len(complained.splitlines()) == 1 and not places["out"].exists()


@pytest.mark.all
def test_a_manifest_of_another_kind_runs_no_code(ask, adapters, base, tmp_path):
    """The manifest names a class: one that is no model of transformers is not called."""
    from meshwright.checkpoint.manifest import Manifest

    for kind, config in (("Trainer", None), ("os", None), ("LlamaForCausalLM", {"attn_implementation": "a/kernel"})):
        folder = shutil.copytree(adapters, tmp_path / kind)
        manifest = Manifest.read(folder)
        model = {**manifest.model, "kind": kind}
        model["config"] = {**model["config"], **(config or {})}
        Manifest(**{**vars(manifest), "model": model}).write(folder)
        status, _, complaint = ask("convert", folder, "--to=adapter", tmp_path / "out")
        assert status in (2, 3) and ("has no " in complaint or "names code to be fetched" in complaint), complaint
