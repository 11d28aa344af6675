"""Turn files of text, records or token ids into batches.

One process per node builds the corpus. The sample order is pure arithmetic, and a loader's state is one integer:

    prepared = prepare(["stdlib"], ByteTokenizer(), validation_fraction=0.01)  # safe in concurrent processes
    corpus = open_corpus(prepared.folder)
    samples = Samples.of([corpus.training], seq_len=128, seed=0)
    loader = Loader(samples, global_batch=8)
    batch = next(loader)  # tokens, labels, positions, document_ids: int64 (8, 128)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import Prepared, default_cache_dir, open_corpus, prepare
    from .loader import Loader, validation_batches
    from .mixture import Interleave, Order, Samples, Stage
    from .options import SourceOptions
    from .packing import IGNORE_INDEX, Corpus, Split, Stream, Whole
    from .scan import Scan, scan_sources
    from .tokenizers import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "IGNORE_INDEX",
    "ByteTokenizer",
    "Corpus",
    "FileTokenizer",
    "Interleave",
    "Loader",
    "Order",
    "Prepared",
    "Samples",
    "Scan",
    "SourceOptions",
    "Split",
    "Stage",
    "Stream",
    "Tokenizer",
    "Whole",
    "default_cache_dir",
    "load_tokenizer",
    "open_corpus",
    "prepare",
    "scan_sources",
    "validation_batches",
]

_HOME = {
    "cache": ("Prepared", "default_cache_dir", "open_corpus", "prepare"),
    "loader": ("Loader", "validation_batches"),
    "mixture": ("Interleave", "Order", "Samples", "Stage"),
    "options": ("SourceOptions",),
    "packing": ("IGNORE_INDEX", "Corpus", "Split", "Stream", "Whole"),
    "scan": ("Scan", "scan_sources"),
    "tokenizers": ("ByteTokenizer", "FileTokenizer", "Tokenizer", "load_tokenizer"),
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"meshwright.data.{module}"), name)
    raise AttributeError(f"module 'meshwright.data' has no attribute '{name}'")
