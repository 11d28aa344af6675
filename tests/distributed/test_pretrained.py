"""Weights out of files onto a mesh: each rank reads its own share, all or none are loaded, and packed documents stay
apart.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import config_of, saved, some_tokens
from support.problems import DDP2, FSDP2, FSDP4, HSDP
from support.ranks import refusal
from support.train import collect
from torch import nn
from torch.distributed.fsdp import FSDPModule

import meshwright
from meshwright import ConfigError, IntegrityError, parallelize, pretrained, verify
from meshwright.checkpoint.tensor_files import SINGLE
from meshwright.distributed import init_distributed
from meshwright.distributed.process.world import get_world_info
from meshwright.distributed.transforms import apply_model_transforms
from meshwright.distributed.weights.shards import pieces
from meshwright.introspection.source import as_module, read_causal_lm

pytestmark = pytest.mark.all


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A plain model, stored in bfloat16, and one with experts that are stored one by one."""
    found = {}
    for family in ("llama", "qwen3_moe"):
        found[family] = tmp_path_factory.mktemp(family)
        saved(found[family], family)
    file = found["llama"] / SINGLE
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return found


def reading(folder, layout):
    """(whole parameters, bytes that this rank asked for, bytes of its share in the files)."""
    weights = pretrained(folder)
    made = parallelize(read_causal_lm(folder), layout, weights=weights)
    stored = 2 if "llama" in str(folder) else 4
    own = sum(piece.local.numel() * stored for parameter in made.parameters() for piece in pieces(parameter))
    return collect(dict(made.named_parameters())), weights.bytes_read, own


@pytest.mark.first("dp_replicate=2-qwen3_moe")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("layout", [FSDP4, DDP2, HSDP, meshwright.Layout(dp_shard=2, tp=2)], ids=str)
def test_each_rank_reads_its_own_share(spmd, folders, family, layout):
    ranks = spmd(layout.world, reading, folders[family], layout)
    for _, asked, own in ranks:
        assert 0 < asked <= 1.05 * own
    (one, _, _), *_ = spmd(1, reading, folders[family], meshwright.Layout(dp_shard=1))
    assert [name for name, value in one.items() if not torch.equal(ranks[0][0][name], value)] == []
    if layout is FSDP4:
        assert sum(asked for _, asked, _ in ranks) <= 1.05 * (folders[family] / SINGLE).stat().st_size


def refused(folders):
    """What a rank raises whose folder is ``folders[rank]``."""
    try:
        parallelize(read_causal_lm(folders[0]), FSDP2, weights=pretrained(folders[get_world_info()[0]]))
    except Exception as error:
        return type(error), str(error)


def test_what_one_rank_cannot_read_nobody_loads(spmd, folders, tmp_path):
    good = folders["llama"]
    cut, other = shutil.copytree(good, tmp_path / "cut"), shutil.copytree(good, tmp_path / "other")
    (cut / SINGLE).write_bytes((good / SINGLE).read_bytes()[:-1])
    save_file({**load_file(good / SINGLE), "more": torch.ones(1)}, other / SINGLE, {"format": "pt"})
    for bad, error, says in (
        (cut, IntegrityError, "its header describes"),
        (other, ConfigError, "they hold more, which the model lacks"),
    ):
        kinds, texts = zip(*spmd(2, refused, [good, bad]), strict=True)
        assert set(kinds) == {error} and len(set(texts)) == 1 and says in texts[0]


def transformed(folder, source, transforms, **context):
    mesh = init_distributed(FSDP2 if "fully_shard" in transforms else DDP2)
    model = as_module(read_causal_lm(folder))
    chain = {**transforms, "load_weights": {"checkpoint_path": str(source), **transforms.get("load_weights", {})}}
    made = apply_model_transforms(model, chain, device_mesh=mesh, **context)
    inner = getattr(made, "module", made)
    return collect(dict(inner.named_parameters())), any(isinstance(module, FSDPModule) for module in made.modules())


def checkpointed(folder, place):
    made = parallelize(read_causal_lm(folder), FSDP2, weights=pretrained(folder))
    meshwright.save(made, place)


@pytest.mark.parametrize("transforms", [{"fully_shard": {}}, {"ddp": {}}], ids=lambda chain: next(iter(chain)))
@pytest.mark.parametrize("kind", ["folder", "checkpoint"])
def test_load_weights_is_a_transform_of_the_chain(spmd, folders, tmp_path, transforms, kind):
    folder = source = folders["qwen3_moe"]
    if kind == "checkpoint":
        source = tmp_path / "checkpoint"
        spmd(2, checkpointed, folder, source)
    (one, _, _), *_ = spmd(1, reading, folder, meshwright.Layout(dp_shard=1))
    (found, is_sharded), *_ = spmd(2, transformed, folder, source, transforms)
    assert is_sharded == ("fully_shard" in transforms)
    assert [name for name, value in one.items() if not torch.equal(found[name], value)] == []


@pytest.mark.parametrize("is_restart", [True, False])
def test_load_weights_leaves_a_restart_alone(spmd, folders, is_restart):
    folder = folders["qwen3_moe"]
    chain = {"fully_shard": {}, "load_weights": {"skip_on_restart": True}}
    (found, _), *_ = spmd(2, restarted, folder, chain, is_restart)
    stored = load_file(folder / SINGLE)["model.embed_tokens.weight"]
    assert torch.equal(found["model.embed_tokens.weight"], stored) != is_restart


def restarted(folder, chain, is_restart):
    return transformed(folder, folder, chain, is_restart=is_restart)


def missing(path):
    return refusal(lambda: transformed(path, "nowhere", {"fully_shard": {}}), ConfigError)


def test_load_weights_needs_a_folder(spmd, folders):
    assert "load_weights.checkpoint_path = 'nowhere' is no folder" in spmd(2, missing, folders["llama"])[0]


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe"])
def test_a_frozen_part_is_equal_to_one_process(pool, family):
    config = config_of(family, num_hidden_layers=2)
    techniques = {"freeze": ("embed_tokens", r"layers\.0\.")}
    report = verify(config, FSDP2, steps=2, techniques=techniques, dtypes=("float64",), pool=pool)
    assert report, report
    graded = {d.name for d in report.comparisons[0].differences if d.stage == "gradient"}
    assert graded and not any("layers.0." in name or "embed" in name for name in graded)


class Crossing(nn.Module):
    """Takes positions, and lets tokens attend to all before them in the row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place, self.head = nn.Embedding(96, 16), nn.Embedding(32, 16), nn.Linear(16, 96)

    def forward(self, input_ids, position_ids):
        x = self.embed(input_ids) + self.place(position_ids)
        return self.head(x.cumsum(1))


def packed(model, layout):
    """Of a row of two documents: (its loss, that of both alone), or what refuses it."""
    made = parallelize(model, layout, techniques={"precision": {"master": "float64"}})
    made.learn_documents()
    tokens = some_tokens(2, 12)
    documents, positions = (
        torch.tensor([0] * 5 + [1] * 7).expand(2, -1),
        torch.tensor([*range(5), *range(7)]).expand(2, -1),
    )
    batch = {"tokens": tokens, "labels": tokens.flip(1), "positions": positions, "document_ids": documents}
    try:
        together = made.evaluate(batch)
    except ConfigError as error:
        return str(error)
    parts = [{key: value[:, cut] for key, value in batch.items()} for cut in (slice(0, 5), slice(5, 12))]
    alone = [made.evaluate(part) for part in parts]
    return float(together), sum(float(loss) * loss.tokens for loss in alone) / together.tokens


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_documents_that_positions_part_are_trained_as_if_alone(spmd, family):
    together, alone = spmd(2, packed, config_of(family), FSDP2)[0]
    assert together == pytest.approx(alone, rel=1e-7)


@pytest.mark.first
def test_a_model_in_which_documents_meet_is_refused(spmd):
    assert "tokens would attend across documents" in spmd(2, packed, Crossing, FSDP2)[0]
