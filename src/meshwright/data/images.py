"""Find the images that records name, and load the model's own processor for them."""

from __future__ import annotations

import functools
import io
import json
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.core.errors import ConfigError, IntegrityError, MissingExtraError, UnsupportedError
from meshwright.core.files import inside, refuse_links_out, refuse_pointer
from meshwright.introspection.source import KEY, TRUST, import_transformers

from .formats import MEDIA_COLUMNS as COLUMNS
from .formats import BadRow, Record, digest_of, digest_of_bytes
from .packing import Rows
from .tokenizers import AligningTokenizer, Tokenizer, read_settings

if TYPE_CHECKING:
    from PIL.Image import Image

# --- find and open the image files that records name, inside the folder of the data file

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
        path = inside(folder, name)
    except ConfigError as error:
        raise BadRow(
            f"{where}: the image {name!r} is not in {folder}, the folder of the data file, and is not read: {error}"
        ) from None
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise BadRow(f"{where}: the image {path} is no file")
        content = path.read_bytes()
        pillow = import_pillow(f"the image {path}")
        with pillow.Image.open(io.BytesIO(content)) as opened:
            opened.load()
            size: tuple[int, int] = opened.size
            if opened.format == "TIFF":  # whether its header is turned already differs between releases of Pillow
                size = pillow.ImageOps.exif_transpose(opened).size
            elif opened.getexif().get(_ORIENTATION) in _ON_ITS_SIDE:
                size = (size[1], size[0])
    except FileNotFoundError:
        raise BadRow(
            f"{where}: the image {name!r} is missing (looked at {path}). Paths of images are relative to the folder of"
            f" the data file"
        ) from None
    except _unreadable() as error:
        raise BadRow(f"{where}: the image {path} does not open ({_reason(error)})") from None
    digest = digest_of_bytes(content)
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
        return digest_of(image.path) != image.digest
    except OSError:
        return True


def _unreadable() -> tuple[type[Exception], ...]:
    """Return the errors by which Pillow says that a file is no image, or is damaged."""
    return OSError, ValueError, SyntaxError, import_pillow().Image.DecompressionBombError


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


# --- load a model's own processor, which turns an image into tokens of its text and into pixels

_NAMES_CLASS = (*PROCESSOR_FILES, "tokenizer_config.json")
_KNOWN_PARTS = {"tokenizer", "image_processor", "video_processor"}
_PER_TOKEN = ("token_type_ids", "mm_token_type_ids")
"""Outputs that mark the tokens of images; the others of a text are made here."""
_OF_TEXT = ("input_ids", "attention_mask", "text_replacement_offsets", *_PER_TOKEN)
_REPLACED = "text_replacement_offsets"
_PROBE = (96, 64)
"""Width and height of the blank images by which a processor is asked for its outputs."""
_SIZES = 1 << 16
"""Sizes of images whose texts are remembered."""


class VisionProcessor:
    """A model's processor, read from its folder: text and numbers of images are its own.

    Images are resized by Pillow, whatever else is installed, so that every machine computes the same pixels. Videos
    are not read; the part that would read them is left out, since it needs torchvision.

    Args:
        folder: of the model.
        trust_remote_code: whether code that lies in the folder may run.

    Raises:
        ConfigError: transformers cannot load the processor.
        UnsupportedError: the processor does not say which text stands for an image.
        MissingExtraError: transformers or pillow is not installed.
    """

    def __init__(self, folder: Path, *, trust_remote_code: bool = False):
        self.folder, what = folder, f"the processor in {folder}"
        import_pillow(what)
        refuse_links_out(folder)
        for file in (path for kind in ("*.json", "*.jinja") for path in folder.glob(kind)):
            refuse_pointer(file)
        self._processor = _load(folder, import_transformers(what), trust_remote_code=trust_remote_code)
        self.image_token: str = getattr(self._processor, "image_token", None) or ""
        if not self.image_token:
            raise UnsupportedError(
                f"{KEY} = {folder}: its processor ({type(self._processor).__name__}) has no image_token, so it is not"
                f" known where a text has its images. Supported are processors such as those of LLaVA, Gemma 3,"
                f" Qwen2.5-VL and SmolVLM"
            )
        self.image_token_ids = np.array([int(i) for i in self._processor.image_token_ids], dtype=np.int64)
        blank = _blank(*_PROBE)
        found = self._call([blank, blank])
        ids = np.asarray(found["input_ids"]).reshape(-1)
        self.token_kinds = next((key for key in _PER_TOKEN if key in found), "")
        """Name of the argument that marks the tokens of images; "" where the model takes none."""
        if self.token_kinds:
            marks = np.asarray(found[self.token_kinds]).reshape(-1)
            if not np.array_equal(marks, self.kinds_of(ids)):
                raise UnsupportedError(
                    f"{KEY} = {self.folder}: its processor marks other tokens in {self.token_kinds} than those of"
                    f" images ({self.image_token_ids.tolist()}), which meshwright does not compute"
                )
        self._per_row = frozenset(key for key, value in self._pixels_in(found).items() if len(value) == 1)

        @functools.lru_cache(_SIZES)
        def text_of(width: int, height: int) -> str:
            # a blank image of the size: no processor looks at its pixels to count tokens
            return self._call([_blank(width, height)], **{f"return_{_REPLACED}": True})[_REPLACED][0][0]["replacement"]

        self._text_of = text_of

    @property
    def template(self) -> str | None:
        """The processor's own chat template, or its tokenizer's; None without one."""
        for holder in (self._processor, self._processor.tokenizer):
            found = getattr(holder, "chat_template", None)
            found = found.get("default") if isinstance(found, dict) else found
            if found:
                return str(found)
        return None

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of the tokens that a template may name, such as ``bos_token``."""
        return {key: str(text) for key, text in self._processor.tokenizer.special_tokens_map.items()}

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of the settings that determine tokens and pixels."""
        parts = [self._processor, self._processor.image_processor]
        settings = [type(self._processor).__name__, *(json.dumps(part.to_dict(), default=str) for part in parts)]
        return digest_of_bytes("\n".join(settings).encode())

    @functools.cached_property
    def _before(self) -> tuple[str, tuple[int, ...]]:
        """The token that begins a text by its text, and the ids that the tokenizer puts before a text without it."""
        tokenizer = self._processor.tokenizer
        whole, bare = (list(tokenizer("a", add_special_tokens=adds)["input_ids"]) for adds in (True, False))
        at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        return tokenizer.bos_token or "", tuple(whole[:at])

    def ids_before(self, text: str) -> tuple[int, ...]:
        """Return the ids that the processor puts before the ids of a conversation's text: none, where it begins so."""
        begin, ids = self._before
        return () if begin and text.startswith(begin) else ids

    def begun(self, text: str) -> str:
        """Return a text with the token in front that the processor puts before it, spelt out."""
        ids = list(self.ids_before(text))
        return "".join(map(str, self._processor.tokenizer.convert_ids_to_tokens(ids))) + text

    def text_of(self, width: int, height: int) -> str:
        """Return the text that stands for an image of this size where a template writes ``image_token``."""
        return self._text_of(width, height)

    def kinds_of(self, ids: np.ndarray) -> np.ndarray:
        """Return 1 for each token of an image and 0 for the others; int64 of the shape of ``ids``."""
        return np.isin(ids, self.image_token_ids).astype(np.int64)

    def spelt_tokens(self) -> list[str]:
        """Return the texts of the tokens of images, which stand in no other text."""
        spelt = self._processor.tokenizer.convert_ids_to_tokens(self.image_token_ids.tolist())
        return sorted({self.image_token, *map(str, spelt)})

    def check(self, tokenizer: Tokenizer) -> None:
        """Raise ConfigError unless ``tokenizer`` gives an image's text the ids that the processor's own gives it."""
        text = self.text_of(*_PROBE)
        own = list(self._processor.tokenizer(text, add_special_tokens=False)["input_ids"])
        given = tokenizer.encode_aligned([text])[0][0] if isinstance(tokenizer, AligningTokenizer) else []
        if own != [int(i) for i in given]:
            raise ConfigError(
                f"data.tokenizer: {tokenizer!r} does not write an image as the processor in {self.folder} does"
                f" ({text[:40]!r}… has the ids {own[:3]}…, and here {[int(i) for i in given][:3]}…): leave"
                f" data.tokenizer out, so that the model's own is used"
            )

    def pixels(self, rows: Sequence[Sequence[Image]]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return the tensors of images by the names of the model's arguments, joined in the order of the rows.

        Each row is processed by itself, so its numbers do not depend on its neighbours. Where rows have tensors of
        different sizes, the smaller are followed by zeros, as the processor does within a batch.

        Args:
            rows: the images of each row; some may have none.

        Returns:
            Float and integer arrays, whose first dim counts images or patches, or rows; none where no row has images.
            The number of each row's images, int64 (rows,); the parts that a processor cuts an image into count.
        """
        found = [self._pixels_in(self._call(images)) if images else {} for images in rows]
        # a row's images are fewer than its patches, if it has any
        lengths = [[value.shape[key in self._per_row] for key, value in each.items()] for each in found]
        counts = np.array([min(each, default=0) for each in lengths], dtype=np.int64)
        joined = {}
        for key, example in next(filter(None, found), {}).items():
            if key in self._per_row:
                parts = [each.get(key, np.zeros((1, 0, *example.shape[2:]), example.dtype)) for each in found]
            else:
                parts = [each[key] for each in found if each]
            largest = np.max([part.shape[1:] for part in parts], axis=0).tolist()
            sides = [[(0, 0), *((0, n - own) for n, own in zip(largest, p.shape[1:], strict=True))] for p in parts]
            filled = [np.pad(p, each) if np.any(each) else p for p, each in zip(parts, sides, strict=True)]
            joined[key] = np.concatenate(filled)
        return joined, counts

    def _call(self, images: Sequence[Image], **options: Any) -> dict[str, Any]:
        text = self.image_token * len(images)
        try:
            found = self._processor(images=[list(images)], text=[text], **(options or {"return_tensors": "np"}))
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, NotImplementedError) as error:
            sizes = ", ".join(f"{image.width} x {image.height}" for image in images)
            raise ConfigError(
                f"{KEY} = {self.folder}: its processor ({type(self._processor).__name__}) does not take images of"
                f" {sizes} pixels ({type(error).__name__}: {error})"
            ) from error
        if options and _REPLACED not in found:
            raise UnsupportedError(
                f"{KEY} = {self.folder}: its processor ({type(self._processor).__name__}) does not tell the text of an"
                f" image ({_REPLACED}), which transformers' processors do since 5.23"
            )
        return dict(found)

    def _pixels_in(self, found: dict[str, Any]) -> dict[str, np.ndarray]:
        return {key: np.asarray(value) for key, value in found.items() if key not in _OF_TEXT}


def _blank(width: int, height: int) -> Image:
    return import_pillow().Image.new("RGB", (width, height))


def _load(folder: Path, transformers: Any, *, trust_remote_code: bool) -> Any:
    """Load a processor of transformers without the part for videos, or one of the folder's own code whole."""
    settings = {name: read_settings(folder, name) for name in _NAMES_CLASS}
    code = next((name for name, keys in settings.items() if keys.get("auto_map")), "")
    name = next((str(keys["processor_class"]) for keys in settings.values() if keys.get("processor_class")), "")
    if name:
        kind = getattr(transformers, name, None)
    else:
        names = transformers.models.auto.processing_auto.PROCESSOR_MAPPING_NAMES
        kind = getattr(transformers, str(names.get(read_settings(folder, "config.json").get("model_type", ""))), None)
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    if kind is None and code and not trust_remote_code:
        raise ConfigError(
            f"{KEY}: {folder / code} names code of its own (auto_map), and transformers has no processor {name!r}."
            f" Read that code, then allow it with {TRUST} = true, on the command line: --{TRUST}=true"
        )
    if "--" in json.dumps([keys.get("auto_map") for keys in settings.values()]):
        raise ConfigError(f"{KEY}: {folder / code} names code in another repository (auto_map), which is not run")
    if kind is None and not code:
        raise ConfigError(
            f"{KEY} = {folder}: no file there ({', '.join(_NAMES_CLASS)}) names a processor_class that transformers"
            f" {transformers.__version__} has"
        )
    try:
        if kind is None or not set(kind.get_attributes()) <= _KNOWN_PARTS:
            return transformers.AutoProcessor.from_pretrained(folder, **options)

        class ImagesAlone(kind):
            def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
                return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

        ImagesAlone.__name__ = kind.__name__
        makers = {
            "tokenizer": lambda: transformers.AutoTokenizer.from_pretrained(folder, **options),
            "image_processor": lambda: transformers.AutoImageProcessor.from_pretrained(
                folder, backend="pil", **options
            ),
            "video_processor": lambda: None,
        }
        described, _ = kind.get_processor_dict(folder, local_files_only=True)
        made = ImagesAlone.from_args_and_dict([makers[part]() for part in kind.get_attributes()], described)
        return made[0] if isinstance(made, tuple) else made
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError) as error:
        raise ConfigError(
            f"{KEY} = {folder}: transformers {transformers.__version__} cannot load its processor"
            f" ({name or 'by its type'}): {' '.join(str(error).split())}"
        ) from error


# --- say whether a run's model takes images, and load its processor when data needs it

CONFIG, TOWER = "config.json", "vision_config"
"""A model's config, and its key that describes the part for images."""
IMAGE_PARTS = {"image": ("image", "path", "url"), "image_url": ("image_url",)}
"""Types of a message's parts that are images, and the keys that hold their path."""
PROMPTS, ANSWERS = ("prompt", "question"), ("completion", "answer")
"""Columns of a prompt and its answer, the usual ones first."""


def sides_of(sample: Record) -> tuple[str, ...]:
    """Return the columns of a prompt and its completion, which some data sets call a question and its answer."""
    return tuple(
        next((name for name in names if sample.get(name) is not None), names[0]) for names in (PROMPTS, ANSWERS)
    )


def names_images(record: Record) -> bool:
    """Return whether a record has images: in a column of them, or as parts of messages."""
    if any(record.get(name) for name in COLUMNS):
        return True
    return any(
        isinstance(part, dict) and part.get("type") in IMAGE_PARTS
        for value in record.values()
        if isinstance(value, list)
        for message in value
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


@dataclass(frozen=True)
class Vision:
    """How a run's data is read where records have images.

    Attributes:
        folder: of a model with a processor; None where records with images are refused.
        refusal: why they are, as the end of a sentence.
        trust_remote_code: whether code that lies in the folder may run.
    """

    folder: Path | None = None
    refusal: str = "and here no model takes images: name one with model.hf"
    trust_remote_code: bool = False

    @cached_property
    def processor(self) -> VisionProcessor:
        """The model's processor, loaded at the first use. Raises as ``VisionProcessor`` does."""

        if self.folder is None:
            raise ConfigError(f"data.source has images, {self.refusal}")
        return VisionProcessor(self.folder, trust_remote_code=self.trust_remote_code)


NO_IMAGES = Vision()


def vision_of(model: str, *, trust_remote_code: bool = False) -> Vision:
    """Return the vision of the model in a folder (``model.hf``; "" for a built-in one). Imports nothing."""
    folder = Path(model).expanduser() if model else None
    if folder is None:
        return Vision(refusal="and the run's model takes no images: name a vision-language model with model.hf")
    try:
        found = json.loads((folder / CONFIG if folder.is_dir() else folder).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # refused, with the reason, where the model is read
        found = {}
    if not (isinstance(found, dict) and isinstance(found.get(TOWER), dict)):
        return Vision(refusal=f"and the model of model.hf = {model} takes no images (its config has no {TOWER})")
    if not folder.is_dir() or not any((folder / name).is_file() for name in PROCESSOR_FILES):
        return Vision(
            refusal=f"and beside the model of model.hf = {model} lies no processor ({' or '.join(PROCESSOR_FILES)}),"
            f" which turns them into tokens and pixels: copy it there from the model's folder"
        )
    return Vision(folder, "", trust_remote_code)


IMAGES = "images"
"""The key of rows that holds a tuple of ``ImageFile`` for each row; an object array of shape (rows,)."""
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


def places_of_images(example: tuple[tuple[str, bool], ...], ends: np.ndarray) -> list[tuple[int, int, ImageFile]]:
    """Return the first token of each image of an example, the token behind its last, and its file; ``ends`` has the
    index of the last character of each token.
    """
    images = getattr(example, "images", ())
    if not images:
        return []
    bounds = np.cumsum([0, *(len(text) for text, _ in example)])
    edges = [np.searchsorted(ends, bounds[[piece, piece + 1]]).tolist() for piece, _ in images]
    return [(begin, end, file) for (begin, end), (_, file) in zip(edges, images, strict=True)]
