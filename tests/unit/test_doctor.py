"""The doctor names what is wrong with an environment, and how to repair it, whatever is wrong; and what a run needs is
refused in a sentence before it starts.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import meshwright
from meshwright.cli import main as cli
from meshwright.core import host as network
from meshwright.core import host as shared_memory
from meshwright.core import host as versions
from meshwright.core.errors import ConfigError, MissingExtraError, UnsupportedError
from meshwright.distributed import setup
from meshwright.distributed.process import world
from meshwright.verification.doctor import findings as host
from meshwright.verification.doctor.examination import EQUAL, judged
from meshwright.verification.doctor.findings import (
    FAILURE,
    HOST,
    NOTE,
    OK,
    WARNING,
    Finding,
    closing,
    holds,
    lines_of,
    plain,
)
from meshwright.verification.doctor.inside import sentence_of

SOURCE = Path(meshwright.__file__).parents[1]


def by_name(findings) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


# --- versions


@pytest.mark.parametrize(
    ("package", "here", "status", "words"),
    [
        ("torch", "2.13.0+cpu", OK, "tested: 2.11 to 2.15"),
        ("torch", "2.9.1", FAILURE, "older than tested: 2.11 to 2.15"),
        ("torch", "2.16.0.dev1", WARNING, "newer than tested: 2.11 to 2.15"),
        ("transformers", None, NOTE, "absent, optional; tested 5.17 to 5.24"),
        ("transformers", "5.3.0", FAILURE, "older than tested"),
    ],
)
def test_versions_stand_beside_the_tested_ones(package, here, status, words, monkeypatch):
    monkeypatch.setattr(host, "installed", lambda name: here if name == package else metadata.version("torch"))
    monkeypatch.setattr(host, "TESTED", {package: versions.TESTED[package]})
    monkeypatch.setattr(host, "_missing_dependencies", lambda: ())
    found = by_name(host.version_findings())[package]
    assert found.status == status and words in found.text and found.figures["version"] == here
    assert (f"{package}>={versions.TESTED[package].oldest}" in found.remedy) == (status == FAILURE)


def test_python_has_no_command_that_renews_it(monkeypatch):
    monkeypatch.setattr(host, "installed", lambda name: "3.14.0")
    found = by_name(host.version_findings())["python"]
    assert (found.status, found.remedy) == (WARNING, "")


def copy_of_torch(folder: Path, version: str, code: str = "") -> Path:
    """A folder with a package torch of this version, and its metadata."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(f"__version__ = {version!r}\n{code}")
    with_metadata(folder, version)
    return folder


def with_metadata(folder: Path, version: str) -> Path:
    info = folder / f"torch-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    return folder


def test_a_second_torch_is_found_with_both_folders(tmp_path, monkeypatch):
    first, second = copy_of_torch(tmp_path / "a", "2.12.0"), copy_of_torch(tmp_path / "b", "2.13.0")
    assert list(host.second_torch([str(first), str(first)])) == []
    (found,) = host.second_torch([str(first), str(second)])
    assert found.status == FAILURE and str(first / "torch") in found.text and str(second / "torch") in found.text
    assert "uninstall" in found.remedy and "then" in found.remedy
    monkeypatch.setenv("PYTHONPATH", str(first))
    (found,) = host.second_torch([str(first), str(second)])
    assert found.remedy == "unset PYTHONPATH"
    (found,) = host.second_torch([str(with_metadata(first, "2.11.0"))])  # one over the other
    assert "2.11.0" in found.text and "2.12.0" in found.text


# --- host


def test_small_shared_memory_is_warned_of_with_the_command(monkeypatch, caplog):
    monkeypatch.setattr(shared_memory, "shared_memory", lambda: 64 * 2**20)
    found = by_name(host.host_findings())[str(shared_memory.FOLDER)]
    assert found.status == WARNING and found.text.startswith("64 MiB") and "mount -o remount,size=8g" in found.remedy
    with caplog.at_level(logging.WARNING, "meshwright"):
        world.warn_of_small_shared_memory(1)
        assert caplog.text == ""
        world.warn_of_small_shared_memory(2)
    assert "64 MiB" in caplog.text and "--shm-size=8g" in caplog.text


@pytest.mark.parametrize(
    ("variable", "name", "status", "remedy"),
    [
        ("XDG_CACHE_HOME", "cache", FAILURE, "export XDG_CACHE_HOME="),
        ("TMPDIR", "temporary", WARNING, "export TMPDIR="),
        ("HOME", "home", WARNING, "export HOME="),
    ],
)
def test_a_folder_that_cannot_be_written_is_named(variable, name, status, remedy, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", None)
    found = by_name(host.folder_findings())[name]
    assert found.status == status and str(tmp_path / "file") in found.text and found.remedy.startswith(remedy)


def test_a_folder_that_is_not_there_yet_is_no_fault(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not" / "yet"))
    assert by_name(host.folder_findings())["cache"].status == OK
    assert list(tmp_path.iterdir()) == []


def test_few_files_are_warned_of_with_what_can_be_had(monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda number: (256, 4096))
    assert by_name(host.host_findings())["open files"].remedy == "ulimit -n 4096"


HERE = {"lo": ("127.0.0.1",), "eth0": ("10.0.0.7", "fe80::1%eth0"), "ib0": ("10.1.0.7",), "docker0": ("172.17.0.1",)}


def test_gloo_takes_what_is_named_else_the_interface_of_the_hosts_name(monkeypatch):
    monkeypatch.setattr(network, "addresses_of_host", lambda: ("10.0.0.7",))
    assert network.gloo_choice(HERE, {}).names == ("eth0",)
    assert network.gloo_choice(HERE, {"GLOO_SOCKET_IFNAME": "ib0"}).names == ("ib0",)
    for own in ((), ("127.0.1.1",), ("203.0.113.9",)):
        monkeypatch.setattr(network, "addresses_of_host", lambda own=own: own)
        choice = network.gloo_choice(HERE, {})
        assert (choice.names, choice.problem, choice.suggestion) == (("lo",), "", "eth0")
    choice = network.gloo_choice(HERE, {"GLOO_SOCKET_IFNAME": "eth7"})
    assert choice.problem.startswith("GLOO_SOCKET_IFNAME = eth7: eth7 is no interface") and choice.suggestion == "eth0"
    assert "no interface" in network.gloo_choice({}, {}).problem


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("", ("ib0",)),
        ("eth", ("eth0",)),
        ("=eth", ()),
        ("=eth0", ("eth0",)),
        ("^ib,docker,lo", ("eth0",)),
        ("bond", ()),
    ],
)
def test_nccl_takes_beginnings_whole_names_and_all_others(wanted, names):
    choice = network.nccl_choice(HERE, {"NCCL_SOCKET_IFNAME": wanted})
    assert choice.names == names and bool(choice.problem) == (not names)


def test_an_interface_that_is_not_here_is_refused_before_the_ranks_connect(monkeypatch):
    monkeypatch.setattr(network, "interfaces", lambda: HERE)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with pytest.raises(ConfigError, match=r"eth7 is no interface.*lo, eth0.*Type: export GLOO_SOCKET_IFNAME=eth0"):
        network.refuse_absent_interfaces()
    monkeypatch.setattr(network, "interfaces", dict)
    with pytest.raises(ConfigError, match="Type: ip link set lo up"):
        network.refuse_absent_interfaces()


TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\x1b[0m\nGPU0\t X \tNV18\tSYS\t0-15\nGPU1\tNV18\t X \tPIX\t0-15\n"
    "GPU2\tSYS\tPIX\t X \t0-15\n\nLegend:\n  X = Self"
)


def test_links_are_read_as_nvidia_smi_prints_them():
    assert host.links_of(TOPOLOGY) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "PIX"}
    assert host.links_of("") == {}


# --- verdicts

BUILD = {"version": metadata.version("torch"), "folder": "/f", "accelerator": None, "is_rocm": False, "cudnn": None}
WELL = {
    "torch": {"found": BUILD},
    "devices": {"found": {"kind": "cpu", "devices": [], "unusable": ""}},
    "meshwright.distributed": {"found": {"gloo": ""}},
    "private points": {"found": {"count": 9, "missing": []}},
    "exchange": {"found": {"messages": ["gloo on cpu"]}, "seconds": 0.1},
    **{axis: {"found": {"worst": 0.0}, "seconds": 1.0} for axis in ("dp_shard", "tp", "pp")},
}


def found_with(**others) -> dict[str, Finding]:
    return by_name(judged({**WELL, **others}.get))


def test_all_is_well_where_all_answers_are():
    found = found_with()
    assert holds(list(found.values())) and [found[f"{axis} 2"].figures["verdict"] for axis in ("dp_shard", "tp", "pp")]
    assert found["devices"].status == NOTE


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"error": "no such rule", "refused": True}, "refused: no such rule"),
        ({"error": "ValueError: 3", "refused": False}, "failed: ValueError: 3"),
        ({"timed_out": 31}, "timed out after 31 s"),
        (None, "failed: the process with torch ended before"),
    ],
)
def test_an_axis_that_fails_leaves_the_others_their_verdicts(answer, words):
    found = found_with(tp=answer)
    assert found["tp 2"].text == words and found["tp 2"].status == FAILURE
    assert found["dp_shard 2"].figures["verdict"] == found["pp 2"].figures["verdict"] == EQUAL
    assert ("--limit 300" in found["tp 2"].remedy) == ("timed out" in words)
    assert not holds(list(found.values()))


def test_a_driver_that_is_too_old_is_torchs_own_sentence():
    why = "The NVIDIA driver on your system is too old (found version 11040)."
    found = found_with(devices={"found": {"kind": "cpu", "devices": [], "unusable": why}})["devices"]
    assert found.status == FAILURE and why in found.text and "update the NVIDIA driver" in found.remedy


def test_a_missing_point_is_named_with_what_needs_it():
    answer = {"found": {"count": 9, "missing": [{"path": "torch._C._x", "needed_by": "traces"}]}}
    found = by_name(judged({**WELL, "private points": answer}.get))
    assert found["all"].text == "8 of 9 are here" and found["torch._C._x"].text == "missing; needed by traces"
    assert found["torch._C._x"].status == FAILURE and found["tp 2"].status == OK


def test_other_metadata_than_the_torch_that_is_imported_are_named():
    found = by_name(judged({**WELL, "torch": {"found": {**BUILD, "version": "2.4.0"}}}.get))
    assert found["version"].status == FAILURE and "2.4.0" in found["version"].text


def test_without_torch_every_axis_says_so():
    found = by_name(judged(None))
    assert {f.text for name, f in found.items() if name != "exchange"} == {"failed: torch is not installed"}


def test_an_error_is_told_in_its_own_words():
    assert sentence_of(ConfigError("a\n  b")) == "a b"
    assert sentence_of(KeyError("k")) == "KeyError: 'k'"


def test_the_report_is_narrow_and_plain():
    findings = [
        Finding(HOST, "a", OK, "word " * 60),
        Finding(HOST, "a.name.that.is.longer.than.its.column", FAILURE, "text", "a command"),
        Finding(HOST, "b", WARNING, "text", "a command"),
    ]
    lines = [line for finding in findings for line in lines_of(finding, "")] + closing(findings, 1.2)
    assert all(len(line) <= 120 and line.isascii() for line in lines)
    assert lines[-1] == "1 of 3 fail, 1 warned of (1 s)" and lines.count("    a command") == 1
    told = json.loads(json.dumps(plain(findings, 1.2, "0")))
    assert told["holds"] is False and told["repairs"] == ["a command"] and told[HOST]["b"]["status"] == "warn"


# --- whole environments, in processes of their own


def told_with(folder: Path, **environment: str) -> dict:
    """The doctor's answer with a folder in front of the path; it ends by itself, and prints nothing else."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(SOURCE)]), **environment}
    command = [sys.executable, "-m", "meshwright", "doctor", "--json", "--limit=20"]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.first
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise OSError('libgomp.so.1: cannot open shared object file')", "OSError: libgomp.so.1: cannot open shared"),
        ("import os; os.abort()", "the process was killed by SIGABRT"),
        ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
    ],
)
def test_a_torch_that_cannot_be_imported_is_a_sentence(code, words, tmp_path):
    told = told_with(copy_of_torch(tmp_path, "2.13.0", code))
    assert words in told["torch"]["import"]["text"]
    assert set(told["verdicts"].values()) == {"failed: torch cannot be imported"}
    assert "2 folders" in told["versions"]["torch, twice"]["text"]


@pytest.mark.all
def test_a_torch_whose_import_hangs_is_given_up(tmp_path):
    told = told_with(copy_of_torch(tmp_path, "2.13.0", "import time; time.sleep(600)"))
    assert "no answer within" in told["torch"]["import"]["text"] and told["seconds"] < 40
    assert all(verdict.startswith("timed out: after") for verdict in told["verdicts"].values())


NO_DISTRIBUTED = """
import sys, types
version = types.SimpleNamespace(hip=None)
backends = types.SimpleNamespace(cudnn=types.SimpleNamespace(version=lambda: None))
distributed = types.ModuleType("torch.distributed")
distributed.is_available = lambda: False
sys.modules["torch.distributed"] = distributed
"""


@pytest.mark.all
def test_a_torch_without_its_distributed_package_is_a_sentence(tmp_path):
    told = told_with(copy_of_torch(tmp_path, "2.13.0", NO_DISTRIBUTED))
    assert "was built without torch.distributed" in told["torch"]["distributed"]["text"]
    assert all("refused: this torch (2.13.0 in " in verdict for verdict in told["verdicts"].values())


@pytest.mark.all
def test_an_older_torch_is_a_sentence_for_the_doctor_and_for_whoever_imports(tmp_path):
    older = copy_of_torch(tmp_path, "2.9.1", NO_DISTRIBUTED)
    told = told_with(older)
    assert "older than tested" in told["versions"]["torch"]["text"]
    assert all("refused: torch 2.9.1 is here" in verdict for verdict in told["verdicts"].values())
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(older), str(SOURCE)])}
    command = [sys.executable, "-c", "import meshwright.distributed"]
    done = subprocess.run(command, env=env, cwd=older, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.strip().splitlines()[-1].startswith("meshwright.core.errors.UnsupportedError: torch 2.9.1 is")


# --- the start of a run


def test_a_verb_refuses_an_older_torch_and_its_absence_in_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(versions, "installed", lambda package: "2.9.1")
    assert cli.main(["train", "--steps=1"]) == UnsupportedError.exit_status
    error = capsys.readouterr().err
    assert error.startswith("meshwright: torch 2.9.1 is here") and "torch>=2.11" in error and error.count("\n") == 1
    monkeypatch.setattr(versions, "installed", lambda package: None)
    monkeypatch.setattr(versions.util, "find_spec", lambda name: None)
    assert cli.main(["train", "--steps=1"]) == MissingExtraError.exit_status
    error = capsys.readouterr().err
    assert "'torch>=2.11', which is not installed" in error and error.count("\n") == 1
    assert cli.main(["completion", "bash"]) == 0


def test_import_of_the_public_names_refuses_a_torch_without_distributed(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_available", lambda: False)
    with pytest.raises(UnsupportedError, match=r"was built without torch\.distributed .* install a release from PyPI"):
        _ = meshwright.distributed.init_distributed


def test_newer_releases_are_warned_of_once_and_on_rank_0_alone(monkeypatch, caplog):
    monkeypatch.setattr(world, "newer_than_tested", lambda: ["torch 9 is newer"])
    for rank, times in (("1", 0), ("0", 1)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        world.warn_of_newer_releases.cache_clear()
        with caplog.at_level(logging.WARNING, "meshwright"):
            world.warn_of_newer_releases()
            world.warn_of_newer_releases()
        assert caplog.text.count("torch 9 is newer") == times
    world.warn_of_newer_releases.cache_clear()


def test_a_named_back_end_that_the_driver_does_not_carry_is_refused_with_the_drivers_sentence(monkeypatch, caplog):
    monkeypatch.setattr(setup, "why_cuda_is_unusable", lambda: "The NVIDIA driver on your system is too old.")
    if setup.local_device() != "cpu":
        pytest.skip("this machine has an accelerator")
    with pytest.raises(ConfigError, match=r"Available: gloo\. The NVIDIA driver on your system is too old\."):
        setup.choose_backend("nccl")
    with caplog.at_level(logging.WARNING, "meshwright"):
        assert setup.choose_backend(setup.DEFAULT_BACKEND) == ("gloo", "cpu")
    assert "ranks compute on its CPU: The NVIDIA driver" in caplog.text


# --- the command


@pytest.mark.parametrize("words", [["--limit=1"], ["--limit=nan"], ["runs/x"], ["--jsn"]])
def test_other_words_are_refused(words, capsys):
    assert cli.main(["doctor", *words]) == 2 and "--limit" in capsys.readouterr().err


def test_its_help_needs_no_torch():
    lines = (
        "import sys",
        "from meshwright.cli.main import main",
        "assert main(['doctor', '--help']) == 0 and 'torch' not in sys.modules",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout and "--limit SECONDS" in done.stdout
