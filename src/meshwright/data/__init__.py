"""From text files to batches: sources, tokenizer, a corpus made once per node, an order that is arithmetic, and a loader whose state
is one integer.

    prepared = prepare(["stdlib"], ByteTokenizer(), validation_fraction=0.01)  # one process per node; safe in all of them
    corpus = open_corpus(prepared.folder)
    order = Order(corpus.training.n_samples(seq_len=128), seed=0)
    loader = Loader(corpus.training, order, seq_len=128, global_batch=8)
    batch = next(loader)  # tokens, labels, positions, document_ids: int64 (8, 128)
"""

from meshwright.data.cache import Prepared, default_cache_dir, prepare
from meshwright.data.corpus import Corpus, open_corpus
from meshwright.data.loader import Loader, validation_batches
from meshwright.data.order import Order
from meshwright.data.packing import IGNORE_INDEX, Split
from meshwright.data.sources import Scan, scan_sources
from meshwright.data.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "IGNORE_INDEX",
    "ByteTokenizer",
    "Corpus",
    "FileTokenizer",
    "Loader",
    "Order",
    "Prepared",
    "Scan",
    "Split",
    "Tokenizer",
    "default_cache_dir",
    "load_tokenizer",
    "open_corpus",
    "prepare",
    "scan_sources",
    "validation_batches",
]
