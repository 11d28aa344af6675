"""``meshwright completion [bash|zsh|fish] [--install]``: let the shell complete verbs, keys, their values and runs.

It prints a script for the shell; with --install the script is written where the shell, by default the one of $SHELL,
looks for it in your home, and it is told what was written and how to undo it. The script asks meshwright itself at each
TAB, so what it offers is always what the installed version takes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from meshwright.core.config import take_flags
from meshwright.core.errors import ConfigError, nearest
from meshwright.core.files import replace_text

from .candidates import SHELLS, candidates, split

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


OPTIONS = (CompletionOptions,)


def run(argv: list[str]) -> int:
    """Print a script, install it, or answer one that asks for candidates."""
    if argv[:1] == [ASK]:
        from meshwright.cli.main import VERBS

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
    print(_install(shell) if installs else SCRIPTS[shell], end="\n" if installs else "")
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


def _install(shell: str) -> str:
    """Write the script where the shell looks for it; return what to tell the user."""
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
    return f"wrote {path}\n{more[shell]}\nnew shells complete 'meshwright'; to undo: rm {path}"
