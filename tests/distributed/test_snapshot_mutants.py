"""A run that resumes from a save beside training computes what the run that went on did; broken savers do not."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from support import snapshot_mutants
from support.odd import moments, odd, train, weights
from support.thread_writer import on_a_thread

from meshwright import load
from meshwright.checkpoint.background import Saver
from meshwright.checkpoint.folder import CheckpointFolder
from meshwright.core.errors import MeshwrightError

MUTANTS = [
    name
    for name, value in vars(snapshot_mutants).items()
    if getattr(value, "__module__", "") == snapshot_mutants.__name__ and callable(value) and name[0] != "_"
]
LIMITED = {"an_old_portion_twice", "finished_for_the_portion_only"}
"""They show where host memory does not hold the state."""
PORTIONS = 1 << 13
STEPS, KEPT = 4, 2


def adam(model):
    return torch.optim.AdamW([{"params": list(model.parameters()), "lr": 1e-2}])


def seen_of(model, optimizer) -> dict:
    return weights(model) | moments(model, optimizer)


def resumed_job(folder: str, mutant: str, host_memory: int) -> list[str]:
    """Names of what is another in a run resumed from one of the kept checkpoints than in the run that went on."""
    made = getattr(snapshot_mutants, mutant)() if mutant else nullcontext()
    run, wrong = CheckpointFolder(Path(folder)), []
    with on_a_thread(), made:
        model = odd("fsdp2")
        optimizer, saver, after, losses = adam(model), Saver(host_memory, say=lambda text: None), {}, []
        for step in range(1, STEPS + 1):
            losses += train(model, optimizer, range(step - 1, step))
            for _, buffer in model.named_buffers():
                buffer.fill_(step + 0.5)
            optimizer.param_groups[0]["lr"] = 1e-2 / step
            path = run.of_step(step)
            handle = saver.begin(model, path, optimizer, {"step": step}, in_run=True, then=lambda: run.keep_last(KEPT))
            for _, buffer in model.named_buffers():
                buffer.fill_(-1)
            train(model, optimizer, range(step, step + 1))
            after[step] = seen_of(model, optimizer)
            handle.over.wait(60)
            if handle.problem:
                wrong.append(f"step {step}: {handle.problem}")
        saver.close()
    for step in range(STEPS - KEPT + 1, STEPS + 1):
        model = odd("fsdp2", seed=5)
        optimizer = adam(model)
        try:
            load(model, run.of_step(step), optimizer=optimizer)
        except (MeshwrightError, RuntimeError) as error:  # torch's, of a random stream that is none
            wrong.append(f"step {step}: {error}")
            continue
        buffers = {name: float(buffer.float().mean()) for name, buffer in model.named_buffers()}
        wrong += [f"step {step}: {name} = {value}" for name, value in buffers.items() if int(value) != step]
        for _, buffer in model.named_buffers():
            buffer.fill_(-1)
        train(model, optimizer, range(step, step + 1))
        found = seen_of(model, optimizer)
        wrong += [f"step {step}: {name}" for name, value in after[step].items() if not torch.equal(found[name], value)]
    return wrong


@pytest.mark.parametrize("host_memory", [0, PORTIONS], ids=["whole", "portions"])
def test_the_original_resumes_as_the_run_that_went_on(spmd, tmp_path, host_memory):
    assert spmd(2, resumed_job, str(tmp_path), "", host_memory) == [[], []]


@pytest.mark.kills("snapshot", "name")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_resumes_as_another_run(spmd, tmp_path, name):
    found = spmd(2, resumed_job, str(tmp_path), name, PORTIONS if name in LIMITED else 0)
    assert any(found), name
