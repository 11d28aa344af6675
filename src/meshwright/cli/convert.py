"""``meshwright convert RUN --to hf OUT``: write a run's model as a folder that transformers' from_pretrained reads.

--step N           a checkpoint other than the newest
--dtype bfloat16   of the weights (default: as the run keeps them)
--like NAME        of a run of meshwright's own decoder: the model type of transformers that computes the same. It is
proven by equal
                   logits before anything is written, or refused.
--trust            run the model code that the run keeps
"""

from __future__ import annotations

from pathlib import Path

from meshwright.core.dtypes import canonical_dtype
from meshwright.core.errors import ConfigError, nearest
from meshwright.core.units import bytes_text

from .arguments import open_run, refuse_rest, take_option, take_trust

FORMATS = ("hf",)


def run(argv: list[str]) -> int:
    """Convert, and print where the result is and how to read it."""
    if not argv or "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0 if argv else 2
    form, argv = take_option(argv, "--to", str)
    step, argv = take_option(argv, "--step", int)
    dtype, argv = take_option(argv, "--dtype", str)
    like, argv = take_option(argv, "--like", str)
    trusted, argv = take_trust(argv)
    if form not in FORMATS:
        what = (
            "--to is missing."
            if form is None
            else f"--to = {form!r} is no format that meshwright writes.{nearest(form, FORMATS)}"
        )
        raise ConfigError(f"{what} Legal: {', '.join(FORMATS)}, as in: meshwright convert runs/demo-… --to hf FOLDER")
    refuse_rest(argv[2:], "meshwright convert", "--to, --step, --dtype, --like, --trust")
    if len(argv) < 2 or any(word.startswith("-") for word in argv):
        raise ConfigError(
            "meshwright convert needs the folder of a run and a new folder: meshwright convert runs/demo-… --to hf"
            " FOLDER"
        )
    dtype = canonical_dtype(dtype, where="--dtype") if dtype is not None else None
    folder, config = open_run(argv[0], trusted=trusted)
    from meshwright.training.run.convert import convert, of_hugging_face

    if like is None:
        counterpart = of_hugging_face(folder, config)
    else:
        from meshwright.verification.counterpart.counterpart import of_decoder

        counterpart = of_decoder(folder, config, like)
    written = convert(folder, counterpart, Path(argv[1]), step=step, dtype=dtype)
    print(f"wrote {written.folder} ({bytes_text(written.bytes)} of weights) from {written.checkpoint}")
    print(f"read it with: transformers.AutoModelForCausalLM.from_pretrained({str(written.folder)!r})")
    if not written.has_tokenizer:
        print(f"no tokenizer is there: the run's data.tokenizer is {config.data.tokenizer!r}, which has no file")
    return 0
