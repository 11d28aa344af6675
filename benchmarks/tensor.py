"""Our tensor + sequence parallel step against the plainest one that a careful person writes by hand: CPU time per
token, 2 gloo ranks.

The hand-written one is the same decoder with its linear layers cut, and raw collectives in small autograd functions
(gather, scatter and their duals) around them, as Megatron-LM has them (arXiv 1909.08053, 2205.05198): embedding and
loss are cut over the vocabulary, gradients of norms are summed once per step in one message. Both train the same
model on the same batches in the same processes, in rounds that alternate, so that the machine's drift hits both
alike. Each round gives a ratio; the median and a 95 % bound (bootstrap of the median) are printed. There are two
ways, and each is compared with the hand-written form of the same way and with the one that keeps: to keep what was
gathered for backward, or to gather it again (our default), which sends one more all-gather for each column-parallel
input.

It also prints what a block keeps for backward, and how large its logits are.

    OMP_NUM_THREADS=1 python benchmarks/tensor.py [--rounds 40] [--dims 256 512]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

TP = 2
COMPARED = (
    ("ours, kept", "by hand, kept"),
    ("ours, gathered again", "by hand, gathered again"),
    ("ours, gathered again", "by hand, kept"),
    ("by hand, gathered again", "by hand, kept"),
)


def by_hand(config: Any, mesh: Any, seed: int, *, regather: bool = False) -> Any:
    """(tokens, labels) -> one step."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from meshwright.distributed.weights.constructed import materialise
    from meshwright.models.decoder import Decoder, rotary_tables, rotate

    gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter_into = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    group = mesh["tp"].get_group()
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def gather(x):
        parts = x.new_empty((size, *x.shape))
        gather_into(parts.flatten(0, 1), x.contiguous(), group=group)
        return parts.transpose(0, 1).reshape(x.shape[0], -1, x.shape[2])

    def scatter(x):
        parts = x.view(x.shape[0], size, -1, x.shape[2]).transpose(0, 1).contiguous()
        mine = torch.empty_like(parts[0])
        scatter_into(mine, parts.flatten(0, 1), group=group)
        return mine

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return gather(x)

        @staticmethod
        def backward(ctx, g):
            return scatter(g)

    class Scatter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return scatter(x)

        @staticmethod
        def backward(ctx, g):
            return gather(g)

    class GatherAgain(torch.autograd.Function):
        """Linear layers of one input, of which only this rank's part is kept."""

        @staticmethod
        def forward(ctx, x, *weights):
            ctx.save_for_backward(x, *weights)
            whole = gather(x)
            return tuple(F.linear(whole, w) for w in weights)

        @staticmethod
        def backward(ctx, *gradients):
            x, *weights = ctx.saved_tensors
            whole = gather(x).flatten(0, 1)
            back = gradients[0] @ weights[0]
            for g, w in zip(gradients[1:], weights[1:], strict=True):
                back += g @ w
            return scatter(back), *(g.flatten(0, 1).T @ whole for g in gradients)

    def linears(x, *modules):
        weights = [module.weight for module in modules]
        if regather:
            return GatherAgain.apply(x, *weights)
        whole = Gather.apply(x)
        return tuple(F.linear(whole, w) for w in weights)

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, labels):
            flat, labels = logits.flatten(0, 1), labels.flatten()
            top = flat.amax(1)
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
            shifted = flat - top.unsqueeze(1)
            e = shifted.exp()
            local = labels - rank * flat.shape[1]
            here = (local >= 0) & (local < flat.shape[1])
            place = torch.where(here, local, 0).unsqueeze(1)
            sums = torch.stack([e.sum(1), shifted.gather(1, place).squeeze(1) * here])
            dist.all_reduce(sums, group=group)
            ctx.save_for_backward(e.div_(sums[0].unsqueeze(1)), place, here)
            ctx.shape = logits.shape
            return (sums[0].log() - sums[1]).sum()

        @staticmethod
        def backward(ctx, g):
            softmax, place, here = ctx.saved_tensors
            return (softmax.scatter_add(1, place, -here.float().unsqueeze(1)) * g).view(ctx.shape), None

    with torch.device("meta"):
        whole = Decoder(config)
    materialise(whole, torch.device("cpu"), seed, {})
    sharded, norms = [], []
    for name, p in whole.named_parameters():
        dim = 1 if name.endswith(("wo.weight", "w_down.weight")) else 0
        if "norm" in name:
            norms.append(p)
        else:
            p.data = p.data.chunk(size, dim)[rank].clone()
            sharded.append(p)
    rows = whole.embedding.weight.shape[0]

    def block(b, x, cos, sin):
        a, f = b.attention, b.feed_forward
        q, k, v = (
            y.unflatten(-1, (-1, a.head_dim)).transpose(1, 2) for y in linears(b.attention_norm(x), a.wq, a.wk, a.wv)
        )
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + Scatter.apply(F.linear(out.transpose(1, 2).flatten(-2), a.wo.weight))
        gate, up = linears(b.feed_forward_norm(x), f.w_gate, f.w_up)
        return x + Scatter.apply(F.linear(F.silu(gate) * up, f.w_down.weight))

    decay = [*sharded]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}], lr=1e-3, fused=True
    )

    def step(batch):
        tokens, labels = batch["tokens"], batch["labels"]
        local = tokens - rank * rows
        here = (local >= 0) & (local < rows)
        x = Scatter.apply(whole.embedding(torch.where(here, local, 0)) * here.unsqueeze(-1))
        cos, sin = rotary_tables(config, torch.arange(tokens.shape[1]).unsqueeze(0), x.dtype)
        for b in whole.layers.values():
            x = block(b, x, cos, sin)
        (logits,) = linears(whole.norm(x), whole.head)
        loss = Loss.apply(logits, labels) / labels.numel()
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in norms])
        dist.all_reduce(flat, group=group)
        for p, g in zip(norms, flat.split([p.numel() for p in norms]), strict=True):
            p.grad.copy_(g.view_as(p.grad))
        square = torch.stack(torch._foreach_norm([p.grad for p in sharded])).square().sum()
        dist.all_reduce(square, group=group)
        norm = (square + flat.square().sum()).sqrt()
        torch._foreach_mul_([p.grad for p in (*sharded, *norms)], min(1.0, 1.0 / (float(norm) + 1e-6)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def ours(config: Any, mesh: Any, seed: int, **techniques: Any) -> Any:
    import torch

    from meshwright.distributed.parallelize import parallelize

    model = parallelize(config, mesh, seed=seed, techniques=techniques)
    optimizer = torch.optim.AdamW(model.make_parameter_groups(), lr=1e-3, fused=True)

    def step(batch):
        loss = model.forward_backward(batch)
        model.optimizer_step(optimizer, 1.0)
        return float(loss)

    step.model = model  # type: ignore[attr-defined]
    return step


def measure(dim: int, rounds: int, seq: int, rows: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from meshwright.distributed.setup import init_distributed
    from meshwright.models.decoder_config import DecoderConfig
    from meshwright.planning.layout import Layout

    config = DecoderConfig(512, dim, 4, 8, 8, 3 * dim, seq)
    mesh = init_distributed(Layout(dp_shard=1, tp=TP))
    steps = {
        "by hand, kept": by_hand(config, mesh, 0),
        "by hand, gathered again": by_hand(config, mesh, 0, regather=True),
        "ours, kept": ours(config, mesh, 0, regather=False),
        "ours, gathered again": ours(config, mesh, 0),
    }
    generator = torch.Generator().manual_seed(0)
    batch = {key: torch.randint(0, 512, (rows, seq), generator=generator) for key in ("tokens", "labels")}
    losses = {name: [step(batch) for _ in range(3)] for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        names = list(steps) if number % 2 else list(steps)[::-1]
        for name in names:
            dist.barrier()
            begun = time.process_time()
            for _ in range(3):
                steps[name](batch)
            times[name].append(time.process_time() - begun)
    return {"losses": losses, "times": times, "tokens": 3 * rows * seq, "kept": kept_elements(config, mesh, rows, seq)}


def kept_elements(config: Any, mesh: Any, rows: int, seq: int) -> dict[str, float]:
    """Elements that autograd keeps for one block on one rank, parameters apart, against the formula of the usual
    account.
    """
    import torch

    step = ours(config, mesh, 0)
    model = step.model.parts[0]
    tokens = torch.zeros((rows, seq), dtype=torch.int64)
    kept: dict[int, int] = {}
    parameters = {p._local_tensor.untyped_storage().data_ptr() for p in model.parameters()}
    inside = [False]

    def pack(x):
        if inside[0] and x.is_floating_point() and x.untyped_storage().data_ptr() not in parameters:
            kept[x.untyped_storage().data_ptr()] = max(
                x.untyped_storage().nbytes() // x.element_size(), kept.get(x.data_ptr(), 0)
            )
        return x

    block = model.layers["1"]
    handles = [
        block.register_forward_pre_hook(lambda *a: inside.__setitem__(0, True)),
        block.register_forward_hook(lambda *a: inside.__setitem__(0, False)),
    ]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = model(tokens)
    for handle in handles:
        handle.remove()
    del output
    c, own = config, rows * seq / TP
    usual = own * (8 * c.dim + 2 * c.n_kv_heads * c.head_dim + 4 * c.hidden_dim + c.n_heads)
    return {"kept": sum(kept.values()), "account": usual, "ratio": sum(kept.values()) / usual}


def bound(ratios: list[float]) -> float:
    draws = random.Random(0)
    medians = sorted(statistics.median(draws.choices(ratios, k=len(ratios))) for _ in range(1000))
    return medians[949]


def main() -> int:
    from meshwright.distributed.process.workers import WorkerPool

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--dims", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4)
    asked = parser.parse_args()
    worst = 0.0
    for dim in asked.dims:
        with WorkerPool(TP) as pool:
            by_rank = pool.run(measure, dim, asked.rounds, asked.seq, asked.rows, world=TP, timeout=1800)
        totals = {
            name: [sum(t) for t in zip(*(r["times"][name] for r in by_rank), strict=True)]
            for name in by_rank[0]["times"]
        }
        print(
            f"dim {dim}, {asked.rows} × {asked.seq} tokens, {asked.rounds} paired rounds; losses {by_rank[0]['losses']}"
        )
        for name, other in COMPARED:
            ratios = [mine / theirs for mine, theirs in zip(totals[name], totals[other], strict=True)]
            print(
                f"  CPU time of {name} / {other}: median {statistics.median(ratios):.3f}, 95 % bound"
                f" {bound(ratios):.3f}"
            )
            worst = (
                max(worst, statistics.median(ratios)) if name.partition(", ")[2] == other.partition(", ")[2] else worst
            )
        print(f"  kept for backward by a block: {by_rank[0]['kept']}")
    return int(worst > 1.05)


if __name__ == "__main__":
    raise SystemExit(main())
