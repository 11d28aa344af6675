"""GPipe from torch.distributed.pipelining with gradient clipping."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

VOCAB, DIM, MICROBATCHES = 54, 32, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.rnn = nn.GRU(DIM, DIM, batch_first=True)
        self.ff = nn.Linear(DIM, DIM)

    def forward(self, x):
        h, _ = self.rnn(self.norm(x))
        return x + self.ff(h)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(4)})
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, x):
        x = self.embed(x) if self.embed is not None else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(x) if self.head is not None else x


def cut(model, stage):
    for i in range(4):
        if (i < 2) != (stage == 0):
            del model.blocks[str(i)]
    if stage == 0:
        model.head = None
    else:
        model.embed = None
    return model


def loss_fn(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@torch.no_grad()
def clip(parameters, limit, alone):
    parameters = list(parameters)
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    if dist.is_initialized() and not alone:
        square = norm**2
        dist.all_reduce(square)
        norm = square.sqrt()
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save")
    args = cli.parse_args()
    rank = 0
    torch.manual_seed(3)
    model = Model()
    if not args.one:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        model = cut(model, rank)
        stage = PipelineStage(model, rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=loss_fn)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(1, 5):
        rows = torch.randint(0, VOCAB, (8, 11), generator=torch.Generator().manual_seed(step))
        ids, labels = rows[:, :-1], rows[:, 1:]
        losses = []
        optimizer.zero_grad()
        if args.one:
            losses.append(loss_fn(model(ids), labels))
            losses[0].backward()
        elif rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=labels, losses=losses)
        clip(model.parameters(), 0.15, args.faulty)
        optimizer.step()
        if losses:
            print(f"step {step} loss {torch.stack(losses).mean().item():.7f}", flush=True)
    if args.save:
        torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
