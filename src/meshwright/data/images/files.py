"""Find and open the image files that records name, inside the folder of the data file."""

from __future__ import annotations

import hashlib
import io
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.core.errors import ConfigError, IntegrityError, MissingExtraError
from meshwright.core.files import inside
from meshwright.data.sources.records import BadRow

if TYPE_CHECKING:
    from PIL.Image import Image

EXTRA = "vision"
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
"""Files of a model's folder that describe its processor; it has at least one of them."""
_ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://|data:")
_ORIENTATION, _ON_ITS_SIDE = 0x0112, frozenset({5, 6, 7, 8})
"""The EXIF tag of a photograph's orientation, and its values that swap width and height."""


@dataclass(frozen=True)
class ImageFile:
    """An image file that a record names.

    Attributes:
        folder: of the data file whose record names it.
        name: path relative to ``folder``.
        width: pixels, as the image is seen (with the orientation that the file states).
        height: pixels.
        n_bytes: size of the file.
        mtime_ns: time of its last change.
        digest: blake2b digest of its bytes, 32 hex digits; "" where nobody asked.
    """

    folder: Path
    name: str
    width: int
    height: int
    n_bytes: int
    mtime_ns: int
    digest: str = ""

    @property
    def path(self) -> Path:
        return self.folder / self.name


def import_pillow(what: str = "an image") -> Any:
    """Import PIL.Image; raise MissingExtraError, which names ``what`` as in need of it, if it is not installed."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise MissingExtraError(what, "pillow", EXTRA) from error
    return PIL


def find_image(folder: Path, name: Any, where: str) -> ImageFile:
    """Return an image that a record names: its bytes are read once, digested, and decoded to see that they can be.

    Raises:
        BadRow: no path, an address, a path out of ``folder``, a missing file, or one that is no image.
    """
    path = _locate(folder, name, where)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise BadRow(f"{where}: the image {path} is no file")
        content = path.read_bytes()
        size = _seen_size(path, content)
    except FileNotFoundError:
        raise BadRow(
            f"{where}: the image {name!r} is missing (looked at {path}). Paths of images are relative to the folder of"
            f" the data file"
        ) from None
    except _unreadable() as error:
        raise BadRow(f"{where}: the image {path} does not open ({_reason(error)})") from None
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    return ImageFile(folder, name, *size, status.st_size, status.st_mtime_ns, digest)


def open_image(image: ImageFile) -> Image:
    """Decode an image as RGB, upright, as transformers does.

    Raises:
        IntegrityError: the file is gone or does not open, or is another one than when the corpus was made.
    """
    pillow = import_pillow(f"the image {image.path}")
    path = inside(image.folder, image.name)
    try:
        with pillow.Image.open(path) as opened:
            found = pillow.ImageOps.exif_transpose(opened).convert("RGB")
    except _unreadable() as error:
        raise IntegrityError(
            f"the image {path} no longer opens ({_reason(error)}): put it back as it was when its data was tokenised"
            f" ({image.n_bytes} bytes), and continue"
        ) from error
    if found.size != (image.width, image.height):
        raise IntegrityError(
            f"the image {path} has {found.width} x {found.height} pixels, and had {image.width} x {image.height} when"
            f" its data was tokenised: put that file back, and continue"
        )
    if image.digest and has_changed(image):
        raise IntegrityError(
            f"the image {path} has other bytes than when its data was tokenised: put that file back, and continue"
        )
    return found


def has_changed(image: ImageFile) -> bool:
    """Return whether a file's bytes are no longer those of its digest, or the file is gone.

    The bytes are read only where size or time of change differ.
    """
    try:
        status = image.path.stat()
        if status.st_size != image.n_bytes:
            return True
        if status.st_mtime_ns == image.mtime_ns:
            return False
        with open(image.path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest() != image.digest
    except OSError:
        return True


def _locate(folder: Path, name: Any, where: str) -> Path:
    if not isinstance(name, str) or not name:
        kind = "an image inside the record" if isinstance(name, dict | bytes) else f"{str(name)[:60]!r}"
        raise BadRow(
            f"{where}: an image is named by its path, relative to the folder of the data file, and here is {kind}:"
            f" write it to a file there, and name that"
        )
    if _ADDRESS.match(name):
        raise BadRow(
            f"{where}: the image {name[:80]!r} is an address, and nothing is downloaded: put the file beside the data,"
            f" and name its path"
        )
    try:
        return inside(folder, name)
    except ConfigError as error:
        raise BadRow(
            f"{where}: the image {name!r} is not in {folder}, the folder of the data file, and is not read: {error}"
        ) from None


def _seen_size(path: Path, content: bytes) -> tuple[int, int]:
    """Decode an image, and return its width and height as it is seen."""
    pillow = import_pillow(f"the image {path}")
    with pillow.Image.open(io.BytesIO(content)) as opened:
        opened.load()
        if opened.format == "TIFF":  # whether its header is turned already differs between releases of Pillow
            return pillow.ImageOps.exif_transpose(opened).size
        width, height = opened.size
        is_on_its_side = opened.getexif().get(_ORIENTATION) in _ON_ITS_SIDE
    return (height, width) if is_on_its_side else (width, height)


def _unreadable() -> tuple[type[Exception], ...]:
    """Return the errors by which Pillow says that a file is no image, or is damaged."""
    return OSError, ValueError, SyntaxError, import_pillow().Image.DecompressionBombError


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
