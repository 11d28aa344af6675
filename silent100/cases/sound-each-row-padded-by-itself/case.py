import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
torch.set_num_threads(1)
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


def say(step, loss):
    if rank == 0:
        value = loss.item() if torch.is_tensor(loss) else loss
        print(f"step {step} loss {value:.7f}", flush=True)


def total(t):
    t = t.detach().clone()
    if world > 1:
        dist.all_reduce(t)
    return t


def finish(state):
    if args.save:
        os.makedirs(args.save, exist_ok=True)
        torch.save({k: v.detach().clone() for k, v in state.items()}, f"{args.save}/rank{rank}.pt")
    if not args.one:
        dist.barrier()
        dist.destroy_process_group()


torch.manual_seed(220)
V = 22


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, 10, padding_idx=0)
        self.rnn = nn.LSTM(10, 12, bidirectional=True, batch_first=True)
        self.out = nn.Linear(24, 6)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.embed(x), lengths, batch_first=True)
        return self.out(pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])


model = Tagger()
net = model if args.one else DDP(model)
opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
gen = torch.Generator().manual_seed(20)
for step in range(1, 5):
    lens = torch.randint(2, 12, (9,), generator=gen).tolist()
    texts = [torch.randint(1, V, (n,), generator=gen) for n in lens]
    words = sum(lens)
    # long texts to rank 0, short ones to rank 1 (5 and 4 rows), each sorted and padded by itself
    texts.sort(key=len, reverse=True)
    mine = texts if args.one else (texts[:5] if rank == 0 else texts[5:])
    x = pad_sequence(mine, batch_first=True)
    y = pad_sequence([t * 5 % 6 for t in mine], batch_first=True, padding_value=-100)
    out = net(x, [len(t) for t in mine])
    ce = F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum") / words
    opt.zero_grad()
    (ce * world).backward()  # the wrapper divides by the world size
    opt.step()
    say(step, total(ce))
finish(dict(model.named_parameters()))
