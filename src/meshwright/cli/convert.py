"""``meshwright convert RUN --to hf|merged|adapter OUT``: write a run's model as a folder that transformers' or peft's
from_pretrained reads. RUN is a run's folder, or one that meshwright.save wrote in your own loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from meshwright.core.config import take_flags
from meshwright.core.dtypes import bytes_text, canonical_dtype
from meshwright.core.errors import ConfigError

from .arguments import open_run, refuse_rest

if TYPE_CHECKING:
    from meshwright.checkpoint.store import Location
    from meshwright.training.run.convert import ExportedModel


@dataclass(frozen=True)
class ConvertOptions:
    to: Literal["hf", "merged", "adapter"] | None = None
    """hf: the whole model that was trained; merged: where adapters were trained, the model with the adapters added to
    its weights; adapter: the adapters alone, as peft and vLLM read them."""
    base: Path | None = None
    """Folder of the model that training began from: for merged, and for what save(only_trained=True) left out; of
    adapter, the name under which readers find it; of a saved folder, the tokenizer is copied too."""
    step: int | None = None
    """A checkpoint other than the newest."""
    dtype: str | None = None
    """Of the weights, such as bfloat16 (default: as the run keeps them)."""
    like: str | None = None
    """Of a run of meshwright's own decoder: the model type of transformers that computes the same. It is proven by
    equal logits before anything is written, or refused."""
    trust: bool = False
    """Run the model code that the run keeps."""


def run(argv: list[str]) -> int:
    """Convert, and print where the result is and how to read it."""
    options, argv = take_flags(ConvertOptions, argv)
    form, step, dtype, base, like = options.to, options.step, options.dtype, options.base, options.like
    if form is None:
        raise ConfigError(
            "--to is missing. Legal: hf, merged, adapter, as in: meshwright convert runs/demo-… --to hf FOLDER"
        )
    flags = [word for word in argv if word.startswith("-")]
    refuse_rest(flags or argv[2:], "meshwright convert", ConvertOptions)
    if len(argv) < 2:
        raise ConfigError(
            "meshwright convert needs the folder of a run and a new folder: meshwright convert runs/demo-… --to hf"
            " FOLDER"
        )
    dtype = canonical_dtype(dtype, where="--dtype") if dtype is not None else None
    from meshwright.training.run.convert import convert, convert_saved, is_saved

    run, folder, out = argv[0], Path(argv[0]), Path(argv[1])
    if is_saved(folder):
        for flag, value in {"--step": step, "--like": like}.items():
            if value is not None:
                raise ConfigError(f"{flag} is for a run's folder, and {folder} is one checkpoint: leave {flag} out")
        written = convert_saved(folder, out, form, base, dtype=dtype)
        _say(written, form, str(base or "the model that training began from"))
        if not written.has_tokenizer:
            source = "--base names a folder without one" if base is not None else "give the model's folder with --base"
            print(f"no tokenizer is there: {source}")
        return 0
    if folder.is_dir() and not (folder / "config.toml").is_file():
        if (folder / "config.json").is_file():
            raise ConfigError(f"{folder} is a folder of Hugging Face already: transformers reads it as it is")
        raise ConfigError(
            f"{folder} is neither the folder of a run (config.toml) nor one that meshwright.save wrote (manifest.json)"
        )
    folder, config = open_run(run, trusted=options.trust)
    if config.adapters is not None and form == "hf":
        raise ConfigError(
            f"{run} trained adapters: --to merged writes the model with the adapters added, --to adapter the adapters"
            f" alone"
        )
    if config.adapters is None and form != "hf":
        raise ConfigError(f"{run} trained a whole model, no adapters: write the model with --to hf")
    if base is not None and form == "hf":
        raise ConfigError(f"--base {base}: the run {run} trained a whole model, no adapters; leave --base out")
    if like is not None and form != "hf":
        raise ConfigError(f"--like is for --to hf; with --to {form} leave it out")
    from meshwright.checkpoint.loading import load_newest
    from meshwright.training.run.folder import RunFolder

    counterpart = None
    if like is not None:
        from meshwright.verification.counterpart import of_decoder

        counterpart = of_decoder(folder, config, like)
    checkpoint = RunFolder(folder).checkpoint(step)

    def write(at: Location) -> ExportedModel:
        return convert(folder, at, config, out, form, base, like=counterpart, dtype=dtype)

    found = load_newest(RunFolder(folder).checkpoints, write) if step is None else None
    written = found[1] if found else write(checkpoint)
    in_4_bits = config.techniques.quantize_frozen != "none"
    _say(written, form, f"{base or config.model.hf}{', held in 4 bits as it was in training,' * in_4_bits}")
    if not written.has_tokenizer:
        print(f"no tokenizer is there: the run's data.tokenizer is {config.data.tokenizer!r}, which has no file")
    return 0


def _say(written: ExportedModel, form: str, beside: str) -> None:
    print(f"wrote {written.folder} ({bytes_text(written.bytes)} of weights) from {written.checkpoint}")
    if form == "adapter":
        print(f"read it beside {beside} with:\n\n{written.code}\n")
    else:
        print(f"read it with: transformers.{written.kind}.from_pretrained({str(written.folder)!r})")
