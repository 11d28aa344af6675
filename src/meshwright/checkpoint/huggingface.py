"""Load weights from a Hugging Face folder: each rank reads its own slices, after everything is checked."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.core.errors import ConfigError, IntegrityError, MeshwrightError, UnsupportedError
from meshwright.core.names import clean, is_within
from meshwright.core.record import recall, remember
from meshwright.core.torch_private import is_persistent
from meshwright.distributed import order
from meshwright.distributed.doors import mean_plan
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.pipeline.split import SharedEnds
from meshwright.distributed.process import agree
from meshwright.distributed.transform_registry import ModelTransform, register_model_transform
from meshwright.distributed.transforms import LoadWeightsTransformConfig
from meshwright.distributed.weights.constructed import Destinations, Weights
from meshwright.distributed.weights.shards import pieces
from meshwright.introspection.adapted_model import AdaptersRead, base_name, is_adapter, is_trained_copy, peft_name
from meshwright.introspection.adapter_request import CONFIG as ADAPTER_CONFIG
from meshwright.introspection.adapter_request import WEIGHTS as ADAPTER_WEIGHTS
from meshwright.introspection.facts import model_facts
from meshwright.introspection.module_kinds import names_to_ignore
from meshwright.planning.techniques import Techniques

from .loading import load_model_tensors
from .manifest import NAME
from .mirror import model_folder
from .state import dtype_word
from .tensor_files import Source, Stored, TensorFiles, sources

# --- load weights from a Hugging Face folder

SHOWN = 4
"""Number of problems that an error lists."""
SAMPLES, SAMPLED_BYTES = 256, 2**16
"""Blocks of a file, and bytes of each, that its fingerprint is made of; a smaller file counts whole."""


class Pretrained:
    """The weights in a folder; called with a model, laid out or not, it writes them.

    Beside a model's adapters only the base's weights are read, or those in a folder of peft's too.

    ``parallelize(config, layout, weights=pretrained(folder))`` reads each value once, into its place.

    Attributes:
        adapter: the folder with the adapters' weights; None: they are not read.
        bytes_read: bytes that this rank requested from the files, at the files' dtype.
    """

    def __init__(self, folder: str | Path, adapter: str | Path = ""):
        self.folder = model_folder(folder)
        self.adapter = Path(adapter).expanduser() if str(adapter) else None
        self.bytes_read = 0

    def check(self, model: nn.Module) -> None:
        """Check that the folder holds exactly a model's weights (on meta or not). Not collective; reads headers only.

        Raises:
            ConfigError: names or shapes that differ, all listed, or no weights.
            IntegrityError: a damaged, truncated or absent file.
            UnsupportedError: weights that are quantized, or stored in a form that cannot be read by slices.
        """
        _Match.of(model, *self._files())

    def _files(self) -> tuple[TensorFiles, TensorFiles | None]:
        return TensorFiles(self.folder), TensorFiles(self.adapter, ADAPTER_WEIGHTS) if self.adapter else None

    def fingerprint(self) -> str:
        """Return a digest of the files: their names, sizes, and some blocks of each.

        Raises:
            IntegrityError: a file cannot be read.
        """
        digest = hashlib.sha256()
        files = TensorFiles(self.folder)
        try:
            for name in sorted({tensor.file for tensor in files.tensors.values()}):
                size = files.store.size(name) or 0
                digest.update(f"{Path(name).name} {size}".encode())
                for place in range(0, size, max(SAMPLED_BYTES, size // SAMPLES)):
                    digest.update(files.store.read(name, place, min(SAMPLED_BYTES, size - place)))
        except OSError as error:
            raise IntegrityError(f"{self.folder}: its weights could not be read ({error})") from error
        return digest.hexdigest()

    def reader(self, model: nn.Module) -> Callable[[str], Tensor]:
        """Return a function that reads one tensor of a model whole, by its name in the model, in the files' dtype.

        Raises:
            ConfigError, IntegrityError, UnsupportedError: as ``check`` does.
        """
        match = _Match.of(model, TensorFiles(self.folder))

        def read(name: str) -> Tensor:
            source = match.sources[match.aliases.get(name, name)]
            return source.read(tuple(slice(0, size) for size in source.shape))

        return read

    def __call__(self, model: nn.Module | ParallelModel) -> set[str]:
        """Write every parameter and persistent buffer, converted to its dtype; return their names. Collective.

        Raises:
            ConfigError, IntegrityError, UnsupportedError: as ``check`` does, on every rank; then nothing was written.
        """
        module = model.parts[0] if isinstance(model, ParallelModel) else model
        module = module.module if isinstance(module, DistributedDataParallel) else module

        def match_files() -> tuple[TensorFiles, _Match]:
            files, of_adapters = self._files()
            match = _Match.of(module, files, of_adapters)
            self._reading(lambda: match.refuse_other_numbers(files), "Nothing was loaded.")
            return files, match

        files, match = agree.together(match_files) or (None, None)
        assert files is not None and match is not None
        agree.together(lambda: self._reading(match.write, "The model now holds a part of them."))
        self.bytes_read += files.bytes_read
        if self.adapter is not None:
            remember(module, AdaptersRead(str(self.adapter)))
        return set(match.sources) | _shared(module)

    def _reading(self, action: Callable[[], None], consequence: str) -> None:
        try:
            action()
        except (OSError, RuntimeError, SafetensorError) as error:
            if isinstance(error, MeshwrightError):
                raise
            raise IntegrityError(f"{self.folder}: its weights could not be read ({error}). {consequence}") from error


def pretrained(folder: str | Path, adapter: str | Path = "") -> Pretrained:
    """Open a Hugging Face folder, or one at an address, for ``parallelize(model, mesh, weights=…)``.

    Args:
        adapter: folder of peft's with the weights at which the model's adapters begin; "": they are drawn.
    """
    return Pretrained(folder, adapter)


@dataclass
class _Match:
    """The tensors of a model, and the source of each."""

    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    sources: dict[str, Source]
    twice: dict[str, Source]
    """Sources of tied parameters that the files hold under a second name too."""
    destinations: Destinations
    copies: dict[str, Stored]
    """Sources of the base's parameters in the file of adapters, where peft saves embeddings whole too."""

    @classmethod
    def of(cls, model: nn.Module, files: TensorFiles, of_adapters: TensorFiles | None = None) -> _Match:
        tensors, aliases, derived = _names(model)
        destinations = Destinations(model)
        shapes = {name: destinations.shape_of(tensor) for name, tensor in tensors.items()}
        shared = _shared(model)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in shared}
        adapters = {
            name: t for name, t in tensors.items() if is_adapter(name) or (of_adapters and is_trained_copy(name))
        }
        tensors = {name: tensor for name, tensor in tensors.items() if name not in adapters}
        # by the names of a model without adapters; from here on by the model's own
        own = {name: base_name(name) for name in (*tensors, *aliases)}
        found = sources(model, {base: shapes[aliases.get(name, name)] for name, base in own.items()}, files)
        left = {name: source for name, source in found.items() if name not in own.values()}
        found = {name: found[base] for name, base in own.items() if base in found} | left
        chosen, twice = {}, {}
        for alias, first in aliases.items():
            if alias in found:
                target = twice if first in found or first in chosen else chosen
                target[first] = found.pop(alias)
        chosen |= {name: found.pop(name) for name in tensors if name in found}
        problems = [f"they lack {name}" for name in tensors if name not in chosen]
        absent = [
            base_name(clean(path)) for path, module in model.named_modules() if getattr(module, "is_absent", False)
        ]
        elsewhere = {name for name in found if any(is_within(name, path) for path in absent)}
        # a model computes some tables itself that older files hold, some at another place
        tables, ignored = {tuple(name.split(".")[-2:]) for name in derived}, names_to_ignore(model)
        left = [
            source.names[0]
            for name, source in found.items()
            if name not in elsewhere
            and tuple(name.split(".")[-2:]) not in tables
            and not any(re.search(pattern, name) for pattern in ignored)
        ]
        problems += [f"they hold {name}, which the model lacks" for name in left]
        problems += [
            text
            for rows in (chosen, twice)
            for name, source in rows.items()
            if (text := _misfit(name, tensors[name], source, destinations))
        ]
        if problems:
            raise ConfigError(
                f"the weights in {files.folder} are not those of {type(model).__name__}:"
                f" {_listed(problems)}. Nothing was loaded; give the config.json that belongs to them."
            )
        match = cls(tensors, aliases, chosen, twice, destinations, {})
        return match if of_adapters is None else match.with_adapters(model, files, of_adapters, adapters, absent)

    def with_adapters(
        self, model: nn.Module, base: TensorFiles, files: TensorFiles, adapters: dict[str, Tensor], absent: list[str]
    ) -> _Match:
        """Return the match of the base and of what the file of adapters holds: adapters, and modules trained whole.

        Args:
            adapters: their tensors in the model.
            absent: paths of the modules that other ranks of a pipeline have.

        Raises:
            ConfigError: the file's tensors are others than the model's.
        """
        own = {
            name: Stored(files, key)
            for name in adapters
            for key in (peft_name(name), f"{peft_name(name)}.weight")  # magnitudes have either name
            if key in files.tensors
        }
        left = files.tensors.keys() - {source.name for source in own.values()}
        named = {base_name(name): name for name in self.tensors}
        copies = {named[name]: Stored(files, key) for key in left if (name := base_name(key)) in named}
        left -= {source.name for source in copies.values()}
        left -= {key for key in left if any(is_within(base_name(key), path) for path in absent)}
        tensors = self.tensors | adapters
        problems = [f"they lack {peft_name(name)}" for name in adapters if name not in own]
        problems += [f"they hold {key}, which the model with adapters lacks" for key in sorted(left)]
        problems += [
            text
            for name, source in (own | copies).items()
            if (text := _misfit(name, tensors[name], source, self.destinations))
        ]
        if problems:
            raise ConfigError(
                f"the adapters in {files.folder} are not those that stand beside {type(model).__name__} in"
                f" {base.folder}: {_listed(problems)}. Nothing was loaded; give the base that they were trained beside."
            )
        return replace(self, tensors=tensors, sources=self.sources | own, copies=copies)

    def refuse_other_numbers(self, files: TensorFiles) -> None:
        """Refuse a tied parameter that the files hold twice with different values, each rank its part; and whole
        parameters of the base in the file of adapters, unless they are the base's own numbers.
        """
        for name, source in self.twice.items():
            cuts = [piece.slices for piece in pieces(self.tensors[name])]
            if not all(torch.equal(source.read(cut), self.sources[name].read(cut)) for cut in cuts):
                raise ConfigError(
                    f"the weights in {files.folder} hold {self.sources[name].names[0]} and {source.names[0]} with"
                    f" different values, and the model ties them: set tie_word_embeddings in its config.json to false."
                    f" Nothing was loaded."
                )
        for name, source in self.copies.items():
            base, cut = self.sources[name], tuple(slice(0, size) for size in source.shape)
            if not torch.equal(source.read(cut).to(base.dtype), base.read(cut)):
                raise UnsupportedError(
                    f"{source.files.folder} holds {base_name(name)} with other numbers than its base, and its module is"
                    f" none of the modules_to_save in {ADAPTER_CONFIG}: whether it was trained is not known. Name it"
                    f" there to train it on. Nothing was loaded."
                )

    def write(self) -> None:
        """Write each value into its place, in the order of the files."""
        for name, source in sorted(self.sources.items(), key=lambda row: row[1].names[0]):
            with torch.no_grad(), self.destinations.opened(self.tensors[name]) as values:
                for piece in pieces(values):
                    piece.local.copy_(source.read(piece.slices))


def _listed(problems: list[str]) -> str:
    more = f" (and {len(problems) - SHOWN} more)" if len(problems) > SHOWN else ""
    return f"{'; '.join(problems[:SHOWN])}{more}"


def _shared(model: nn.Module) -> set[str]:
    """List the tensors that a pipeline's first stage gives to its last."""
    ends = recall(model, SharedEnds)
    return set(ends.names) if ends is not None else set()


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Map global names to parameters (tied ones once) and persistent buffers: what a file must hold of a model."""
    return _names(model)[0]


def _names(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], set[str]]:
    """Return tensors (tied ones once), other name -> first name, and the buffers that no file needs to hold."""
    tensors: dict[str, Tensor] = {clean(name): parameter for name, parameter in model.named_parameters()}
    first = {id(parameter): clean(name) for name, parameter in model.named_parameters()}
    every = [(clean(name), parameter) for name, parameter in model.named_parameters(remove_duplicate=False)]
    aliases = {name: first[id(parameter)] for name, parameter in every if name not in tensors}
    derived = set()
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            full = clean(f"{path}.{name}" if path else name)
            if not is_persistent(module, name):
                derived.add(full)
            else:
                tensors[full] = buffer
    return tensors, aliases, derived


def _misfit(name: str, tensor: Tensor, source: Source, destinations: Destinations) -> str:
    shape, dtype = destinations.shape_of(tensor), destinations.dtype_of(tensor)
    if source.shape != shape:
        return f"{name} is {list(source.shape)} there and {list(shape)} in the model"
    if source.dtype.is_floating_point != dtype.is_floating_point:
        return f"{name} is {dtype_word(source.dtype)} there and {dtype_word(dtype)} in the model"
    return ""


# --- register the transform ``load_weights``, which reads a Hugging Face folder or one of our checkpoints

log = logging.getLogger("meshwright")
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


@register_model_transform("load_weights", LoadWeightsTransformConfig, after=("fully_shard",), before=("ddp",))
class LoadWeightsTransform(ModelTransform):
    """A transform that writes each rank's share of a folder's weights, creating a model on meta. Collective.

    Context: ``is_restart`` states whether this process resumes what an earlier one began (default: torchrun's and
    Slurm's restart counts).
    """

    def apply(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        config: LoadWeightsTransformConfig = self.config
        restarts = self.context.get("is_restart")
        if restarts is None:
            restarts = any(int(os.environ.get(name, "0")) > 0 for name in RESTARTS)
        if config.skip_on_restart and restarts:
            log.info("load_weights: this is a restart, so %s is not read", config.checkpoint_path)
            return model
        weights = weights_in(config.checkpoint_path)
        facts = model_facts(model)
        if not facts.on_meta:
            weights(model.module if isinstance(model, DistributedDataParallel) else model)
            return model
        mesh = self.context.get("device_mesh")
        site = order.Site(mesh, facts, self.context.get("seed", 0), weights=weights)
        return order.apply(model, mean_plan(facts, mesh, Techniques()), site, only=("weights",))


def weights_in(path: str | Path) -> Weights:
    """Return a writer of a folder's weights; ConfigError where there is no such folder."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"load_weights.checkpoint_path = {path!r} is no folder; name one with safetensors, or a checkpoint of"
            f" meshwright"
        )
    if not (folder / NAME).is_file():
        return Pretrained(folder)

    def write(model: nn.Module) -> set[str]:
        tensors = named_tensors(model)
        load_model_tensors({f"model.{name}": tensor for name, tensor in tensors.items()}, folder)
        return set(tensors)

    return write
