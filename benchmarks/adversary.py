"""Random odd models on random layouts with random options, each against plain torch in one process.

Nothing of the oracle is the library's.

    python benchmarks/adversary.py [--trials 500] [--seed 0] [--only SEED]

A trial draws a transformer from parts (attention, feed-forward, norms, positions, what is done to logits, ties,
oddities), a layout of two or four ranks, techniques, batches and an optimizer, trains for three steps, and compares
losses, gradient norms and weights in float64. Coins of layers that are passed over are each data rank's own, and one
process tosses the same. It ends as

    equal      within 1e-9 of the norm, relative
    refused    by an error of the library's own, before the first step
    WRONG      anything else that trained
    CRASH      an error that is not the library's, or one behind the first step
    HANG       no end within 100 s

Every trial is printed with its seed; the exit status is 1 where one was WRONG, CRASH or HANG.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright import Layout, MeshwrightError, parallelize
from meshwright.distributed.process.workers import WorkerDied, WorkerFailed, WorkerPool, WorkerTimeout

IDS, HEAD, STEPS, CLOSE, LIMIT_SEC = 53, 4, 3, 1e-9, 100.0
CLOSE_IN_FLOAT32 = 1e-6
SMALL = 1e-3
"""A tensor that is smaller is compared with this: the gradient of a key's bias is nothing but rounding."""


# --- models


class Attention(nn.Module):
    def __init__(self, r: random.Random, width: int):
        super().__init__()
        heads = width // HEAD
        self.kv = r.choice([heads, heads, max(1, heads // 2), 1])
        self.bias, self.fused = r.random() < 0.5, r.random() < 0.4
        self.kind = r.choice(["plain", "plain", "window", "normed", "gated", "alibi"])
        self.by_hand = r.random() < 0.3
        if self.fused:
            self.qkv = nn.Linear(width, width + 2 * self.kv * HEAD, bias=self.bias)
        else:
            self.q, self.k, self.v = (
                nn.Linear(width, n, bias=self.bias) for n in (width, self.kv * HEAD, self.kv * HEAD)
            )
        self.o = nn.Linear(width, width, bias=self.bias)
        if self.kind == "normed":
            self.q_norm, self.k_norm = nn.LayerNorm(HEAD), nn.LayerNorm(HEAD)
        if self.kind == "gated":
            self.gate = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, given: Tensor | None = None) -> Tensor:
        seq, width = x.shape[1:]
        sizes = [width, self.kv * HEAD, self.kv * HEAD]
        q, k, v = self.qkv(x).split(sizes, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in (q, k, v))
        if self.kind == "normed":
            q, k = self.q_norm(q), self.k_norm(k)
        if given is not None:
            return self._left(x, self._attended(q, k, v, given))
        mask = torch.ones(seq, seq, dtype=torch.bool).tril()
        if self.kind == "window":
            mask = mask.triu(-2)
        bias = torch.zeros(seq, seq, dtype=x.dtype).masked_fill(~mask, -torch.inf)
        if self.kind == "alibi":
            place = torch.arange(seq, dtype=x.dtype)
            bias = bias - (place[:, None] - place).abs() / 8
        return self._left(x, self._attended(q, k, v, bias))

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        if not self.by_hand:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        return (q @ k.mT / HEAD**0.5 + bias).softmax(-1) @ v

    def _left(self, x: Tensor, mixed: Tensor) -> Tensor:
        out = mixed.transpose(1, 2).flatten(-2)
        return self.o(out * self.gate(x).sigmoid() if self.kind == "gated" else out)


class FeedForward(nn.Module):
    def __init__(self, r: random.Random, width: int):
        super().__init__()
        hidden, self.gated = r.choice([2, 3, 4]) * width, r.random() < 0.5
        bias = r.random() < 0.5
        self.up, self.down = (
            nn.Linear(width, hidden * (2 if self.gated else 1), bias=bias),
            nn.Linear(hidden, width, bias=bias),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.gated:
            gate, x = x.chunk(2, -1)
            return self.down(F.silu(gate) * x)
        return self.down(F.gelu(x))


class Experts(nn.Module):
    """A list of experts, of which a rank may use some only."""

    def __init__(self, r: random.Random, width: int):
        super().__init__()
        self.router, self.experts = nn.Linear(width, 3), nn.ModuleList(FeedForward(r, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        best, out = weights.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (chosen := best == number).any():
                out[chosen] = expert(x[chosen]) * weights[chosen][:, number, None]
        return out


class Block(nn.Module):
    def __init__(self, r: random.Random, width: int, experts: bool):
        super().__init__()
        norm = r.choice([nn.LayerNorm, nn.RMSNorm])
        self.first, self.second, self.parallel = norm(width), norm(width), r.random() < 0.2
        self.attention, self.scale = Attention(r, width), r.random() < 0.2
        self.feed_forward = Experts(r, width) if experts else FeedForward(r, width)
        if self.scale:
            self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, given: Tensor | None = None) -> Tensor:
        a = self.attention(self.first(x), given)
        if self.parallel:
            return x + a + self.feed_forward(self.second(x))
        x = x + (a * self.gain if self.scale else a)
        return x + self.feed_forward(self.second(x))


ODDITIES = (
    *("none",) * 14,
    *(
        "batch mean",
        "running mean",
        "counter",
        "late",
        "carried",
        "rare adapter",
        "chosen branch",
        "unused",
        "max_norm",
        "normalised head",
    ),
    *(
        "tuple",
        "dict",
        "object",
        "auxiliary loss",
        "shared norm",
        "batch norm",
        "frozen half",
        "sparse",
        "hook",
        "looped",
        "skip",
        "x0",
    ),
    *("coin of torch", "coin of python", "coin of numpy", "random depth", "early exit", "tokens counted", "float32"),
)
COINS = {
    "coin of torch": lambda: float(torch.rand(())),
    "coin of python": random.random,
    "coin of numpy": np.random.random,
}
POSITIONS = ("none", "range", "range", "parameter", "buffer", "sum")
TAILS = (*("none",) * 8, "in place", "column", "scaled part", "filled", "by mode", "by length", "by buffer", "capped")
GIVEN = (*("nothing",) * 4, "triangle", "distances", "distances by buffer")


class Model(nn.Module):
    def __init__(self, seed: int):
        super().__init__()
        r = random.Random(seed)
        self.odd, self.calls, self.carried = r.choice(ODDITIES), 0, torch.zeros(())
        self.width, layers = HEAD * r.choice([2, 4, 4]), r.choice([2, 2, 3, 4])
        self.config = type("Config", (), {"vocab_size": IDS})()
        self.emb = nn.Embedding(
            IDS, self.width, max_norm=0.8 if self.odd == "max_norm" else None, sparse=self.odd == "sparse"
        )
        self.positions, self.tail, self.given = r.choice(POSITIONS), r.choice(TAILS), r.choice(GIVEN)
        self.places = nn.Embedding(40, self.width) if self.positions != "none" else None
        self.register_buffer("ids", torch.arange(40), persistent=False)
        self.register_buffer("factor", torch.tensor(0.5))
        sparse = r.random() < 0.15
        kind = r.choice([nn.ModuleList, nn.ModuleDict])
        blocks = [Block(r, self.width, sparse) for _ in range(layers)]
        self.layers: Any = (
            nn.ModuleList(blocks) if kind is nn.ModuleList else nn.ModuleDict({str(i): b for i, b in enumerate(blocks)})
        )
        self.norm, self.head = nn.LayerNorm(self.width), nn.Linear(self.width, IDS, bias=r.random() < 0.5)
        if r.random() < 0.3 and self.odd not in ("sparse", "max_norm", "normalised head"):
            self.head.weight = self.emb.weight
        if self.odd in ("rare adapter", "unused", "chosen branch"):
            self.extra, self.other = nn.Linear(self.width, self.width), nn.Linear(self.width, self.width)
        if self.odd == "batch norm":
            self.batch_norm = nn.BatchNorm1d(self.width)
        if self.odd == "tokens counted":
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        if self.odd == "float32":
            self.gain = nn.Parameter(torch.ones(self.width))
        if self.odd in ("running mean", "counter"):
            self.register_buffer("mean", torch.zeros(self.width))
        if self.odd == "shared norm":
            for block in blocks:
                block.first = self.norm
        if self.odd == "x0":
            self.lambdas = nn.Parameter(torch.ones(layers))
        if self.odd == "hook":
            self.head.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        if self.odd == "frozen half":
            for p in blocks[0].parameters():
                p.requires_grad_(False)

    def _blocks(self) -> list[nn.Module]:
        return list(self.layers.values()) if isinstance(self.layers, nn.ModuleDict) else list(self.layers)

    def forward(self, tokens: Tensor) -> Any:
        self.calls += 1
        if self.odd == "normalised head":
            with torch.no_grad():
                self.head.weight.div_(self.head.weight.norm(dim=-1, keepdim=True))
        x = self.emb(tokens)
        if self.places is not None:
            x = x + self._placed(tokens)
        first, kept, given = x, [], self._given(tokens, x.dtype)
        blocks = self._blocks()
        if self.training and self.odd == "random depth":
            blocks = blocks[: random.randint(1, len(blocks))]
        for number, block in enumerate(blocks):
            if self.training and self.odd in COINS and COINS[self.odd]() < 0.4:
                continue
            if self.odd == "early exit" and number and x.square().mean() > 1.5:
                break
            if self.odd == "x0":
                x = x + self.lambdas[number] * first
            if self.odd == "skip" and number >= len(blocks) // 2 and kept:
                x = x + kept.pop()
            x = block(x, given)
            if self.odd == "skip" and number < len(blocks) // 2:
                kept.append(x)
        if self.odd == "looped":
            x = blocks[-1](x, given)
        x = self._oddly(x, tokens)
        logits = self._ended(self.head(self.norm(x)))
        match self.odd:
            case "tuple":
                return (logits,)
            case "dict":
                return {"logits": logits}
            case "object":
                return type("Output", (), {"logits": logits})()
            case "auxiliary loss":
                return {"logits": logits, "aux_loss": logits.square().mean()}
        return logits

    def _placed(self, tokens: Tensor) -> Tensor:
        seq = tokens.shape[1]
        assert self.places is not None
        match self.positions:
            case "parameter":
                return self.places.weight[:seq]
            case "buffer":
                return self.places(self.ids[:seq])
            case "sum":
                return self.places((tokens != 1).long().cumsum(1))
        return self.places(torch.arange(seq, device=tokens.device))

    def _given(self, tokens: Tensor, dtype: torch.dtype) -> Tensor | None:
        seq = tokens.shape[1]
        if self.given == "nothing":
            return None
        bias = torch.full((seq, seq), -torch.inf, dtype=dtype).triu(1)
        if self.given == "triangle":
            return bias
        place = torch.arange(seq, dtype=dtype)
        return bias - (place[:, None] - place).abs() * (self.factor if "buffer" in self.given else 0.25)

    def _ended(self, logits: Tensor) -> Tensor:
        match self.tail:
            case "in place":
                logits[..., 40:] = -1e4
            case "column":
                logits[:, :, 7] = 0.5
            case "scaled part":
                logits[..., :5] *= 3
            case "filled":
                logits.narrow(-1, 10, 3).fill_(-2.0)
            case "by mode":
                logits = logits * 3 if self.training else logits
            case "by length":
                logits = logits * logits.shape[1] ** -0.5
            case "by buffer":
                logits = logits * float(self.factor)
            case "capped":
                logits = 4 * torch.tanh(logits / 4)
        return logits

    def _oddly(self, x: Tensor, tokens: Tensor) -> Tensor:
        match self.odd:
            case "batch mean":
                return x - x.mean(0)
            case "batch norm":
                return self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
            case "running mean":
                found = x - self.mean
                self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
                return found
            case "counter":
                self.mean += 1
                return x / self.mean
            case "tokens counted":
                self.seen += tokens.numel()
            case "float32":
                return x * self.gain.to(x.dtype)
            case "late":
                return x.roll(1, 1) if self.calls > 2 else x
            case "carried":
                found = x * (1 + self.carried)
                self.carried = x.detach().mean()
                return found
            case "rare adapter":
                rare = tokens == IDS - 1
                return torch.where(rare[..., None], self.extra(x), x) if rare.any() else x
            case "chosen branch":
                return (self.extra if int(tokens[0, 0]) % 2 else self.other)(x)
        return x


def logits_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return output[0] if isinstance(output, tuple) else output["logits"] if isinstance(output, dict) else output.logits


# --- trials


def drawn(seed: int) -> dict[str, Any]:
    """A trial's layout, techniques and batch sizes."""
    r = random.Random(10_000 + seed)
    world = r.choice([2, 2, 2, 4])
    layouts = [
        {"dp_shard": world},
        {"dp_shard": 1, "dp_replicate": world},
        {"dp_shard": 1, "tp": 2},
        {"dp_shard": 1, "pp": 2},
        {"dp_shard": 1, "cp": 2},
    ]
    if world == 4:
        layouts += [
            {"dp_shard": 2, "dp_replicate": 2},
            {"dp_shard": 2, "tp": 2},
            {"dp_shard": 2, "pp": 2},
            {"dp_shard": 1, "tp": 2, "pp": 2},
            {"dp_shard": 2, "cp": 2},
            {"dp_shard": 1, "cp": 2, "tp": 2},
            {"dp_shard": 1, "cp": 2, "pp": 2},
        ]
    layout = Layout(**r.choice(layouts))
    techniques: dict[str, Any] = {}
    for key, values in (
        ("activation_checkpointing", ["none", "none", "full", "selective_op"]),
        ("sync_grad_accum", [False, False, True]),
        ("sequence_parallel", [True, True, False]),
        ("reshard_after_forward", [True, True, False]),
        ("loss_chunks", [1, 1, 2, 3]),
    ):
        techniques[key] = r.choice(values)
    if layout.tp == 1:
        techniques.pop("sequence_parallel")
    elif layout.cp > 1:
        techniques["sequence_parallel"] = r.random() < 0.3
    if layout.dp_shard == 1:
        techniques.pop("reshard_after_forward")
    if layout.pp > 1:
        techniques["pipeline_schedule"] = r.choice(["1f1b", "gpipe"])
    return {
        "layout": layout,
        "techniques": techniques,
        "rows": r.choice([1, 2, 3]),
        "piece": r.choice([0, 0, 1]),
        "seq": r.choice([5, 8, 12]),
        "adamw": r.random() < 0.5,
        "max_norm": r.choice([None, 0.5]),
        "masked": r.random() < 0.4,
    }


def batches(seed: int, ranks: int, rows: int, seq: int, masked: bool) -> Iterator[list[dict[str, Tensor]]]:
    """By step, the batch of each data rank."""
    g = torch.Generator().manual_seed(seed)
    for step in range(STEPS):
        found = []
        for rank in range(ranks):
            tokens = torch.randint(0, IDS - 1, (rows, seq), generator=g)
            if step == 1 and rank == 0:
                tokens[0, 1] = IDS - 1
            labels = torch.randint(0, IDS, (rows, seq), generator=g)
            if masked:
                labels = labels.masked_fill(torch.rand((rows, seq), generator=g) < 0.3, -100)
                labels[0, 0] = 1
            found.append({"tokens": tokens, "labels": labels})
        yield found


def optimizer_of(parameters: Any, adamw: bool) -> torch.optim.Optimizer:
    chosen = [p for p in parameters if p.requires_grad]
    # a gradient that is nothing but rounding (of a key's bias) must not be divided by its own size
    return torch.optim.AdamW(chosen, 1e-2, eps=1e-4) if adamw else torch.optim.SGD(chosen, 0.1, momentum=0.9)


ALONE = (*COINS, "random depth", "early exit")
"""Oddities by which a data rank's microbatch is another case than that of the rank beside."""


def pieces_of(by_rank: list[dict[str, Tensor]], piece: int, step: int, *, alone: bool) -> Iterator[dict[str, Tensor]]:
    """Yield the microbatches of one process: of all ranks' rows together, or of each rank's by itself."""
    for number, group in enumerate([[b] for b in by_rank] if alone else [by_rank]):
        toss_again(step, number)
        for start in range(0, len(by_rank[0]["tokens"]), piece):
            yield {key: torch.cat([b[key][start : start + piece] for b in group]) for key in ("tokens", "labels")}


def toss_again(step: int, rank: int) -> None:
    """Set the coins of a data rank for a step."""
    random.seed(1000 * step + rank)
    np.random.seed(1000 * step + rank)
    torch.manual_seed(1000 * step + rank)


def built(seed: int) -> Model:
    model = Model(seed).double()
    if model.odd == "float32":
        model.gain = nn.Parameter(model.gain.detach().float())
    return model


def one_process(seed: int, trial: dict[str, Any], piece: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Plain torch: losses, norms before clipping, and everything at the end."""
    torch.manual_seed(0)
    model = built(seed)
    optimizer = optimizer_of(model.parameters(), trial["adamw"])
    ranks = trial["layout"].dp_replicate * trial["layout"].dp_shard
    losses, norms = [], []
    for by_rank in batches(seed, ranks, trial["rows"], trial["seq"], trial["masked"]):
        tokens = sum(int((b["labels"] != -100).sum()) for b in by_rank)
        total = 0.0
        for both in pieces_of(by_rank, piece or trial["rows"], len(losses), alone=model.odd in ALONE):
            logits = logits_of(model(both["tokens"]))
            loss = F.cross_entropy(logits.flatten(0, 1), both["labels"].flatten(), reduction="sum") / tokens
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), trial["max_norm"] or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}


def on_a_layout(seed: int) -> tuple[str, str]:
    """How a trial ends on this rank, and why."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    trial = drawn(seed)
    layout = trial["layout"]

    def build() -> nn.Module:
        return built(seed)

    try:
        model = parallelize(build, layout, techniques=trial["techniques"], microbatch_rows=trial["piece"])
    except MeshwrightError as error:
        return "refused", str(error).splitlines()[0]
    optimizer = optimizer_of(model.parameters(), trial["adamw"])
    ranks = layout.dp_replicate * layout.dp_shard
    rank = (
        0
        if model.mesh is None
        else model.mesh["dp_replicate"].get_local_rank() * layout.dp_shard + model.mesh["dp_shard"].get_local_rank()
    )
    losses, norms = [], []
    for by_rank in batches(seed, ranks, trial["rows"], trial["seq"], trial["masked"]):
        toss_again(len(losses), rank)
        losses.append(float(model.forward_backward(by_rank[rank])))
        norms.append(model.optimizer_step(optimizer, trial["max_norm"]).grad_norm)
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()} | dict(
        model.named_buffers()
    )
    expected = one_process(seed, trial, trial["piece"])
    errors = {"loss": _apart(losses, expected[0]), "norm": _apart(norms, expected[1])}
    for name, value in whole.items():
        wanted = expected[2][name]
        errors[name] = float((value.detach() - wanted).double().norm() / (wanted.double().norm() + SMALL))
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    close = CLOSE_IN_FLOAT32 if Model(seed).odd == "float32" else CLOSE
    return ("equal", "") if errors[worst] <= close else ("WRONG", f"{worst} is {errors[worst]:.1e} off")


def _apart(found: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) / (abs(b) + 1e-12) for a, b in zip(found, wanted, strict=True))


def tried(seed: int, pool: WorkerPool) -> tuple[str, str]:
    world = drawn(seed)["layout"].world
    try:
        said = pool.run(on_a_layout, seed, world=world, timeout=LIMIT_SEC)
    except WorkerTimeout as error:
        return "HANG", str(error).splitlines()[0]
    except (WorkerFailed, WorkerDied) as error:
        return "CRASH", str(error).strip().splitlines()[-1]
    return next((found for found in said if found[0] not in ("equal", "refused")), said[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first trial")
    parser.add_argument("--only", type=int, help="one trial, by its seed")
    asked = parser.parse_args()
    seeds = [asked.only] if asked.only is not None else range(asked.seed, asked.seed + asked.trials)
    counts: Counter[str] = Counter()
    begun = time.monotonic()
    with WorkerPool(4) as pool:
        for seed in seeds:
            ended, why = tried(seed, pool)
            counts[ended] += 1
            print(f"{seed:6} {ended:8} {Model(seed).odd:16} {drawn(seed)['layout']}  {why[:160]}", flush=True)
    print(f"{len(seeds)} trials in {time.monotonic() - begun:.0f} s: {dict(counts)}")
    return int(any(counts[word] for word in ("WRONG", "CRASH", "HANG")))


if __name__ == "__main__":
    sys.exit(main())
