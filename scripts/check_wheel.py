"""Build the sdist, from it the wheel, and try the wheel as its users meet it: first in an environment that holds
nothing else.

python scripts/check_wheel.py [FOLDER]      FOLDER: gets the two, in place of an earlier version's, if all is well

Run by ``make test`` and ``make wheel`` with the development environment's Python, whose third-party packages the second
half borrows, so that torch is not installed again. Exits 1 and says what is wrong with the wheel.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parent.parent

BARE_IMPORT = """
import sys, meshwright
print(meshwright.__version__)
loaded = sorted({"torch", "numpy"} & set(sys.modules))
assert not loaded, f"import meshwright loads {loaded}"
assert set(meshwright.__all__) <= set(dir(meshwright)), "dir(meshwright) lacks public names"
"""

EVERY_NAME = """
import meshwright
for name in meshwright.__all__:
    getattr(meshwright, name)
print(meshwright.__file__)
"""


def run(*command: str | Path) -> str:
    """Standard output of ``command``, run outside the checkout; its failure ends the check."""
    done = subprocess.run([str(c) for c in command], cwd=tempfile.gettempdir(), capture_output=True, text=True)
    if done.returncode:
        print(f"{done.stdout}{done.stderr}", file=sys.stderr)
        first_line = " ".join(map(str, command)).splitlines()[0]
        sys.exit(f"check_wheel: the words above, and exit status {done.returncode}, came from: {first_line}")
    return done.stdout.strip()


def require(truth: object, message: str) -> None:
    if not truth:
        sys.exit(f"check_wheel: {message}")


def check_contents(wheel: Path) -> str:
    """What is in the wheel and what its metadata says; returns the version."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        fields = archive.read(next(n for n in names if n.endswith(".dist-info/METADATA")))
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    require(tops == {"meshwright"}, f"the wheel puts {sorted(tops)} beside each other; only meshwright belongs there")
    require(
        "meshwright/py.typed" in names,
        "the wheel has no meshwright/py.typed: type checkers would ignore the annotations",
    )
    require(any(n.endswith("/licenses/LICENSE") for n in names), "the wheel has no LICENSE")
    sources = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src" / "meshwright").rglob("*.py")}
    require(sources <= names, f"the wheel lacks {sorted(sources - names)}; is a pattern of .gitignore too wide?")
    metadata = Metadata.from_email(fields, validate=True)  # what an index would refuse
    require(
        metadata.description_content_type == "text/markdown" and metadata.description, "the wheel's page lacks a text"
    )
    torch = [str(each) for each in metadata.requires_dist or () if each.name == "torch"]
    require(
        len(torch) == 1 and re.fullmatch(r"torch>=[\d.]+", torch[0]),
        f"torch wants one lower bound and no pin, not {torch}",
    )
    return str(metadata.version)


def keep(built: Path, folder: Path) -> None:
    """Put the sdist and the wheel into a folder, where older ones would be uploaded with them."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("meshwright-*"):
        old.unlink()
    for file in sorted(built.glob("meshwright-*")):
        shutil.copy(file, folder)
        print(folder / file.name)


def main(folder: Path | None = None) -> None:
    with tempfile.TemporaryDirectory(prefix="meshwright-wheel-") as scratch:
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", scratch, ROOT)
        (wheel,) = Path(scratch).glob("*.whl")
        version = check_contents(wheel)

        place = Path(scratch) / "venv"
        venv.create(place, with_pip=False)
        python = place / "bin" / "python"
        run(sys.executable, "-m", "pip", "--quiet", "--python", python, "install", "--no-deps", "--no-index", wheel)
        found = run(python, "-c", BARE_IMPORT)
        require(found == version, f"meshwright.__version__ is {found}, the wheel's metadata says {version}")

        site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
        borrowed = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
        (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
        where = run(python, "-c", EVERY_NAME)
        require(Path(where).is_relative_to(place.resolve()), f"tried {where}, which is not the wheel's")
        usage = run(place / "bin" / "meshwright", "--help")
        require("train" in usage, f"`meshwright --help` does not name the verb train:\n{usage}")
        if folder is not None:
            keep(Path(scratch), folder)
    print(f"wheel: meshwright {version} installs, imports with nothing beside it, and its command runs")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
