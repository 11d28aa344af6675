"""Ask random questions about layouts, and find legal ones that are called illegal by the rules of ``parallelize``.

    python benchmarks/legality.py [--questions 500] [--seed 0] [--only NUMBER]

Models are our decoders, families of transformers from their configs, and modules of one's own; GPUs are 1 to 4,096;
batches, techniques, pins and stated layouts are drawn. What ``foresee`` answers is planned again by the rules alone.
Where it calls a layout illegal, or says that none fills the GPUs, all layouts are tried in the order of their ranks
until the rules allow one. Exit status 1: a legal layout is called illegal, or an illegal one legal.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.core.errors import MeshwrightError
from meshwright.introspection.cluster import Cluster
from meshwright.introspection.facts import ModelFacts, model_facts
from meshwright.introspection.source import CausalLM, as_module
from meshwright.models.decoder_config import DecoderConfig, MoEConfig
from meshwright.planning.build import plan
from meshwright.planning.layout import Layout
from meshwright.planning.techniques import Techniques, as_techniques
from meshwright.planning.values import Batch
from meshwright.simulation.foresee import foresee
from meshwright.simulation.search import Pin, divisors

VOCABULARY, LONGEST = 512, 4096


class Block(nn.Module):
    """A block of one's own: attention without a projection for keys, and a gated feed-forward."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.query, self.out = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(self.norm(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        x = x + self.out(F.scaled_dot_product_attention(query, query, query, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Own(nn.Module):
    """A model of one's own without a config."""

    def __init__(self, dim: int = 48, heads: int = 6, layers: int = 6):
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, dim), nn.Linear(dim, VOCABULARY)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class RowsTogether(Own):
    """A model whose rows depend on each other, so that no two ranks may have other rows."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = x - x.mean(0, keepdim=True)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Plain(nn.Module):
    """A model without repeated blocks."""

    def __init__(self, dim: int = 32):
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, dim), nn.Linear(dim, VOCABULARY)
        self.hidden = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(self.table(tokens))))


DENSE = DecoderConfig(VOCABULARY, 96, 8, n_heads=8, n_kv_heads=4, hidden_dim=192, max_seq_len=LONGEST)
OURS: dict[str, Any] = {
    "dense": DENSE,
    "tied": replace(DENSE, n_layers=6, tied_embeddings=True, qk_norm=True),
    "odd heads": replace(DENSE, dim=120, n_heads=5, n_kv_heads=5),
    "mixture": replace(DENSE, n_layers=4, moe=MoEConfig(n_experts=8, hidden_dim=64)),
}
OWN: dict[str, Callable[[], nn.Module]] = {"own": Own, "rows together": RowsTogether, "no blocks": Plain}
SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 96}
GROUPED = SIZES | {"num_key_value_heads": 2, "max_position_embeddings": LONGEST}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "gemma": GROUPED | {"head_dim": 16},
    "phi3": GROUPED | {"pad_token_id": 0},
    "gpt_neox": SIZES | {"max_position_embeddings": LONGEST},
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": LONGEST},
    "mixtral": GROUPED | {"num_local_experts": 4},
}
TECHNIQUES: tuple[dict[str, Any], ...] = (
    *({},) * 8,
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "every_n"},
    {"loss_chunks": 4},
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"data_parallel": "ddp"},
    {"reshard_after_forward": False},
    {"sync_grad_accum": True},
    {"pipeline_schedule": "gpipe"},
    {"pipeline_schedule": "interleaved_1f1b"},
    {"sequence_parallel": False},
    {"context_parallel_method": "ring"},
    {"compile": True},
    {"cpu_offload": "optimizer"},
    {"optimizer_state": "8bit"},
    {"optimizer": "muon"},
    {"float8": "tensorwise"},
    {"async_tensor_parallel": True},
)
PINS = (
    "tp=4",
    "tp<=2",
    "pp=2",
    "cp=2",
    "dp_shard=8",
    "microbatch=2",
    "recompute=full",
    "ep=2",
    "tp=16",
)


@dataclass(frozen=True)
class Question:
    """A question to ``foresee``; an open layout is searched."""

    model: str
    gpus: int
    per_node: int
    batch: Batch
    techniques: dict[str, Any]
    layout: Layout
    pins: tuple[str, ...]

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.gpus, self.per_node, gpu="h100")

    def __str__(self) -> str:
        what = f"{self.model} on {self.gpus} GPUs, {self.per_node} per node, {self.batch}, {self.techniques}"
        return f"{what}, {self.layout if self.layout != Layout() else 'any layout'} {' '.join(self.pins)}"


def draw(generator: random.Random) -> Question:
    """Draw a question."""
    names = [*OURS, *FAMILIES, *OWN]
    gpus = 2 ** generator.randint(0, 12)
    if generator.random() < 0.4:
        gpus = generator.choice(
            (3, 6, 7, 12, 24, 48, 60, 96, 100, 288, 576, 1000, 1536, 3072, generator.randint(1, 4096))
        )
    per_node = generator.choice([n for n in (1, 4, 8, 8, 8) if gpus % n == 0 or n > gpus])
    rows = generator.choice((gpus, 4 * gpus, max(1, gpus // 2), max(1, gpus // 8), 16, 1, 6 * gpus))
    pairs, least = generator.random() < 0.15, generator.choice((0, 0, 0, 1, 2, 4))
    seq = generator.choice((128, 256, 1024, 96, 100, 4096))
    batch = Batch(rows * (1 + pairs), seq, 2 * least if pairs else least, VOCABULARY, pairs)
    layout, pins = Layout(), ()
    if generator.random() < 0.4:
        sizes = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp"), 1)
        left = gpus
        for axis in generator.sample(list(sizes), 5):
            size = generator.choice([n for n in divisors(left) if n <= 8 or axis.startswith("dp")])
            sizes[axis], left = size, left // size
        sizes["dp_shard"] *= left
        layout = Layout(**sizes, ep=generator.choice((1, 1, 1, 2)))
    elif generator.random() < 0.3:
        pins = (generator.choice(PINS),)
    return Question(generator.choice(names), gpus, per_node, batch, generator.choice(TECHNIQUES), layout, pins)


@cache
def facts_of(name: str) -> ModelFacts:
    """Return the facts of a model, which is measured once."""
    if name in OWN:
        return model_facts(OWN[name]())
    if name in OURS:
        return model_facts(as_module(OURS[name]))
    from transformers import AutoConfig

    return model_facts(as_module(CausalLM(AutoConfig.for_model(name, vocab_size=VOCABULARY, **FAMILIES[name]))))


def allows(asked: Question, layout: Layout, techniques: Techniques, rows: int) -> str:
    """Return why the rules refuse a layout; "" if they allow it."""
    here = Cluster(asked.gpus, min(asked.per_node, asked.gpus), "cuda")
    try:
        plan(
            facts_of(asked.model),
            layout,
            batch=replace(asked.batch, microbatch_rows=rows),
            cluster=here,
            techniques=techniques,
        )
    except MeshwrightError as refused:
        return str(refused)
    return ""


def layouts(asked: Question) -> Iterator[tuple[Layout, int]]:
    """Yield all layouts of a question's GPUs with rows of a microbatch, as its pins and its batch state them."""
    pins = [Pin.parse(pin) for pin in asked.pins]
    blocks = len(facts_of(asked.model).blocks)
    sizes = sorted(
        (tp * cp * pp, pp, tp, cp, shard)
        for pp in divisors(asked.gpus)
        if pp <= max(blocks, 1)
        for tp in divisors(asked.gpus // pp)
        for cp in divisors(asked.gpus // pp // tp)
        if asked.batch.global_rows % (asked.gpus // pp // tp // cp) == 0
        for shard in divisors(asked.gpus // pp // tp // cp)
    )
    for _, pp, tp, cp, shard in sizes:
        data = asked.gpus // pp // tp // cp
        own = asked.batch.global_rows // data
        for ep in (1, 2):
            layout = Layout(pp, data // shard, shard, cp, tp, ep)
            values = dict(layout.sizes)
            for rows in [asked.batch.microbatch_rows] if asked.batch.microbatch_rows else sorted({1, 2, own}):
                if own % rows == 0 and all(pin.holds(values | {"microbatch": rows}) for pin in pins):
                    yield layout, rows


def judge(asked: Question) -> tuple[str, str]:
    """Return a word for the answer to a question, and what is wrong with it; "" if nothing is."""
    facts, techniques, is_open = facts_of(asked.model), as_techniques(asked.techniques), asked.layout == Layout()
    words = {"batch": asked.batch, "cluster": asked.cluster, "techniques": asked.techniques, "pins": asked.pins}
    try:
        answer = foresee(facts, asked.layout, **words)
    except MeshwrightError as refused:
        if "nothing fits" in str(refused):
            return "too large", ""
        if not is_open:
            why = allows(asked, asked.layout, techniques, asked.batch.microbatch_rows)
            return "refused", "" if why else f"{asked.layout} is legal, and is refused: {refused}"
        for layout, rows in layouts(asked):
            for changed in (techniques, replace(techniques, activation_checkpointing="full")):
                if all(pin.key != "recompute" for pin in map(Pin.parse, asked.pins)) and changed != techniques:
                    continue
                if not allows(asked, layout, changed, rows):
                    return "refused", f"{layout} with microbatch {rows} is legal, and is refused: {refused}"
        return "refused", ""
    for one in answer.candidates:
        if why := allows(asked, one.layout, one.techniques, one.microbatch):
            return "answered", f"{one} is called legal: {why}"
        if one.layout.world != asked.gpus:
            return "answered", f"{one} is for {one.layout.world} GPUs"
    return "answered", ""


def run(questions: int, seed: int, only: int = -1) -> tuple[Counter[str], list[str]]:
    """Ask questions, and return how often each answer came, and what was wrong."""
    generator, answers, wrong = random.Random(seed), Counter[str](), []
    for number in range(questions):
        asked = draw(generator)
        if only in (-1, number):
            began = time.process_time()
            word, problem = judge(asked)
            answers[word] += 1
            if number % 25 == 24:
                print(f"after {number + 1}: {dict(answers)}", flush=True)
            wrong += [f"{number}: {asked}\n    {problem}"] * bool(problem)
            if problem or only == number or time.process_time() - began > 20:
                print(f"{number} ({time.process_time() - began:.0f} s) {asked}: {word} {problem}", flush=True)
    return answers, wrong


def main() -> int:
    """Read the arguments, ask, and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, default=-1)
    arguments = parser.parse_args()
    answers, wrong = run(arguments.questions, arguments.seed, arguments.only)
    print(f"{sum(answers.values())} questions: {dict(answers)}; judged wrongly: {len(wrong)} (goal 0)")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
