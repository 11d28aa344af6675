"""A model of transformers at an address: its tensors are those of the folder, and each rank reads its own bytes."""

from __future__ import annotations

import random
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from meshwright.checkpoint import tensor_files
from meshwright.checkpoint.huggingface import Pretrained
from meshwright.checkpoint.mirror import ADDRESS, model_folder
from meshwright.checkpoint.store import RemoteStore
from meshwright.checkpoint.tensor_files import TensorFiles, holds_weights
from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.training.config import Config
from meshwright.training.fine_tuning import before_data, is_fine_tuning


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def requests(monkeypatch) -> list[int]:
    """Bytes of each read of a remote store."""
    read, counts = RemoteStore.read, []

    def counted(self, name, begin=0, size=-1):
        found = read(self, name, begin, size)
        counts.append(len(found))
        return found

    monkeypatch.setattr(RemoteStore, "read", counted)
    return counts


def at_address(folder: Path) -> str:
    address = f"memory://{folder.parent.name}/{folder.name}"
    for path in folder.iterdir():
        fsspec.filesystem("memory").pipe_file(f"/{folder.parent.name}/{folder.name}/{path.name}", path.read_bytes())
    return address


@pytest.fixture
def model(tmp_path) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path / "model"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (64, 48), "stack": (4, 24, 16), "vector": (40,), "scalar": (), "deep": (2, 3, 5, 7)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors |= {"half": tensors["matrix"].bfloat16(), "whole": torch.arange(12).reshape(3, 4)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "notes.bin").write_bytes(b"not fetched")
    return folder, tensors


@pytest.mark.parametrize("gap", [1, 64, 1 << 16])
def test_any_part_of_any_tensor_is_what_the_folder_holds(model, requests, monkeypatch, gap):
    monkeypatch.setattr(tensor_files, "GAP", gap)
    monkeypatch.setattr(tensor_files, "PART", 100)
    files, draw = TensorFiles(model_folder(at_address(model[0]))), random.Random(0)
    assert files.tensors.keys() == model[1].keys()
    for name, tensor in model[1].items():
        for _ in range(12):
            spans = [sorted(draw.sample(range(size + 1), 2)) for size in tensor.shape]
            cut = tuple(slice(*span) for span in spans)
            requests.clear()
            found = files.read(name, cut)
            assert found.dtype == tensor.dtype and torch.equal(found, tensor[cut])
            assert gap > 1 or sum(requests) == tensor[cut].nbytes, "no byte of a gap"
        assert torch.equal(
            files.read(name, tuple(slice(0, 0) for _ in tensor.shape)), tensor[(slice(0, 0),) * tensor.dim()]
        )


def test_a_rank_reads_its_own_share_and_the_headers(tmp_path, requests):
    folder = tmp_path / "large"
    folder.mkdir()
    tensors = {f"layer.{number}.weight": torch.randn(512, 128) for number in range(4)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    files = TensorFiles(model_folder(at_address(folder)))
    for name in tensors:
        files.read(name, (slice(128, 256), slice(0, 128)))
    own = sum(tensor.nbytes for tensor in tensors.values()) / 4
    assert own <= sum(requests) <= 1.05 * own and files.bytes_read == own


def test_the_stand_in_is_taken_for_the_folder_but_holds_no_weights(model):
    address = at_address(model[0])
    config = before_data(Config.from_dict({"model": {"hf": address}}))
    folder = Path(config.model.hf)
    assert is_fine_tuning(config) and holds_weights(folder)
    assert sorted(path.name for path in folder.iterdir()) == [ADDRESS, "config.json", "model.safetensors"]
    assert (folder / "model.safetensors").stat().st_size < (model[0] / "model.safetensors").stat().st_size / 10
    assert Pretrained(address).fingerprint() == Pretrained(model[0]).fingerprint()
    with pytest.raises(Exception, match="[Ii]ncomplete|header"):
        from safetensors.torch import load_file

        load_file(folder / "model.safetensors")


def test_only_our_own_cache_says_where_weights_are(model, requests):
    folder = model[0]
    (folder / ADDRESS).write_text(at_address(folder))
    requests.clear()
    TensorFiles(folder).read("matrix", (slice(0, 2), slice(0, 2)))
    assert not requests


def test_what_is_wrong_at_an_address_is_said(model, monkeypatch):
    with pytest.raises(ConfigError, match="memory://nothing/here holds no config.json"):
        model_folder("memory://nothing/here")
    address = at_address(model[0])
    memory, name = fsspec.filesystem("memory"), "model.safetensors"
    content = memory.cat_file(f"{address}/{name}")
    memory.pipe_file(f"{address}/{name}", content[:-1])
    with pytest.raises(IntegrityError, match=f"{address}/{name} has .* bytes, and its header describes"):
        model_folder(address)

    def denied(self, *_):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(RemoteStore, "read", denied)
    with pytest.raises((ConfigError, IntegrityError), match="Access Denied"):
        model_folder(address)
