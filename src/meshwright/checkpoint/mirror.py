"""Stand in for a model's folder at an address: its small files are fetched, its weights read there by ranges.

Torch-free, no collectives.
"""

from __future__ import annotations

import hashlib
from fnmatch import fnmatch
from pathlib import Path

from meshwright.core.errors import ConfigError
from meshwright.core.files import replacing
from meshwright.core.host import default_cache_dir

from .manifest import read_header
from .store import LocalStore, Store, is_remote, store_of

KEPT = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
"""Small files of a model: config, tokenizer, code."""
ADDRESS = "address"
"""File in the stand-in that says where the weights are, written last."""


def model_folder(place: str | Path) -> Path:
    """Return the folder of a model, of an address its stand-in: small files whole, of weights the headers alone.

    Raises:
        ConfigError: no model lies there, or it may not be read.
        IntegrityError: a file of weights is damaged.
    """
    if not isinstance(place, str) or not is_remote(place):
        return Path(place).expanduser()
    store = store_of(place)
    there = store.files()
    if "config.json" not in there:
        raise ConfigError(
            f"{place} holds no config.json: give the address of a model's folder, as in s3://bucket/model"
        )
    name = f"{place.rstrip('/').rpartition('/')[2]}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"
    folder = _stand_ins() / name
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for name in there:
            is_weights = fnmatch(name, "*.safetensors")
            if is_weights or any(fnmatch(name, pattern) for pattern in KEPT):
                content = store.read(name, 0, read_header(store, name)[1] if is_weights else -1)
                with replacing(folder / name) as new:
                    new.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{place} cannot be read ({error}): the environment's credentials must allow that") from error
    (folder / ADDRESS).write_text(place, encoding="utf-8")
    return folder


def weights_store(folder: Path) -> Store:
    """Return the store that holds a model folder's weights; what a folder outside our cache says of it is not read."""
    if folder.parent == _stand_ins() and (folder / ADDRESS).is_file():
        return store_of((folder / ADDRESS).read_text(encoding="utf-8"))
    return LocalStore(folder)


def _stand_ins() -> Path:
    return default_cache_dir() / "models"
