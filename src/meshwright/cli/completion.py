"""``meshwright completion [bash|zsh|fish] [--install]``: let the shell complete verbs, keys, their values and runs.

It prints a script for the shell; with --install the script is written where the shell, by default the one of $SHELL,
looks for it in your home, and it is told what was written and how to undo it. The script asks meshwright itself at each
TAB, so what it offers is always what the installed version takes.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.core.config import public_keys, take_flags
from meshwright.core.config.flags import flag_of, legal_words
from meshwright.core.config.schema import field_types, section_of, sections, union_arms
from meshwright.core.errors import ConfigError, nearest
from meshwright.core.files import replace_text

from .help import KEYS, config_of, described, options_of

RUN_FILES = ("config.toml", "identity.json")
OUT = "runs"
"""Folder in which runs lie by default."""
SHELLS = ("bash", "zsh", "fish")


def split(line: str) -> list[str]:
    """Split a command line up to the cursor into words; the last is the one to complete, empty behind a space."""
    try:
        words = shlex.split(line)
    except ValueError:  # a quote that is still open
        words = re.sub("[\"']", "", line).split()
    return [*words, ""] if not words or line[-1:].isspace() else words


def candidates(words: list[str], verbs: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return the words that may stand in place of the last one.

    One that ends with ``=``, ``.`` or ``/`` goes on; the others are complete.

    Args:
        words: those behind the program's name.
        verbs: verb -> (module:function, its help).
    """
    last = words[-1]
    if len(words) == 1:
        return _that_begin([*verbs, "--help", "--version"], last)
    verb, before = words[0], words[1:-1]
    if verb not in verbs:
        return []
    if verb == "completion":
        return _that_begin([*SHELLS, "--install"], last)
    usage, _ = described(verb, verbs[verb][0])
    takes_keys = KEYS in usage
    if before and before[-1] in ("-h", "--help") and takes_keys:
        return _that_begin((path for path, _ in sections(config_of(verb)) if path and "[]" not in path), last)
    own = {flag_of(name): kind for cls in options_of(verbs[verb][0]) for name, kind in field_types(cls).items()}
    if last.startswith("-"):
        flag, equals, value = last.partition("=")
        if equals:
            legal = _legal(own[flag]) if flag in own else _values_of_key(config_of(verb), flag) if takes_keys else ()
            found = _that_begin(legal, value) or list(_paths(value, ("",)))
            return [f"{flag}={one}" for one in found]
        return _that_begin(["--help", *own], last) + (_keys(config_of(verb), last) if takes_keys else [])
    if before and (kind := own.get(before[-1])) is not None and bool not in union_arms(kind):
        return _that_begin(_legal(kind), last) or list(_paths(last, ("",)))
    if before and before[-1].startswith("-") and "=" not in before[-1] and before[-1] not in own:
        return list(_paths(last, ("",)))
    endings = (".toml",) if "CONFIG" in usage else ()
    if re.search("DATA|FILE", re.sub(r"\[.*?\]", "", usage)):
        endings = ("",)  # of verbs that take no file, only folders are offered
    return list(dict.fromkeys([*(_runs(last) if "RUN" in usage else ()), *_paths(last, endings)]))


def _that_begin(words: Iterable[str], beginning: str) -> list[str]:
    return sorted({word for word in words if word.startswith(beginning)})


def _legal(annotation: Any) -> list[str]:
    """Return the words that an option may be, but for none, which is its absence."""
    return [word for word in legal_words(annotation) if word != "none"]


def _keys(cls: type, beginning: str) -> list[str]:
    """Return flags of keys, up to their next dot where several go on there."""
    typed = beginning.replace("-", "_").replace("__", "--", 1)
    # of an array of tables, the array's own key is the flag
    flags = dict.fromkeys(f"--{key.partition('[]')[0]}" for key in public_keys(cls))
    found = {flag for flag in flags if flag.startswith(typed)}
    ends = {(flag + "=").find(".", len(typed)) for flag in found}
    if len(found) > 1 and len(ends) == 1 and (end := ends.pop()) >= 0 and len({flag[:end] for flag in found}) == 1:
        return _keys(cls, next(iter(found))[: end + 1])
    return sorted({flag[: end + 1] if (end := flag.find(".", len(typed))) >= 0 else f"{flag}=" for flag in found})


def _values_of_key(cls: type, flag: str) -> tuple[str, ...]:
    *path, last = flag.removeprefix("--").replace("-", "_").split(".")
    for name in path:
        inner = section_of(field_types(cls).get(name, str))
        if inner is None:
            return ()
        cls = inner
    annotation = field_types(cls).get(last)
    if f"{flag}".endswith("model.size"):
        from meshwright.models.decoder_config import SIZES

        return tuple(SIZES)
    return legal_words(annotation) if annotation is not None else ()


def _runs(beginning: str) -> Iterator[str]:
    """Yield folders of runs: those in ``runs``, newest first, and those where the typed path leads."""
    head, slash, _ = beginning.rpartition("/")
    for place in dict.fromkeys([Path(OUT), Path(head or "/") if slash else Path(OUT)]):
        try:
            found = [path for path in place.iterdir() if any((path / name).is_file() for name in RUN_FILES)]
            found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        except OSError:
            continue
        yield from (str(path) for path in found if str(path).startswith(beginning))


def _paths(beginning: str, endings: tuple[str, ...]) -> Iterator[str]:
    """Yield folders, and files with one of the endings, whose paths begin as typed; hidden ones only if asked for."""
    head, _, tail = beginning.rpartition("/")
    folder = Path(head + "/" if head or beginning.startswith("/") else ".").expanduser()
    try:
        inside = sorted(folder.iterdir())
    except OSError:
        return
    for path in inside:
        if not path.name.startswith(tail) or (path.name.startswith(".") and not tail.startswith(".")):
            continue
        shown = f"{head}/{path.name}" if "/" in beginning else path.name
        if path.is_dir():
            if not any((path / name).is_file() for name in RUN_FILES) or "" in endings:
                yield f"{shown}/"
        elif path.name.endswith(endings):
            yield shown


ASK = "--candidates"
"""The flag by which a script asks: the command line up to the cursor follows."""
MARK = "completion of meshwright"

BASH = f"""# {MARK} for bash
_meshwright() {{
    local line="${{COMP_LINE:0:COMP_POINT}}" typed found
    typed="${{line##*[[:space:]]}}"
    local cut=""
    # readline replaces what stands behind the last of its word breaks, and = and : are among them
    if [[ "$COMP_WORDBREAKS" == *=* && "$typed" == *=* ]]; then cut="${{typed%"${{typed##*=}}"}}"; fi
    COMPREPLY=()
    while IFS= read -r found; do
        [[ -n "$found" ]] && COMPREPLY+=("${{found#"$cut"}}")
    done < <("${{COMP_WORDS[0]}}" completion {ASK} "$line" 2>/dev/null)
    case "${{COMPREPLY[0]-}}" in *[=./]) compopt -o nospace 2>/dev/null ;; esac
}}
complete -o nosort -F _meshwright meshwright
"""

ZSH = f"""#compdef meshwright
# {MARK} for zsh
_meshwright() {{
    local -a found whole open
    local one
    found=("${{(@f)$("${{words[1]}}" completion {ASK} "${{(j: :)${{(@)words[1,CURRENT]}}}}" 2>/dev/null)}}")
    for one in $found; do
        if [[ "$one" == *[=./] ]]; then open+=("$one"); else whole+=("$one"); fi
    done
    (( $#whole )) && compadd -U -V whole -- $whole
    (( $#open )) && compadd -U -V open -S '' -- $open
    return 0
}}
if [[ "$funcstack[1]" == "_meshwright" ]]; then _meshwright "$@"; else compdef _meshwright meshwright; fi
"""

FISH = f"""# {MARK} for fish
function __meshwright_candidates
    set -l words (commandline -opc)
    $words[1] completion {ASK} (commandline -cp) 2>/dev/null
end
complete -c meshwright -f -a '(__meshwright_candidates)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


@dataclass(frozen=True)
class CompletionOptions:
    install: bool = False
    """Write the script where the shell looks for it."""


def run(argv: list[str]) -> int:
    """Print a script, install it, or answer one that asks for candidates."""
    if argv[:1] == [ASK]:
        from .main import VERBS

        words = split(argv[1] if len(argv) > 1 else "")
        print("\n".join(candidates(words[1:] or [""], VERBS)))
        return 0
    options, words = take_flags(CompletionOptions, argv)
    installs = options.install
    if len(words) > 1:
        raise ConfigError(f"meshwright completion takes one shell, not {' '.join(words)}")
    if not words and not installs:
        raise ConfigError(
            f"meshwright completion needs a shell, one of {', '.join(SHELLS)}: it prints the script; with --install it"
            " writes it"
        )
    shell = words[0] if words else Path(os.environ.get("SHELL", "")).name
    if shell.startswith("-"):
        raise ConfigError(
            f"meshwright completion does not know '{shell}'.{nearest(shell, ['--install'])} Name a shell before it, or"
            f" none for that of $SHELL: meshwright completion [{'|'.join(SHELLS)}] [--install]"
        )
    if shell not in SCRIPTS:
        named = "" if words else " (from $SHELL)"
        raise ConfigError(
            f"'{shell}'{named} is no shell that can be completed.{nearest(shell, SHELLS)} Name one: meshwright"
            f" completion {'|'.join(SHELLS)}{' --install' * installs}"
        )
    if not installs:
        print(SCRIPTS[shell], end="")
        return 0
    path = place_of(shell)
    if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        raise ConfigError(
            f"{path} is there already and was not written by meshwright: move it away, then install again"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, SCRIPTS[shell])
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror or error}): print the script instead") from None
    more = {
        "bash": f"it is read by the package bash-completion; without that, add to ~/.bashrc: source {path}",
        "zsh": f"if ~/.zshrc has no such line, add: fpath=({path.parent} $fpath); autoload -Uz compinit && compinit",
        "fish": "fish reads it by itself",
    }
    print(f"wrote {path}\n{more[shell]}\nnew shells complete 'meshwright'; to undo: rm {path}")
    return 0


def place_of(shell: str) -> Path:
    """Return the file in which a shell looks for a user's completion of meshwright."""
    home = Path.home()
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    if shell == "bash":
        return data / "bash-completion" / "completions" / "meshwright"
    if shell == "zsh":
        return data / "zsh" / "site-functions" / "_meshwright"
    return Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "fish" / "completions" / "meshwright.fish"
