"""Test other releases of torch, transformers and Python than those of constraints.txt, in environments of their own.

    python scripts/releases.py                 the oldest and the newest release
    python scripts/releases.py 2.14.1 ...      these; 'here' is the environment that runs this script
    ... --quick                                     what CI runs: the cheapest cases
    ... --record                                    keep the results in tests/versions/results.json
    ... --if-possible                               an environment that cannot be made is a sentence, not a failure

A file of tests/versions names an environment's Python and the packages that differ from constraints.txt. Environments
are kept between runs, and shared by checkouts, in $MESHWRIGHT_ENVIRONMENTS (default ~/.cache/meshwright/environments):
some 6 GB each, most of it CUDA's libraries, without which torch's wheels from PyPI do not start. The package is not
installed there: its sources are on the path.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ROOT / "tests" / "versions"
RESULTS = FILES / "results.json"
EXTRAS = ("adapters", "eval", "fabric", "float8", "hf", "slurm", "track", "trl", "vision")
TOOLS = ("grimp", "hypothesis", "pytest", "pytest-xdist")
SHOWN = (
    "torch transformers tokenizers accelerate datasets peft trl lightning-fabric lm-eval torchao numpy rich"
).split()
"""Packages whose releases the results name."""
NEEDED_GB = 9.0
"""Free disk for an environment and its download."""


class Unavailable(Exception):
    """An environment cannot be made here; the message is one sentence."""


@dataclass(frozen=True)
class Part:
    """Tests of one thing that a release may break.

    Attributes:
        quick: arguments of pytest beside ``--tier=test`` in a quick run; None: left out of it.
        whole: arguments in a whole run.
    """

    name: str
    files: tuple[str, ...]
    quick: tuple[str, ...] | None = ()
    whole: tuple[str, ...] = ("--tier=test",)


PARTS = (
    Part(
        "private names",
        (
            "tests/unit/test_torch_private.py",
            "tests/unit/test_private_names.py",
            "tests/distributed/test_distributed_private.py",
        ),
        whole=("--tier=all",),
    ),
    Part("weights as torch reads and writes them", ("tests/distributed/test_torch_doors.py",), whole=("--tier=all",)),
    Part(
        "array of ways",
        ("tests/distributed/test_ways.py",),
        quick=("-k", "gpt2 or gpt_neox"),
        whole=("--tier=all",),
    ),
    Part("checkpoints", ("tests/distributed/test_checkpoint.py",)),
    Part(
        "functions of other systems",
        (
            "tests/distributed/test_functions.py",
            "tests/distributed/test_parallelizer.py",
            "tests/distributed/test_transforms.py",
        ),
    ),
    Part("generation", ("tests/distributed/test_generation.py",), whole=("--tier=all",)),
    Part("fine-tuning and export", ("tests/e2e/test_hugging_face_runs.py",)),
    Part(
        "loops of other libraries",
        (
            "tests/distributed/test_laid_out_trainer.py",
            "tests/distributed/test_trainer_heads.py",
            "tests/distributed/test_accelerate_calls.py",
            "tests/distributed/test_fabric_strategy.py",
            "tests/distributed/test_lm_eval.py",
        ),
        quick=None,
    ),
    Part(
        "adapters, float8, low-bit optimizers",
        (
            "tests/distributed/test_requested_adapters.py",
            "tests/distributed/test_stacked_adapters.py",
            "tests/distributed/test_dora.py",
            "tests/distributed/test_float8.py",
            "tests/distributed/test_float8_gather.py",
            "tests/distributed/test_optimizer_state.py",
        ),
        quick=None,
    ),
    Part("unit tests", ("tests/unit",), quick=None),
)


# --- environments


def files() -> dict[str, Path]:
    """The files of tests/versions by release, oldest first."""
    return {path.stem: path for path in sorted(FILES.glob("*.txt"), key=lambda path: _numbers(path.stem))}


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def environment(name: str) -> Path:
    """The Python of an environment, made where it is not there.

    Raises:
        Unavailable: it cannot be.
    """
    if name == "here":
        return Path(sys.executable)
    text = files()[name].read_text(encoding="utf-8")
    wanted = re.search(r"^# python (\S+)", text, re.MULTILINE)
    python = _interpreter(wanted[1] if wanted else "")
    made_of = "\n".join([python, *requirements(text), *constraints(text)])
    home = os.environ.get("MESHWRIGHT_ENVIRONMENTS") or Path.home() / ".cache" / "meshwright" / "environments"
    folder = Path(home) / f"torch-{name}-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"
    if not (folder / "complete").exists():
        _make(folder, name, python, requirements(text), constraints(text))
    return folder / "bin" / "python"


def _interpreter(version: str) -> str:
    """The command of a Python of this release where one is found, else the one that runs this script."""
    candidates = [f"python{version}"]
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates += map(str, sorted(root.glob(f"versions/{version}.*/bin/python")))
    for command in candidates if version else ():
        code = f"import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != {version!r})"
        if shutil.which(command) and subprocess.run([command, "-c", code], capture_output=True).returncode == 0:
            return command
    return sys.executable


def requirements(text: str) -> list[str]:
    """What an environment installs: the package's dependencies and extras, the tools of its tests, and the pins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for extra in EXTRAS for line in project["optional-dependencies"][extra]]
    plain = [line for line in (*project["dependencies"], *extras) if not line.startswith("meshwright")]
    return [*plain, *TOOLS, *_pins(text)]


def constraints(text: str) -> list[str]:
    """The lines of constraints.txt about packages that the environment does not pin itself."""
    own = {_name(line) for line in _pins(text)}
    lines = _pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    loose = _follows("torch", own) | _follows("transformers", own)
    return [line for line in lines if _name(line) not in own | loose]


def _follows(package: str, own: set[str]) -> set[str]:
    """Packages whose release another one's decides, where that one is another than constraints.txt has."""
    of = {"torch": {"networkx", "sympy", "fsspec", "setuptools"}, "transformers": {"huggingface_hub", "tokenizers"}}
    return of[package] if package in own else set()


def _pins(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def _name(line: str) -> str:
    return re.split(r"[<>=!~\[; ]", line, maxsplit=1)[0].lower().replace("_", "-")


def _make(folder: Path, name: str, python: str, wanted: list[str], constrained: list[str]) -> None:
    begin = time.monotonic()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free / 1e9
        if free < NEEDED_GB:
            raise Unavailable(f"torch {name} needs {NEEDED_GB:.0f} GB of disk, and {folder.parent} has {free:.0f}")
        for old in folder.parent.glob(f"torch-{name}-*"):
            shutil.rmtree(old)
        subprocess.run([python, "-m", "venv", folder], check=True, capture_output=True, text=True)
        for file, lines in (("requirements.txt", wanted), ("constraints.txt", constrained)):
            (folder / file).write_text("\n".join(lines) + "\n", encoding="utf-8")
        made = folder / "bin" / "python"
        subprocess.run([made, "-m", "pip", "install", "--quiet", "uv"], check=True, capture_output=True, text=True)
        command = [made, "-m", "uv", "pip", "install", "--quiet", "--python", made]
        command += ["-r", folder / "requirements.txt", "-c", folder / "constraints.txt"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=1200)
    except OSError as error:
        raise Unavailable(f"torch {name}: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"torch {name} was not installed within {error.timeout:.0f} s") from error
    except subprocess.CalledProcessError as error:
        said = " ".join(error.stderr.split()) or "no reason was printed"
        raise Unavailable(f"torch {name} could not be installed: {said[-400:]}") from error
    (folder / "complete").touch()
    print(f"versions: made {folder} in {time.monotonic() - begin:.0f} s", flush=True)


def packages(python: Path) -> dict[str, str]:
    """Releases in an environment of what ``SHOWN`` lists, and of Python."""
    code = (
        "import json, platform, importlib.metadata as m, sys\n"
        "def v(p):\n    try: return m.version(p)\n    except m.PackageNotFoundError: return None\n"
        "print(json.dumps({'python': platform.python_version(), **{p: v(p) for p in sys.argv[1:]}}))"
    )
    done = subprocess.run([python, "-c", code, *SHOWN], capture_output=True, text=True, check=True)
    return {name: version for name, version in json.loads(done.stdout).items() if version}


# --- runs


def run_environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run_parts(python: Path, quick: bool) -> dict[str, dict[str, int]]:
    """Counts of passed, failed and skipped tests by part. Parts with equal arguments share a run."""
    runs: dict[tuple[str, ...], list[Part]] = {}
    for part in PARTS:
        arguments = part.quick if quick else part.whole
        if arguments is not None:
            runs.setdefault((*(["--tier=test"] if quick else []), *arguments), []).append(part)
    found: dict[str, dict[str, int]] = {}
    for arguments, parts in runs.items():
        found |= _run(python, arguments, parts)
    return {part.name: found[part.name] for part in PARTS if part.name in found}


def _run(python: Path, arguments: tuple[str, ...], parts: list[Part]) -> dict[str, dict[str, int]]:
    paths = [path for part in parts for path in part.files if (ROOT / path).exists()]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1", *arguments, *paths]
        subprocess.run(command, cwd=ROOT, env=run_environment(), check=False)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    found = {part.name: {"passed": 0, "failed": 0, "skipped": 0} for part in parts}
    for case in cases:
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        file = case.get("file") or ""
        owner = max(parts, key=lambda part: max((len(path) for path in part.files if file.startswith(path)), default=0))
        found[owner.name][outcome] += 1
    if not cases:
        found[parts[0].name]["failed"] = 1
    return found


def handed_over(pythons: dict[str, Path]) -> dict[str, int]:
    """Let every environment read what every one wrote; count checkpoints that differ or cannot be read."""
    script, wrong = str(FILES / "handover.py"), 0
    with tempfile.TemporaryDirectory() as folder:
        written = {name: str(Path(folder) / name) for name in pythons}
        for name, python in pythons.items():
            wrong += subprocess.run([python, script, "write", written[name]], env=run_environment()).returncode
        for python in pythons.values():
            wrong += subprocess.run([python, script, "read", *written.values()], env=run_environment()).returncode
    return {"passed": len(pythons) ** 2 if not wrong else 0, "failed": wrong, "skipped": 0}


def trained(python: Path) -> dict[str, int]:
    """Train over four ranks; a warning is a failure."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-W", "default", "-m", "meshwright", "train", "--model.size=debug", "--steps=4"]
        command += ["--layout.dp_shard=2", "--layout.tp=2", f"--run={folder}/run"]
        done = subprocess.run(command, env=run_environment(), capture_output=True, text=True)
    warned = [line for line in (done.stdout + done.stderr).splitlines() if "Warning" in line or " W1" in line[:20]]
    if done.returncode or warned:
        print(done.stdout[-1500:], done.stderr[-1500:], *warned, sep="\n")
    return {
        "passed": int(not done.returncode and not warned),
        "failed": int(bool(done.returncode or warned)),
        "skipped": 0,
    }


# --- results


def keep(name: str, here: dict[str, str], counts: dict[str, dict[str, int]]) -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    results[here["torch"].partition("+")[0]] = {"date": str(date.today()), "packages": here, "parts": counts}
    ordered = dict(sorted(results.items(), key=lambda entry: _numbers(entry[0])))
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def _cell(counts: dict[str, int] | None) -> str:
    if counts is None:
        return "not run"
    more = [f"{counts[key]} {key}" for key in ("failed", "skipped") if counts[key]]
    return ", ".join([f"{counts['passed']} passed", *more])


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("versions", nargs="*")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--if-possible", action="store_true")
    options = parser.parse_args()
    known = list(files())
    wanted = options.versions or [known[0], known[-1]]
    if unknown := set(wanted) - {*known, "here"}:
        parser.error(f"no file of tests/versions for {', '.join(sorted(unknown))}; there are {', '.join(known)}, here")
    pythons, failed = dict[str, Path](), 0
    for name in wanted:
        try:
            pythons[name] = environment(name)
        except Unavailable as error:
            print(f"versions: {error}; nothing of it was tested", flush=True)
            failed += not options.if_possible
    shared = handed_over(pythons) if pythons else {}
    for name, python in pythons.items():
        begin, here = time.monotonic(), packages(python)
        counts = {"four ranks without a warning": trained(python), "checkpoints of the others": shared}
        counts |= run_parts(python, options.quick)
        failed += sum(count["failed"] for count in counts.values())
        print(f"versions: torch {here['torch']}, Python {here['python']}, {time.monotonic() - begin:.0f} s")
        for part, count in counts.items():
            print(f"  {part:<42} {_cell(count)}")
        if options.record:
            keep(name, here, counts)
    print(f"versions: {failed} failed" if failed else "versions: all passed", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
