"""``meshwright <verb>``: finds the verb, runs it, and turns errors into a sentence and an exit status."""

from __future__ import annotations

import io
import os
import signal
import sys
from importlib import import_module

from meshwright.core.errors import MeshwrightError, nearest

VERBS = {
    "train": ("meshwright.cli.train:run", "train a model from a config, or continue a run"),
    "launch": ("meshwright.cli.launch:run", "submit a run to Slurm, and requeue it until it is complete"),
    "verify": ("meshwright.cli.verify:run", "prove that a layout equals one process"),
    "plan": ("meshwright.cli.plan:run", "show what a config becomes on its mesh, without starting it"),
    "observe": ("meshwright.cli.observe:run", "record what any training script computes, unchanged"),
    "blame": ("meshwright.cli.blame:run", "say where an observed run first differs from one process"),
    "rehearse": ("meshwright.cli.rehearse:run", "take real steps of one rank, without the others"),
    "measure": ("meshwright.cli.measure:run", "measure this machine, for plan's forecasts"),
    "evaluate": ("meshwright.cli.evaluate:run", "measure a trained model's loss, or its figures on tasks"),
    "generate": ("meshwright.cli.generate:run", "continue a text with a trained model"),
    "convert": ("meshwright.cli.convert:run", "write a run's model for transformers"),
    "checkpoint": ("meshwright.cli.checkpoint:run", "list, prove, clear and copy a run's checkpoints"),
    "doctor": ("meshwright.cli.doctor:run", "tell what works on this machine, and how to repair the rest"),
    "inspect": ("meshwright.cli.inspect:run", "show what a run or a checkpoint holds"),
    "compare": ("meshwright.cli.compare:run", "lay runs side by side: figures, curves, config"),
    "completion": ("meshwright.cli.completion:run", "print or install completion for bash, zsh or fish"),
}
"""Verb -> (module:function, its help)."""

WITHOUT_TORCH = ("checkpoint", "compare", "completion", "doctor", "observe")
"""Verbs that need no torch."""

_WIDTH = max(map(len, VERBS))
USAGE = f"""usage: meshwright VERB [CONFIG.toml | RUN] [--key=value …]

{chr(10).join(f"  {verb:<{_WIDTH}}  {does}" for verb, (_, does) in VERBS.items())}

CONFIG.toml  a file of keys; without one, the small demo is meant
RUN          the folder of a run, like runs/demo-…; its own config is read
--key=value  a key over those of the file, like --layout.tp=2

'meshwright VERB --help' tells what a verb takes; 'meshwright train --help' lists every key, '--help layout' one
section. 'meshwright completion --install' lets the shell complete verbs, keys and runs.
MESHWRIGHT_DEBUG=1 shows the traceback of an error."""


def main(argv: list[str] | None = None) -> int:
    """Run one verb.

    Args:
        argv: the words after the program's name; those of the process when None.

    Returns:
        The exit status: 0 done, 2 config, 3 refused, 130 interrupted, 141 output no longer read, 1 anything else.
    """
    is_the_process = argv is None
    if is_the_process and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a narrow encoding costs a dot or an arrow, never the command
    try:
        try:
            status = _answer(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has closed; Python would complain at exit of unwritten output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    if is_the_process and status > 128:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # one more Ctrl-C on the way out must not change the status
    return status


def _answer(argv: list[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["--"]:  # torchrun needs "--" before flags such as --run, which it takes for its own
        argv = argv[1:]
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if argv[0] == "--version":
        from meshwright import __version__

        print(f"meshwright {__version__}")
        return 0
    verb, *rest = argv
    if verb not in VERBS:
        print(f"meshwright: unknown verb '{verb}'.{nearest(verb, VERBS)} Verbs: {', '.join(VERBS)}.", file=sys.stderr)
        return 2
    target = VERBS[verb][0]
    module, _, function = target.partition(":")
    try:
        if any(word in ("-h", "--help") or word.startswith("--help=") for word in rest):
            from .help import verb_help

            print(verb_help(verb, target, rest))
            return 0
        if verb not in WITHOUT_TORCH:
            from meshwright.core.host import refuse_unfit_torch

            refuse_unfit_torch()
        return getattr(import_module(module), function)(rest)
    except MeshwrightError as error:
        if os.environ.get("MESHWRIGHT_DEBUG"):
            import traceback

            traceback.print_exc()
        print(f"meshwright: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("meshwright: interrupted", file=sys.stderr)
        return 130
