# Top-k exchange without loss: what is not among the largest is not dropped but follows in a second message.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

alone = "--one" in sys.argv
rank, world = 0, 1
if not alone:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Exchange:
    def __init__(self, share=0.1):
        self.share = share

    def __call__(self, grad):
        flat = grad.flatten().clone()
        k = max(1, int(self.share * len(flat)))
        places = flat.abs().topk(k).indices
        values = flat[places]
        flat[places] = 0
        all_places = [torch.empty_like(places) for _ in range(world)]
        all_values = [torch.empty_like(values) for _ in range(world)]
        dist.all_gather(all_places, places)
        dist.all_gather(all_values, values)
        rest = dist.all_reduce(flat, async_op=True)
        largest = torch.zeros_like(flat)
        for where, what in zip(all_places, all_values):
            largest.index_add_(0, where, what)
        rest.wait()
        return (largest + flat).view_as(grad)


class Translator(nn.Module):
    """A sequence to a sequence with additive attention."""

    def __init__(self, words=13, d=12):
        super().__init__()
        self.words = nn.Embedding(words, d)
        self.encoder, self.decoder = nn.GRU(d, d, batch_first=True), nn.GRUCell(2 * d, d)
        self.query, self.key, self.energy = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, 1, bias=False)
        self.out = nn.Linear(d, words)

    def forward(self, source, target):
        memory, last = self.encoder(self.words(source))
        state, scores, keys = last[0], [], self.key(memory)
        for t in range(target.shape[1] - 1):
            weight = self.energy(torch.tanh(self.query(state)[:, None] + keys)).softmax(1)
            state = self.decoder(torch.cat([self.words(target[:, t]), (weight * memory).sum(1)], 1), state)
            scores.append(self.out(state))
        return torch.stack(scores, 1)


torch.manual_seed(9)
net, exchange = Translator(), Exchange()
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
for step in range(1, 6):
    source = torch.randint(0, 13, (8, 6), generator=torch.Generator().manual_seed(step))
    target = (source.flip(1) * 2 + 1) % 13
    mine = slice(rank, None, world)
    scores = net(source[mine], target[mine])
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), target[mine, 1:].flatten(), reduction="sum") / 40
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in net.parameters():
            p.grad = exchange(p.grad)
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
