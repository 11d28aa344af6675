"""Run one module again from what it was given, in float64 and with switches off, to say which of them changes it.

Like the recorder, this file is loaded by its path into whatever environment the script has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.observation.pieces import walk
from meshwright.observation.sketches import first_tensor, local_of, new_step


class Reruns:
    """Watches for the first call of some modules in each step, and runs them again.

    Args:
        asked: the modules' names in the trace.
        recorder: of the process; it records nothing meanwhile.
    """

    def __init__(self, asked: list[str], recorder: Any):
        self.asked, self.recorder = asked, recorder
        self.names: dict[int, str] = {}
        self.draws: dict[str, Tensor] = {}

    def entered(self, module: nn.Module, args: Any) -> None:
        """Note names below an outermost module, and what random numbers come next."""
        if self.recorder.stack == [id(module)]:
            self.names = {}
            walk(module, "", {}, self.names)
        if (name := self.names.get(id(module), "")) in self.asked and name not in self.recorder.now["again"]:
            self.draws[name] = torch.get_rng_state()

    def ended(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        recorder, name = self.recorder, self.names.get(id(module), "")
        if name not in self.draws or recorder.closed or not torch.is_grad_enabled():
            return
        kept, left, draws = recorder.now, torch.get_rng_state(), self.draws.pop(name)
        recorder.now = new_step() | {"again": dict.fromkeys(self.asked)}  # none is due
        recorder.stack.append(id(self))  # and none is outermost
        try:
            kept["again"][name] = self.errors(module, args, kwargs, output, draws)
        except Exception as error:  # noqa: BLE001 - whatever the script's code raises
            kept["again"][name] = {"problem": f"{type(error).__name__}: {error}"}
        finally:
            torch.set_rng_state(left)
            recorder.stack.pop()
            recorder.now = kept

    def errors(self, module: nn.Module, args: Any, kwargs: Any, output: Any, draws: Tensor) -> dict[str, float]:
        """Return how far each way of running is from float64, relative to its norm."""

        def run(cast: Callable[[Tensor], Tensor], plain: bool) -> Tensor:
            torch.set_rng_state(draws)
            with holding(module, cast), sdpa_kernel(SDPBackend.MATH) if plain else nullcontext():
                found = module.forward(*mapped(args, cast), **mapped(kwargs, cast))
            return values_of(found)

        with torch.autocast(local_of(first_tensor(output)).device.type, enabled=False):
            exact = run(lambda t: t.detach().double() if t.is_floating_point() else t.detach().clone(), True)
        again, twice, plain = (run(lambda t: t.detach().clone(), is_plain) for is_plain in (False, False, True))
        size = max(float(exact.norm()), 1e-300)
        ways = {"ran": values_of(output), "again": again, "twice": exact + twice - again, "plain": plain}
        return {way: float((found - exact).norm()) / size for way, found in ways.items()}


def values_of(output: Any) -> Tensor:
    """Return a rank's numbers of an output in float64."""
    return local_of(first_tensor(output)).detach().double()


def mapped(value: Any, cast: Callable[[Tensor], Tensor]) -> Any:
    """Cast the tensors among arguments."""
    if isinstance(value, Tensor):
        return cast(value)
    if isinstance(value, dict):
        return {key: mapped(item, cast) for key, item in value.items()}
    return type(value)(mapped(item, cast) for item in value) if type(value) in (list, tuple) else value


@contextmanager
def holding(module: nn.Module, cast: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Give a module copies of its parameters and buffers for a while."""
    tables: list[dict[str, Any]] = [own for part in module.modules() for own in (part._parameters, part._buffers)]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.update({name: None if tensor is None else cast(tensor) for name, tensor in table.items()})
    try:
        yield
    finally:
        for table, before in zip(tables, kept, strict=True):
            table.update(before)
