"""What the scorer of silent100 reads: cases, judges' answers; and what it makes of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from silent100 import scorer  # noqa: E402
from silent100.cases import Answer, Case, CaseError, neutral, order, read, read_all  # noqa: E402
from silent100.scorer import Asked, Judge, Verdict, parse, table  # noqa: E402

TOML = """
id = "a"
title = "A fault"
source = "somebody/something#1"
edge = "step"
axis = "data"
processes = 2
tier = 1

[answer]
place = 'head.*'
step = 2
ranks = [1, 0]
kind = "wrong scale"
"""
SCRIPT = '''"""A loop."""
from __future__ import annotations
import argparse, sys
cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
args = cli.parse_args()
print(args.faulty)  # Faulty or not
'''


def write(folder: Path, toml: str = TOML, script: str = SCRIPT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "case.toml").write_text(toml)
    (folder / "case.py").write_text(script)
    return folder


def case(answer: Answer | None, **values: object) -> Case:
    known = {"id": "a", "title": "", "edge": "step", "axis": "data", "processes": 2, "tier": 1}
    return Case(Path("a"), **(known | values), answer=answer)  # type: ignore[arg-type]


ANSWER = Answer("head.*", 2, (0, 1), "wrong scale")


def test_a_case_is_read(tmp_path: Path):
    write(tmp_path / "a")
    assert read(tmp_path / "a").answer == ANSWER
    write(tmp_path / "sound", TOML.partition("[answer]")[0].replace('"a"', '"b"') + "sound = true\n")
    assert [found.answer for found in read_all(tmp_path)] == [ANSWER, None]
    assert [found.id for found in read_all(tmp_path, "s*")] == ["b"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('kind = "wrong scale"', 'kind = "odd"', "kind = 'odd' is none of missing reduction"),
        ('edge = "step"', 'edge = "ledge"', "edge = 'ledge' is none of step"),
        ("step = 2", "", "KeyError: 'step'"),
        ("head.*", "head(", "error"),
        ("[answer]", "", "KeyError: 'answer'"),
        ("tier = 1", "tier = 3", "tier = 3 is none of 1, 2"),
    ],
)
def test_a_case_that_cannot_be_used_is_refused(tmp_path: Path, old: str, new: str, words: str):
    with pytest.raises(CaseError, match=r"case\.toml") as refused:
        read(write(tmp_path / "a", TOML.replace(old, new)))
    assert words in str(refused.value)


def test_a_folder_without_cases_is_refused(tmp_path: Path):
    with pytest.raises(CaseError, match="holds no case named x"):
        read_all(tmp_path, "x")
    (write(tmp_path / "a") / "case.py").unlink()
    with pytest.raises(CaseError, match=r"has no case\.py"):
        read_all(tmp_path)


def test_what_is_run_does_not_tell_that_it_is_faulty(tmp_path: Path):
    for faulty in (False, True):
        text = neutral(SCRIPT, faulty)
        assert "fault" not in text.lower()
        (tmp_path / "train.py").write_text(text)
        done = subprocess.run([sys.executable, tmp_path / "train.py"], capture_output=True, text=True)
        assert done.stdout.split() == [str(faulty)], done.stderr


def test_sound_twins_are_not_always_asked_about_first():
    assert {order(case(ANSWER, id=name)) for name in "ab"} == {("sound", "fault"), ("fault", "sound")}
    assert order(case(None)) == ("sound",)


def test_an_answer_is_read_from_the_last_line():
    line = '{"verdict": "fault", "place": "head", "step": 1, "kind": "mask", "ranks": [1, 0], "more": 3}'
    assert parse(f"step 1 loss 2.0\n{line}\n\n") == Verdict(True, "head", 1, "mask", (0, 1))
    assert parse('{"verdict": "sound", "place": null}') == Verdict()


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("", "printed nothing"),
        ("it is fine", "no JSON"),
        ("[]", 'no "verdict"'),
        ('{"verdict": "maybe"}', 'no "verdict"'),
        ('{"verdict": "fault", "step": "1"}', "whole number"),
        ('{"verdict": "fault", "ranks": 1}', "list of them"),
    ],
)
def test_what_is_no_answer_is_said(output: str, words: str):
    with pytest.raises(ValueError, match=words):
        parse(output)


def test_marks_and_the_table():
    right = Verdict(True, "head.weight", 2, "wrong scale", (0, 1), seconds=2.0)
    off = Verdict(True, "embed", 1, "mask", (0,), seconds=1.0)
    every = [
        Asked(case(ANSWER), {"sound": Verdict(), "fault": right}),
        Asked(case(ANSWER, tier=2), {"sound": off, "fault": off}),
        Asked(case(None, axis="tensor"), {"sound": Verdict(error="no answer")}),
    ]
    assert all(right == (mark != "false alarm") for mark, right in every[0].marks.items())
    assert [mark for mark, found in every[1].marks.items() if found] == ["false alarm", "found"]
    assert every[2].marks == {"false alarm": False}
    rows = {row[0]: row[1:] for line in table("x", every).splitlines()[4:] if (row := line.strip("| ").split(" | "))}
    rows = {name.strip(): [cell.strip() for cell in cells] for name, cells in rows.items()}
    assert rows["all"] == ["2", "2 (100 %)", *["1 (50 %)"] * 4, "1 of 3", "1", "4"]
    assert rows["tier 2"][:2] == ["1", "1 (100 %)"] and rows["axis tensor"][:2] == ["0", "–"]


def test_nothing_imports_meshwright():
    files = [*(ROOT / "silent100").glob("*.py"), *(ROOT / "silent100" / "judges").glob("*.py")]
    assert len(files) >= 6
    assert not [
        file for file in files if "import meshwright" in file.read_text() or "from meshwright" in file.read_text()
    ]


SERVING = """
import json, sys, time
for number, line in enumerate(sys.stdin, 1):
    asked = json.loads(line)
    if asked["many"] == "end":
        sys.exit(3)
    if asked["many"] == "hang":
        time.sleep(600)
    print(json.dumps({"verdict": "fault", "step": number, "words": asked["keep"]}), flush=True)
"""


def test_a_judge_that_serves_is_started_once_and_again_where_it_ended_or_gave_no_answer(tmp_path: Path, monkeypatch):
    (tmp_path / "judge.py").write_text(SERVING)
    monkeypatch.setattr(scorer, "TIMEOUT", 3)
    judge, found = Judge(f"{sys.executable} {tmp_path / 'judge.py'} --serve"), []
    for question in ("a", "b", "end", "c", "hang", "d"):
        commands = {"one": ["one"], question: [question]}
        found.append(judge.ask(commands, question, tmp_path))
    judge.close()
    assert [verdict.step for verdict in found] == [1, 2, 0, 1, 0, 1]
    assert found[0].words == str(tmp_path / "kept") and (tmp_path / "kept").is_dir()
    assert found[2].error == "it printed nothing" and found[4].error == "no answer in 3 seconds"
    assert judge.process is not None and judge.process.returncode == 0


FORKS = """
import os, sys
sys.path.insert(0, sys.argv[1])
import forks
for script in sys.argv[2:]:
    child = forks.forked(lambda: forks.train(script, ["word"], dict(os.environ)))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
PLAIN = """
import atexit, subprocess, sys
class Given:
    number: int
atexit.register(print, "at exit")
print(Given.__annotations__["number"], sys.argv[1:], __name__)
print(subprocess.run(["echo", "shell"], capture_output=True, text=True).stdout)
open(sys.argv[0] + ".left", "w").write("left open")
kept = open(sys.argv[0] + ".kept", "w")
kept.write("kept open")
sys.exit("no more")
"""


def test_a_fork_runs_a_script_as_python_does(tmp_path: Path):
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "wrong.py").write_text("raise ValueError('no rows')")
    words = [str(ROOT / "silent100" / "judges"), str(tmp_path / "plain.py"), str(tmp_path / "wrong.py")]
    site, settings = ROOT / "src" / "meshwright" / "observation" / "site", {"folder": str(tmp_path / "trace")}
    environment = os.environ | {"MESHWRIGHT_OBSERVE": json.dumps(settings), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(site), str(ROOT / "src")])
    done = subprocess.run([sys.executable, "-c", FORKS, *words], env=environment, capture_output=True, text=True)
    assert done.stdout.split("\n") == ["<class 'int'> ['word'] __main__", "shell", "", "at exit", "1", "1", ""], (
        done.stderr
    )
    assert "no more\n" in done.stderr and done.stderr.endswith("ValueError: no rows\n")
    assert [(tmp_path / f"plain.py.{name}").read_text() for name in ("left", "kept")] == ["left open", "kept open"]


HUNG = """
import sys
sys.path.insert(0, sys.argv[1])
import forks
forks.LONGEST = 1.0
for launch in ([sys.executable], [*forks.LAUNCH, "2"]):
    forks.finish(" ".join([*launch, sys.argv[2]]), sys.argv[3], sys.argv[4])
    print(open(sys.argv[4]).read(), flush=True)
"""


def test_a_script_that_never_ends_is_judged_by_what_it_printed(tmp_path: Path):
    (tmp_path / "hung.py").write_text("import time\nprint('step 1 loss 2.5', flush=True)\ntime.sleep(600)\n")
    judges, printed = ROOT / "silent100" / "judges", tmp_path / "printed.txt"
    words = [judges, tmp_path / "hung.py", tmp_path, printed]
    done = subprocess.run(
        [sys.executable, "-c", HUNG, *map(str, words)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split("\n") == ["step 1 loss 2.5", "", *["step 1 loss 2.5"] * 2, "", ""], done.stderr
