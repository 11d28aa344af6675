"""``meshwright doctor [--limit SECONDS] [--json]``: tell what works on this machine, and how to repair the rest.

It reports versions beside the tested ones, the host, the build of torch and its devices, and the private names of other
libraries that meshwright uses; lets two processes exchange data; and compares a tiny model over two ranks of each of
dp_shard, tp and pp with one process. Exit status 0: all hold; 1: something fails, and the report says what and why.
"""

from __future__ import annotations

import json
import platform
import time
from dataclasses import dataclass
from typing import Annotated

from meshwright.core.config import take_flags
from meshwright.core.config.ranges import Range

from .arguments import refuse_rest


@dataclass(frozen=True)
class DoctorOptions:
    limit: Annotated[float, Range("5 or more seconds", lambda value: value >= 5)] = 55.0
    """Seconds after which it gives up (default: 55)."""
    json: bool = False
    """Everything as one JSON object, for programs."""


def run(argv: list[str]) -> int:
    """Print findings as they are made; return 0 if all hold, else 1."""
    began = time.monotonic()
    options, rest = take_flags(DoctorOptions, argv)
    refuse_rest(rest, "meshwright doctor", DoctorOptions)
    from meshwright import __version__

    if not options.json:
        print(f"meshwright {__version__} on {platform.node()}", flush=True)
    from meshwright.verification.doctor.examination import examine
    from meshwright.verification.doctor.findings import closing, holds, lines_of, plain

    findings, section = [], ""
    for finding in examine(began + options.limit):
        findings.append(finding)
        if not options.json:
            print("\n".join(lines_of(finding, section)), flush=True)
        section = finding.section
    seconds = time.monotonic() - began
    if options.json:
        print(json.dumps(plain(findings, seconds, __version__), indent=1))
    else:
        print("\n".join(closing(findings, seconds)))
    return 0 if holds(findings) else 1
