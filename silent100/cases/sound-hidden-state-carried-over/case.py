"""Truncated backpropagation through time over ten parallel streams."""

import argparse

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--save")


class CharRnn(nn.Module):
    def __init__(self, chars=30, width=36):
        super().__init__()
        self.embed, self.out = nn.Embedding(chars, 20), nn.Linear(width, chars)
        self.lstm = nn.LSTM(20, width, num_layers=2, batch_first=True)

    def forward(self, x, state):
        y, state = self.lstm(self.embed(x), state)
        return self.out(y), tuple(s.detach() for s in state)


class Streams:
    def __init__(self, rank, world, streams=10, length=200):
        text = torch.randint(0, 30, (streams, length), generator=torch.Generator().manual_seed(64))
        self.text = text.tensor_split(world)[rank]

    def windows(self, size):
        for start in range(0, self.text.shape[1] - size, size):
            yield self.text[:, start : start + size], self.text[:, start + 1 : start + size + 1]


def main(args):
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(90)
    rnn, state = CharRnn(), None
    optimizer = torch.optim.SGD(rnn.parameters(), lr=1.0)
    for step, (x, y) in enumerate(Streams(rank, world).windows(12), 1):
        logits, state = rnn(x, state)
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), y)
        rnn.zero_grad()
        loss.backward()
        shown = loss.detach()
        if world > 1:
            grads = torch.cat([p.grad.flatten() for p in rnn.parameters()])
            dist.all_reduce(grads)
            place = 0
            for p in rnn.parameters():
                p.grad.copy_(grads[place : place + p.numel()].view_as(p) / world)
                place += p.numel()
            dist.all_reduce(shown)
        nn.utils.clip_grad_norm_(rnn.parameters(), 0.25)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
        if step == 6:
            break
    if args.save:
        torch.save(rnn.state_dict(), f"{args.save}/rank{rank}.pt")
    if world > 1:
        dist.destroy_process_group()


main(parser.parse_args())
