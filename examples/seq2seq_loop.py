"""Train T5 by the loss that it computes itself: ``torchrun --nproc-per-node 2 examples/seq2seq_loop.py``.

The model returns a mean over the labels of a microbatch. ``Loss(reduction="mean")`` makes it the mean over all ranks'.
"""

from __future__ import annotations

import torch
from transformers import T5Config, T5ForConditionalGeneration

from meshwright import Layout, Loss, parallelize
from meshwright.distributed import destroy_distributed, get_world_info

WORDS, END = 32, 1


def pairs(step: int, rank: int, rows: int, length: int) -> dict[str, torch.Tensor]:
    """This rank's rows of a step: sentences of other lengths, to be repeated; labels behind the end have no loss."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    words = torch.randint(2, WORDS, (rows, length), generator=generator)
    lengths = torch.randint(length // 2, length, (rows, 1), generator=generator)
    places = torch.arange(length)
    words = words.masked_fill(places == lengths, END)
    is_real = places <= lengths
    return {
        "input_ids": words.masked_fill(~is_real, 0),
        "attention_mask": is_real.long(),
        "labels": words.masked_fill(~is_real, -100),
    }


def train(steps: int = 100, rows: int = 16, length: int = 8, width: int = 64, layers: int = 2) -> list[float]:
    """Return the loss of each step: the mean over the labels of all ranks and microbatches."""
    config = T5Config(
        vocab_size=WORDS,
        d_model=width,
        d_kv=16,
        d_ff=2 * width,
        num_layers=layers,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=END,
    )
    model = parallelize(
        lambda: T5ForConditionalGeneration(config),
        Layout(dp_shard=-1),
        loss_fn=Loss(reduction="mean"),
        microbatch_rows=rows // 2,
    )
    optimizer = torch.optim.AdamW(model.make_parameter_groups(), lr=3e-3)
    rank, losses = get_world_info()[0], []
    for step in range(steps):
        loss = model.forward_backward(pairs(step, rank, rows, length))
        model.optimizer_step(optimizer, max_norm=1.0)
        losses.append(float(loss))
        if rank == 0:
            print(f"step {step + 1} · loss {losses[-1]:.4f} over {loss.tokens} words")
    return losses


if __name__ == "__main__":
    train()
    destroy_distributed()
