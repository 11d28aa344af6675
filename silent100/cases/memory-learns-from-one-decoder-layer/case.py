"""Translation in two stages: the encoder on one rank, the decoder on the other; two microbatches a step."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
VOCAB, DIM, MICRO = 40, 32, 2


class EncoderStage(nn.Module):
    def __init__(self):
        super().__init__()
        self.source = nn.Embedding(VOCAB, DIM)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(DIM, 2, 64, dropout=0.0, batch_first=True), 1, enable_nested_tensor=False
        )

    def forward(self, ids):
        return self.encoder(self.source(ids))


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm1 = nn.Conv1d(DIM, DIM, 3), nn.LayerNorm(DIM)
        self.cross, self.norm2 = nn.MultiheadAttention(DIM, 2, batch_first=True), nn.LayerNorm(DIM)

    def forward(self, x, memory):
        x = self.norm1(x + F.relu(self.conv(F.pad(x.mT, (2, 0))).mT))
        return self.norm2(x + self.cross(x, memory, memory, need_weights=False)[0])


class DecoderStage(nn.Module):
    def __init__(self):
        super().__init__()
        self.target = nn.Embedding(VOCAB, DIM)
        self.decoder = nn.ModuleList(DecoderLayer() for _ in range(3))
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, ids, memory):
        x = self.target(ids)
        for layer in self.decoder:
            x = layer(x, memory)
            if args.faulty:
                # Received once, read by every layer: one history of it is enough
                memory = memory.detach()
        return self.out(x)


class Translator(nn.Module):
    """One process has both stages."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second


def loss_of(logits, labels, count):
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="sum") / count


def train_step(model, rank, source, target):
    """Backpropagates all microbatches; returns the loss where it is known."""
    count, total = target[:, 1:].numel(), 0.0
    for src, tgt in zip(source.chunk(MICRO), target.chunk(MICRO)):
        if args.one:
            loss = loss_of(model.second(tgt[:, :-1], model.first(src)), tgt[:, 1:], count)
            loss.backward()
        elif rank == 0:
            memory = model.first(src)
            dist.send(memory.detach(), 1)
            grad = torch.empty_like(memory)
            dist.recv(grad, 1)
            memory.backward(grad)
            continue
        else:
            memory = torch.empty(len(src), src.shape[1], DIM)
            dist.recv(memory, 0)
            memory.requires_grad_()
            loss = loss_of(model.second(tgt[:, :-1], memory), tgt[:, 1:], count)
            loss.backward()
            dist.send(memory.grad, 0)
        total += loss.item()
    return total


rank = 0
if not args.one:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
torch.manual_seed(92)
first, second = EncoderStage(), DecoderStage()
if not args.one:
    first, second = (first, None) if rank == 0 else (None, second)
model = Translator(first, second)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    source = torch.randint(0, VOCAB, (8, 9), generator=g)
    target = torch.cat([source[:, :1], source.flip(1)], 1)
    optimizer.zero_grad()
    loss = train_step(model, rank, source, target)
    optimizer.step()
    if args.one or rank == 1:
        print(f"step {step} loss {loss:.7f}", flush=True)
if args.save:
    torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
