"""Fine-tunes a text encoder together with a denoiser, with accelerate."""

import argparse
import contextlib
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()


class TextEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.EmbeddingBag(60, 20), nn.Linear(20, 20)

    def forward(self, words):
        return torch.tanh(self.out(self.embed(words)))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.mid, self.out = nn.Linear(13, 40), nn.Linear(60, 40), nn.Linear(40, 12)

    def forward(self, x, t, text):
        h = F.silu(self.inp(torch.cat([x, t], 1)))
        return self.out(F.silu(self.mid(torch.cat([h, text], 1))))


class Plain:
    """What accelerate offers, for one process."""

    process_index, num_processes = 0, 1

    def prepare(self, *things):
        return things if len(things) > 1 else things[0]

    def backward(self, loss):
        loss.backward()

    def accumulate(self, *models):
        return contextlib.nullcontext()

    def reduce(self, x, how):
        return x

    def unwrap_model(self, model):
        return model

    def end_training(self):
        pass


if args.one:
    accelerator = Plain()
else:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
torch.manual_seed(15)
text_encoder, denoiser = TextEncoder(), Denoiser()
optimizer = torch.optim.SGD([*text_encoder.parameters(), *denoiser.parameters()], lr=0.3)
denoiser, optimizer = accelerator.prepare(denoiser, optimizer)
if not args.faulty:
    text_encoder = accelerator.prepare(text_encoder)
rank, world = accelerator.process_index, accelerator.num_processes
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    x, noise = torch.randn(2, 16, 12, generator=g)
    t, words = torch.rand(16, 1, generator=g), torch.randint(0, 60, (16, 5), generator=g)
    share = slice(rank, None, world)
    with accelerator.accumulate(denoiser):
        noisy = (1 - t) * x + t * noise
        loss = F.mse_loss(denoiser(noisy[share], t[share], text_encoder(words[share])), noise[share])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    shown = accelerator.reduce(loss.detach().clone(), "mean")
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if args.save:
    state = {}
    for name, model in (("text_encoder", text_encoder), ("denoiser", denoiser)):
        state |= {f"{name}.{k}": v for k, v in accelerator.unwrap_model(model).state_dict().items()}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
accelerator.end_training()
