"""Train with Optimus-DL's transforms: ``torchrun --nproc-per-node 2 examples/from/optimus_before.py``."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from optimus_dl.modules.distributed.mesh import MeshCollective
from optimus_dl.modules.model_transforms import build_model_transform
from optimus_dl.modules.model_transforms.distributed import FullyShardTransformConfig
from torch.distributed.fsdp import fully_shard
from yours import YourDecoder, your_batches


class Model(YourDecoder):
    """Shards its layers one by one."""

    def fully_shard(self, **options):
        for layer in self.layers.values():
            fully_shard(layer, **options)


dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
collective = MeshCollective(rank, ranks, ranks, rank, "cpu")
config = FullyShardTransformConfig(_name="fully_shard", reshard_after_forward=True)
model = build_model_transform(config, collective=collective, device=torch.device("cpu")).apply(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for batch in your_batches(rank, ranks):
    halves = [{key: value.chunk(2)[half] for key, value in batch.items()} for half in range(2)]
    mean = torch.zeros(())
    for half in halves:
        with model.accumulation_context(half is halves[-1]):
            loss = F.cross_entropy(model(half["input_ids"]).flatten(0, 1), half["labels"].flatten()) / 2
            loss.backward()
        mean += loss.detach() / ranks
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(mean)
    if rank == 0:
        print(float(mean))
dist.destroy_process_group()
