"""``meshwright doctor [--json] [--limit SECONDS]``: tell what works on this machine, and how to repair the rest.

It reports versions beside the tested ones, the host, the build of torch and its devices, and the private names of other
libraries that meshwright uses; lets two processes exchange data; and compares a tiny model over two ranks of each of
dp_shard, tp and pp with one process. Exit status 0: all hold; 1: something fails, and the report says what and why.

  --limit SECONDS  give up after that long (default 55)
  --json           everything as one JSON object, for programs
"""

from __future__ import annotations

import json
import platform
import time

from meshwright.core.errors import ConfigError

from .arguments import take_flag, take_option

LEAST_S = 5.0


def run(argv: list[str]) -> int:
    """Print findings as they are made; return 0 if all hold, else 1."""
    began = time.monotonic()
    as_json, argv = take_flag(argv, "--json")
    limit_s, argv = take_option(argv, "--limit", float)
    if argv:
        raise ConfigError(f"meshwright doctor takes --json and --limit SECONDS, not {' '.join(argv)}")
    if limit_s is not None and not limit_s >= LEAST_S:
        raise ConfigError(f"--limit = {limit_s:g}: give at least {LEAST_S:g} seconds")
    from meshwright import __version__

    if not as_json:
        print(f"meshwright {__version__} on {platform.node()}", flush=True)
    from meshwright.verification.doctor.examination import LIMIT_S, examine
    from meshwright.verification.doctor.findings import closing, holds, lines_of, plain

    findings, section = [], ""
    for finding in examine(began + (limit_s or LIMIT_S)):
        findings.append(finding)
        if not as_json:
            print("\n".join(lines_of(finding, section)), flush=True)
        section = finding.section
    seconds = time.monotonic() - began
    if as_json:
        print(json.dumps(plain(findings, seconds, __version__), indent=1))
    else:
        print("\n".join(closing(findings, seconds)))
    return 0 if holds(findings) else 1
