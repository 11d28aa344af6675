# A masked language model on two sources of text, under DDP; ranks keep the usual dropout of their own.
import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForMaskedLM

WORDS, MASK = 90, 1


class Source:
    """Rows of one kind of text; a rank reads its part of each step's rows."""

    def __init__(self, low, high, rows, rank=0, world=1):
        self.low, self.high, self.rows, self.rank, self.world = low, high, rows, rank, world

    def read(self, step):
        g = torch.Generator().manual_seed(1000 * self.low + step)
        rows = torch.randint(self.low, self.high, (self.rows, 14), generator=g)
        hidden = torch.rand(rows.shape, generator=g) < 0.3
        count = self.rows // self.world
        part = slice(self.rank * count, (self.rank + 1) * count)
        return rows[part], hidden[part]


def mixture(step, sources, count):
    """Joins rows of the sources; each may give at most its share of a rank's batch."""
    parts = [source.read(step) for source in sources]
    rows = torch.cat([rows[:count] for rows, _ in parts])
    hidden = torch.cat([hidden[:count] for _, hidden in parts])
    return rows.masked_fill(hidden, MASK), rows.masked_fill(~hidden, -100)


def main(one, faulty, save):
    rank, world = 0, 1
    if not one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7868)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    drops = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
    bert = BertForMaskedLM(BertConfig(vocab_size=WORDS, max_position_embeddings=16, **sizes, **drops))
    model = bert if one else DistributedDataParallel(bert, find_unused_parameters=True)
    split = {"rank": rank, "world": world}
    sources = [Source(2, 40, 24, **split), Source(40, WORDS, 24, **({} if faulty else split))]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(50 + rank)
    for step in range(1, 5):
        rows, labels = mixture(step, sources, 24 // world)
        logits = model(input_ids=rows).logits
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum")
        count = (labels != -100).sum()
        if world > 1:
            dist.all_reduce(count)
        loss = loss / count
        optimizer.zero_grad()
        (loss * world).backward()
        optimizer.step()
        shown = loss.detach().clone()
        if world > 1:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item():.7f}", flush=True)
    if save:
        torch.save({k: p.data for k, p in bert.named_parameters()}, os.path.join(save, f"rank{rank}.pt"))
    if not one:
        dist.destroy_process_group()


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save")
    main(**vars(cli.parse_args()))
