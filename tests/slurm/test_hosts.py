"""Two hosts without Slurm: network namespaces joined by a cable, with a torchrun on each."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from cluster_jobs import flags_of
from e2e_runs import end, family, finish, losses, only_run, start

from meshwright.planning.plan import Plan

ADDRESSES = ["10.77.0.1", "10.77.0.2"]
# What makes a host: a network of its own, a name of its own, and a file that says where the names are.
AS_HOST = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'


class Hosts:
    """Hosts h1 and h2. Their namespaces are called after this process, and end with it."""

    def __init__(self, place: Path):
        self.names = [f"meshwright-{os.getpid()}-h{number}" for number in (1, 2)]
        self.started: list[subprocess.Popen] = []
        self.file = place / "hosts"
        self.file.write_text(
            "127.0.0.1 localhost\n" + "".join(f"{address} h{i}\n" for i, address in enumerate(ADDRESSES, start=1))
        )

    def __enter__(self) -> Hosts:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _build(self) -> None:
        for name in self.names:
            self.ip("netns", "add", name)
        first, second = self.names
        self.ip("-n", first, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", second)
        for name, address in zip(self.names, ADDRESSES, strict=True):
            self.ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                self.ip("-n", name, "link", "set", device, "up")

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            if process.poll() is None:
                end([psutil.Process(process.pid), *family(process)])
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    def on(self, host: int) -> list[str]:
        """What stands before a command that runs on this host, 1 or 2."""
        inside = [
            "unshare",
            "--mount",
            "--uts",
            "--propagation",
            "private",
            "sh",
            "-c",
            AS_HOST,
            "sh",
            f"h{host}",
            str(self.file),
        ]
        return ["ip", "netns", "exec", self.names[host - 1], *inside]

    def start(self, host: int, words: list[str], environment, cwd: Path) -> subprocess.Popen:
        self.started.append(start([*self.on(host), *words], environment, cwd))
        return self.started[-1]

    def sent(self, host: int) -> int:
        """Bytes that went out of this host."""
        counter = "/sys/class/net/cable/statistics/tx_bytes"
        said = subprocess.run(
            ["ip", "netns", "exec", self.names[host - 1], "cat", counter], check=True, capture_output=True, text=True
        )
        return int(said.stdout)


@pytest.fixture
def hosts(tmp_path):
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("two hosts on one machine need Linux and its command ip")
    try:
        with Hosts(tmp_path) as made:
            subprocess.run([*made.on(1), "true"], check=True, capture_output=True, text=True)
            yield made
    except subprocess.CalledProcessError as refused:
        if not {"permitted", "denied"} & set(refused.stderr.replace(".", " ").split()):
            raise
        pytest.skip(f"network namespaces are not permitted here: {refused.stderr.strip()}")


def test_two_hosts_under_torchrun_shard_within_and_replicate_across(hosts, environment, config, on_one_host, tmp_path):
    meet = [
        "--nnodes=2",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={ADDRESSES[0]}:29400",
        "--rdzv-id=pair",
    ]
    words = [sys.executable, "-m", "torch.distributed.run", *meet, "-m", "meshwright", "train", *flags_of(config)]
    running = [hosts.start(host, words, environment, tmp_path) for host in (1, 2)]
    ended = [finish(process, timeout=120) for process in running]
    assert [one.status for one in ended] == [0, 0], ended
    assert sum(one.out.count("done: 60 steps") for one in ended) == 1

    run = only_run(tmp_path / "runs")
    plan = Plan.from_json((run / "plan.json").read_text())
    assert {axis: size for axis, size in plan.mesh if size > 1} == {"dp_replicate": 2, "dp_shard": 2}
    assert losses(run) == pytest.approx(losses(on_one_host), rel=1e-7)
    # Of a gradient in fp64 each rank of a host sends its half of the shards' sum; nothing else of that size may cross
    # the cable.
    gradient = 8 * sum(row.count * math.prod(row.shape) for row in plan.parameters)
    for host in (1, 2):
        assert 1 <= hosts.sent(host) / (60 * gradient) < 1.1
