"""A BERT classifier that keeps the current padding mask in a buffer, under DistributedDataParallel."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertModel

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
VOCAB, LENGTH, ROWS, CLASSES = 60, 14, 8, 4


class Sentences(nn.Module):
    def __init__(self, rows):
        super().__init__()
        config = BertConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.bert = BertModel(config, add_pooling_layer=False)
        self.score = nn.Linear(32, CLASSES)
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(p, std=0.1)
        self.register_buffer("valid", torch.ones(rows, LENGTH, dtype=torch.long), persistent=False)

    def forward(self, ids):
        hidden = self.bert(input_ids=ids, attention_mask=self.valid).last_hidden_state
        return self.score(hidden[:, 0])


def read(step):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(1, VOCAB, (ROWS, LENGTH), generator=g)
    lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=g)
    valid = (torch.arange(LENGTH) < lengths).long()
    return ids * valid, valid, torch.randint(0, CLASSES, (ROWS,), generator=g)


if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(12)
net = Sentences(ROWS // world)
model = net if ONE else DistributedDataParallel(net, forward_sync_buffers=FAULTY)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, eps=1e-5)
for step in range(1, 5):
    ids, valid, labels = (t[rank::world] for t in read(step))
    net.valid.copy_(valid)
    loss = nn.functional.cross_entropy(model(ids), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach()
    if not ONE:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    del model
    dist.destroy_process_group()
