"""Write tests/mutants.txt: in which ways (tests/ways.txt) each mutant of the galleries dies, and by which question.

    python scripts/mutants.py [--check]
        --check: change nothing; exit with 1 if a way that the file names kills its mutant no more,
                                            or if a mutant has none

Each mutant is applied to ways, the plainest first, until ``ENOUGH`` killed it. `make test` applies it to the first of
them again.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from conftest import Workers
from support.asked import answers
from support.galleries import FILE, HEAD, Kill, lines_of, on_ways, read_kills
from support.oracle import oracle
from support.ways import Way, ways

from meshwright.core.errors import MeshwrightError

ENOUGH, TRIED = 1, 40


def cost(way: Way) -> tuple[bool, int, int, str]:
    """The plainest first: of few switches, on few ranks."""
    return way.compile == "yes", str(way).count("="), way.layout.world, str(way)


def killed(mutant: str, way: Way, pool: Workers) -> Kill | None:
    """By which questions; a job that fails or hangs kills too, but says less."""
    with tempfile.TemporaryDirectory() as folder:
        reference = pool.run(oracle, way.problem, world=1)[0]
        try:
            faults = answers(way, pool, reference, Path(folder), mutant).faults
        except MeshwrightError:
            return Kill(way, ("fails",))
    return Kill(way, tuple(faults)) if faults else None


def computed(pool: Workers) -> dict[str, list[Kill]]:
    found: dict[str, list[Kill]] = {}
    for mutant in on_ways():
        found[mutant] = []
        for way in [way for way in sorted(ways(), key=cost) if way.is_ours][:TRIED]:
            if (kill := killed(mutant, way, pool)) is not None and kill.questions != ("fails",):
                found[mutant].append(kill)
            if len(found[mutant]) == ENOUGH:
                break
        print(f"{mutant}: {'; '.join(f'{kill.way} ({kill.by})' for kill in found[mutant]) or 'NEVER'}", flush=True)
    return found


def main() -> int:
    with Workers(4, threads=1) as pool:
        if "--check" not in sys.argv:
            found = computed(pool)
            FILE.write_text(HEAD + lines_of(found), encoding="utf-8")
            return any(not kills for kills in found.values())
        known = read_kills()
        alive = [mutant for mutant in on_ways() if not known.get(mutant)]
        alive += [
            f"{mutant} in {kill.way}"
            for mutant, kills in known.items()
            for kill in kills
            if killed(mutant, kill.way, pool) != kill
        ]
    print(
        f"alive, or killed by another question: {alive}"
        if alive
        else f"{len(known)} mutants die as tests/mutants.txt says"
    )
    return bool(alive)


if __name__ == "__main__":
    sys.exit(main())
