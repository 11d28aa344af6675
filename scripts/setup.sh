#!/bin/sh
# Make the virtual environment VENV and install this checkout into it, editable, at the versions of constraints.txt.
# A second call does nothing until pyproject.toml, constraints.txt or the place of the checkout changes.
#
#   scripts/setup.sh VENV [EXTRAS]      EXTRAS: extras of pyproject.toml, separated by commas
#
# PYTHON           interpreter of a new environment; else the first that will do
# INSTALLER        uv or pip; else uv where it is installed and pip has no package sources of its own
# TORCH_INDEX_URL  one more package index, asked beside the usual one: PyTorch's CPU index keeps CUDA off a machine without a GPU
set -eu

say() { printf '%s\n' "$*" >&2; }
die() { say "setup: $*"; exit 1; }

venv=$1
extras=${2:-}
case $venv in /*) ;; *) venv=$(pwd -P)/$venv ;; esac
cd "$(dirname "$0")/.."

version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

check_asked_python() {
    [ -n "$(version "$PYTHON")" ] || die "PYTHON=$PYTHON does not run. Name a Python 3.11 or newer, for example PYTHON=python3.12."
    is_recent "$PYTHON" || die "PYTHON=$PYTHON is Python $(version "$PYTHON"), and meshwright needs 3.11 or newer. Name another one."
    [ ! -x "$venv/bin/python" ] || [ "$(version "$PYTHON")" = "$(version "$venv/bin/python")" ] ||
        die "$venv holds Python $(version "$venv/bin/python") and PYTHON=$PYTHON is $(version "$PYTHON"). Run 'make clean' first," \
            "or choose another place: make ... VENV=.venv-$(version "$PYTHON")"
}

# A name on PATH may be a shim that does not run, so each candidate is asked. python3 goes first: it is the one that the user chose.
find_python() {
    if [ -n "${PYTHON:-}" ]; then
        echo "$PYTHON"
        return
    fi
    for needs in 'import sys, ensurepip, venv' 'import sys'; do
        for name in python3 python3.13 python3.12 python3.11 python3.14; do
            if "$name" -c "$needs; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))" >/dev/null 2>&1; then
                echo "$name"
                return
            fi
        done
    done
    die "no Python from 3.11 to 3.14 found. Install one, or name it: make ... PYTHON=/path/to/python3.12 (python3 is $(version python3 || echo missing))."
}

# uv does not read pip's settings; where pip was given sources of its own (a mirror, a folder of wheels), they are meant to be used.
pip_has_sources() {
    [ -n "${PIP_INDEX_URL:-}${PIP_EXTRA_INDEX_URL:-}${PIP_FIND_LINKS:-}" ] ||
        "${PYTHON:-python3}" -m pip config list 2>/dev/null | grep -Eq '(index-url|find-links)='
}
uv_has_sources() { [ -n "${UV_DEFAULT_INDEX:-}${UV_INDEX:-}${UV_INDEX_URL:-}${UV_EXTRA_INDEX_URL:-}${UV_FIND_LINKS:-}" ]; }

choose_installer() {
    if [ -n "${INSTALLER:-}" ]; then
        case $INSTALLER in uv | pip) echo "$INSTALLER" ;; *) die "INSTALLER=$INSTALLER: it is uv or pip." ;; esac
    elif command -v uv >/dev/null 2>&1 && { uv_has_sources || ! pip_has_sources; }; then
        echo uv
    else
        echo pip
    fi
}

# A copied or moved environment does not count: its scripts still start the old one.
is_usable() {
    is_recent "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1 && grep -qF "$venv/bin/" "$venv/bin/pip"
}

make_venv() {
    if is_usable; then
        return
    fi
    if [ -d "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
        die "$venv exists and is no virtual environment. Remove it, or choose another place: make ... VENV=.venv-meshwright"
    fi
    if [ "$installer" = uv ]; then
        uv venv --quiet --clear --seed --python "${PYTHON:->=3.11,<3.15}" "$venv"
        return
    fi
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
        die "$python cannot make virtual environments: its venv module is missing. On Debian and Ubuntu: apt install python3-venv (or python$(version "$python")-venv). Or install uv."
    "$python" -m venv --clear "$venv"
}

# PyPI's torch for Linux brings CUDA along: gigabytes that a machine without a GPU has no use for.
prefer_cpu_torch() {
    if [ "$(uname -s)" != Linux ] || nvidia-smi -L >/dev/null 2>&1 || [ -n "${TORCH_INDEX_URL:-}" ] || [ -d "$(torch_folder)" ]; then
        return
    fi
    if [ "$installer" = uv ]; then
        uv_has_sources || export UV_TORCH_BACKEND="${UV_TORCH_BACKEND:-cpu}"
    elif ! pip_has_sources; then
        say "setup: no NVIDIA GPU here, and the default torch for Linux brings gigabytes of CUDA. To spare them, stop now and" \
            "install uv, or set TORCH_INDEX_URL to the address of PyTorch's CPU package index (PyTorch's page 'Get Started' gives it)."
    fi
}
torch_folder() { "$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib") + "/torch")'; }

install() {
    if [ "$installer" = uv ]; then
        uv pip install --python "$venv/bin/python" --constraint constraints.txt --editable ".${extras:+[$extras]}" \
            ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL" --index-strategy unsafe-best-match} ||
            die "uv could not install (above). INSTALLER=pip asks pip instead${UV_TORCH_BACKEND:+, which takes the default torch, not the CPU build}."
    else
        # all of torch's bytecode takes longer to write than that of the part which a run imports
        "$venv/bin/python" -m pip install --disable-pip-version-check --constraint constraints.txt --editable ".${extras:+[$extras]}" \
            $([ -n "$extras" ] || echo --no-compile) ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"}
    fi
    [ -n "$extras" ] || PYTHONDONTWRITEBYTECODE= "$venv/bin/python" -c 'import meshwright.training.trainer'
}

[ -z "${PYTHON:-}" ] || check_asked_python
stamp=$venv/.meshwright-$(echo "${extras:-core}" | tr ',' '-')
wanted=$({ pwd -P; cat pyproject.toml constraints.txt; } | cksum)
is_current() { [ "$(cat "$1" 2>/dev/null)" = "$wanted" ]; }

if is_current "$stamp"; then
    exit 0
fi
installer=$(choose_installer)
make_venv
for old in "$venv"/.meshwright-*; do # an interrupted install must not pass for a finished one
    is_current "$old" || rm -f "$old"
done
prefer_cpu_torch
install
echo "$wanted" >"$venv/.meshwright-core" # every install has the core in it
echo "$wanted" >"$stamp"
