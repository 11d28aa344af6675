"""``python -m benchmarks.findings [NAME …]``: print what blame says of each finding."""

import sys
import tempfile
from pathlib import Path

from . import CASES, run

for name in sys.argv[1:] or CASES:
    with tempfile.TemporaryDirectory() as folder:
        print(f"{name}: {run(name, Path(folder))['words']}", flush=True)
