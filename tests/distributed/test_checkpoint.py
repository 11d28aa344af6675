"""Checkpoints: what one layout wrote every other reads, bit for bit.

What is damaged, foreign or unfinished is refused in words.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import pathlib
import pickle
import random
import re
import shutil
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.disk import failing_disk, full
from support.heard import heard
from support.odd import LAYOUTS, Odd, moments, odd, own_rows, train, weights
from support.oracle import relative_errors

from meshwright import IntegrityError, Layout, load, parallelize, save
from meshwright.checkpoint.folder import CheckpointFolder
from meshwright.checkpoint.manifest import (
    NAME,
    DamagedCheckpoint,
    Manifest,
    TensorEntry,
    blocks_in,
    commit,
    pack_name,
)
from meshwright.checkpoint.pieces import write_pieces
from meshwright.checkpoint.state import NUMPY, PYTHON, python_streams, restore_random
from meshwright.checkpoint.store import LocalStore
from meshwright.distributed.process import agree
from meshwright.distributed.torch_private import local_part
from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig, MoEConfig

FROZEN = ("blocks.0.gain.three",)


def adam(model, lr=1e-2):
    return torch.optim.AdamW(model.make_parameter_groups(), lr=lr)


def bits_equal(found: dict, wanted: dict) -> list[str]:
    """Names of tensors whose bits, shapes or dtypes differ (all of those that only one side has)."""
    names = found.keys() | wanted.keys()
    return sorted(
        n
        for n in names
        if n not in found
        or n not in wanted
        or found[n].dtype != wanted[n].dtype
        or not torch.equal(found[n], wanted[n])
    )


def refusal(action: Callable[[], object]) -> str:
    """Class and words of the error that ``action`` raises; "none" without one."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


# --- every layout reads every other


def write_job(layout: str, folder: str) -> dict:
    model = odd(layout, freeze=FROZEN)
    optimizer = adam(model)
    losses = train(model, optimizer, range(2))
    for name, buffer in model.named_buffers():
        buffer.fill_(3 if name.endswith("seen") else 0.25)
    save(model, folder, optimizer=optimizer, extra={"step": 2, "of": ["a", None, 1.5]})
    saved = {"weights": weights(model), "moments": moments(model, optimizer)}
    losses += train(model, optimizer, range(2, 4))
    return saved | {"losses": losses, "last": weights(model), "random": torch.get_rng_state()}


def read_job(layout: str, folder: str) -> dict:
    model = odd(layout, freeze=FROZEN, seed=99)
    optimizer = adam(model, lr=5.0)
    extra = load(model, folder, optimizer=optimizer)
    tied = dict(model.parts[0].named_parameters(remove_duplicate=False))
    return {
        "weights": weights(model),
        "moments": moments(model, optimizer),
        "extra": extra,
        "tied": tied["head.weight"] is tied["embed.weight"],
        "losses": train(model, optimizer, range(2, 4)),
        "last": weights(model),
    }


@pytest.fixture(scope="module")
def written(pool, tmp_path_factory):
    """``written(layout)``: the folder of what it wrote, and what its first rank had; once for the module."""
    known = {}

    def ask(layout):
        if layout not in known:
            folder = str(tmp_path_factory.mktemp("written") / "step")
            known[layout] = folder, pool.run(write_job, layout, folder, world=LAYOUTS[layout][0], timeout=120)[0]
        return known[layout]

    return ask


@pytest.mark.parametrize("writer", LAYOUTS)
@pytest.mark.parametrize("reader", LAYOUTS)
def test_every_layout_reads_what_every_other_wrote(spmd, written, writer, reader):
    folder, source = written(writer)
    for got in spmd(LAYOUTS[reader][0], read_job, reader, folder):
        assert bits_equal(got["weights"], source["weights"]) == []
        assert bits_equal(got["moments"], source["moments"]) == []
        assert got["extra"] == {"step": 2, "of": ["a", None, 1.5]}
        assert got["tied"]
        if reader == writer:
            assert got["losses"] == source["losses"][2:], "two steps, saved, loaded and two more are not four in a row"
            assert bits_equal(got["last"], source["last"]) == []
        else:
            assert got["losses"] == pytest.approx(source["losses"][2:], rel=1e-10)
            floats = {n: t for n, t in source["last"].items() if t.is_floating_point()}
            assert max(relative_errors({n: got["last"][n] for n in floats}, floats).values()) < 1e-10


@pytest.mark.parametrize("writer", LAYOUTS)
def test_a_checkpoint_holds_what_it_should_and_nothing_else(written, writer):
    folder, source = written(writer)
    assert source["losses"][2] != source["losses"][0]
    trained = [name for name in source["weights"] if not name.endswith(("offset", "seen", *FROZEN))]
    assert set(source["moments"]) == {
        f"{name}/{state}" for name in trained for state in ("step", "exp_avg", "exp_avg_sq")
    }, "the frozen parameter and the buffers have no optimizer state"
    assert torch.equal(source["last"][FROZEN[0]], source["weights"][FROZEN[0]]), "and stays as it was"
    kinds = {path.suffix for path in pathlib.Path(folder).iterdir()}
    assert kinds == {".safetensors", ".json"}, "nothing pickled (.metadata, .distcp) lies there"
    keys = Manifest.read(pathlib.Path(folder)).tensors
    assert "model.embed.weight" in keys and "model.head.weight" not in keys, "tied weights are stored once"
    assert keys["model.embed.weight"].shape == (257, 8), "shapes are global and unpadded"
    assert not any("scratch" in key for key in keys), "a buffer that is not persistent is not stored"


def narrow_job(layout: str, folder: str, writes: bool) -> dict:
    model = odd(layout, dtype=torch.bfloat16, seed=0 if writes else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if writes:
        train(model, optimizer, range(2))
        save(model, folder, optimizer=optimizer)
    else:
        load(model, folder, optimizer=optimizer)
    return weights(model) | moments(model, optimizer)


@pytest.mark.all
def test_narrow_dtypes_survive(spmd, tmp_path):
    written = spmd(4, narrow_job, "fsdp4", str(tmp_path / "c"), True)[0]
    assert written["embed.weight"].dtype == torch.bfloat16 and len(written) == 30
    for layout in ("one", "hsdp2x2"):
        assert bits_equal(spmd(LAYOUTS[layout][0], narrow_job, layout, str(tmp_path / "c"), False)[0], written) == []


# --- nothing is unpickled


@contextmanager
def no_pickle() -> Iterator[None]:
    """Inside, whatever could run code from a file raises."""

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("something was unpickled")

    class Forbidden:
        __init__ = forbidden

    places = [(pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (pickle, "_Unpickler"), (torch, "load")]
    kept = [(module, name, getattr(module, name)) for module, name in places]
    for module, name in places:
        setattr(module, name, Forbidden if name.endswith("Unpickler") else forbidden)
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def unpickling_job(folder: str) -> tuple[bool, str]:
    model = odd("one")
    optimizer = adam(model)
    train(model, optimizer, range(1))
    save(model, folder, optimizer=optimizer)
    before = weights(model)
    model = odd("one", seed=1)
    with no_pickle():
        guard = refusal(lambda: pickle.loads(pickle.dumps(1)))
        load(model, folder, optimizer=adam(model))
    return bits_equal(weights(model), before) == [], guard


def test_reading_unpickles_nothing(spmd, tmp_path):
    ((same, guard),) = spmd(1, unpickling_job, str(tmp_path / "c"))
    assert same and "something was unpickled" in guard


# --- damage


def _truncate(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def _flip(path: pathlib.Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1
    path.write_bytes(bytes(data))


def _change(path: pathlib.Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def _rewrite(folder: pathlib.Path, change: Callable[[dict], object]) -> None:
    """Change what the manifest says, and renew its checksum."""
    said = json.loads((folder / NAME).read_text())
    said.pop("crc32")
    change(said)
    (folder / NAME).write_text(json.dumps({**said, "crc32": zlib.crc32(json.dumps(said).encode())}))


def _pack(folder: pathlib.Path) -> pathlib.Path:
    """The file of the first rank."""
    return next(folder.glob("pieces-*-00000.safetensors"))


def _leave_out(folder: pathlib.Path) -> None:
    name = _pack(folder).name

    def drop(said: dict) -> None:
        said["files"].pop(name)
        for row in said["tensors"].values():
            row["pieces"] = [piece for piece in row["pieces"] if piece[2] != name]

    _rewrite(folder, drop)


def _move_out(folder: pathlib.Path) -> pathlib.Path:
    outside = folder.with_name(f"{folder.name} outside")
    outside.mkdir()
    moved = outside / _pack(folder).name
    shutil.move(_pack(folder), moved)
    return moved


def _name_outside(folder: pathlib.Path) -> None:
    moved = _move_out(folder)
    name = f"../{moved.parent.name}/{moved.name}"

    def rename(said: dict) -> None:
        said["files"][name] = said["files"].pop(moved.name)
        for row in said["tensors"].values():
            row["pieces"] = [
                [*piece[:2], name, *piece[3:]] if piece[2] == moved.name else piece for piece in row["pieces"]
            ]

    _rewrite(folder, rename)


def _link_out(folder: pathlib.Path) -> None:
    moved = _move_out(folder)
    (folder / moved.name).symlink_to(moved)


SHARD = "pieces-[0-9a-f]{8}-00000.safetensors"
DAMAGE: dict[str, tuple[Callable[[pathlib.Path], object], str]] = {
    "truncated": (lambda c: _truncate(_pack(c)), f"{SHARD} has [0-9,]+ bytes, but [0-9,]+ were written"),
    "a bit of a tensor": (lambda c: _flip(_pack(c), 0.99), f"{SHARD} has the right size, but its content changed"),
    "missing": (lambda c: _pack(c).unlink(), f"{SHARD} is missing"),
    "half written": (
        lambda c: (c / NAME).unlink(),
        "has no manifest, which is written last, so its writing was never finished",
    ),
    "not there": (lambda c: shutil.rmtree(c), "does not exist"),
    "manifest cut": (lambda c: _truncate(c / NAME), f"{NAME} is damaged"),
    "manifest edited": (
        lambda c: _change(c / NAME, '"lr": 0.01', '"lr": 0.02'),
        f"{NAME} is damaged.*its content changed",
    ),
    "manifest empty": (lambda c: (c / NAME).write_text("[]"), f"{NAME} is damaged"),
    "a shard that nobody lists": (
        _leave_out,
        r"its files hold (only a part|nothing) of (model|optimizer)\..*Nothing was loaded",
    ),
    "a shard that is elsewhere": (
        _name_outside,
        "manifest.json is damaged.*it names '../copy[0-9]+ outside/.*no file of this checkpoint",
    ),
    "a link": (_link_out, f"{SHARD} is a link to .*is not read.*Nothing was loaded"),
    "other version": (
        lambda c: _change(c / NAME, '"version": 2', '"version": 7'),
        "has format version 7; this meshwright reads versions 1 and 2",
    ),
}


def damage_job(folders: dict[str, str]) -> dict[str, tuple[str, list[str]]]:
    model = odd("fsdp2", seed=1)
    optimizer = adam(model)
    train(model, optimizer, range(1))
    before = weights(model) | moments(model, optimizer)
    found = {}
    for name, folder in folders.items():
        said = refusal(lambda folder=folder: load(model, folder, optimizer=optimizer))
        found[name] = (said, bits_equal(weights(model) | moments(model, optimizer), before))
    return found


def write_plain_job(layout: str, folder: str) -> None:
    model = odd(layout)
    optimizer = adam(model)
    train(model, optimizer, range(1))
    save(model, folder, optimizer=optimizer)


@pytest.mark.all
def test_damage_is_named_and_changes_nothing(spmd, tmp_path):
    spmd(2, write_plain_job, "fsdp2", str(tmp_path / "whole"))
    folders = {}
    for number, (name, (harm, _)) in enumerate(DAMAGE.items()):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(tmp_path / "whole", copy)
        harm(copy)
        folders[name] = str(copy)
    partial = tmp_path / "left.partial"
    shutil.copytree(tmp_path / "whole", partial)
    folders["a partial that looks whole"] = str(partial)
    for rank, found in enumerate(spmd(2, damage_job, folders | {"whole": str(tmp_path / "whole")})):
        assert found.pop("whole")[0] == "none"
        said, changed = found.pop("a partial that looks whole")
        assert "IntegrityError" in said and "unfinished save" in said and not changed
        for name, (said, changed) in found.items():
            assert said.startswith(("DamagedCheckpoint: ", "NewerManifest: ")), f"rank {rank}, {name}: {said}"
            assert re.search(DAMAGE[name][1], said, re.DOTALL), f"rank {rank}, {name}: {said}"
            assert changed == [], f"rank {rank}, {name}"


# --- another model, another optimizer


def foreign_job(folder: str) -> dict[str, tuple[str, bool]]:
    found = {}

    def attempt(name, model, make_optimizer=None):
        optimizer = make_optimizer(model) if make_optimizer else None
        if optimizer is not None:
            train(model, optimizer, range(1))
        state = weights(model) | (moments(model, optimizer) if optimizer is not None else {})
        said = refusal(lambda: load(model, folder, optimizer=optimizer))
        after = weights(model) | (moments(model, optimizer) if optimizer is not None else {})
        found[name] = (said, bits_equal(after, state) == [])

    attempt("vocab", odd("one", vocab=256))
    attempt("blocks", odd("one", blocks=3))
    attempt("fewer blocks", odd("one", blocks=1))
    attempt("dtype", odd("one", dtype=torch.float32))
    attempt("optimizer", odd("one"), lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9))
    attempt("frozen others", odd("one"), lambda m: torch.optim.AdamW(m.parameters(), lr=0.1))
    attempt(
        "groups",
        odd("one", freeze=FROZEN),
        lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.1),
    )
    return found


def write_frozen_job(folder: str) -> None:
    model = odd("one", freeze=FROZEN)
    optimizer = adam(model)
    train(model, optimizer, range(1))
    save(model, folder, optimizer=optimizer)


def test_another_model_or_optimizer_is_refused_before_anything_changes(spmd, tmp_path):
    spmd(1, write_frozen_job, str(tmp_path / "c"))
    (found,) = spmd(1, foreign_job, str(tmp_path / "c"))
    words = {
        "vocab": "is a checkpoint of another model: embed.weight is float64[257, 8] there and float64[256, 8] in the"
        " model",
        "blocks": "it lacks blocks.2.gain.offset",
        "fewer blocks": "it has blocks.1.gain.offset, which the model lacks",
        "dtype": "is float64[2] there and float32[2] in the model",
        "optimizer": "holds the state of AdamW, which SGD cannot continue",
        "frozen others": "has no optimizer state for blocks.0.gain.three (1 in all): were other parameters frozen?",
        "groups": "was written with other optimizer groups: embed.weight and ",
    }
    for name, text in words.items():
        said, unchanged = found[name]
        assert said.startswith("ConfigError: ") and text in said and "Nothing was loaded" in said, f"{name}: {said}"
        assert unchanged, name


# --- what the optimizer holds


def optimizer_job(folder: str) -> dict[str, object]:
    found: dict[str, object] = {}
    model = odd("one")
    optimizer = torch.optim.AdamW(model.make_parameter_groups(), lr=0.5, foreach=True)
    optimizer.param_groups[0]["betas"] = (0.5, 0.6)
    train(model, optimizer, range(1))
    save(model, folder + "a", optimizer=optimizer)

    other = torch.optim.AdamW(model.make_parameter_groups(), lr=torch.tensor(0.1), fused=True)
    load(model, folder + "a", optimizer=other)
    found["restored"] = [(float(g["lr"]), g["betas"], g["weight_decay"], g["foreach"]) for g in other.param_groups]
    found["still a tensor"] = isinstance(other.param_groups[0]["lr"], torch.Tensor)
    other = torch.optim.AdamW(model.parameters(), lr=0.1)
    load(model, folder + "a", optimizer=other, restore_options=False)
    found["kept"] = [(g["lr"], g["betas"]) for g in other.param_groups]
    found["state anyway"] = bits_equal(moments(model, other), moments(model, optimizer))

    fresh = adam(model)
    save(model, folder + "b", optimizer=fresh)
    load(model, folder + "b", optimizer=optimizer)
    found["state of a fresh one"] = len(moments(model, optimizer))

    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    save(model, folder + "c", optimizer=plain)
    found["no state at all"] = refusal(lambda: load(model, folder + "c", optimizer=plain))
    save(model, folder + "d")
    found["none saved"] = refusal(lambda: load(model, folder + "d", optimizer=plain))

    class Counting(torch.optim.SGD):
        def step(self):
            self.state[self.param_groups[0]["params"][0]]["turns"] = 3

    counting = Counting(model.parameters(), lr=0.1)
    counting.step()
    found["plain number"] = refusal(lambda: save(model, folder + "e", optimizer=counting))
    stranger = torch.optim.SGD(odd("one").parameters(), lr=0.1)
    found["stranger"] = refusal(lambda: save(model, folder + "e", optimizer=stranger))

    class Unused(Odd):
        def __init__(self):
            super().__init__()
            self.spare = torch.nn.Linear(2, 2, dtype=torch.float64)

    model = parallelize(Unused, LAYOUTS["one"][1])
    optimizer = adam(model)
    train(model, optimizer, range(1))
    save(model, folder + "f", optimizer=optimizer)
    before, again = moments(model, optimizer), adam(model)
    found["unused"] = refusal(lambda: load(model, folder + "f", optimizer=again))
    found["unused equal"] = bits_equal(moments(model, again), before)
    return found


def test_optimizer_state_and_options(spmd, tmp_path):
    (found,) = spmd(1, optimizer_job, str(tmp_path / "c"))
    assert found["restored"] == [(0.5, (0.5, 0.6), 0.1, None), (0.5, (0.9, 0.999), 0.0, None)], "how it runs here stays"
    assert found["still a tensor"]
    assert found["kept"] == [(0.1, (0.9, 0.999))]
    assert found["state anyway"] == []
    assert found["state of a fresh one"] == 0, "a checkpoint of step 0 clears what the optimizer held"
    assert found["no state at all"] == "none", "plain SGD can be continued"
    assert "holds no optimizer state: load it without optimizer=" in found["none saved"]
    assert "UnsupportedError: Counting keeps 'turns' of embed.weight as int" in found["plain number"]
    assert "UnsupportedError: group 0 of the optimizer holds a parameter that is not the model's" in found["stranger"]
    assert found["unused"] == "none", "a parameter that never had a gradient has no state, and needs none"
    assert found["unused equal"] == []


class OfShards(torch.optim.SGD):
    """Keeps state as long as this rank's shard."""

    def step(self):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["mean"] = local_part(parameter).detach().clone()


class OfRows(torch.optim.SGD):
    """Keeps a number a row, as a DTensor where the parameter is one."""

    def step(self):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            if parameter.dim() > 1:
                self.state[parameter]["mean"] = parameter.detach().sum(-1)


def odd_state_job(folder: str, layout: str) -> dict[str, str]:
    """What is said of state that a checkpoint cannot hold."""
    model, found = odd(layout), {}
    kinds = ("dict", "vector", "list", "of nothing")
    optimizers = {kind: torch.optim.SGD(model.parameters(), lr=0.1) for kind in kinds}
    optimizers["dict"].param_groups[0]["seen"] = {"a": 1}
    optimizers["vector"].param_groups[0]["seen"] = torch.zeros(3)
    optimizers["list"].param_groups[0]["seen"] = [torch.ones(2)]
    optimizers["of nothing"].state["global"] = torch.zeros(3)
    if layout != "one":
        optimizers["of shards"] = OfShards(model.parameters(), lr=0.1)
        optimizers["of rows"] = OfRows(model.parameters(), lr=0.1)
        for kind in ("of shards", "of rows"):
            train(model, optimizers[kind], range(1))
        last = optimizers["one rank's"] = torch.optim.SGD(model.parameters(), lr=0.1)
        if dist.get_rank() == 1:
            last.state[last.param_groups[0]["params"][0]]["turns"] = 3
    for kind, optimizer in optimizers.items():
        for beside in (False, True):
            found[f"{kind}, {beside}"] = refusal(
                lambda o=optimizer, b=beside: save(model, folder, optimizer=o, asynchronous=b)
            )
    found["keys"] = refusal(lambda: save(model, folder, extra={"rates": [{2: 1}]}))
    with copy.deepcopy(model).lent():
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        save(model, folder)
        found["lent, save"] = refusal(lambda: save(model, folder, optimizer=plain))
        found["lent, load"] = refusal(lambda: load(model, folder, optimizer=plain))
        found["lent, step"] = refusal(lambda: train(model, plain, range(1)))
    first = next(module for path, module in model.named_modules() if path.startswith("blocks.0"))
    first.register_buffer("cache", torch.zeros(1), persistent=False)
    save(model, folder)
    first.register_buffer("count", torch.zeros(1))
    found["buffer"] = refusal(lambda: save(model, folder))
    return found


@pytest.mark.parametrize("layout", ["one", "fsdp2"])
def test_state_that_a_checkpoint_cannot_hold_is_refused_on_all_ranks(spmd, tmp_path, layout):
    words = {
        "dict": "group 0 of the optimizer has 'seen', a dict",
        "vector": "group 0 of the optimizer has 'seen', a Tensor",
        "list": "group 0 of the optimizer cannot be saved: Object of type Tensor is not JSON serializable",
        "of nothing": "SGD keeps state['global'], which is of no parameter",
        "of shards": "a plain tensor of [",
        "of rows": "as a DTensor of [",
        "lent": "inside lent()",
        "buffer": ".count came behind parallelize",
        "one rank's": "SGD keeps 'turns' of embed.weight as int",
    }
    for found in spmd(LAYOUTS[layout][0], odd_state_job, str(tmp_path / "c"), layout):
        assert "the key 2 of a dict would come back as text" in found.pop("keys")
        assert found and not {k: said for k, said in found.items() if words[k.partition(",")[0]] not in said}


def extra_job(folder: str) -> tuple[str, dict]:
    """What is said of an optimizer's own dict, and what a load returns once it is given as ``extra``."""
    model = odd("one")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["seen"] = {"a": 1}
    said = refusal(lambda: save(model, folder, optimizer=optimizer))
    save(model, folder, optimizer=optimizer, extra={"seen": optimizer.param_groups[0].pop("seen")})
    return said, load(model, folder, optimizer=optimizer)


@pytest.mark.follows("extra=")
def test_what_an_optimizer_cannot_keep_is_given_beside_it(spmd, tmp_path):
    ((said, extra),) = spmd(1, extra_job, str(tmp_path / "c"))
    assert "give save the rest as extra=, outside the optimizer" in said and extra == {"seen": {"a": 1}}


def options_job(folder: str) -> list[dict[str, object]]:
    model = odd("one")
    betas = torch.tensor(0.5), torch.tensor(0.75)
    optimizer, other = (torch.optim.AdamW(model.parameters(), lr=0.1, betas=betas, foreach=False) for _ in range(2))
    optimizer.param_groups[0] |= {"step": 7, "initial_lr": 0.2}
    train(model, optimizer, range(1))
    other.param_groups[0]["betas"] = torch.tensor(0.1), torch.tensor(0.2)
    save(model, folder, optimizer=optimizer)
    load(model, folder, optimizer=other)
    return [{key: group[key] for key in ("step", "initial_lr", "betas")} for group in other.param_groups]


def test_options_that_a_new_optimizer_lacks_and_tensors_in_them_come_back(spmd, tmp_path):
    ((found,),) = spmd(1, options_job, str(tmp_path / "c"))
    assert (found["step"], found["initial_lr"]) == (7, 0.2)
    assert found["betas"] == (torch.tensor(0.5), torch.tensor(0.75)) and torch.is_tensor(found["betas"][0])


def resumed_job(folder: str) -> tuple[bool, str, str]:
    """Whether gradients go with a state that is loaded; what is said of gradients in a save, and of state left over."""
    model = odd("fsdp2")
    optimizer = adam(model)
    train(model, optimizer, range(1))
    save(model, folder, optimizer=optimizer)
    train(model, optimizer, range(1, 2))
    wanted = weights(model)
    load(model, folder, optimizer=optimizer)
    model.forward_backward(own_rows(model, 5))
    with heard() as said:
        save(model, f"{folder}-within", optimizer=optimizer)
    load(model, folder, optimizer=optimizer)
    train(model, optimizer, range(1, 2))
    fewer = torch.optim.AdamW(list(model.parameters())[1:])
    return not bits_equal(weights(model), wanted), " ".join(said), refusal(lambda: load(model, folder, optimizer=fewer))


def test_a_state_that_is_loaded_has_no_gradients_and_leaves_nothing_over(spmd, tmp_path):
    results = spmd(2, resumed_job, str(tmp_path / "c"))
    assert [is_equal for is_equal, _, _ in results] == [True, True]
    assert [said for _, said, _ in results] == [
        f"{tmp_path}/c-within is saved without the gradients there are: save behind optimizer_step, which clears them",
        "",
    ]
    assert all("trained here and is in no group of this optimizer" in said for _, _, said in results)


def routed_job(folder: str) -> bool:
    """Whether words that were routed before a load count in no expert's bias behind it."""
    config = DecoderConfig(
        64, 16, 2, n_heads=2, n_kv_heads=2, hidden_dim=32, max_seq_len=8, moe=MoEConfig(4, 1, bias_rate=0.1)
    )
    found = []
    for begun in (False, True):
        model = parallelize(lambda: Decoder(config), Layout(), seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if not begun:
            save(model, folder, optimizer=optimizer)
        else:
            model.forward_backward({"tokens": torch.zeros(4, 8, dtype=torch.long), "labels": torch.zeros(4, 8).long()})
        load(model, folder, optimizer=optimizer)
        tokens = torch.arange(32).view(4, 8)
        model.forward_backward({"tokens": tokens, "labels": tokens})
        model.optimizer_step(optimizer)
        found.append(model.state_dict())
    return any("bias" in name for name in found[0]) and not bits_equal(*found)


def test_words_that_were_routed_before_a_load_do_not_count(spmd, tmp_path):
    assert spmd(1, routed_job, str(tmp_path / "c")) == [True]


def drawn() -> list[float]:
    """Numbers of every stream: normal ones come in pairs, of which the second is kept."""
    return [*torch.rand(3).tolist(), random.random(), random.gauss(), np.random.rand(), np.random.randn()]


def random_job(folder: str) -> tuple[bool, bool]:
    model = odd("ddp2")
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(50 + dist.get_rank())
    drawn()
    save(model, folder)
    wanted = drawn()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    load(model, folder)
    return drawn() == wanted, len(set(map(tuple, agree.everybody_says(wanted)))) == 2


def test_random_streams_continue_on_a_world_of_the_same_size(spmd, tmp_path):
    assert spmd(2, random_job, str(tmp_path / "c")) == [(True, True)] * 2


@pytest.mark.parametrize(
    ("name", "form", "values"),
    [
        ("numpy", NUMPY, (*range(624), 2_000_000_000, 0, 0.0)),
        ("numpy", NUMPY, (*range(624), 625, 0, 0.0)),
        ("numpy", "<4I", range(4)),
        ("python", PYTHON, (*range(624), 1000, False, 0.0)),
        ("cpu", "<16B", range(16)),
    ],
)
def test_a_random_stream_that_is_none_is_refused(name, form, values):
    """NumPy reads beyond its words for a place that is too large."""
    state = torch.frombuffer(bytearray(struct.pack(form, *values)), dtype=torch.uint8)
    with pytest.raises(DamagedCheckpoint, match="random streams are none"):
        restore_random({f"random.{name}.rank0": state})


@contextmanager
def twisterless() -> Iterator[None]:
    kept = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        yield
    finally:
        np.random.set_bit_generator(kept)


def test_a_stream_that_numpy_has_replaced_is_left_alone():
    state = torch.frombuffer(bytearray(struct.pack(NUMPY, *range(624), 0, 0, 0.0)), dtype=torch.uint8)
    with twisterless():
        restore_random({"random.numpy.rank0": state})
        assert not any("numpy" in key for key in python_streams())


# --- writing that fails


def one_rank_job(folder: str) -> list[tuple[str, list[str], str]]:
    """On rank 1 the disk is full; on rank 0 the manifest cannot be written."""
    model = odd("fsdp2")
    runs = CheckpointFolder(pathlib.Path(folder))
    save(model, runs.of_step(1), extra={"step": 1})
    before = weights(model)
    train(model, torch.optim.SGD(model.parameters(), lr=1.0), range(1))

    def unwritable(*_, **others):
        raise OSError(errno.EIO, "Input/output error")

    module = sys.modules["meshwright.checkpoint.saving"]
    found = []
    for rank, fault in [(1, "write"), (0, "manifest")]:
        for step in (1, 2):  # over an older checkpoint, and beside it
            kept = module.commit
            if dist.get_rank() == rank and fault == "manifest":
                module.commit = unwritable
            with failing_disk(1 if dist.get_rank() == rank and fault == "write" else 0, full, "write"):
                said = refusal(lambda step=step: save(model, runs.of_step(step), extra={"step": 2}))
            module.commit = kept
            again = odd("fsdp2", seed=3)
            extra = load(again, runs.latest())
            other = refusal(lambda again=again: load(again, runs.of_step(2)))
            found.append((said, bits_equal(weights(again), before), f"{extra} {runs.steps()} {other}"))
    return found


@pytest.mark.all
def test_a_rank_that_cannot_write_fails_the_save_on_every_rank_and_spoils_nothing(spmd, tmp_path):
    results = spmd(2, one_rank_job, str(tmp_path))
    assert results[0] == results[1]
    for (said, changed, rest), fault in zip(
        results[0], [f for f in ("No space left", "Input/output") for _ in (1, 2)], strict=True
    ):
        assert (
            said.startswith("IntegrityError: cannot ") and fault in said and "No earlier checkpoint was touched" in said
        ), said
        assert "Traceback" not in said
        assert changed == []
        assert rest.startswith("{'step': 1} [1] DamagedCheckpoint: ")


def disk_job(folder: str) -> tuple[list[str], list[str]]:
    """Saves over an older checkpoint while the n-th change to the disk fails, for every n: what failed, and what a
    good save does.
    """
    model = odd("one")
    optimizer = adam(model)
    place = pathlib.Path(folder) / "c"
    save(model, place, optimizer=optimizer, extra={"is": "old"})
    before = weights(model)
    keep = shutil.copytree(place, folder + "-keep")
    train(model, optimizer, range(1))
    changes = []
    for fail_at in range(1, 100):
        with failing_disk(fail_at, full) as seen:
            said = refusal(lambda: save(model, place, optimizer=optimizer, extra={"is": "new"}))
        if len(seen) < fail_at:
            break
        if said == "none":  # making a folder that is there may fail without harm
            assert seen[fail_at - 1] == "mkdir"
        else:
            changes.append(seen[fail_at - 1])
            assert said.startswith("IntegrityError") and "No space left" in said, said
            again = odd("one", seed=3)
            whole = load(again, place)["is"]
            assert whole == ("new" if "replace" in seen[: fail_at - 1] else "old"), (fail_at, seen)
            assert bits_equal(weights(again), before if whole == "old" else weights(model)) == [], (fail_at, seen)
        shutil.rmtree(place)
        shutil.copytree(keep, place)
    save(model, place, optimizer=optimizer, extra={"is": "new"})
    again = odd("one", seed=3)
    assert load(again, place) == {"is": "new"} and bits_equal(weights(again), weights(model)) == []
    assert sorted(entry.name for entry in pathlib.Path(folder).iterdir()) == ["c"], "nothing is left beside it"
    return changes, seen


@pytest.mark.all
def test_a_disk_that_fails_at_any_change_leaves_the_older_checkpoint(spmd, tmp_path):
    ((failed, done),) = spmd(1, disk_job, str(tmp_path))
    blocks = done.count("write") - 2
    folders = ["mkdir", "mkdir"]  # that of all checkpoints, and this one's
    pieces = ["write"] * (1 + blocks)
    wanted = [*folders, *pieces, "fsync", "fsync", "mkdir", "write", "fsync", "replace", "fsync"]
    assert done == wanted, "the pieces are on disk before the manifest, and it before it has its name"
    assert failed == [change for change in done if change != "mkdir"], "each of them failed once"


def crash_job(folder: str) -> list[str]:
    """Saves over an older checkpoint in a child that ends at its n-th change to the disk, for every n.

    What is loaded after each.
    """
    model = odd("one")
    place = pathlib.Path(folder) / "c"
    found = []
    for fail_at in range(1, 100):
        shutil.rmtree(folder, ignore_errors=True)
        save(model, place, extra={"is": "old"})
        child = os.fork()
        if child == 0:
            with torch.no_grad():
                next(model.parameters()).add_(1)
            with failing_disk(fail_at, lambda: os._exit(9)):  # type: ignore[arg-type,return-value]
                save(model, place, extra={"is": "new"})
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found.append(load(odd("one", seed=3), place)["is"])
        save(model, place, extra={"is": "next"})
        assert load(model, place) == {"is": "next"}
        assert sorted(entry.name for entry in pathlib.Path(folder).iterdir()) == ["c"]
        if status == 0:
            break
    return found


@pytest.mark.all
def test_a_crash_at_any_change_leaves_the_older_checkpoint_or_the_new_one(spmd, tmp_path):
    (found,) = spmd(1, crash_job, str(tmp_path / "runs"))
    olds = found.count("old")
    assert found == ["old"] * olds + ["new"] * (len(found) - olds) and olds >= 8 and found[-1] == "new"


def refused_places_job(folder: str) -> list[str]:
    model = odd("ddp2")
    precious = pathlib.Path(folder) / "thesis"
    agree.together(lambda: (precious.mkdir(), (precious / "draft.tex").write_text("x")), here=dist.get_rank() == 0)
    said = [
        refusal(lambda: save(model, precious)),
        refusal(lambda: save(model, precious / "draft.tex")),
        refusal(lambda: save(model, precious / "new", extra={"weights": torch.ones(1)})),
    ]
    (pathlib.Path(folder) / "empty").mkdir(exist_ok=True)
    dist.barrier()
    save(model, pathlib.Path(folder) / "empty")
    return [*said, str(sorted(entry.name for entry in precious.iterdir()))]


def test_what_is_no_checkpoint_is_never_replaced(spmd, tmp_path):
    for found in spmd(2, refused_places_job, str(tmp_path)):
        assert all(said.startswith("ConfigError: ") for said in found[:3]), found
        assert (
            "thesis is there and is no checkpoint" in found[0] and "draft.tex is there and is no checkpoint" in found[1]
        )
        assert "extra cannot be saved: Object of type Tensor is not JSON serializable" in found[2]
        assert found[3] == "['draft.tex']"


# --- the folder of a run


BLOCK = bytes(range(64))


def whole_step(folder: CheckpointFolder, step: int, *contents: bytes, after: int | None = None) -> pathlib.Path:
    """A checkpoint of tensors of so many bytes each, written without torch."""
    store, name = LocalStore(folder.path), f"step-{step:08d}"
    earlier = {}, {}
    if after is not None:
        earlier = blocks_in(store, f"step-{after:08d}", name)
    pieces = [
        SimpleNamespace(key=f"model.{i}", offset=(0,), shape=(len(c),), dtype="uint8", data=c)
        for i, c in enumerate(contents)
    ]
    entries = write_pieces(store, name, pack_name(f"{step:08x}", 0), pieces, *earlier)
    tensors = {e.key: TensorEntry(e.shape, "uint8", (e,)) for e in entries}
    commit(store, name, Manifest(tensors, {}, extra={"step": step}))
    return folder.of_step(step)


@pytest.fixture
def folder(tmp_path):
    made = CheckpointFolder(tmp_path / "checkpoints")
    for step in (10, 20, 30, 1_000_000_000):
        whole_step(made, step, BLOCK + bytes([step % 251]))
    (made.path / "step-00000040.partial").mkdir()
    (made.path / "step-abc").mkdir()
    return made


def test_steps_are_those_with_a_manifest(folder, tmp_path):
    assert folder.steps() == [10, 20, 30, 1_000_000_000]
    assert folder.half_written() == [folder.path / "step-00000040.partial"]
    nothing = CheckpointFolder(tmp_path / "nowhere")
    assert (nothing.steps(), nothing.latest(), nothing.half_written()) == ([], None, [])


SPOILT: dict[str, tuple[Callable[[pathlib.Path], object], str]] = {
    "its manifest has not come": (lambda at: (at / NAME).unlink(), ""),
    "its manifest is cut": (lambda at: _truncate(at / NAME), "manifest.json is damaged"),
    "a file has not come": (lambda at: _pack(at).unlink(), "is missing"),
    "a file is cut": (lambda at: _truncate(_pack(at)), "bytes, but"),
    "it is gone": (shutil.rmtree, ""),
}


@pytest.mark.parametrize("how", SPOILT)
def test_the_newest_is_the_newest_whole_one_whatever_a_file_says(folder, how):
    spoil, words = SPOILT[how]
    assert folder.newest() == (folder.of_step(1_000_000_000), [])
    (folder.path / "latest").write_text("step-00000010")
    os.utime(folder.of_step(10), (2e9, 2e9))  # clocks that differ
    spoil(folder.of_step(1_000_000_000))
    newest, problems = folder.newest()
    assert newest == folder.of_step(30)
    assert len(problems) == bool(words) and words in "".join(problems)
    moved = CheckpointFolder(folder.path.rename(folder.path.with_name("moved")))
    assert moved.latest() == moved.of_step(30)


def test_where_none_is_whole_nothing_begins_anew(folder):
    for step in folder.steps():
        _pack(folder.of_step(step)).unlink()
    with pytest.raises(IntegrityError, match="no checkpoint in .* is whole: .*pieces-.* is missing"):
        folder.newest()


def test_a_newest_that_a_newer_release_wrote_is_not_passed_over(folder):
    _change(folder.of_step(1_000_000_000) / NAME, '"version": 2', '"version": 3')
    with pytest.raises(IntegrityError, match="has format version 3; this meshwright reads versions 1 and 2"):
        folder.newest()


@pytest.mark.parametrize(
    ("count", "left"),
    [
        (0, [10, 20, 30, 1_000_000_000]),
        (1, [1_000_000_000]),
        (2, [30, 1_000_000_000]),
        (9, [10, 20, 30, 1_000_000_000]),
    ],
)
def test_old_steps_go(folder, count, left):
    folder.keep_last(count)
    assert folder.steps() == left
    assert sorted(path.name for path in folder.path.glob("step-0*")) == sorted(
        [f"step-{step:08d}" for step in left if step < 10**8] + ["step-00000040.partial"]
    )


def test_only_whole_checkpoints_count_as_kept(folder):
    _pack(folder.of_step(1_000_000_000)).unlink()
    folder.keep_last(1)
    assert folder.latest() == folder.of_step(30) and folder.steps() == [30, 1_000_000_000]


def test_what_is_unchanged_is_referred_to_and_stays_as_long_as_it_is_needed(tmp_path):
    folder = CheckpointFolder(tmp_path)
    base, step = bytes(1000), iter(range(100))
    for number in range(1, 5):
        whole_step(folder, number, base, bytes([next(step)] * 80), after=number - 1 or None)
    sizes = [sum(path.stat().st_size for path in folder.of_step(n).glob("*.safetensors")) for n in range(1, 5)]
    assert sizes[0] > 1080 and max(sizes[1:]) < 300, "the base is written once"
    folder.keep_last(1)
    assert folder.steps() == [4] and folder.latest() == folder.of_step(4)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.safetensors"))
    assert left == [f"step-{n:08d}/pieces-{n:08x}-00000.safetensors" for n in (1, 4)], "and stays"
    assert folder.half_written() == []
    whole_step(folder, 5, bytes([9] * 1000), bytes([next(step)] * 80), after=4)
    folder.keep_last(1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"], "until nobody needs it"


def test_packs_that_are_mostly_idle_are_not_referred_to_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.checkpoint.pieces.IDLE", 0)
    folder = CheckpointFolder(tmp_path)
    parts = [bytes([i] * 500) for i in range(8)]
    for number in range(1, 41):
        parts[number % 8] = bytes([number % 251, 255] * 250)
        whole_step(folder, number, *parts, after=number - 1 or None)
        folder.keep_last(1)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) < 3 * 8 * 500 + 9 * 300


def test_a_pack_is_not_kept_for_a_little_that_never_changes(tmp_path):
    """It doubled what is on disk, and its damage made every later checkpoint unusable."""
    folder, fixed = CheckpointFolder(tmp_path), bytes(range(250)) * 20
    for step in (1, 2, 3):
        at = whole_step(folder, step, bytes([step]) * 500_000, fixed, after=step - 1 or None)
        folder.keep_last(1)
        assert [path.parent for path in tmp_path.rglob("*.safetensors")] == [at]


def test_a_manifest_keeps_what_it_is_given(tmp_path):
    extra = {"text": "ü", "number": 0.1, "nested": {"list": [1, None, True]}, "3": "x"}
    Manifest({}, {}, "AdamW", [{"params": ["a"], "options": {"betas": (0.9, 0.95)}}], extra, "{}").write(tmp_path)
    read = Manifest.read(tmp_path)
    assert (
        read.extra == extra
        and read.groups == [{"params": ["a"], "options": {"betas": [0.9, 0.95]}}]
        and read.optimizer == "AdamW"
    )
    text = (tmp_path / NAME).read_text()
    assert json.loads(text)["crc32"] > 0


@pytest.mark.parametrize("wrong", [["a"], {"a": 1}])
def test_a_manifest_whose_rounded_weights_have_no_dtypes_is_refused(tmp_path, wrong):
    Manifest({}, {}, in_4_bits=wrong).write(tmp_path)
    with pytest.raises(IntegrityError, match="in_4_bits is of another type"):
        Manifest.read(tmp_path)
