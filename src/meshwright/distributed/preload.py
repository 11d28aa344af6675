"""What the fork server imports once, so that each worker starts with it: torch and our distributed floor. Starts no threads."""

import torch._dynamo  # fully_shard and the optimizers import it at first use
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.nn.parallel  # noqa: F401

import meshwright.distributed.parallelize  # noqa: F401
