"""Moments in few bits: on every layout torchao's own, to the last bit, of what each rank has.

And no other switch is lost on the way.
"""

from __future__ import annotations

import pytest
import torch
from support.laid_out import own_rows
from support.ranks import ranks
from support.states import BATCHES, LAYOUTS, Held, adamw, beside_torchao, bits, held, laid_out, train, uncompiled
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.checkpoint.state import as_values
from meshwright.core.errors import ConfigError
from meshwright.distributed.memory.account import MemoryAccount
from meshwright.distributed.optimizer.low_bit import SIGNED, TorchaoAdamW
from meshwright.distributed.weights.shards import memory_of
from meshwright.planning.memory import MemoryUse as Kind
from meshwright.planning.memory import plan_memory
from meshwright.planning.optimizer import OptimizerPlan


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("word", ["8bit", "4bit"])
def test_every_layout_steps_its_shards_as_torchao_does(spmd, layout, word):
    ranks = spmd(LAYOUTS[layout][0], beside_torchao, layout, word)
    assert all(found.differ == [] for found in ranks), ranks
    assert all(found.rounded for found in ranks) and any(found.whole for found in ranks), (
        "some moments are in few bits, some too small"
    )


# --- what it is in whole numbers


def first_step(layout: str, word: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights after one step, and the largest element of each block's first moment's error, as a share of the block's
    largest.
    """
    with uncompiled():
        model = laid_out(layout, {"optimizer_state": word})
        optimizer = adamw(model)
        train(model, optimizer, range(1))
        return {name: whole(p) for name, p in model.named_parameters()}, {
            f"{name}/{key}": whole(as_values(optimizer.state[p][key], p))
            for name, p in model.named_parameters()
            for key in SIGNED
        }


@pytest.mark.all
@pytest.mark.parametrize("word", ["8bit", "4bit"])
def test_a_layout_is_as_far_from_one_process_in_full_precision_as_codes_lie_apart(spmd, word):
    """The first update is computed before its moments are rounded: groups, rates, decay and clipping are AdamW's own.
    The moments then are off by half the way to the next code at most, times the largest element of the block, which
    is at most that of all.
    """
    ((weights, moments),) = spmd(1, first_step, "one", "full")
    for layout in ("one", "FSDP2 + TP"):
        got, kept = spmd(LAYOUTS[layout][0], first_step, layout, word)[0]
        for name, weight in weights.items():
            torch.testing.assert_close(got[name], weight, rtol=1e-5, atol=1e-6)
        for name, moment in moments.items():
            furthest = (kept[name] - moment).abs().max()
            assert furthest <= (_apart(word, name.endswith("exp_avg")) + 1e-4) * moment.abs().max(), (layout, name)
    assert any((kept[name] != moment).any() for name, moment in moments.items())


def _apart(word: str, signed: bool) -> float:
    """The farthest that a number from -1 (0, without a sign) to 1 is from a code."""
    table = torch.tensor(_table(word, signed))
    ends = [1.0 + table[0].item()] if signed else [table[0].item()]
    return max([*(table.diff() / 2).tolist(), *ends])


def _table(word: str, signed: bool) -> tuple[float, ...]:
    from torchao.optim import subclass_4bit, subclass_8bit

    kind = {"8bit": subclass_8bit, "4bit": subclass_4bit}[word]
    return kind.get_qmap_signed() if signed else kind.get_qmap_unsigned()


@pytest.mark.all
@ranks(1, timeout=300.0)
def test_what_is_compiled_is_what_torchao_compiles():
    """Where ours, compiled as it is, differs from torchao's own, compiled as it is."""
    word = "8bit"
    import torchao.optim

    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(64, 64, generator=generator), torch.randn(33, 3, generator=generator)]
    mine, theirs = ([torch.nn.Parameter(w.clone()) for w in weights] for _ in range(2))
    kind = {"8bit": torchao.optim.AdamW8bit, "4bit": torchao.optim.AdamW4bit}[word]
    ours, other = TorchaoAdamW([*mine], OptimizerPlan(word), lr=0.01), kind([*theirs], lr=0.01)
    for _ in range(3):
        for p, q in zip(mine, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        ours.step()
        other.step()
    states = [
        f"{n}/{key}"
        for n, (p, q) in enumerate(zip(mine, theirs, strict=True))
        for key in SIGNED
        if not all(map(torch.equal, bits(ours.state[p][key]), bits(other.state[q][key])))
    ]
    found = [str(n) for n, (p, q) in enumerate(zip(mine, theirs, strict=True)) if not torch.equal(p, q)], states
    assert found == ([], [])


def parameters_elsewhere(offloads: bool) -> Held:
    with uncompiled():
        model = laid_out("FSDP2", {"optimizer_state": "8bit", "cpu_offload": offloads})
        optimizer = adamw(model)
        return held(model, optimizer, train(model, optimizer, range(3)))


@pytest.mark.all
def test_parameters_in_host_memory_change_nothing(spmd):
    for one, other in zip(*(spmd(2, parameters_elsewhere, offloads) for offloads in (False, True)), strict=True):
        assert other.differs_from(one) == [] and other.losses == one.losses


# --- what does not fit


@ranks(1)
def test_an_optimizer_that_would_do_otherwise_than_the_plan_says_is_refused():
    said = {}
    model = laid_out("one", {"optimizer_state": "8bit"})
    model.forward_backward(BATCHES(0))
    for name, optimizer in {
        "torch's": torch.optim.AdamW(model.parameters(), lr=0.1),
        "other bits": TorchaoAdamW(model.parameters(), OptimizerPlan("4bit"), lr=0.1),
    }.items():
        with pytest.raises(ConfigError) as caught:
            model.optimizer_step(optimizer)
        said[name] = str(caught.value)
    assert (
        "laid out with techniques.optimizer_state = 8bit" in said["torch's"]
        and "this AdamW would do otherwise" in said["torch's"]
    )
    assert "this TorchaoAdamW would do otherwise" in said["other bits"]


# --- skipped steps


def skips() -> tuple[bool, list[str], list[str]]:
    """A step whose loss overflows: skipped, and what differs afterwards; what differs after the next one."""
    with uncompiled():
        model = laid_out(
            "FSDP2", {"optimizer_state": "8bit", "precision": {"compute": "float16", "loss_scale": 2.0**120}}
        )
        optimizer = adamw(model)
        model.forward_backward(own_rows(model, BATCHES(0)))
        before = held(model, optimizer, [])
        skipped = model.optimizer_step(optimizer).skipped
        after = held(model, optimizer, [])
        model.loss_scale.restore({**model.loss_scale.state(), "value": 1024.0})
        train(model, optimizer, range(1), 1e-4)
        stepped = held(model, optimizer, [])
        return (
            skipped,
            after.differs_from(before),
            [k for k in before.tensors if not torch.equal(stepped.tensors[k][0], before.tensors[k][0])],
        )


def test_a_step_that_is_skipped_leaves_weights_and_moments_alone(spmd):
    for skipped, changed, stepped in spmd(2, skips):
        assert skipped and changed == [] and stepped


# --- memory


def bytes_held(layout: str, word: str, master: str) -> tuple[int, int, int]:
    """Of the optimizer: held, planned, and as the account says."""
    with uncompiled():
        techniques = {"optimizer_state": word, "precision": {"master": master, "compute": master, "reduce": "float32"}}
        model = laid_out(layout, techniques)
        optimizer = adamw(model)
        train(model, optimizer, range(1))
        account = MemoryAccount(model.parts, [256])
        account.add_optimizer(optimizer)
        found = sum(
            plain.nbytes for state in optimizer.state.values() for value in state.values() for plain in memory_of(value)
        )
        return found, plan_memory(model.plan).optimizer, account.most[Kind.OPTIMIZER]


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
@pytest.mark.parametrize("word", ["8bit", "4bit"])
@pytest.mark.parametrize("layout", ["DDP", "FSDP2", "FSDP2 + TP", "PP + FSDP2", "EP"])
def test_the_plan_estimates_what_is_held(spmd, layout, word, master):
    figures = spmd(LAYOUTS[layout][0], bytes_held, layout, word, master)
    most = max(found for found, _, _ in figures)
    planned = {planned for _, planned, _ in figures}
    assert len(planned) == 1 and most == pytest.approx(planned.pop(), rel=0.01), figures
    assert all(account == found for found, _, account in figures)
