"""Stochastic rounding: on average nothing is lost, copies are rounded alike wherever they lie, and a resumed run
draws the same numbers.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.states import BF16, LAYOUTS, adamw, held, laid_out, local, train, uncompiled

from meshwright import IntegrityError, load, save
from meshwright.core.errors import ConfigError
from meshwright.distributed.optimizer import low_bit
from meshwright.distributed.optimizer.low_bit import TorchaoAdamW, rounded_by
from meshwright.planning.optimizer import OptimizerPlan

ROUNDED = BF16 | {"stochastic_rounding": True}
ONCE = OptimizerPlan(stochastic_rounding=True)


# --- what it does


def test_over_all_numbers_that_can_be_drawn_the_mean_is_the_value_itself():
    every = torch.arange(1 << 16, dtype=torch.int32)
    for value in (1.001, -1.001, 3.14159, 1e-20, -2.5e-39, 0.0, 1.0, 1.99999, 255.9):
        wide = torch.full((1 << 16,), value, dtype=torch.float32)
        found = rounded_by(wide, every).double()
        assert found.mean().item() == wide[0].double().item(), value  # sums of multiples of one power of two: exact
        assert len(found.unique()) <= 2


def test_the_same_numbers_round_as_torchao_does():
    from torchao.optim.quant_utils import _fp32_to_bf16_sr

    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(257, 33, generator=generator)
    noise = torch.randint(0, 1 << 16, wide.shape, dtype=torch.int32, generator=generator)
    with patch.object(torch, "randint", lambda *_, **__: noise):
        theirs = _fp32_to_bf16_sr(wide)
    assert torch.equal(rounded_by(wide, noise), theirs)


def moved(plan: OptimizerPlan, steps: int, rate: float) -> torch.Tensor:
    """How far weights of 1 come by AdamW, whose every update is ``rate``."""
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    made = partial(torch.optim.AdamW, [weight]) if plan == OptimizerPlan() else partial(TorchaoAdamW, [weight], plan)
    optimizer = made(
        lr=rate, weight_decay=0.0, **({"named_parameters": [("w", weight)]} if plan != OptimizerPlan() else {})
    )
    with uncompiled():
        for _ in range(steps):
            weight.grad = torch.full_like(weight, 0.5)
            optimizer.step()
    return 1 - weight.detach().double()


@pytest.mark.parametrize("state", ["full", "8bit"])
def test_updates_below_the_last_bit_move_weights_on_average_where_plain_rounding_stalls(state):
    steps, rate, ulp = 50, 1e-4, 2.0**-8  # below 1; half of it is twenty updates
    assert (moved(OptimizerPlan(), steps, rate) == 0).all()
    far = moved(OptimizerPlan(state, stochastic_rounding=True), steps, rate)
    # each step of each weight is off by chance, with a variance of at most rate · ulp (Bernoulli: p (1 - p) ulp², p =
    # rate / ulp)
    deviation = (steps * rate * ulp / far.numel()) ** 0.5
    assert abs(far.mean().item() - steps * rate) < 5 * deviation < 0.1 * steps * rate


def test_steps_names_and_places_draw_other_numbers():
    weights = [torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = TorchaoAdamW(weights, ONCE, named_parameters=zip("ab", weights, strict=True), seed=1)
    drawn = [optimizer._noise(weight, step) for weight in weights for step in (1, 2)]
    again = TorchaoAdamW(weights, ONCE, named_parameters=zip("ab", weights, strict=True), seed=2)
    drawn.append(again._noise(weights[0], 1))
    for number, one in enumerate(drawn):
        assert one.min() >= 0 and one.max() < 1 << 16 and abs(one.double().mean().item() / (1 << 15) - 1) < 0.05
        for other in drawn[:number]:
            assert (one == other).double().mean() < 0.01
    assert torch.equal(optimizer._noise(weights[0], 1), drawn[0])


def test_the_users_random_stream_is_left_alone():
    weight = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
    optimizer = TorchaoAdamW([weight], ONCE, named_parameters=[("a", weight)])
    weight.grad = torch.ones_like(weight)
    before = torch.get_rng_state()
    with uncompiled():
        optimizer.step()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("wrong", ["nameless", "float32"])
def test_parameters_that_cannot_be_rounded_so_are_refused(wrong):
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.float32 if wrong == "float32" else torch.bfloat16))
    with pytest.raises(ConfigError, match="stochastic rounding is of bfloat16 parameters whose names are given"):
        TorchaoAdamW([weight], ONCE, named_parameters=[("a", weight)] * (wrong == "float32"))
    first = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = TorchaoAdamW([first], ONCE, named_parameters=[("first", first)])
    with pytest.raises(ConfigError, match="stochastic rounding is of bfloat16 parameters whose names are given"):
        optimizer.add_param_group({"params": [weight]})


# --- on layouts


def by_rank(words, seed, step, *place):
    """A mutant: every rank draws from a stream of its own."""
    return 1000 * step + dist.get_rank()


def rounded_on(layout: str, mutated: bool) -> tuple[str, dict[str, torch.Tensor]]:
    """What the audit says after two steps, and the parameters that are here, as bits."""
    with uncompiled(), patch.object(low_bit, "seed_of", by_rank) if mutated else nullcontext():
        model = laid_out(layout, ROUNDED)
        optimizer = adamw(model)
        train(model, optimizer, range(2), max_norm=1e-3)
        said = ""
        try:
            model.audit(optimizer)
        except IntegrityError as error:
            said = str(error)
        return said, {name: local(p.detach()).view(torch.int16).clone() for name, p in model.named_parameters()}


@pytest.mark.all
@pytest.mark.parametrize("layout", ["DDP", "HSDP", "TP", "TP, copies of key heads", "FSDP2 + TP", "EP", "PP + FSDP2"])
def test_replicas_are_rounded_alike(spmd, layout):
    assert {said for said, _ in spmd(LAYOUTS[layout][0], rounded_on, layout, False)} == {""}


@pytest.mark.kills("rounding", "layout")
@pytest.mark.parametrize("layout", ["DDP", "HSDP", "TP", "FSDP2 + TP"])
def test_ranks_that_draw_from_their_own_streams_are_caught(spmd, layout):
    assert all(said for said, _ in spmd(LAYOUTS[layout][0], rounded_on, layout, True))


@pytest.mark.all
def test_copies_of_key_heads_are_rounded_alike(spmd):
    name = "layers.0.attention.wk.weight"
    for mutated in (False, True):
        keys = [here[name] for _, here in spmd(4, rounded_on, "TP, copies of key heads", mutated)]
        assert torch.equal(keys[0], keys[1]) is torch.equal(keys[2], keys[3]) is not mutated
        assert not torch.equal(keys[0], keys[2])


@pytest.mark.all
def test_both_ends_of_a_pipeline_round_what_they_share_alike(spmd):
    for mutated in (False, True):
        first, last = (here["embedding.weight"] for _, here in spmd(2, rounded_on, "PP, tied", mutated))
        assert torch.equal(first, last) is not mutated


# --- resuming


def resumed(layout: str, word: str, folder: str) -> list[str]:
    """What differs between four steps in a row, and two, saved, loaded and two more."""
    with uncompiled():
        techniques = ROUNDED | {"optimizer_state": word}
        model = laid_out(layout, techniques)
        optimizer = adamw(model, seed=5)
        losses = train(model, optimizer, range(2))
        save(model, folder, optimizer=optimizer)
        whole = held(model, optimizer, losses + train(model, optimizer, range(2, 4)))
        model = laid_out(layout, techniques, seed=99)
        optimizer = adamw(model, seed=5)
        load(model, folder, optimizer=optimizer)
        cut = held(model, optimizer, losses + train(model, optimizer, range(2, 4)))
        assert cut.losses == whole.losses
        return cut.differs_from(whole)


@pytest.mark.all
@pytest.mark.parametrize("word", ["full", "8bit"])
@pytest.mark.parametrize("layout", ["HSDP", "PP, tied"])
def test_a_resumed_run_is_the_undisturbed_one(spmd, tmp_path, layout, word):
    assert all(differ == [] for differ in spmd(LAYOUTS[layout][0], resumed, layout, word, str(tmp_path / "c")))
