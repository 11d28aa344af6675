"""The pretend device computes what the CPU computes, and finds what a GPU would not forgive."""

import random
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from support import pretend_gpu
from support.pretend import DEVICE, on
from torch import nn

# --- numbers


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


def trained(device, dtype=torch.float64, **options):
    model = small_model().to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = on(device, torch.randn(5, 8, generator=generator, dtype=dtype))
        loss = F.cross_entropy(model(x), on(device, torch.arange(5) % 4))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().cpu().flatten() for p in model.parameters()])


def job_optimizers():
    kinds = [{}, {"fused": True}, {"foreach": True}, {"foreach": False}]
    return [(trained(DEVICE, **kind) - trained("cpu", **kind)).abs().max().item() for kind in kinds]


def test_optimizers_train_to_the_same_numbers(on_device):
    assert max(on_device(1, job_optimizers)[0]) < 1e-12


def attention(device):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 8, 12, 16), (2, 2, 12, 16), (2, 2, 12, 16))
    given = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    given = [on(device, tensor).requires_grad_() for tensor in given]
    output = F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
    output.square().sum().backward()
    return [tensor.cpu() for tensor in (output.detach(), *(t.grad for t in given))]


def job_attention():
    return [(a - b).abs().max().item() for a, b in zip(attention(DEVICE), attention("cpu"), strict=True)]


def test_attention_with_grouped_heads_is_the_cpus(on_device):
    assert max(on_device(1, job_attention)[0]) < 1e-12


def views(device):
    x = on(device, torch.arange(24.0).reshape(2, 3, 4)).clone()
    x[:, 1].mul_(2)
    x.transpose(0, 2)[1] += 1
    x.view(torch.int32)[0, 0, 0] = 7
    y = torch.empty(0, device=device)
    torch.add(x, 1, out=y)
    halves = x.unbind(1)
    halves[2].zero_()
    x.untyped_storage()
    alias = torch.empty(0, device=device).set_(x.untyped_storage(), 4, (3, 2), (2, 1))
    return [t.cpu() for t in (x, y, alias, x[x > 3], torch.cat(halves), x.flip(0), x.remainder(3))]


def job_views():
    return [torch.equal(a, b) for a, b in zip(views(DEVICE), views("cpu"), strict=True)]


def test_views_writes_and_results_of_unknown_shape_are_the_cpus(on_device):
    assert all(on_device(1, job_views)[0])


def job_memory():
    device = torch.get_device_module(DEVICE)
    before = device.memory_allocated()
    x = torch.zeros(1000, device=DEVICE)
    held = device.memory_allocated() - before
    view = x[10:]
    del x
    still = device.memory_allocated() - before
    storage = view.untyped_storage()
    storage.resize_(0)
    freed = (device.memory_allocated() - before, storage.size())
    storage.resize_(4000)
    poisoned = bool(view.isnan().all())
    del view, storage
    return held, still, freed, poisoned, device.memory_allocated() - before


def test_memory_is_counted_by_storage_and_poisoned_when_freed(on_device):
    assert on_device(1, job_memory)[0] == (4000, 4000, (0, 0), True, 0)


def job_autocast():
    model = nn.Linear(8, 8, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        output = model(torch.randn(4, 8, device=DEVICE))
    output.float().sum().backward()
    return output.dtype, model.weight.grad.dtype


def test_autocast_computes_products_in_its_dtype(on_device):
    assert on_device(1, job_autocast)[0] == (torch.bfloat16, torch.float32)


# --- what is found


def no_wait():
    x = torch.randn(1000, device=DEVICE)
    side = torch.get_device_module(DEVICE).Stream()
    with torch.get_device_module(DEVICE).stream(side):
        y = x * 2  # FOUND
    side.synchronize()
    return y


def half_wait():
    device = torch.get_device_module(DEVICE)
    x = torch.randn(1000, device=DEVICE)
    side = device.Stream()
    side.wait_stream(device.current_stream())
    with device.stream(side):
        x.mul_(2)
    kept = x + 1  # FOUND
    side.synchronize()
    return kept


def early_event():
    device = torch.get_device_module(DEVICE)
    x, side = torch.randn(1000, device=DEVICE), device.Stream()
    event = device.current_stream().record_event()
    x.add_(1)
    side.wait_event(event)
    with device.stream(side):
        y = x.sum()  # FOUND
    side.synchronize()
    return y


def no_record():
    device = torch.get_device_module(DEVICE)
    x, side = torch.randn(1000, device=DEVICE), device.Stream()
    side.wait_stream(device.current_stream())
    with device.stream(side):
        y = x * 2  # FOUND
    del x
    torch.zeros(2000, device=DEVICE)
    side.synchronize()
    return y


def host_too_early():
    host, x = torch.empty(10, pin_memory=True), torch.randn(10, device=DEVICE)
    host.copy_(x, non_blocking=True)
    return host.sum()  # FOUND


def host_overwrites():
    host, x = torch.ones(10).pin_memory(), torch.empty(10, device=DEVICE)
    x.copy_(host, non_blocking=True)
    host.zero_()  # FOUND
    return x


def pageable():
    return torch.randn(3).to(DEVICE, non_blocking=True)  # FOUND


def message_unwaited():
    import torch.distributed as dist

    x = torch.ones(1000, device=DEVICE)
    work = dist.all_reduce(x, async_op=True)
    y = x + 1  # FOUND
    work.wait()
    return y


def sound():
    device = torch.get_device_module(DEVICE)
    x, side = torch.randn(1000, device=DEVICE), device.Stream()
    side.wait_stream(device.current_stream())
    with device.stream(side):
        y = x * 2
        x.record_stream(side)
    halves = torch.empty(2, 8, device=DEVICE)
    side.wait_stream(device.current_stream())
    with device.stream(side):
        halves[0].fill_(1)
        halves.record_stream(side)
    halves[1].fill_(2)
    event = side.record_event()
    device.current_stream().wait_event(event)
    host = torch.empty(1000, pin_memory=True)
    host.copy_(y, non_blocking=True)
    device.current_stream().synchronize()
    y.record_stream(device.current_stream())
    del x
    torch.zeros(2000, device=DEVICE)
    return host.sum() + halves.sum().cpu()


FOUND = [no_wait, half_wait, early_event, no_record, host_too_early, host_overwrites, pageable, message_unwaited]


def job_faults(case):
    from support.pretend import a_group

    with a_group(), pretend_gpu.watching() as seen:
        case()
    return seen.faults()


def line_of(case):
    import inspect

    lines, first = inspect.getsourcelines(case)
    return first + next(n for n, text in enumerate(lines) if "# FOUND" in text)


@pytest.mark.parametrize("case", FOUND, ids=lambda case: case.__name__)
def test_what_streams_and_hosts_must_not_do_is_found_at_its_line(on_device, case):
    faults = on_device(1, job_faults, case)[0]
    assert faults and all(f"test_pretend_gpu.py:{line_of(case)}" in fault for fault in faults), faults


def test_a_sound_program_is_given_no_fault(on_device):
    assert on_device(1, job_faults, sound)[0] == []


READS = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x[:1].tolist(),
    "branch": lambda x: 1 if (x > 0).any() else 0,
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "to the host": lambda x: x.cpu(),
    "a number from the host": lambda x: torch.tensor([1.0, 2.0], device=DEVICE),
    "equal": lambda x: torch.equal(x, x),
    "synchronize": lambda x: torch.get_device_module(DEVICE).synchronize(),
    "repeat": lambda x: x.repeat_interleave(torch.full((10,), 2, device=DEVICE)),
}


def job_reads(name):
    x = torch.randn(10, device=DEVICE)
    with pretend_gpu.watching() as seen:
        READS[name](x)
    return [str(read) for read in seen.host_reads]


@pytest.mark.parametrize("name", READS)
def test_each_wait_of_the_host_is_seen_at_its_line(on_device, name):
    reads = on_device(1, job_reads, name)[0]
    assert reads and all("test_pretend_gpu.py" in read for read in reads)


def job_no_reads():
    model, x = small_model().to(DEVICE), torch.randn(5, 8, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    with pretend_gpu.watching() as seen:
        model(x).square().mean().backward()
        optimizer.step()
        torch.zeros(3, device=DEVICE).masked_fill_(torch.ones(3, device=DEVICE).bool(), 2.0)
    return [str(read) for read in seen.host_reads], seen.launches


def test_a_step_that_stays_on_the_device_has_no_reads_and_counts_its_kernels(on_device):
    reads, launches = on_device(1, job_no_reads)[0]
    assert reads == [] and launches > 20


def job_mixtures():
    refused = []
    for make in (
        lambda x, y: x + y,
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.mm(x, y),
        lambda x, y: torch._foreach_add([x], [y]),
        lambda x, y: F.embedding(torch.zeros(2, dtype=torch.int64), x),
    ):
        try:
            make(torch.randn(3, 3, device=DEVICE), torch.randn(3, 3))
            refused.append(None)
        except RuntimeError as error:
            refused.append("device" in str(error))
    return refused


def test_tensors_of_two_devices_are_refused(on_device):
    assert all(on_device(1, job_mixtures)[0])


# --- vector clocks against the graph that they stand for


def a_program(seed):
    """Draw instructions of three streams, two events and two buffers."""
    draw = random.Random(seed)
    made = []
    for _ in range(draw.randint(4, 14)):
        stream, other = draw.sample(range(3), 2)
        kinds = ["access"] * 4 + ["record", "await event", "await stream", "synchronize"]
        made.append((draw.choice(kinds), stream, other, draw.randrange(2), draw.random() < 0.5))
    return made


def has_races(program):
    """Ask for two accesses of a buffer on two streams, one a write, of which neither leads to the other."""
    edges: dict[object, set[object]] = {}
    last: dict[object, object] = {}  # the last node of each stream, and of the host
    events: dict[int, object] = {}
    accesses = []

    def follow(who, node, *before):
        edges[node] = {found for found in (last.get(who), *before) if found is not None}
        last[who] = node

    for number, (kind, stream, other, which, writes) in enumerate(program):
        if kind == "access":
            follow(stream, number, last.get("host"))
            accesses.append((number, stream, which, writes))
        elif kind == "record":
            events[which] = last.get(stream)
        elif kind == "await event":
            follow(stream, number, events.get(which))
        elif kind == "await stream":
            follow(stream, number, last.get(other))
        else:
            follow("host", number, last.get(stream))

    def leads(first, second):
        waiting, seen = [second], set()
        while waiting:
            node = waiting.pop()
            if node == first:
                return True
            fresh = edges.get(node, set()) - seen
            seen |= fresh
            waiting += fresh
        return False

    return any(
        a[1] != b[1] and a[2] == b[2] and (a[3] or b[3]) and not leads(a[0], b[0]) for a, b in combinations(accesses, 2)
    )


def is_racing(program):
    """Run a program, and ask the watch."""
    device = torch.get_device_module(DEVICE)
    buffers = [torch.zeros(8, device=DEVICE) for _ in range(2)]
    streams, events = [device.Stream() for _ in range(3)], [device.Event() for _ in range(2)]
    with pretend_gpu.watching() as seen:
        for kind, stream, other, which, writes in program:
            if kind == "access":
                with device.stream(streams[stream]):
                    buffers[which].add_(1) if writes else buffers[which].sum()
            elif kind == "record":
                events[which].record(streams[stream])
            elif kind == "await event":
                streams[stream].wait_event(events[which])
            elif kind == "await stream":
                streams[stream].wait_stream(streams[other])
            else:
                streams[stream].synchronize()
    return bool(seen.races)


def job_programs(seeds):
    """Count sound and racing programs, and list those on which graph and watch differ."""
    counts, differ = [0, 0], []
    for seed in seeds:
        program = a_program(seed)
        expected, found = has_races(program), is_racing(program)
        counts[expected] += 1
        if expected != found:
            differ.append((seed, program))
    return counts, differ


def test_the_watch_finds_races_where_the_graph_has_them_and_nowhere_else(on_device):
    (sound, racing), differ = on_device(1, job_programs, range(400))[0]
    assert differ == [] and sound > 40 and racing > 40
