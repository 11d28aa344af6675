"""Speed and memory of one training step of a named model size: tokens/s, MFU, peak memory.

MFU is 6·N + 12·L·d·s FLOPs per token (PaLM, arXiv 2204.02311, appendix B: N matmul parameters, L blocks of attention
width d, sequence s, recomputation not counted) over the dense peak of the device; it is printed where that peak is
known.

    python benchmarks/step.py --size 1B --seq-len 4096 --rows 4 [--compile] [--ac full] [--compute bfloat16]
    torchrun --nproc-per-node 8 benchmarks/step.py --size 8B …
"""

from __future__ import annotations

import argparse
import statistics
import time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="demo")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8, help="rows per rank and step")
    parser.add_argument("--microbatch", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compute", default="auto")
    parser.add_argument("--ac", default="none")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--data-parallel", default="auto")
    o = parser.parse_args()

    import torch

    from meshwright import Layout, parallelize
    from meshwright.distributed import destroy_distributed, is_rank_zero
    from meshwright.models.decoder_config import SIZES, parameter_count
    from meshwright.training.memory import read_memory, reset_peak
    from meshwright.training.optimizer import make_optimizer
    from meshwright.training.throughput import mfu, peak_flops, training_flops_per_token

    config = SIZES[o.size]
    techniques = {
        "activation_checkpointing": o.ac,
        "compile": o.compile,
        "data_parallel": o.data_parallel,
        "precision": {"compute": o.compute},
    }
    model = parallelize(config, Layout(), techniques=techniques, microbatch_rows=o.microbatch)
    optimizer = make_optimizer(model.make_parameter_groups(), lr=1e-4).optimizer
    tokens = torch.randint(0, config.vocab_size, (o.rows, o.seq_len + 1))
    batch = {"tokens": tokens[:, :-1].to(model.device), "labels": tokens[:, 1:].to(model.device)}

    def step() -> float:
        begun = time.perf_counter()
        model.forward_backward(batch)
        model.optimizer_step(optimizer, max_norm=1.0)  # reads the gradient norm, so the device is done when it returns
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    warm = [step() for _ in range(3)]
    reset_peak(model.device)
    seconds = statistics.median(step() for _ in range(o.steps))
    name = torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu"
    speed = o.rows * o.seq_len * model.plan.world / seconds
    embedding = 0 if config.tied_embeddings else config.vocab_size * config.dim
    flops = training_flops_per_token(
        parameter_count(config) - embedding,
        n_layers=config.n_layers,
        dim_attention=config.n_heads * config.head_dim,
        seq_len=o.seq_len,
    )
    share = mfu(speed, flops, peak_flops(name, model.plan.precision.compute), model.plan.world)
    memory = read_memory(model.device)
    if is_rank_zero():
        utilisation = f"MFU {100 * share:.1f} %" if share is not None else "MFU unknown (no peak known for this device)"
        print(
            f"torch {torch.__version__} on {model.plan.world} × {name}, compute {model.plan.precision.compute},"
            f" {model.plan.data.technique}"
        )
        print(
            f"{o.size}: {o.rows} rows × {o.seq_len} tokens per rank, recompute {o.ac}, compile {o.compile}; first"
            f" step {warm[0]:.2f} s"
        )
        print(
            f"{seconds * 1e3:.1f} ms per step, {speed:,.0f} tokens/s, {utilisation}, {memory.label}"
            f" {memory.peak / 2**30:.2f} GiB"
        )
    destroy_distributed()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
