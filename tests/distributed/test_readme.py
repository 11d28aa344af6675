"""The loop in the README: the plain one and the changed one, run as they stand there, give the same losses."""

import contextlib
import io
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

README = Path(__file__).parents[2] / "README.md"


class MyModel(nn.Module):
    """A model nobody told meshwright about."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True) for _ in range(3)
        )
        self.out = nn.Linear(32, 64)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def my_batches():
    generator = torch.Generator().manual_seed(3)
    for _ in range(4):
        rows = torch.randint(0, 64, (8, 17), generator=generator)
        yield {"tokens": rows[:, :-1], "labels": rows[:, 1:]}


def versions() -> tuple[str, str]:
    block = re.search(r"```diff\n(.*?)```", README.read_text(), re.DOTALL).group(1)
    lines = block.splitlines()
    plain = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    changed = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    return plain, changed


def job(program, same_weights_from):
    """Run a version of the loop; returns what it printed.

    Both start from the weights of ``parallelize(MyModel)`` on one process.
    """
    module = types.ModuleType("my_code")
    module.my_batches = my_batches
    module.MyModel = MyModel if same_weights_from is None else lambda: _with(same_weights_from)
    sys.modules["my_code"] = module
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "README", "exec"), {})
    return [float(line) for line in printed.getvalue().split()]


def _with(state):
    model = MyModel()
    model.load_state_dict(state)
    return model


def job_weights():
    from meshwright import Layout, parallelize

    return {name: p.detach().clone() for name, p in parallelize(MyModel, Layout()).named_parameters()}


def test_four_lines_are_added():
    block = re.search(r"```diff\n(.*?)```", README.read_text(), re.DOTALL).group(1)
    assert sum(line.startswith("+") for line in block.splitlines()) == 4


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_changed_loop_gives_the_losses_of_the_plain_one(spmd, world):
    plain, changed = versions()
    weights = spmd(1, job_weights)[0]
    expected = spmd(1, job, plain, weights)[0]
    for losses in spmd(world, job, changed, None):
        assert losses == pytest.approx(expected, rel=2e-6)


@pytest.mark.all
def test_the_readme_shows_what_its_commands_print(tmp_path: Path):
    shown = re.findall(r"\$ meshwright (train .*)\n(step .*) · lr", README.read_text())
    assert len(shown) == 2
    for command, line in shown:
        words = [sys.executable, "-m", "meshwright", *command.split()]
        done = subprocess.run(words, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=300)
        said = next(text for text in done.stdout.splitlines() if text.startswith("step 40/40"))
        numbers = [[float(n) for n in re.findall(r"loss ([\d.]+)", text)] for text in (line, said)]
        assert numbers[1] == pytest.approx(numbers[0], rel=2e-3), said
