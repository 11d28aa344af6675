"""Print commands to go on with at the end of a run, as they can be pasted into the shell that it was started from."""

from __future__ import annotations

from pathlib import Path

from meshwright.core.errors import command
from meshwright.data.options import FARMYARD
from meshwright.planning.plan import Plan
from meshwright.training.config import Config

FORECAST = ("--gpus", 8, "--gpu", "h100", "--model.size=8B", "--data.seq_len=4096")


def is_demo(config: Config) -> bool:
    """Return whether a run trains a model of random weights on the demo's text."""
    return config.data.source == (FARMYARD,) and not config.data.mixture and not config.model.hf


def next_steps(folder: Path, config: Config, plan: Plan) -> str:
    """Return the command that writes another text, and behind the demo some more to try."""
    prompt = config.sample.prompt
    words = ["--prompt", prompt] if prompt.isprintable() else []
    base = ["--base", config.model.hf] if config.adapters is not None else []
    lines = [f"sample again with: {command('generate', folder, *words, *base)}"]
    if is_demo(config):
        axis = "pp" if dict(plan.mesh).get("tp", 1) > 1 else "tp"
        layout = [("another layout, the same losses", command("train", f"--layout.{axis}=2"))]
        tries = [
            ("the sentence about another animal", command("generate", folder, "--prompt", "My sleepy owl")),
            *(layout if plan.world % 2 == 0 else []),
            ("layouts of a large model on GPUs that need not be here", command("plan", *FORECAST)),
        ]
        lines += ["", "try next", *(line for why, words in tries for line in (f"  {why}:", f"    {words}"))]
    return "\n".join(lines)
