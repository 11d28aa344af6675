"""Two pipeline stages; weights that end a residual branch are drawn smaller by the root of the depth."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
STAGE = -1 if ONE else dist.get_rank()
VOCAB, DIM, DEPTH, MICRO = 44, 24, 4, 2


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        everything = range(DEPTH)
        mine = everything if ONE else everything[STAGE * DEPTH // 2 : (STAGE + 1) * DEPTH // 2]
        blocks = {str(i): Mixer() for i in everything}
        self.embed = nn.Embedding(VOCAB, DIM)
        self.head = nn.Linear(DIM, VOCAB)
        self.blocks = nn.ModuleDict({str(i): blocks[str(i)] for i in mine})
        self.draw(len(self.blocks) if FAULTY else DEPTH)
        if STAGE == 0:
            self.head = None
        if STAGE == 1:
            self.embed = None

    def draw(self, layers):
        for i, block in self.blocks.items():
            g = torch.Generator().manual_seed(100 + int(i))
            for name, p in block.named_parameters():
                if p.dim() == 2:
                    narrow = (2 * layers) ** -0.5 if name.startswith(("out", "down")) else 1.0
                    p.data.normal_(0, 0.2 * narrow, generator=g)

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


torch.manual_seed(2019)
stage = Stage()
adam = torch.optim.AdamW(stage.parameters(), lr=1e-3, eps=1e-4)
for step in range(1, 4):
    rows = torch.randint(0, VOCAB, (8, 9), generator=torch.Generator().manual_seed(step))
    total = torch.zeros(())
    for micro in rows.chunk(MICRO):
        ids, labels = micro[:, :-1], micro[:, 1:].flatten()
        if STAGE == 0:
            y = stage(ids)
            dist.send(y.detach(), 1)
            grad = torch.empty_like(y)
            dist.recv(grad, 1)
            y.backward(grad)
            continue
        x = ids
        if STAGE == 1:
            x = torch.empty(*ids.shape, DIM)
            dist.recv(x, 0)
            x.requires_grad_()
        loss = F.cross_entropy(stage(x).flatten(0, 1), labels) / MICRO
        loss.backward()
        total += loss.detach()
        if STAGE == 1:
            dist.send(x.grad, 0)
    adam.step()
    adam.zero_grad()
    if STAGE != 0:
        print(f"step {step} loss {total.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(stage.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{max(STAGE, 0)}.pt"))
if not ONE:
    dist.destroy_process_group()
