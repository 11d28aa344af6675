"""Read folders laid out as data sets on Hugging Face's hub are (card, splits, subsets), also by name from its cache."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

from meshwright.core.errors import ConfigError, nearest
from meshwright.core.files import inside

CARD = "README.md"
_ABOUT = re.compile(r"(readme|licen[cs]e|citation|notice|changelog|contributing)\b.*", re.IGNORECASE)
_DESCRIPTIONS = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json"})
_SPLITS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
"""The words in names of files and folders that stand for a split, as the hub reads them."""
_SUBSET = re.compile(r"^\s*-?\s*config_name:\s*(.+?)\s*$", re.MULTILINE)


_NAME = re.compile(r"(?P<owner>\w[\w.-]*)/(?P<name>\w[\w.-]*)(?:/(?P<rest>[^/].*?))?/?")
"""A name on the hub, and what is named behind it."""
_ENDINGS = (".txt", ".md", ".py", ".jsonl", ".json", ".ndjson", ".gz", ".parquet", ".npy", ".bin", ".toml", ".csv")
"""Endings of files: whoever names one that is missing did not mean the hub."""


def is_about(name: str) -> bool:
    """Return whether a file describes the records beside it, by its name."""
    return _ABOUT.fullmatch(name) is not None or name in _DESCRIPTIONS


def split_of(name: str) -> str:
    """Return the split that a file belongs to, by the last word of its path that stands for one; "" without one."""
    words = re.split(r"[^a-z]+", name.lower())
    return next((_SPLITS[word] for word in reversed(words) if word in _SPLITS), "")


def is_split(name: str) -> bool:
    return name.lower() in _SPLITS


def of_split(files: list[tuple[str, Path]], split: str, root: Path) -> list[tuple[str, Path]]:
    """Return the files of a split. With "" all of them, if they are of one.

    Raises:
        ConfigError: the folder has no such split, or its files are of several splits or subsets, and none is named.
    """
    splits = Counter(split_of(name) for name, _ in files)
    named = ", ".join(f"{name} ({count} files)" for name, count in sorted(splits.items()) if name)
    if split:
        if chosen := [(name, path) for name, path in files if split_of(name) == _SPLITS[split.lower()]]:
            return chosen
        raise ConfigError(
            f"data.source: {root / split} does not exist, and the folder {root} has no split of this name. By the names"
            f" of its files it has: {named or 'none'}"
        )
    if len(set(splits) - {""}) > 1:
        first = "train" if splits["train"] else min(set(splits) - {""})
        raise ConfigError(
            f"data.source: the folder {root} holds the splits {named}: name the one to train on, like {root / first}"
        )
    subsets = _subsets(root)
    if len(subsets) > 1:
        raise ConfigError(
            f"data.source: {root / CARD} lists the subsets {', '.join(subsets)}, which may differ in their columns:"
            f" name the folder or the files of one in data.source"
        )
    return files


def _subsets(root: Path) -> list[str]:
    """Return the subsets that a data set's card lists in its front matter."""
    try:
        text = (root / CARD).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    if not text.startswith("---"):
        return []
    return list(dict.fromkeys(_SUBSET.findall(text[3:].partition("\n---")[0])))


def cache() -> Path:
    """Return the folder in which the hub's client keeps what it downloaded, as its environment variables say."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface").expanduser()
    return Path(os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub").expanduser()


def in_cache(source: str) -> Path | None:
    """Return the place of ``owner/name``, or of a folder, file or split behind it, in the hub's cache, if it is there.

    The snapshot is that of the branch ``main``, or where the cache does not say which that is, the newest.
    """
    if (found := _NAME.fullmatch(source)) is None:
        return None
    place = _folder_of(found["owner"], found["name"])
    snapshots = sorted((place / "snapshots").glob("*/"), key=lambda path: path.stat().st_mtime)
    if not snapshots:
        return None
    snapshot = snapshots[-1]
    try:
        named = place / "snapshots" / (place / "refs/main").read_text(encoding="utf-8").strip()
        snapshot = named if named in snapshots else snapshot
    except (OSError, ValueError):
        pass
    return inside(snapshot, found["rest"]) if found["rest"] else snapshot


def absence(source: str) -> str:
    """Say where a name of the hub was looked for, and how to get it; "" for a source that is no such name."""
    if (found := _NAME.fullmatch(source)) is None or source.endswith(_ENDINGS):
        return ""
    name = f"{found['owner']}/{found['name']}"
    held = [path.name.removeprefix("datasets--").replace("--", "/", 1) for path in cache().glob("datasets--*--*")]
    return (
        f" As a data set of the hub it was looked for in {_folder_of(found['owner'], found['name'])}, and is not"
        f" there.{nearest(name, held)} Nothing is downloaded: fetch it with 'hf download --repo-type dataset {name}',"
        f" and name it so again."
    )


def _folder_of(owner: str, name: str) -> Path:
    return cache() / f"datasets--{owner}--{name}"
