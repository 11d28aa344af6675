"""Judge by invariants that TrainCheck learns: PyPI's ``traincheck``, in an environment of its own.

As its guide says: trace the one process, infer invariants, trace the ranks for these, check. Left out are relations of
order, which the guide switches off where one reference overfits, and what the one process itself violates when it is
traced for its own invariants. A model is any variable that the script asks for ``parameters``.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ORDER = ("FunctionLeadRelation", "FunctionCoverRelation")
TOLD = ("var_name", "function", "meta_vars.step", "process_id")


def use(python: str, tool: str, *words: object, needed: bool = True) -> bool:
    """Run one of TrainCheck's commands; return whether it, and the program under it, succeeded, or exit."""
    command = [python, "-m", f"traincheck.{tool}", *map(str, words)]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    if done.returncode:
        print(tool, (done.stdout + done.stderr)[-1000:], file=sys.stderr)
    return sys.exit(1) if needed and done.returncode else not done.returncode


def models(script: str) -> list[str]:
    """Return the names of the variables that hold models."""
    nodes = list(ast.walk(ast.parse(Path(script).read_text(encoding="utf-8"))))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    asked = [node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr.endswith("parameters")]
    return sorted(stored & {ast.unparse(value).split(".")[0] for value in asked})


def collect(python: str, command: str, trace: Path, *flags: object) -> None:
    """Trace a command; follow its models in the first way under which it runs."""
    words = [python, *shlex.split(command)[1:]]
    script = next(word for word in words if word.endswith(".py"))
    shell = trace.with_suffix(".sh")
    shell.write_text(shlex.join(words) + "\n", encoding="utf-8")
    names = models(script)
    follow = [["--models-to-track", *names, "--model-tracker-style", style] for style in ("proxy", "subclass") if names]
    for way in [*follow, []]:
        shutil.rmtree(trace, ignore_errors=True)
        places = ["--pyscript", script, "--shscript", shell, "--output-dir", trace]
        if use(python, "collect_trace", *places, *flags, *way, needed=False):
            return
    sys.exit("the program does not run under TrainCheck")


def violations(python: str, trace: Path, invariants: Path) -> list[dict[str, Any]]:
    """Check a trace; return the violated invariants, the first to be seen first."""
    found = trace / "found"
    use(python, "checker", "-f", trace, "-i", invariants, "-o", found, "--no-html-report")
    text = (found / trace.name / "failed.log").read_text(encoding="utf-8").strip()
    several = json.loads(f"[{text}]".replace("\n}\n{", "\n},\n{"))
    return sorted(several, key=lambda violation: violation["detection_time"] or 0)


def main() -> None:
    """Print the first violation: its variable or function, its step, and the rank of its process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--one")
    parser.add_argument("--many")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--python", default=os.environ.get("TRAINCHECK_PYTHON"), help="one that has traincheck")
    given = parser.parse_args()
    if not given.python:
        sys.exit("name a Python that has traincheck, by --python or TRAINCHECK_PYTHON")
    every, kept, many = (given.keep / name for name in ("every.json", "kept.json", "many"))
    if not kept.exists():
        collect(given.python, given.one, given.keep / "one")
        use(given.python, "infer_engine", "-f", given.keep / "one", "-o", every, "--disable-relation", *ORDER)
        collect(given.python, given.one, given.keep / "again", "--invariants", every)
        own = [violation["invariant"] for violation in violations(given.python, given.keep / "again", every)]
        lines = every.read_text(encoding="utf-8").splitlines(keepends=True)
        kept.write_text("".join(line for line in lines if json.loads(line) not in own), encoding="utf-8")
    collect(given.python, given.many, many, "--invariants", kept)
    found = violations(given.python, many, kept)
    answer: dict[str, Any] = {"verdict": "sound"}
    if found:
        records = found[0]["trace"] or []
        # What a record does not tell is None or NaN, which is unlike itself
        told = {key: [r[key] for r in records if r.get(key) not in (None, "") and r[key] == r[key]] for key in TOLD}
        processes = sorted({int(file.name.split("_")[2]) for file in many.glob("trace_API_*")})
        answer = {
            "verdict": "fault",
            "place": (told["var_name"] + told["function"] + [""])[0],
            "step": int(max(told["meta_vars.step"], default=0)),
            "ranks": sorted({processes.index(process) for process in told["process_id"]}),
            "words": "; ".join(violation["invariant"]["text_description"] for violation in found),
        }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
