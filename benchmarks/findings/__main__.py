"""``python -m benchmarks.findings [NAME …]``: print what blame says of each finding."""

import argparse
import tempfile
from pathlib import Path

from . import CASES, run

cli = argparse.ArgumentParser(prog="python -m benchmarks.findings", description="Print what blame says of findings.")
cli.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)} (default: all)")
names = cli.parse_args().names
if strange := [name for name in names if name not in CASES]:
    cli.error(f"no finding is called {', '.join(strange)}; there are {', '.join(CASES)}")
for name in names or CASES:
    with tempfile.TemporaryDirectory() as folder:
        print(f"{name}: {run(name, Path(folder))['words']}", flush=True)
