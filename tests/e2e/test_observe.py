"""``observe`` and ``blame`` on a script that knows nothing of meshwright: sound layouts, and one fault at a time."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.followed import found_in
from support.served import Meshwright

from meshwright.observation.traces import Run

SCRIPT = str(Path(__file__).parents[1] / "support" / "observed_script.py")
MESHWRIGHT = [sys.executable, "-m", "meshwright"]
ALONE = [sys.executable, SCRIPT, "--one"]
SEVERAL = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT]
FAULTS = [
    ("data", "one not reduced", r"layers\.1\.attn\.v\.weight", 1, "missing reduction", [0, 1]),
    ("data", "mean", r"\.\+", 1, "wrong scale", [0, 1]),
    ("data", "twice", r"emb\.weight", 1, "double reduction", [0, 1]),
    ("data", "same rows", r"\.\+", 1, "wrong rows", [1]),
    ("data", "labels", r"\.\+", 1, "wrong rows", [1]),
    ("data", "own mean", r"\.\+", 1, "wrong scale", [0, 1]),
    ("data", "rounded", r"\.\+", 1, "rounding/dtype", [0, 1]),
    ("data", "not zeroed", r"\.\+", 2, "stale value", [0, 1]),
    ("data", "stale", r"layers\.0\.mlp\.down\.weight", 2, "stale value", [0, 1]),
    ("data", "swapped", r"layers\.0\.n[12]\.weight", 1, "wrong order", [0, 1]),
    ("data", "not stepped", r"layers\.1\.mlp\.up\.weight", 1, "not updated", [0, 1]),
    ("data", "state lost", r"head\.weight", 2, "not restored", [0, 1]),
    ("data", "seed", r"layers\.1\.mlp\.up\.weight", 1, "seed", [1]),
    ("data", "positions", r"pos", 1, "position", [1]),
    ("data", "no mask", r"layers\.0\.attn\.o", 1, "mask", [1]),
    ("tensor", "input not reduced", r"layers\.2\.(attn\.o|mlp.*|n2.*)", 1, "missing reduction", [0, 1]),
    ("tensor", "backward doubled", r"layers\.2\.mlp\.down\.weight", 1, "double reduction", [0, 1]),
    ("tensor", "positions", r"pos", 1, "position", [1]),
]


served = Meshwright()


@pytest.fixture(scope="module", autouse=True)
def _ended() -> Iterator[None]:
    yield
    served.close()


def observe(folder: Path, command: list[str], *flags: str) -> None:
    done = served.run(["observe", folder, *flags, "--", *command])
    assert done.returncode == 0, done.stdout + done.stderr


def blame(*words: object) -> dict:
    done = served.run(["blame", *words, "--json"])
    found = json.loads(done.stdout)
    assert done.returncode == (found["verdict"] == "fault"), done.stderr
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("alone")
    observe(folder / "one", ALONE, "--noisy", str(folder / "noisy"))
    return folder / "one", folder / "noisy"


@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_a_sound_layout_is_equal_to_one_process(axis: str, alone: tuple[Path, Path], tmp_path: Path):
    observe(tmp_path / "many", [*SEVERAL, "--axis", axis])
    one, noisy = alone
    assert blame(one, tmp_path / "many", "--noisy", noisy)["verdict"] == "sound"
    assert blame(one, noisy)["verdict"] == "sound"
    sent = Run.read(tmp_path / "many").step(1, 0)["sent"]
    assert {(event["kind"], tuple(event["ranks"])) for event in sent} == {("all_reduce", (0, 1))}
    inside = {event["module"] for event in sent if event["phase"] == "forward"}
    gradients = [event["of"] for event in sent if event["of"]]
    if axis == "data":
        assert not inside and gradients == [[name] for name in Run.read(one).step(0, 0)["gradients"]]
        assert sent[0]["values"][0] > 1  # the number of labels
    else:
        assert not gradients and inside == {f"layers.{n}.{part}" for n in range(3) for part in ("attn", "mlp")}
    turned = served.run(["blame", tmp_path / "many", one])
    assert (
        turned.returncode == 2 and "is a trace of 2 processes: blame takes that of one process first" in turned.stderr
    )


@pytest.mark.parametrize(("axis", "fault", "place", "step", "kind", "ranks"), FAULTS, ids=lambda value: str(value))
def test_a_fault_is_found_where_it_arises(
    axis, fault, place, step, kind, ranks, alone: tuple[Path, Path], tmp_path: Path
):
    observe(tmp_path / "many", [*SEVERAL, "--axis", axis, "--fault", fault])
    found = blame(alone[0], tmp_path / "many", "--noisy", alone[1])
    assert found["verdict"] == "fault" and re.fullmatch(place, found["place"]), found
    assert (found["step"], found["kind"], found["ranks"]) == (step, kind, ranks), found
    if fault == "twice":
        assert found["words"].endswith(" · all_reduce over ranks 0, 1 (8,192 B)")


LIBRARIES = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
dist.init_process_group("gloo")
torch.manual_seed(0)
class Cut(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
    def forward(self, x):
        return (DTensor.from_local(x, self.weight.device_mesh) @ self.weight).full_tensor()
net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Cut())
fully_shard(net[0])
net[1] = nn.parallel.DistributedDataParallel(net[1], gradient_as_bucket_view=True)
net[2].weight = nn.Parameter(distribute_tensor(net[2].weight.detach(), init_device_mesh("cpu", (2,)), [Shard(0)]))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
store = dist.PrefixStore("own", dist.distributed_c10d._get_default_store())
own = dist.ProcessGroup(store, dist.get_rank(), 2)  # which torch.distributed does not know
own._register_backend(
    torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo(store, dist.get_rank(), 2)
)
for _ in range(3):
    net(torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))).sum().backward()
    own.allreduce([torch.ones(3)]).wait()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.all
def test_collectives_are_recorded_whoever_calls_them(tmp_path: Path):
    (tmp_path / "train.py").write_text(LIBRARIES)
    observe(tmp_path / "many", [*SEVERAL[:-1], str(tmp_path / "train.py")])
    sent = Run.read(tmp_path / "many").step(1, 1)["sent"]
    assert [event["bytes"] for event in sent if event["ranks"] != [0, 1]] == [12]
    found = {(event["kind"], event["phase"], event["module"], *event["of"]) for event in sent}
    assert found >= {
        ("all_gather", "forward", "0"),
        ("reduce_scatter", "backward", "", "0.weight", "0.bias"),
        ("all_reduce", "backward", "", "1.weight", "1.bias"),
        ("all_reduce", "forward", "2"),
    }


OTHER = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, {last}))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def test_what_has_no_place_in_one_process_is_never_called_equal(alone: tuple[Path, Path], tmp_path: Path):
    for last in (3, 5):
        observe(tmp_path / f"other{last}", [sys.executable, "-c", OTHER.format(last=last)])
    done = served.run(["blame", alone[0], tmp_path / "other3"])
    assert done.returncode == 2 and "none of the 4 parameters of rank 0 is one of" in done.stderr
    assert blame(tmp_path / "other3", tmp_path / "other3")["unknown"] == []
    found = blame(tmp_path / "other3", tmp_path / "other5")
    assert found["unknown"] == ["1.bias", "1.weight"] and "place in one process is unknown: 1.bias" in found["words"]


BY_HAND = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
for step in range(3):
    model(torch.ones(2, 4)).square().sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= (0.2 if {doubled} and step == 1 and p.dim() > 1 else 0.1) * p.grad
            {forget}
"""


@pytest.mark.parametrize("forget", ["p.grad = None", "p.grad.zero_()"])
def test_parameters_that_a_script_updates_itself_are_observed(tmp_path: Path, forget: str):
    for name, doubled in (("right", False), ("wrong", True)):
        observe(tmp_path / name, [sys.executable, "-c", BY_HAND.format(doubled=doubled, forget=forget)])
    found = blame(tmp_path / "right", tmp_path / "wrong")
    assert (found["step"], found["place"]) in ((2, "0.weight"), (2, "2.weight")) and "update" in found["words"]
    assert blame(tmp_path / "right", tmp_path / "right")["verdict"] == "sound"


IN_TURN = """
import torch
torch.manual_seed(0)
enter, leave = torch.nn.Linear(4, 6), torch.nn.Linear(6, 2)
first, second = (torch.optim.Adam(m.parameters(), lr=0.1) for m in {order})
for step in range(3):
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    leave(enter(rows)).square().sum().backward()
    for optimizer in (first, second):
        optimizer.step()
        optimizer.zero_grad()
"""


def test_models_that_are_called_and_stepped_in_turn(tmp_path: Path):
    one, noisy, turned = (tmp_path / name for name in ("one", "noisy", "turned"))
    observe(one, [sys.executable, "-c", IN_TURN.format(order="(enter, leave)")], "--noisy", str(noisy))
    observe(turned, [sys.executable, "-c", IN_TURN.format(order="(leave, enter)")])
    assert blame(one, turned, "--noisy", noisy)["verdict"] == "sound"


@pytest.mark.follows("meshwright observe")
def test_what_cannot_be_observed_is_said(tmp_path: Path):
    idle = [sys.executable, "-c", "import torch; print(torch.ones(1))"]
    words = [*MESHWRIGHT, "observe", str(tmp_path / "idle"), "--", *idle]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "no process of the command changed a module's parameters" in done.stdout
    done = subprocess.run([*MESHWRIGHT, "blame", tmp_path / "idle", tmp_path / "x"], capture_output=True, text=True)
    assert done.returncode == 2 and "no process of that run changed a module's parameters" in done.stderr
    printed = shlex.split(found_in("Write one with: meshwright (observe .*)", done.stderr))
    (tmp_path / "train.py").write_text(OTHER.format(last=3))
    words = [*MESHWRIGHT, *printed[: printed.index("python")], sys.executable, tmp_path / printed[-1]]
    assert subprocess.run(words, capture_output=True, timeout=300).returncode == 0
    assert blame(tmp_path / "idle", tmp_path / "idle")["unknown"] == []
    done = subprocess.run([*MESHWRIGHT, "observe", str(tmp_path / "x")], capture_output=True, text=True)
    assert done.returncode == 2 and "then -- and the command" in done.stderr


LOOP = """
import os, sys, torch
import torch.nn.functional as F
torch.manual_seed({seed})
nets = [torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)) for _ in range({models})]
optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
{before}
for step in range({steps}):
    x = torch.ones(2, 4) * (step + 1) + torch.arange(4)
    for net in nets:
        loss = net(x).square().mean() + nets[0](x).mean()
        loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
{after}
"""
USUAL = {"seed": 0, "models": 1, "before": "", "steps": 2, "after": ""}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("usual") / "one"
    observe(folder, [sys.executable, "-c", LOOP.format(**USUAL)])
    return folder


@pytest.mark.parametrize(
    ("change", "flags", "words"),
    [
        ({"models": 2}, [], "equal up to rounding.*several models are trained: names of others begin with Sequential"),
        ({"before": "os.fork()"}, [], "two processes call themselves rank 0 at the same time: the script forks"),
        ({"steps": 3}, [], "not all took as many steps: 2 to 3"),
        ({"seed": 1}, [], "everything: it differs on rank 0: before the first step"),
        ({"seed": "int.from_bytes(os.urandom(4))"}, ["--noisy"], "are two runs of one process and not the same"),
    ],
    ids=["two models", "fork", "steps", "seed", "drawn"],
)
def test_odd_scripts_get_a_sentence(change: dict, flags: list[str], words: str, usual: Path, tmp_path: Path):
    observe(tmp_path / "many", [sys.executable, "-c", LOOP.format(**(USUAL | change))])
    one = tmp_path / "many" if "models" in change else usual
    noisy = [*flags, str(tmp_path / "many")] if flags else []
    done = served.run(["blame", one, tmp_path / "many", *noisy])
    assert re.search(words, (done.stdout + done.stderr).replace("\n", " ")), done.stdout + done.stderr


def test_a_process_that_ends_at_once_leaves_its_steps(usual: Path, tmp_path: Path):
    command = [sys.executable, "-c", LOOP.format(**(USUAL | {"after": "sys.stdout.flush(); os._exit(0)"}))]
    served.close()  # as when a worker of pytest comes back to these tests
    done = served.run(["observe", tmp_path / "many", "--", *command])
    assert done.returncode == 0 and "rank 0 ended by os._exit or a signal" in done.stdout, done.stdout
    assert blame(usual, tmp_path / "many")["verdict"] == "sound"


def test_a_trace_that_lacks_a_file_is_refused(usual: Path, tmp_path: Path):
    shutil.copytree(usual, tmp_path / "some")
    next((tmp_path / "some").glob("rank-*-000001.pt")).unlink()
    done = served.run(["blame", usual, tmp_path / "some"])
    assert done.returncode == 2 and re.search(r"holds rank-\S+\.rest\.pt and lacks rank-\S+-000001\.pt", done.stderr)


ASKS = "import importlib.util\nfound = importlib.util.find_spec('torch')\n"
SINK = """
import sys, torch
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 4)
    def forward(self, x):
        return {"logits": self.a(x), "loss": self.a(x).sum()}
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(Two(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    optimizer.zero_grad()
    model(torch.ones(2, 4))["loss"].backward()
    optimizer.step()
"""


def test_scripts_of_libraries_are_observed(tmp_path: Path):
    """Some ask whether there is a torch before they import it; DDP gives unused outputs no gradient."""
    words = [*MESHWRIGHT, "observe", tmp_path / "asks", "--", sys.executable, "-c", ASKS + OTHER.format(last=3)]
    subprocess.run(words, check=True, timeout=300)
    observe(tmp_path / "sink", [sys.executable, "-c", SINK, str(tmp_path / "store")])
    for name in ("asks", "sink"):
        assert blame(tmp_path / name, tmp_path / name)["verdict"] == "sound"


def test_parameters_without_numbers_are_refused(usual: Path, tmp_path: Path):
    words = LOOP.format(**USUAL).replace("Linear(4, 8)", "Linear(0, 0)").replace("Linear(8, 4)", "Linear(0, 0)")
    observe(tmp_path / "empty", [sys.executable, "-c", words.replace("x = ", "x = torch.ones(2, 0) #")])
    done = served.run(["blame", usual, tmp_path / "empty"])
    assert done.returncode == 2 and "hold no numbers between the passes of a step" in done.stderr


GRAPH = """
import sys, torch
import torch.nn.functional as F
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 4)
    def forward(self, x, labels):
        logits = self.down(torch.tanh(self.drop(self.up(x))))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = torch.compile(model, fullgraph=True) if "--compile" in sys.argv else model
x, labels = torch.ones(64, 4), torch.arange(64) % 4
for step in range(5):
    run(x * (step + 1), labels)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
print("dropout:", int(not torch.equal(run(x, labels)["logits"], run(x, labels)["logits"])))
"""


@pytest.mark.all
@pytest.mark.parametrize("flags", [[], ["--parameters-alone"]], ids=["cut", "whole"])
def test_compiled_graphs_are_the_same_training_cut_or_whole(flags: list[str], tmp_path: Path):
    observe(tmp_path / "one", [sys.executable, "-c", GRAPH])
    words = [*MESHWRIGHT, "observe", str(tmp_path / "many"), *flags, "--", sys.executable, "-c", GRAPH, "--compile"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "dropout: 1" in done.stdout, done.stdout + done.stderr  # after the steps, too
    found = blame(tmp_path / "one", tmp_path / "many")
    assert found["verdict"] == "sound" and ("graphs were cut at modules" in found["words"]) == (not flags)


SWITCHED = """
import sys, torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
fault = sys.argv[1] if len(sys.argv) > 1 else ""
calls = [0]
class Core(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Linear(8, 8)
    def forward(self, x):
        x = self.mix(x)
        if fault == "compile" and torch.compiler.is_compiling():
            x = x * 1.25
        if fault == "recompute":
            calls[0] += 1
            x = x * (1 + 0.125 * calls[0])
        if fault == "dtype":
            x = (x * 8).round() / 8 if x.dtype == torch.float32 else x
        q = x.view(4, 4, 2, 4).transpose(1, 2)
        fused = fault == "fused" and torch.backends.cuda.flash_sdp_enabled()
        return F.scaled_dot_product_attention(q, q, q, scale=0.1 if fused else 0.5).transpose(1, 2).reshape(4, 4, 8)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.core, self.head = torch.nn.Linear(8, 8), Core(), torch.nn.Linear(8, 4)
    def forward(self, x):
        x = self.inner(x) * (2 if fault == "inputs" else 1)
        x = checkpoint(self.core, x, use_reentrant=False) if fault == "recompute" else self.core(x)
        return self.head(x)
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, labels = torch.randn(4, 4, 8), torch.arange(16) % 4
if fault == "compile":
    model.core.compile(backend="eager")
for step in range(3):
    optimizer.zero_grad()
    F.cross_entropy(model(x).flatten(0, 1), labels).backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def switched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("switched") / "one"
    observe(folder, [sys.executable, "-c", SWITCHED])
    return folder


@pytest.mark.first("fused")
@pytest.mark.parametrize("fault", ["compile", "recompute", "fused", "dtype", "inputs"])
def test_a_module_that_runs_again_says_which_switch_makes_the_difference(fault: str, switched: Path, tmp_path: Path):
    observe(tmp_path / "many", [sys.executable, "-c", SWITCHED, fault])
    found = blame(switched, tmp_path / "many", "--bisect", "compile,recompute,fused,dtype")
    assert found["verdict"] == "fault" and found["place"] == ("inner" if fault == "inputs" else "core"), found
    assert found["switch"] == ("" if fault == "inputs" else fault), found


ADDED_UP = """
import sys, torch
torch.manual_seed(0)
net, x = torch.nn.Linear(4, 4), torch.randn(8, 4)
for step in range(3):
    outputs = [net(part * (2 if step == 1 and len(sys.argv) > 1 else 1)) for part in x.split(4)]
    parts = [torch.autograd.grad(output.square().sum(), [*net.parameters()]) for output in outputs]
    with torch.no_grad():
        for parameter, *gradients in zip(net.parameters(), *parts):
            parameter -= 0.01 * sum(gradients)
"""


def test_gradients_that_autograd_grad_returns_are_added_up(tmp_path: Path):
    for name in ("one", "many"):
        observe(tmp_path / name, [sys.executable, "-c", ADDED_UP, *["again"] * (name == "many")])
    found = blame(tmp_path / "one", tmp_path / "many")
    assert blame(tmp_path / "one", tmp_path / "one")["words"].startswith("equal up to rounding (3 steps")
    assert (found["verdict"], found["step"]) == ("fault", 2)


IN_TRANSFORMS = """
import sys, torch
import torch.nn.functional as F
from torch.func import functional_call, grad, vmap
torch.manual_seed(0)
net, x, y = torch.nn.Linear(4, 4), torch.randn(8, 4), torch.arange(8) % 4
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
noise = torch.Generator().manual_seed(int(sys.argv[1]))
def loss(weights, row, label):
    return F.cross_entropy(F.dropout(functional_call(net, weights, (row[None],)), 0.0), label[None])
for step in range(3):
    weights = {name: parameter.detach() for name, parameter in net.named_parameters()}
    for name, each in vmap(grad(loss), (None, 0, 0))(weights, x, y).items():
        gradient = each.sum(0)
        net.get_parameter(name).grad = gradient + torch.randn(gradient.shape, generator=noise)
    optimizer.step()
"""


def test_passes_inside_transforms_are_compared_and_get_no_verdict_where_they_differ(tmp_path: Path):
    for seed in ("1", "2"):
        observe(tmp_path / seed, [sys.executable, "-c", IN_TRANSFORMS, seed])
    assert blame(tmp_path / "1", tmp_path / "1")["verdict"] == "sound"
    done = served.run(["blame", tmp_path / "1", tmp_path / "2"])
    assert done.returncode == 2 and "run inside torch.func" in done.stderr, done.stdout


KEPT_BESIDE = """
import sys
import torch
from torch import nn
kinds, late = sys.argv[1].split(), sys.argv[2] == "late"
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8))
net[3].bias.requires_grad_(False)
names = [name for name, p in net.named_parameters() if p.requires_grad]
now = lambda: [p.detach().clone() for p in net.parameters() if p.requires_grad]
averages = {kind: dict(zip(names, now())) if "dict" in kind else now() for kind in kinds}
optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)

def follow(kind):
    old, share = averages[kind], 0.1 + 0.2 * kinds.index(kind)
    pairs = list(zip(old.values() if "dict" in kind else old, now()))
    if "rebuilt" in kind:
        new = [a.lerp(p, share) for a, p in pairs]
        averages[kind] = dict(zip(names, new)) if "dict" in kind else new
    for average, p in pairs:
        average.lerp_(p, share)

for step in range(4):
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
    (net(x) - x).abs().mean().backward()
    gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    if late and step == 1:
        follow(kinds[-1])
    optimizer.step()
    optimizer.zero_grad()
    for kind in kinds[:-1] if late and step == 1 else kinds:
        follow(kind)
"""


@pytest.mark.parametrize("kinds", ["list dict", "rebuilt-dict", pytest.param("rebuilt-list", marks=pytest.mark.all)])
def test_what_scripts_keep_of_parameters_in_dicts_and_lists_is_compared(tmp_path: Path, kinds: str):
    for when in ("one", "again", "late"):
        observe(tmp_path / when, [sys.executable, "-c", KEPT_BESIDE, kinds, when], "--steps", "4")
    assert blame(tmp_path / "one", tmp_path / "again")["verdict"] == "sound"
    found = blame(tmp_path / "one", tmp_path / "late")
    place = f"averages.{kinds.split()[-1]}"
    assert (found["verdict"], found["step"], found["place"]) == ("fault", 2, place) and "average" in found["words"]


VARIED = """
import copy, sys
import torch
from torch import nn
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
what = sys.argv[1]

class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def turned(self, x):
        angles = torch.arange(6)[:, None] * torch.tensor([1.0, 0.3]) * (1.5 if what == "position" else 1)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scale = 0.25 if what == "wrong scale" else None
        mask = causal_lower_right(6, 6) if what == "mask of a class" else None
        y = F.scaled_dot_product_attention(
            self.turned(q), self.turned(k), v, mask, is_causal=mask is None and what != "mask", scale=scale
        )
        y = y.flip(1) if what == "wrong order" else y * 2 if what == "doubled" else y
        return self.o(y.transpose(1, 2).flatten(2))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.first, self.last = nn.Embedding(16, 8), Mixer(), Mixer()
        self.a, self.b = (nn.Parameter(torch.randn(8, 8) / 3) for _ in range(2))
        if what == "not updated":
            self.both = nn.Parameter(torch.stack([self.a.detach(), self.b.detach()]))
            del self.a, self.b
        self.fails = what == "retried"

    def forward(self, ids):
        x = self.words(ids)
        x = x + self.first(x)
        if self.fails:
            self.fails = False
            raise MemoryError
        x = x + self.last(x)
        for matrix in self.both if what == "not updated" else (self.a, self.b):
            x = x @ matrix
        return x

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD([p for p in net.parameters() if p.dim() < 3], lr=0.1, momentum=0.9)

def train(step):
    ids = torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(step))
    try:
        x = net(ids)
    except MemoryError:
        x = net(ids)
    optimizer.zero_grad()
    x.square().mean().backward()
    optimizer.step()

for step in range(3):
    before = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    train(step)
    if what == "undone" and step == 1:
        net.load_state_dict(before[0])
        optimizer.load_state_dict(before[1])
        train(step)
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("varied") / "one"
    observe(folder, [sys.executable, "-c", VARIED, "plain"], "--steps", "4")
    return folder


@pytest.mark.first("mask")
@pytest.mark.parametrize(
    ("what", "kind"),
    [
        *((kind, kind) for kind in ("mask", "position", "wrong scale", "wrong order", "not updated")),
        ("doubled", "wrong scale"),
        *((sound, "") for sound in ("retried", "undone", "mask of a class")),
    ],
)
def test_attention_and_steps_done_again(what: str, kind: str, plain: Path, tmp_path: Path):
    observe(tmp_path / "many", [sys.executable, "-c", VARIED, what], "--steps", "4")
    found = blame(plain, tmp_path / "many")
    place = r"both" if what == "not updated" else r"first(\..*)?" if kind else ""
    assert found["verdict"] == ("fault" if kind else "sound") and re.fullmatch(place, found["place"]), found
    assert (found["step"], found["kind"]) == (int(bool(kind)), kind), found
    if what == "undone":
        assert blame(tmp_path / "many", plain)["verdict"] == "sound"


OWN_ROWS = """
import sys, torch
import torch.distributed as dist
from torch import nn
way, rank, world = sys.argv[1], 0, 1
if way != "one":
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

class Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if world > 1:
            dist.all_reduce(x)
        return x
    @staticmethod
    def backward(ctx, gradient):
        return gradient

class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.head = nn.Parameter(torch.randn(12, 4)), nn.Linear(4, 3)
    def forward(self, ids, shift):
        table = self.rows * ((torch.arange(12) + shift) % world == rank)[:, None]
        if way == "of own ids":  # each rank looks up some of a batch's ids, in whatever row
            mine = torch.arange(len(ids)) % world == rank
            return self.head(Added.apply(self.rows[ids] * mine[:, None]))
        return self.head(Added.apply(table[ids]))

torch.manual_seed(0)
model = Table()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
for step in range(4):
    torch.manual_seed(step)
    shift = int(step > 1 and way in ("handed over", "kept"))
    if step == 2 and way == "handed over":
        for rows in (model.rows.data, optimizer.state[model.rows]["sum"]):
            rows *= (torch.arange(12) % world == rank)[:, None]
            dist.all_reduce(rows)
    loss = nn.functional.cross_entropy(model(torch.randint(0, 12, (16,)), shift), torch.randint(0, 3, (16,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("way", "step"), [("still", 0), ("handed over", 0), ("kept", 2), ("of own ids", 1)], ids=lambda value: str(value)
)
def test_rows_that_one_rank_steps_and_others_never_read(way: str, step: int, tmp_path: Path):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    (script := tmp_path / "script.py").write_text(OWN_ROWS)
    observe(tmp_path / "one", [sys.executable, str(script), "one"], "--steps", "4")
    observe(tmp_path / "many", [*start, str(script), way], "--steps", "4")
    found = blame(tmp_path / "one", tmp_path / "many")
    assert (found["verdict"], found["step"]) == (("fault", step) if step else ("sound", 0)), found
    assert not step or found["place"] == "rows"
