"""Judge what the process with torch told: a finding for each stage, and a verdict for each mesh axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meshwright.core.errors import command, install_command
from meshwright.core.host.versions import TESTED, installed

from .findings import FAILURE, NOTE, OK, PRIVATE, TORCH, TRIALS, Finding, gibibytes
from .trials import AXES, EXCHANGE

Answer = Mapping[str, Any]
Ask = Callable[[str], Answer | None]
"""Stage → its answer: ``found``, ``error`` or ``timed_out``; None for a stage that was not reached."""
IMPORT, PACKAGE, POINTS = "torch", "meshwright.distributed", "private points"
EQUAL = "equal to one process"


def judged(ask: Ask | None) -> Iterator[Finding]:
    """Yield a finding for each stage as its answer comes.

    Args:
        ask: None where there is no torch.
    """
    if ask is not None:
        yield from torch_findings(ask)
        yield from private_findings(ask(POINTS))
    yield exchange_finding(ask)
    for axis in AXES:
        yield verdict(axis, ask)


def torch_findings(ask: Ask) -> Iterator[Finding]:
    """Yield build, devices and back ends; or why torch, or meshwright with it, cannot be imported."""
    answer = ask(IMPORT)
    if (trouble := _trouble(answer)) is not None:
        yield Finding(TORCH, "import", FAILURE, f"torch cannot be imported: {trouble}", _reinstall("torch", answer))
        return
    build = _found(answer)
    made_for = f"{'ROCm' if build['is_rocm'] else 'CUDA'} {build['accelerator']}" if build["accelerator"] else "the CPU"
    cudnn = f", cuDNN {build['cudnn']}" if build["cudnn"] else ""
    yield Finding(TORCH, "build", OK, f"{build['version']} for {made_for}{cudnn} in {build['folder']}", figures=build)
    meant = installed("torch")
    if meant is not None and not _is_same(meant, build["version"]):
        text = f"metadata of torch {meant} lie first on the path, and {build['version']} in {build['folder']} is used"
        yield Finding(TORCH, "version", FAILURE, text, _reinstall("torch"), {"metadata": meant})
    yield _devices(ask("devices"))
    answer = ask(PACKAGE)
    if (trouble := _trouble(answer)) is not None:
        remedy = _reinstall("torch", answer) if "torch" in trouble else ""
        yield Finding(TORCH, "distributed", FAILURE, f"{PACKAGE}: {trouble}", remedy)
        return
    found = _found(answer)
    names = [f"{name} {release}".strip() for name, release in found.items()]
    yield Finding(TORCH, "back ends", OK if names else FAILURE, ", ".join(names) or "none", figures=found)


def _devices(answer: Answer | None) -> Finding:
    if (trouble := _trouble(answer)) is not None:
        return Finding(TORCH, "devices", FAILURE, trouble)
    found = _found(answer)
    if found["unusable"]:
        why = found["unusable"]
        text = f"torch cannot use the GPUs of this host: {why}"
        remedy = "update the NVIDIA driver, or install a build for it (pytorch.org/get-started)"
        return Finding(TORCH, "devices", FAILURE, text, remedy, found)
    names = [d["name"] + (f" ({gibibytes(d['bytes'])})" if d["bytes"] else "") for d in found["devices"]]
    counted = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return Finding(
        TORCH, "devices", OK if names else NOTE, counted or "no GPU: ranks compute on the CPU", figures=found
    )


def private_findings(answer: Answer | None) -> Iterator[Finding]:
    """Yield how many private points are here, and each that is not, with what it switches off."""
    if (trouble := _trouble(answer)) is not None:
        yield Finding(PRIVATE, "all", FAILURE, f"cannot be looked for: {trouble}")
        return
    found = _found(answer)
    gone, count = found["missing"], found["count"]
    yield Finding(PRIVATE, "all", NOTE if gone else OK, f"{count - len(gone)} of {count} are here", figures=found)
    for point in gone:
        package = point["path"].partition(".")[0]
        remedy = _reinstall(package) if package in TESTED else ""
        yield Finding(PRIVATE, point["path"], FAILURE, f"missing; needed by {point['needed_by']}", remedy)


def exchange_finding(ask: Ask | None) -> Finding:
    """Return whether two processes exchanged data."""
    answer = ask(EXCHANGE) if ask is not None else None
    if answer is not None and "found" in answer:
        text = f"2 processes: all_reduce, send and recv by {', '.join(answer['found']['messages'])}"
        return Finding(TRIALS, EXCHANGE, OK, f"{text} ({answer['seconds']:.1f} s)", figures=answer["found"])
    return Finding(TRIALS, EXCHANGE, FAILURE, f"2 processes: {_words(answer, ask)}")


def verdict(axis: str, ask: Ask | None) -> Finding:
    """Return the verdict on an axis of two ranks: equal, refused, failed or timed out."""
    answer = ask(axis) if ask is not None else None
    name = f"{axis} 2"
    if answer is not None and "found" in answer:
        figures = {**answer["found"], "seconds": answer["seconds"], "verdict": EQUAL}
        return Finding(TRIALS, name, OK, f"{EQUAL} ({answer['seconds']:.1f} s)", figures=figures)
    words = _words(answer, ask)
    remedy = command("doctor", "--limit", "300") if words.startswith("timed out") else ""
    return Finding(TRIALS, name, FAILURE, words, remedy, {"verdict": words})


def _words(answer: Answer | None, ask: Ask | None) -> str:
    """Say what became of a trial that has no result."""
    if ask is None:
        return "failed: torch is not installed"
    if answer is not None:
        if "timed_out" in answer:
            return f"timed out after {answer['timed_out']} s"
        return f"{'refused' if answer.get('refused') else 'failed'}: {answer['error']}"
    for stage in (IMPORT, PACKAGE):
        before = ask(stage)
        if before is not None and "timed_out" in before:
            return f"timed out: after {before['timed_out']} s {stage} was still being imported"
        if before is not None and "error" in before:
            return f"failed: {stage} cannot be imported"
    return "failed: the process with torch ended before"


def _found(answer: Answer | None) -> dict[str, Any]:
    return answer["found"] if answer is not None else {}


def _trouble(answer: Answer | None) -> str | None:
    """Return what went wrong in a stage; None where it has an answer."""
    if answer is None:
        return "not reached"
    if "found" in answer:
        return None
    return f"no answer within {answer['timed_out']} s" if "timed_out" in answer else answer["error"]


def _is_same(metadata: str, imported: str) -> bool:
    """Compare versions; a local part ("+cpu") counts where both have one."""
    first, second = metadata.split("+"), imported.split("+")
    return first[0] == second[0] and (len(first) == 1 or len(second) == 1 or first[1] == second[1])


def _reinstall(package: str, answer: Answer | None = None) -> str:
    """Return the command that installs the newest tested release; none where only the time was short."""
    is_slow = answer is not None and "timed_out" in answer
    return "" if is_slow else install_command(f"{package}=={TESTED[package].newest}.*")
