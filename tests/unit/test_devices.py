"""Devices of any type: the accelerator that torch finds on this machine, and what is decided by it."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from meshwright import Precision, Techniques
from meshwright.core import devices
from meshwright.core.errors import ConfigError
from meshwright.core.torch_private import fake_mode
from meshwright.distributed import order
from meshwright.distributed.optimizer.low_bit import at_rest
from meshwright.distributed.process import agree
from meshwright.distributed.recompute.kept import restore_streams, streams
from meshwright.distributed.recompute.recompute import Copies
from meshwright.distributed.setup import DEFAULT_BACKEND, choose_backend
from meshwright.distributed.weights import audit, shards
from meshwright.planning import rules
from meshwright.training.memory import read_memory, reset_peak

XPU = torch.device("xpu", 1)


class StandIn(SimpleNamespace):
    """A device module like torch.xpu, of device 1 of 2, that notes its calls."""

    def __init__(self):
        super().__init__(told=[], state=torch.arange(3, dtype=torch.uint8), started=True)

    def current_device(self):
        return 1

    def is_initialized(self):
        return self.started

    def get_rng_state(self):
        return self.state

    def set_rng_state(self, state):
        self.state = state

    def memory_allocated(self, device):
        return 5

    def max_memory_allocated(self, device):
        return 7

    def reset_peak_memory_stats(self, device):
        self.told.append(("reset", device))

    def current_stream(self, device):
        return SimpleNamespace(synchronize=lambda: self.told.append(("synchronize", device)))


def found_here(monkeypatch, device_type, **also):
    """Let torch find an accelerator of a type on this machine, or none."""
    found = torch.device(device_type) if device_type else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
    module = StandIn()
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name in ("gloo", *also.get("backends", ())))
    return module


def test_the_accelerator_that_torch_finds_is_the_local_device(monkeypatch):
    for device_type, expected in (("xpu", "xpu"), ("cuda", "cuda"), (None, "cpu"), ("mps", "cpu")):
        found_here(monkeypatch, device_type)
        assert devices.local_device() == expected


def test_what_is_an_accelerator():
    accelerators = ("cuda", "xpu", "pretend", XPU, torch.device("cuda:0"))
    assert all(devices.is_accelerator(device) for device in accelerators)
    others = ("cpu", "meta", torch.device("cpu"), torch.device("cpu", 0), torch.device("meta"))
    assert not any(devices.is_accelerator(device) for device in others)


def test_the_current_device_has_its_number_on_an_accelerator_alone(monkeypatch):
    found_here(monkeypatch, "xpu")
    assert devices.current_device("xpu") == XPU and devices.current_device("cpu") == torch.device("cpu")
    assert devices.current_device("cpu").index is None


def test_an_accelerator_is_in_use_once_its_module_was_started(monkeypatch):
    module = found_here(monkeypatch, "xpu")
    assert devices.device_in_use() == "xpu"
    module.started = False
    assert devices.device_in_use() == "cpu"
    found_here(monkeypatch, None)
    assert devices.device_in_use() == "cpu"


def test_the_stream_of_an_accelerator_is_waited_for(monkeypatch):
    module = found_here(monkeypatch, "xpu")
    devices.finish_stream(XPU)
    devices.finish_stream(torch.device("cpu"))
    assert module.told == [("synchronize", XPU)]


@pytest.mark.parametrize(
    ("here", "device_type", "words"),
    [
        (None, "xpu", "--device = 'xpu' is none of cpu, cuda$"),
        ("cuda", "xpu", "--device = 'xpu' is none of cpu, cuda$"),
        ("xpu", "hpu", "--device = 'hpu' is none of cpu, cuda, xpu$"),
        ("xpu", "cuda:0", "--device = 'cuda:0' is none of cpu, cuda, xpu$"),
        ("xpu", "xpu", ""),
        (None, "cuda", ""),
        ("xpu", "cpu", ""),
    ],
)
def test_a_plan_is_for_the_cpu_for_cuda_or_for_the_accelerator_here(monkeypatch, here, device_type, words):
    found_here(monkeypatch, here)
    if not words:
        devices.check_device_type(device_type, "--device")
        return
    with pytest.raises(ConfigError, match=words):
        devices.check_device_type(device_type, "--device")


def test_weights_are_drawn_on_a_device_that_exists():
    from meshwright import parallelize

    with pytest.raises(ConfigError, match="draw_on = 'hpu' is none of cpu, cuda"):
        parallelize(torch.nn.Linear(2, 2), draw_on="hpu")


@pytest.mark.parametrize("given", [{"microbatch_rows": value} for value in ("2", -2, 1.5)] + [{"seed": "a"}], ids=str)
def test_numbers_of_a_call_that_are_none_are_refused(given):
    from meshwright import parallelize

    ((name, value),) = given.items()
    with pytest.raises(ConfigError, match=f"{name} = {value!r}: .* whole number"):
        parallelize(torch.nn.Linear(2, 2), **given)


@pytest.mark.parametrize(
    ("here", "backends", "request_", "chosen"),
    [
        (None, (), DEFAULT_BACKEND, ("gloo", "cpu")),
        ("mps", (), DEFAULT_BACKEND, ("gloo", "cpu")),
        ("cuda", ("nccl",), DEFAULT_BACKEND, ("cpu:gloo,cuda:nccl", "cuda")),
        ("cuda", (), DEFAULT_BACKEND, ("gloo", "cpu")),
        ("xpu", ("xccl",), DEFAULT_BACKEND, ("cpu:gloo,xpu:xccl", "xpu")),
        ("xpu", (), DEFAULT_BACKEND, ("gloo", "cpu")),
        ("cuda", ("nccl",), "nccl", ("nccl", "cuda")),
        ("xpu", ("xccl",), "xccl", ("xccl", "xpu")),
        ("xpu", ("xccl",), "cpu:gloo,xpu:xccl", ("cpu:gloo,xpu:xccl", "xpu")),
        ("xpu", ("xccl",), "gloo", ("gloo", "cpu")),
        ("cuda", ("nccl",), "cpu:gloo", ("gloo", "cpu")),
        (None, (), "cpu:gloo,cuda:gloo", ("cpu:gloo,cuda:gloo", "cpu")),
    ],
)
def test_backends_follow_the_accelerator_and_the_list(monkeypatch, here, backends, request_, chosen):
    found_here(monkeypatch, here, backends=backends)
    assert choose_backend(request_) == chosen


def test_backends_that_are_missing_beside_an_accelerator_are_named(monkeypatch, caplog):
    found_here(monkeypatch, "xpu", backends=("xccl", "nccl"))  # a torch built for both
    with pytest.raises(ConfigError, match="'nccl' for cuda is not available .* on this machine. Available: gloo, xccl"):
        choose_backend("xpu:xccl,cuda:nccl")
    found_here(monkeypatch, "xpu")
    with caplog.at_level(logging.INFO, logger="meshwright"):
        choose_backend(DEFAULT_BACKEND)
    assert "back ends that this machine lacks were dropped: xpu:xccl" in caplog.text


@pytest.mark.follows("process.backend = gloo", "process.backend = …")
def test_an_accelerator_without_a_backend_is_given_one_or_left(monkeypatch):
    found_here(monkeypatch, "mtia", backends=("mine",))
    with pytest.raises(ConfigError, match="torch knows no backend for mtia, the accel") as refused:
        choose_backend(DEFAULT_BACKEND)
    named, alone = re.findall("process.backend = '(.*?)'", str(refused.value))
    assert choose_backend(alone) == ("gloo", "cpu")
    assert choose_backend(named.replace("…", "mine")) == ("cpu:gloo,mtia:mine", "mtia")
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "mtia", "mine")  # as its package registers it
    assert choose_backend(DEFAULT_BACKEND) == ("cpu:gloo,mtia:mine", "mtia")


def test_small_agreed_values_travel_on_the_accelerator_where_the_cpu_has_no_backend(monkeypatch):
    found_here(monkeypatch, "xpu")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "xccl")
    monkeypatch.setattr(dist, "get_backend_config", lambda: "xpu:xccl")
    assert agree.word_device() == XPU
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,xpu:xccl")
    assert agree.word_device() == torch.device("cpu")


def test_random_streams_are_those_of_the_cpu_and_of_the_accelerator_in_use(monkeypatch):
    module = found_here(monkeypatch, "xpu")
    kept = streams()
    assert set(kept) == {"cpu", "xpu"} and torch.equal(kept["xpu"], module.state)
    drawn, module.state = torch.rand(3), torch.zeros(3, dtype=torch.uint8)
    restore_streams(kept)
    assert torch.equal(torch.rand(3), drawn) and torch.equal(module.state, kept["xpu"])
    module.started = False
    assert set(streams()) == {"cpu"}


def test_memory_is_read_from_the_accelerators_allocator(monkeypatch):
    module = found_here(monkeypatch, "xpu")
    reading = read_memory(XPU)
    assert (reading.current, reading.peak, reading.label) == (5, 7, "device peak")
    reset_peak(XPU)
    reset_peak(torch.device("cpu"))
    assert module.told == [("reset", XPU)]
    assert read_memory(torch.device("cpu")).label.startswith("RSS")


def test_an_accelerator_computes_in_bf16_by_default():
    assert rules.resolve_precision(Techniques(), {"float32": 1}, "xpu").compute == "bfloat16"
    assert rules.resolve_precision(
        Techniques(precision=Precision(compute="float32")), {"float32": 1}, "xpu"
    ).compute == ("float32")


def test_state_rests_in_pinned_memory_where_it_travels_to_an_accelerator(monkeypatch):
    asked, plain = [], torch.empty_like
    monkeypatch.setattr(
        torch, "empty_like", lambda like, *, pin_memory, **given: asked.append(pin_memory) or plain(like, **given)
    )
    state = torch.ones(4)
    assert torch.equal(at_rest(state, XPU), state) and torch.equal(at_rest(state, torch.device("cpu")), state)
    assert asked == [True, False]


def test_copies_of_activations_run_on_a_stream_of_the_tensors_device(monkeypatch):
    class Stream:
        device = XPU

        def __init__(self, device):
            told.append(("stream", device))

        def wait_stream(self, stream):
            told.append(("wait_stream", stream))

        def record_event(self):
            return "event"

    told: list = []
    module = found_here(monkeypatch, "xpu")
    current = SimpleNamespace(wait_event=lambda event: told.append(("wait_event", event)))
    module.Stream, module.current_stream = Stream, lambda device=None: current
    module.stream = lambda stream: told.append(("beside", type(stream)))
    copies = Copies()
    assert copies.mark() is None
    copies.wait(None)
    for _ in range(2):
        copies._beside(SimpleNamespace(device=XPU))
    copies.wait(copies.mark())
    entered = [("wait_stream", current), ("beside", Stream)]
    assert told == [("stream", XPU), *entered, *entered, ("wait_event", "event")]


def test_buffers_lie_where_a_model_computes_and_offloaded_parameters_in_host_memory():
    """FSDP2 gathers parameters on the device, and leaves buffers where they are."""
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4))
    model[1].running_mean = model[0].running_mean
    site = SimpleNamespace(facts=SimpleNamespace(on_meta=True, parameters=()), seed=0, draw_on=None, weights=None)
    for elsewhere in ("cpu", "meta"):  # meta stands for a device that this machine lacks
        plan = SimpleNamespace(device=elsewhere, data=SimpleNamespace(cpu_offload=True, technique="fully_shard"))
        order._weights(model, plan, site)
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
        assert {buffer.device.type for buffer in model.buffers()} == {elsewhere}


def test_buffers_that_modules_share_stay_shared():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4))
    model[1].running_mean = model[0].running_mean
    shards.move_buffers(model, torch.device("meta"))
    assert model[1].running_mean is model[0].running_mean and model[0].running_mean is not model[0].running_var


def test_a_checksum_of_weights_sees_one_bit_the_order_and_the_length():
    half = 2**16
    values = torch.arange(1.0, 2.0 * half + 7)
    first, second, rest = values[:half], values[half : 2 * half], values[2 * half :]
    others = {
        "one bit": torch.cat((first, second, rest[:-1], torch.nextafter(rest[-1:], torch.zeros(1)))),
        "neighbours": torch.cat((values[1:2], values[:1], values[2:])),
        "far apart": torch.cat((second, first, rest)),
        "the last": values[:-1],
        "a zero more": torch.cat((values, torch.zeros(1))),
    }
    found = {name: int(audit.fingerprint(tensor)) for name, tensor in others.items()}
    assert len({*found.values(), int(audit.fingerprint(values))}) == 6, found
    assert audit.fingerprint(values.clone()) == audit.fingerprint(values.reshape(2, -1)) == audit.fingerprint(values)
    assert audit.fingerprint(torch.zeros(0)) == 0
    assert audit.fingerprint(torch.zeros(3, dtype=torch.bfloat16)) != audit.fingerprint(torch.zeros(2, 2))


def test_replicas_on_several_devices_are_compared_device_by_device(monkeypatch):
    seen = []

    def equal_over(words, groups):
        seen.append((words.device.type, len(words)))
        return SimpleNamespace(tolist=lambda: [number > 0 for number in range(len(words))])

    monkeypatch.setattr(agree, "equal_over", equal_over)
    monkeypatch.setattr(audit, "fingerprint", lambda tensor: torch.empty((), device=tensor.device))
    with fake_mode():
        model = torch.nn.Linear(4, 4)
        model.register_buffer("mean", torch.empty(4, device="cuda"))
        problems = list(audit._replicas(model, [object()]))
    assert seen == [("cpu", 2), ("cuda", 1)]
    assert [problem.split()[0] for problem in problems] == ["weight", "mean"]


def test_devices_are_named_without_torch():
    code = "import sys, meshwright.core.devices, meshwright.training.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
