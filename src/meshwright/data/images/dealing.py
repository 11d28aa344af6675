"""Open the images of rows as they are dealt, and give a batch their pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.data.corpus.cache import Prepared, open_corpus
from meshwright.data.corpus.packing import Corpus, Rows
from meshwright.data.corpus.pictured import IMAGES, Pictured, beside_images
from meshwright.data.options import MixturePart

from .files import Vision, VisionProcessor, open_image

PER_ROW = "images_per_row"
"""The key of a batch that holds the number of each row's images, int64 (rows,)."""
_PACKED = ("positions", "document_ids")


@dataclass(frozen=True)
class PixelReader:
    """Turns rows that name images into a batch with their pixels, by the model's own processor."""

    processor: VisionProcessor

    def __call__(self, rows: Rows) -> Rows:
        """Return rows with ``images_per_row`` and the tensors of images under the names of the model's arguments.

        The tensors are joined in the order of the rows, and left out where no row has an image. Positions and document
        ids are left out too: each row holds one document, whose positions the model counts by its images.

        Raises:
            ConfigError: an image does not open, or the processor refuses it.
            IntegrityError: an image is of another size than when the data was tokenised.
        """
        named = rows.get(IMAGES)  # absent where no row could be read
        files = [()] * len(rows["tokens"]) if named is None else [images or () for images in named.tolist()]
        batch = {key: values for key, values in rows.items() if key not in (IMAGES, *_PACKED)}
        if self.processor.token_kinds:
            batch[self.processor.token_kinds] = self.processor.kinds_of(batch["tokens"])
        pixels, counts = self.processor.pixels([[open_image(image) for image in images] for images in files])
        return batch | {PER_ROW: counts} | pixels


def open_parts(
    prepared: Sequence[Prepared], parts: Sequence[MixturePart], vision: Vision
) -> tuple[list[Corpus], PixelReader | None]:
    """Open the parts of a mixture; return them, and the reader of their images if one has any.

    Raises:
        UnsupportedError: one part has images, and another is plain text.
    """
    corpora = [open_corpus(p.folder, part.too_long, p.scan) for p, part in zip(prepared, parts, strict=True)]
    corpora = beside_images(corpora, [part.name for part in parts])
    return corpora, PixelReader(vision.processor) if isinstance(corpora[0].training, Pictured) else None
