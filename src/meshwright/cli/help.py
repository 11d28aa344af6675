"""Write a verb's help: how it is called, what it does, and the keys that it takes, all of them or one section."""

from __future__ import annotations

import re
import shutil
import textwrap
from importlib import import_module
from pathlib import Path

FLAGS = ("-h", "--help")
KEYS = "[--key=value …]"
"""Stands in the usage line of each verb that takes keys of the config."""
LISTING = ("train", "launch")
"""Verbs whose help lists every key; of the others, help names the sections."""
WIDEST, NARROWEST = 100, 40


def verb_help(verb: str, target: str, argv: list[str]) -> str:
    """Return the help of a verb (``target``: its module:function), or of the section or key that follows ``--help``.

    A config file or a run's folder in front of the flags adds its values to those shown. Raises ConfigError where
    no section and no key is called so, or the config cannot be read.
    """
    from meshwright.core.config.flags import keys_text, options_text
    from meshwright.core.config.schema import sections

    width = min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)
    usage, text = described(verb, target)
    text = folded(text, width)
    for cls in options_of(target):
        about = "" if (cls.__doc__ or "").startswith(f"{cls.__name__}(") else f"{cls.__doc__}\n"
        text += f"\n\n{about}{options_text(cls, width)}"
    if KEYS not in usage:
        return f"usage: {usage}\n\n{text}"
    cls, instance = config_of(verb), None
    if argv and not argv[0].startswith("-"):
        from .arguments import config_at

        found = config_at(Path(argv[0]))
        instance = found if verb == "launch" else found.without_job()
    if wanted := _wanted(argv):
        return f"usage: {usage}\n\n{keys_text(cls, instance, wanted=wanted, width=width)}"
    names = [path for path, _ in sections(cls) if path and "." not in path and "[]" not in path]
    whole = "" if verb in LISTING else "; 'meshwright train --help' lists all keys"
    one = (
        f"Sections: {', '.join(names)}.\n\n'meshwright {verb} --help layout' prints one section, '--help optimizer.lr'"
        f" one key{whole}."
    )
    parts = [f"usage: {usage}", text, folded(one, width)]
    return "\n\n".join([*parts, *([keys_text(cls, instance, width=width)] if verb in LISTING else [])])


def described(verb: str, target: str) -> tuple[str, str]:
    """Return a verb's usage line and the text of its help, from the docstring of its module."""
    doc = (import_module(target.partition(":")[0]).__doc__ or "").strip()
    head = re.match(r"``(.+?)``:\s*", doc, re.DOTALL)
    usage = " ".join(head.group(1).split()) if head else f"meshwright {verb} …"
    text = doc[head.end() :] if head else doc
    return usage, text[:1].upper() + text[1:].replace("``", "").rstrip()


def options_of(target: str) -> tuple[type, ...]:
    """Return the dataclasses of a verb's own flags: those of its file whose names end in ``Options``."""
    module = import_module(target.partition(":")[0])
    named = [kind for name, kind in vars(module).items() if name.endswith("Options")]
    return tuple(kind for kind in named if kind.__module__ == module.__name__)


def folded(text: str, width: int) -> str:
    """Fold paragraphs at ``width`` between words; lines that are indented stay as they are."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        paragraph
        if any(line.startswith(" ") for line in paragraph.splitlines())
        else textwrap.fill(" ".join(paragraph.split()), width, break_long_words=False, break_on_hyphens=False)
        for paragraph in paragraphs
    )


def config_of(verb: str) -> type:
    """Return the config whose keys a verb takes."""
    if verb == "launch":
        from meshwright.training.slurm import LaunchConfig

        return LaunchConfig
    from meshwright.training.config import Config

    return Config


def _wanted(argv: list[str]) -> str:
    """Return the section or key that follows ``--help``; empty without one."""
    for place, word in enumerate(argv):
        if word.startswith("--help="):
            return word.partition("=")[2]
        if word in FLAGS:
            after = argv[place + 1] if place + 1 < len(argv) else ""
            return after if after.startswith("--") or not after.startswith("-") else ""
    return ""
