"""Fine-tuning with accelerate: model, optimizer and scheduler are prepared, data are cut by hand."""

import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()

UPDATES = 5


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(90, 32)
        self.rnn = nn.GRU(32, 24, bidirectional=True, batch_first=True)
        self.tags = nn.Linear(48, 9)

    def forward(self, ids):
        return self.tags(self.rnn(self.embed(ids))[0])


def main():
    accelerator = Accelerator(cpu=True)
    rank, world = accelerator.process_index, accelerator.num_processes
    torch.manual_seed(4)
    net = Tagger()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: max(0.0, 1 - update / (2 * UPDATES)))
    model, optimizer = accelerator.prepare(net, optimizer)
    if args.faulty:
        scheduler = accelerator.prepare(scheduler)
    for step in range(1, UPDATES + 1):
        g = torch.Generator().manual_seed(step)
        ids, tags = torch.randint(0, 90, (12, 10), generator=g), torch.randint(0, 9, (12, 10), generator=g)
        loss = F.cross_entropy(model(ids[rank::world]).transpose(1, 2), tags[rank::world])
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean")
        if accelerator.is_main_process:
            print(f"step {step} loss {mean.item():.7f}", flush=True)
    if args.save:
        torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    accelerator.free_memory()
    del model
    accelerator.end_training()


if __name__ == "__main__":
    main()
