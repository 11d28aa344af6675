#!/usr/bin/env python3
"""A private Slurm with two virtual nodes on this machine, for tests.

It needs root and Debian's packages slurm-wlm and munge.

    slurm_cluster.py check            whether this machine can have one; says what is in the way
    slurm_cluster.py install          get the packages by apt-get, where they are missing
    slurm_cluster.py start FOLDER     bring a cluster up; prints what to export
    slurm_cluster.py stop FOLDER      cancel its jobs and end its daemons, by the process numbers in FOLDER/pids

Everything lies in FOLDER, an authentication daemon of its own included; an installed Slurm is not looked at. The
nodes are called n1 and n2. That these names mean this machine is known in the nodes' own mount namespace only:
/etc/hosts stays as it is.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
NODES = ("n1", "n2")
CONF = """
ClusterName=virtual
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until the credentials of its last start are void: two minutes, unless they live shorter
# (5 s at the least).
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
FirstJobId={first_job}
ReturnToService=2
KillWait=30
InactiveLimit=0
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8 PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=EXCLUSIVE PriorityTier=2 PreemptMode=OFF
"""


def main(words: list[str]) -> int:
    match words:
        case ["check"]:
            return say(why_not() or what_is_missing())
        case ["install"]:
            return say(why_not() or install())
        case ["start", folder]:
            return say(start(Path(folder).resolve()))
        case ["stop", folder]:
            return say(stop(Path(folder).resolve()))
    print(__doc__)
    return 2


def say(problem: str) -> int:
    if problem:
        print(f"slurm_cluster: {problem}", file=sys.stderr)
    return 1 if problem else 0


def why_not() -> str:
    """What keeps this machine from having such a cluster, whatever is installed; or nothing."""
    if sys.platform != "linux" or os.geteuid():
        return "a private Slurm needs Linux and root"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        return "a private Slurm needs mount namespaces, and 'unshare --mount' is not permitted here"
    return ""


def what_is_missing() -> str:
    names = ", ".join(name for name in COMMANDS if find(name) is None)
    return names and f"{names} missing: '{Path(__file__).name} install' gets Debian's packages slurm-wlm and munge"


def find(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def install() -> str:
    """Get what is missing. Returns why that is not possible here, or nothing."""
    if not what_is_missing():
        return ""
    if find("apt-get") is None:
        return f"{what_is_missing()}, and there is no apt-get here"
    for words in (["update", "-q"], ["install", "-q", "-y", "--no-install-recommends", "slurm-wlm", "munge"]):
        quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        done = subprocess.run(["apt-get", *words], env=quiet, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            return f"apt-get {words[0]} failed: {(done.stderr or done.stdout).strip()[-300:]}"
    return what_is_missing()


def start(folder: Path) -> str:
    """Bring the cluster up. Returns what went wrong, or nothing."""
    if reason := why_not() or what_is_missing():
        return reason
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "pids").exists():
        return f"{folder} has a cluster already"
    conf = write_files(folder)
    os.environ["SLURM_CONF"] = str(conf)
    in_names = [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        f'mount --bind "{folder}/hosts" /etc/hosts && exec "$@"',
        "sh",
    ]
    own = [f"--{name}={folder}/{file}" for name, file in OWN_FILES.items()]
    daemons = {
        "munged": ["munged", "-F", "-f", *own],
        "slurmctld": ["slurmctld", "-D", "-f", str(conf)],
        **{node: [*in_names, find("slurmd") or "slurmd", "-D", "-f", str(conf), "-N", node] for node in NODES},
    }
    with (folder / "pids").open("w") as pids:
        for name, words in daemons.items():
            with (folder / f"{name}.out").open("w") as out:
                process = subprocess.Popen(
                    [find(words[0]) or words[0], *words[1:]],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            pids.write(f"{process.pid} {birth(process.pid)} {name}\n")
            pids.flush()
            if name == "munged":
                wait_for((folder / "munge.socket").exists, 10)
    if not wait_for(is_idle, 30):
        stop(folder)
        return f"the nodes did not come up within 30 s; {folder} holds the logs"
    print(f"export SLURM_CONF={conf}")
    return ""


OWN_FILES = {
    "socket": "munge.socket",
    "key-file": "munge.key",
    "log-file": "munged.log",
    "pid-file": "munged.pid",
    "seed-file": "munged.seed",
}


def write_files(folder: Path) -> Path:
    """Configuration, key and names of the cluster. Returns the place of the configuration."""
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    (folder / "state").mkdir()
    (folder / "hosts").write_text(f"{Path('/etc/hosts').read_text()}\n127.0.0.1 {' '.join(NODES)}\n")
    host, ports = socket.gethostname().split(".")[0], free_ports(1 + len(NODES))
    rows = [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000 State=UNKNOWN"
        for node, port in zip(NODES, ports[1:], strict=True)
    ]
    # The port of a run follows from its job's number: clusters beside each other had better count from different ones.
    values = {
        "folder": folder,
        "host": host,
        "port": ports[0],
        "nodes": "\n".join(rows),
        "first_job": random.randrange(1_000, 11_000),
    }
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(**values))
    return conf


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def is_idle() -> bool:
    states = subprocess.run(
        ["sinfo", "-h", "-N", "-p", "main", "-o", "%T"], capture_output=True, text=True
    ).stdout.split()
    return states == ["idle"] * len(NODES)


def stop(folder: Path) -> str:
    """End the cluster of a folder: its jobs, then the daemons that ``start`` wrote down.

    Returns what is left, or nothing.
    """
    pids = folder / "pids"
    if not pids.exists():
        return f"{folder} has no cluster"
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    subprocess.run(["scancel", "--signal=KILL", "--full", "--user=root"], capture_output=True)
    subprocess.run(["scancel", "--user=root"], capture_output=True)
    wait_for(lambda: not subprocess.run(["squeue", "-h"], capture_output=True, text=True).stdout.strip(), 15)
    rows = [line.split() for line in pids.read_text().splitlines()]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid, born, _ in reversed(rows):
            if birth(int(pid)) == born:
                os.kill(int(pid), number)
        if wait_for(lambda: not alive(rows), 10):
            pids.unlink()
            return ""
    return f"still there: {alive(rows)}"


def alive(rows: list[list[str]]) -> list[str]:
    return [f"{name} ({pid})" for pid, born, name in rows if birth(int(pid)) == born]


def birth(pid: int) -> str:
    """When a process began, in the kernel's ticks: with its number that names it for good.

    Empty: there is none (any more).
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def wait_for(happens, seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if happens():
            return True
        time.sleep(0.1)
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
