"""Fine-tuning a whole model of transformers on conversations, from its folder and a file of messages, against one
process with plain torch and transformers that reads both by itself: losses, gradients, and weights after steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import families
from support.laid_out import own_rows
from support.oracle import relative_errors
from support.train import collect
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright import Layout, parallelize, pretrained
from meshwright.data.cache import open_corpus, prepare
from meshwright.data.options import SourceOptions
from meshwright.data.tokenizers import load_tokenizer

SEQ, STEPS = 64, 3
EXACT, WITH_FP32_INSIDE = 1e-10, 1e-6
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WAYS = {
    "one": (Layout(dp_shard=1), "stablelm", EXACT),
    "FSDP 4": (Layout(dp_shard=4), "stablelm", EXACT),
    "FSDP 2 x tp 2": (Layout(dp_shard=2, tp=2), "stablelm", EXACT),
    "pp 2": (Layout(dp_shard=1, pp=2), "stablelm", EXACT),
    "llama, FSDP 2 x tp 2": (Layout(dp_shard=2, tp=2), "llama", WITH_FP32_INSIDE),
    "experts, ep 2": (Layout(dp_shard=2, ep=2), "qwen3_moe", WITH_FP32_INSIDE),
}


def folder_of(family: str, place: Path) -> Path:
    """A folder as it is downloaded, and conversations beside it: one or two questions with answers."""
    folder = place / family
    folder.mkdir(parents=True)
    families.saved(folder, family)
    families.save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    draw = np.random.default_rng(1)

    def words() -> str:
        return "".join(draw.choice(list("abc xyz"), size=draw.integers(1, 7))).strip() or "a"

    turns = [[words() for _ in range(2 * n)] for n in (1, 2, 1, 1, 2, 1, 1, 1, 2, 1)]
    roles = ("user", "assistant")
    talks = [[{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)] for texts in turns]
    (place / f"{family}.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place, known = tmp_path_factory.mktemp("models"), {}

    def of(family: str) -> Path:
        known.setdefault(family, None)
        known[family] = known[family] or folder_of(family, place)
        return known[family]

    return of


def optimizer_of(family: str, parameters: Any) -> torch.optim.Optimizer:
    """AdamW where sums alone round; SGD where fp32 inside would be amplified."""
    parameters = list(parameters)
    return torch.optim.AdamW(parameters, 1e-3, eps=1e-4) if family == "stablelm" else torch.optim.SGD(parameters, 0.1)


def tuned(layout: Layout, family: str, folder: Path, mutant: str = ""):
    """Losses of the steps, gradients of the first, weights after the last: ours, as a loop's owner writes it."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    if family == "qwen3_moe":
        config._experts_implementation = "eager"  # transformers' grouped kernels take no float64
    wide = {"master": "float64", "reduce": "float64"}
    model = parallelize(config, layout, techniques={"precision": wide}, weights=pretrained(folder))
    model.learn_documents()
    batch = own_rows(model, rows_of(folder, model.plan.world, mutant))
    optimizer = optimizer_of(family, model.parameters())
    losses, first = [], {}
    for step in range(STEPS):
        losses.append(float(model.forward_backward(batch)))
        if step == 0:
            first = everywhere({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        model.optimizer_step(optimizer)
    return losses, first, everywhere({name: p.detach() for name, p in model.named_parameters()})


def everywhere(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All of them on rank 0, and on a pipeline's others their own."""
    return {name: value.clone() for name, value in tensors.items() if not isinstance(value, DTensor)} | collect(tensors)


def rows_of(folder: Path, ranks: int, mutant: str) -> dict[str, Tensor]:
    """The file's conversations in rows, by meshwright; rows of padding fill the last ones up."""
    tokenizer = load_tokenizer(str(folder))
    options = SourceOptions(source=(str(folder.parent / f"{folder.name}.jsonl"),))
    made = prepare(options, tokenizer, 0.0, str(folder.parent / f"cache-{folder.name}"))
    split = open_corpus(made.folder, "refuse").training
    found = split.rows(np.arange(split.n_samples(SEQ)), SEQ)
    batch = {key: torch.from_numpy(value) for key, value in found.items()}
    if mutant == "prompts are learnt":
        ahead, same = torch.roll(batch["tokens"], -1, 1), torch.roll(batch["document_ids"], -1, 1)
        batch["labels"] = torch.where(same == batch["document_ids"], ahead, -100)
    if mutant == "the end is not learnt":
        batch["labels"] = batch["labels"].masked_fill(batch["labels"] == tokenizer.end_of_document, -100)
    fill = -len(batch["tokens"]) % max(ranks, 4)
    empty = {"tokens": 0, "labels": -100, "positions": 0, "document_ids": -1}
    return {key: torch.cat([value, torch.full((fill, SEQ), empty[key])]) for key, value in batch.items()}


def by_transformers(family: str, folder: Path):
    """The same, each conversation in a forward of its own: text, ids and labels are put together here."""
    import tokenizers
    from transformers import AutoModelForCausalLM

    options = {"experts_implementation": "eager"} if family == "qwen3_moe" else {}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options).train()
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    talks = []
    for line in (folder.parent / f"{folder.name}.jsonl").read_text().splitlines():
        ids, learnt = [], []
        for message in json.loads(line)["messages"]:
            answer = f"{message['content']}<|endoftext|>"
            for text, counts in ((f"{message['role']}: ", False), (answer, message["role"] == "assistant")):
                found = tokenizer.encode(text, add_special_tokens=False).ids
                ids += found
                learnt += [counts] * len(found)
        talks.append((torch.tensor(ids), torch.tensor(learnt)))
    optimizer = optimizer_of(family, model.parameters())
    losses, first = [], {}
    for step in range(STEPS):
        terms = [
            F.cross_entropy(model(input_ids=ids[None, :-1]).logits[0][learnt[1:]], ids[1:][learnt[1:]], reduction="sum")
            for ids, learnt in talks
        ]
        loss = torch.stack(terms).sum() / sum(int(learnt[1:].sum()) for _, learnt in talks)
        optimizer.zero_grad()
        loss.backward()
        losses.append(float(loss.detach()))
        if step == 0:
            first = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    return losses, first, {name: p.detach() for name, p in model.named_parameters()}


def all_of(results: list, which: int) -> dict[str, Tensor]:
    return {name: value for result in results for name, value in result[which].items()}


@pytest.mark.all
@pytest.mark.parametrize("name", WAYS)
def test_conversations_teach_what_plain_transformers_learns_from_them(spmd, folders, name):
    layout, family, bound = WAYS[name]
    losses, gradient, weights = spmd(1, by_transformers, family, folders(family))[0]
    results = spmd(layout.world, tuned, layout, family, folders(family))
    assert all(result[0] == results[0][0] for result in results) and losses[-1] < losses[0] - 1e-3
    assert results[0][0] == pytest.approx(losses, rel=bound)
    for which, reference in ((1, gradient), (2, weights)):
        errors = relative_errors(all_of(results, which), reference)
        assert max(errors.values()) <= bound, (which, errors)


@pytest.mark.parametrize("mutant", ["prompts are learnt", "the end is not learnt"])
def test_other_labels_are_another_training(spmd, folders, mutant):
    losses, gradient, _ = spmd(1, by_transformers, "stablelm", folders("stablelm"))[0]
    found, first, _ = spmd(1, tuned, Layout(dp_shard=1), "stablelm", folders("stablelm"), mutant)[0]
    assert abs(found[0] - losses[0]) > 1e-3 and max(relative_errors(first, gradient).values()) > 1e-3
