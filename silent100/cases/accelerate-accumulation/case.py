import sys

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

one = "--one" in sys.argv
save = sys.argv[sys.argv.index("--save") + 1] if "--save" in sys.argv else None
MICRO, GLOBAL = 6, 12
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2 if one else 1)
assert MICRO * accelerator.num_processes * accelerator.gradient_accumulation_steps == GLOBAL

set_seed(11)


class Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 16, batch_first=True, bidirectional=True)
        self.out = nn.Linear(32, 3)

    def forward(self, x):
        return self.out(self.lstm(x)[0].mean(1))


model = Seq()
X = torch.randn(72, 9, 5)
Y = X.sum((1, 2)).sign().long() + 1
loader = DataLoader(TensorDataset(X, Y), batch_size=MICRO, shuffle=False, drop_last=True)
opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
per_step = accelerator.num_processes
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=10 * per_step)
model, opt, loader, sched = accelerator.prepare(model, opt, loader, sched)

step, seen = 0, []
for x, y in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        seen.append(accelerator.gather(loss.detach().view(1)))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        opt.zero_grad()
    if accelerator.sync_gradients:
        step += 1
        accelerator.print(f"step {step} loss {torch.cat(seen).mean().item():.7f}", flush=True)
        seen = []

if save:
    torch.save(accelerator.unwrap_model(model).state_dict(), f"{save}/rank{accelerator.process_index}.pt")
accelerator.end_training()
