"""Forwards that a user replaces on modules of a built model, and hooks: small copies of its config have them too."""

from __future__ import annotations

import functools
import random
from types import MethodType

import pytest
import torch
from support.cut_rows import EXACT, errors

from meshwright import Layout, MeshwrightError, plan
from meshwright.introspection.facts import model_facts
from meshwright.models.decoder import Decoder, DecoderConfig

CONFIG = DecoderConfig(40, 24, 6, n_heads=4, n_kv_heads=2, hidden_dim=20, max_seq_len=16)


def closure(layer, change):
    before = layer.forward
    layer.forward = lambda *args, **kwargs: change(before(*args, **kwargs))


def method(layer, change):
    before = layer.forward

    def forward(self, *args, **kwargs):
        return change(before(*args, **kwargs))

    layer.forward = MethodType(forward, layer)


def partial(layer, change):
    def forward(before, *args, **kwargs):
        return change(before(*args, **kwargs))

    layer.forward = functools.partial(forward, layer.forward)


def default(layer, change):
    def forward(*args, before=layer.forward, **kwargs):
        return change(before(*args, **kwargs))

    layer.forward = forward


def hook(layer, change):
    layer.register_forward_hook(lambda module, args, output: change(output))


WAYS = {each.__name__: each for each in (closure, method, partial, default, hook)}


def halved(x):
    return 0.5 * x


def mixed(x):
    return x + x.cumsum(1) / x.shape[1]


def changed(way, change, blocks=(4,)):
    torch.manual_seed(0)
    model = Decoder(CONFIG).double()
    for block in blocks:
        WAYS[way](model.layers[str(block)], change)
    return model


@pytest.mark.parametrize("way", WAYS)
def test_a_small_copy_runs_what_was_put_on_a_block(way):
    """Its own modules run, and no layer of the large model."""
    model = changed(way, halved)
    small = model_facts(model).measurements.sample().model
    assert small is not model and len(small.layers) > 4
    small.zero_grad()
    small(torch.zeros((1, 3), dtype=torch.int64)).sum().backward()
    assert small.layers["4"].attention.wq.weight.grad is not None
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}, {"cp": 2}, {"dp_shard": 2}], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_factor_is_equal(way, sizes, spmd):
    sizes = {"dp_shard": 1} | sizes
    for found in spmd(2, errors, functools.partial(changed, way, halved), sizes, {}, 8):
        assert max(found.values()) < EXACT, found


def skips(coin):
    """Skip a block by a coin, in a forward that replaces its own."""
    model = changed("closure", halved, ())
    before = model.layers["4"].forward
    model.layers["4"].forward = lambda x, *args, **kwargs: x if coin() < 0.5 else before(x, *args, **kwargs)
    return model


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}, {"cp": 2}], ids=str)
@pytest.mark.parametrize("coin", [random.random, functools.partial(torch.rand, ())], ids=["python", "torch"])
def test_a_coin_is_seen(coin, sizes):
    with pytest.raises(MeshwrightError, match=r"layers\.4|pass over layers"):
        plan(skips(coin), Layout(dp_shard=1, **sizes))


def refusal(build, sizes):
    try:
        errors(build, sizes, {}, 8)
    except MeshwrightError as error:
        return str(error)


@pytest.mark.parametrize("way", WAYS)
def test_tokens_that_are_mixed_are_seen(way, spmd):
    for found in spmd(2, refusal, functools.partial(changed, way, mixed), {"dp_shard": 1, "cp": 2}):
        assert "rehearsed" in found and "wrong" in found
