"""``meshwright convert RUN --to hf|merged|adapter OUT``: write a run's model as a folder that transformers' or peft's
from_pretrained reads.

--to hf            the whole model that a run trained
--to merged        of a run that trained adapters: the model with the adapters added to its weights
--to adapter       of such a run: the adapters alone, as peft and vLLM read them
--base FOLDER      for merged: the model beside which the adapters were trained

--step N           a checkpoint other than the newest
--dtype bfloat16   of the weights (default: as the run keeps them)
--like NAME        of a run of meshwright's own decoder: the model type of transformers that computes the same. It is
proven by equal
                   logits before anything is written, or refused.
--trust            run the model code that the run keeps
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.core.dtypes import canonical_dtype
from meshwright.core.errors import ConfigError, nearest
from meshwright.core.units import bytes_text

from .arguments import open_run, refuse_rest, take_option, take_trust

if TYPE_CHECKING:
    from meshwright.training.config import Config
    from meshwright.training.run.convert import ExportedModel

FORMATS = ("hf", "merged", "adapter")


def run(argv: list[str]) -> int:
    """Convert, and print where the result is and how to read it."""
    if not argv or "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0 if argv else 2
    form, argv = take_option(argv, "--to", str)
    step, argv = take_option(argv, "--step", int)
    dtype, argv = take_option(argv, "--dtype", str)
    base, argv = take_option(argv, "--base", Path)
    like, argv = take_option(argv, "--like", str)
    trusted, argv = take_trust(argv)
    if form not in FORMATS:
        what = (
            "--to is missing."
            if form is None
            else f"--to = {form!r} is no format that meshwright writes.{nearest(form, FORMATS)}"
        )
        raise ConfigError(f"{what} Legal: {', '.join(FORMATS)}, as in: meshwright convert runs/demo-… --to hf FOLDER")
    refuse_rest(argv[2:], "meshwright convert", "--to, --base, --step, --dtype, --like, --trust")
    if len(argv) < 2 or any(word.startswith("-") for word in argv):
        raise ConfigError(
            "meshwright convert needs the folder of a run and a new folder: meshwright convert runs/demo-… --to hf"
            " FOLDER"
        )
    dtype = canonical_dtype(dtype, where="--dtype") if dtype is not None else None
    folder, config = open_run(argv[0], trusted=trusted)
    _refuse_other_form(argv[0], form, config, base, like)
    written = _convert(folder, config, Path(argv[1]), form, base, like, {"step": step, "dtype": dtype})
    print(f"wrote {written.folder} ({bytes_text(written.bytes)} of weights) from {written.checkpoint}")
    if form == "adapter":
        print(f"read it with: peft.PeftModel.from_pretrained(model, {str(written.folder)!r}), beside {config.model.hf}")
    else:
        print(f"read it with: transformers.AutoModelForCausalLM.from_pretrained({str(written.folder)!r})")
    if not written.has_tokenizer:
        print(f"no tokenizer is there: the run's data.tokenizer is {config.data.tokenizer!r}, which has no file")
    return 0


def _refuse_other_form(run: str, form: str, config: Config, base: Path | None, like: str | None) -> None:
    """Raise ConfigError for a form that does not fit how the run trained, or flags that do not fit the form."""
    if config.adapters is not None and form == "hf":
        raise ConfigError(
            f"{run} trained adapters: --to merged writes the model with the adapters added, --to adapter the adapters"
            f" alone"
        )
    if config.adapters is None and form != "hf":
        raise ConfigError(f"{run} trained a whole model, no adapters: write the model with --to hf")
    if base is not None and form != "merged":
        raise ConfigError(f"--base is for --to merged; with --to {form} leave it out")
    if like is not None and form != "hf":
        raise ConfigError(f"--like is for --to hf; with --to {form} leave it out")


def _convert(
    folder: Path, config: Config, out: Path, form: str, base: Path | None, like: str | None, options: dict[str, Any]
) -> ExportedModel:
    from meshwright.training.run import convert

    if form == "merged":
        return convert.convert_merged(folder, config, out, base, **options)
    if form == "adapter":
        return convert.convert_adapter(folder, config, out, **options)
    if like is None:
        counterpart = convert.of_hugging_face(folder, config)
    else:
        from meshwright.verification.counterpart.counterpart import of_decoder

        counterpart = of_decoder(folder, config, like)
    return convert.convert(folder, counterpart, out, **options)
