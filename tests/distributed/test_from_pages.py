"""Pages "from another system to meshwright": their scripts give the losses of one plain process, and of that system."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import re
import runpy
import sys
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.from_pages import PAGES as DOCS
from support.from_pages import SCRIPTS, page_diff, script, script_diff

from meshwright.core.config import public_keys
from meshwright.distributed.process.world import STORE
from meshwright.training.config import Config

TOLERANCE = 1e-6
"""Largest relative difference of a loss in float32."""
PAGES = {
    "fsdp2": (2, "your_model", "torch"),
    "torchtitan": (4, "your_model", "torchtitan"),
    "automodel": (2, "your_model", "nemo_automodel"),
    "optimus": (2, "YourDecoder", "optimus_dl"),
    "kempnerforge": (2, "YourDecoder", "kempnerforge"),
}
"""Page -> its ranks, the model of its scripts, and the package that the first script needs."""


def printed_by(name: str) -> list[float]:
    """Start a script on this rank, as torchrun would; return the numbers that it prints.

    Ranks of the pool meet in a file, where those of torchrun have an address.
    """
    printed, initialize = io.StringIO(), dist.init_process_group
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    here = functools.partial(initialize, "gloo", f"file://{os.environ[STORE]}", rank=rank, world_size=ranks)
    dist.init_process_group = lambda *args, **given: initialize(*args, **given) if args or given else here()
    if name == "torchtitan_before" and not torch.cuda.is_available():
        from torchtitan.tools import utils  # pyright: ignore[reportMissingImports]

        utils.device_type = "cpu"  # it takes CUDA for the device of a machine that has none
    sys.path.insert(0, str(SCRIPTS))
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(script(name)), run_name="__main__")
    finally:
        sys.path.remove(str(SCRIPTS))
        dist.init_process_group = initialize
    return [float(line) for line in printed.getvalue().split()]


@cache
def of_one_process(model_name: str) -> list[float]:
    """The losses of plain torch on all rows."""
    yours = runpy.run_path(str(script("yours")))
    model = yours[model_name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for batch in yours["your_batches"](0, 1):
        output = model(batch["input_ids"])
        logits = output if isinstance(output, torch.Tensor) else output.logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check(losses: list[float], model: str) -> None:
    wanted = of_one_process(model)
    assert len(wanted) == 20 and wanted[-1] < 0.9 * wanted[0]
    assert losses == pytest.approx(wanted, rel=TOLERANCE)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_prints_the_difference_of_its_scripts(page):
    assert page_diff(page) == script_diff(page)


def test_torchtitans_keys_have_counterparts():
    lines = (DOCS / "torchtitan.md").read_text().splitlines()
    named = [re.match(r"\| `\S+` \| `(\S+)`", line).group(1) for line in lines if line.startswith("| `")]
    assert len(named) > 20 and set(named) <= set(public_keys(Config))


@pytest.mark.all
@pytest.mark.parametrize("page", PAGES)
def test_a_changed_script_gives_the_losses_of_one_process(spmd, page):
    ranks, model, _ = PAGES[page]
    check(spmd(ranks, printed_by, f"{page}_after")[0], model)


@pytest.mark.first("torchtitan")
@pytest.mark.parametrize("page", PAGES)
def test_the_other_system_gives_the_same_losses(spmd, page):
    ranks, model, package = PAGES[page]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: docs/from/{page}.md says when this was tried with it")
    check(spmd(ranks, printed_by, f"{page}_before")[0], model)
