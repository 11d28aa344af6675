"""Save results of operators and collectives for a recomputation, chosen by a policy.

torch's own cache (``torch.utils.checkpoint.create_selective_checkpoint_contexts``) saves results of operators, so it
misses every collective that writes into a buffer. It fails if the recomputed forward has an operator that the forward
had not (a sharded unit gathers again, a hook observes). And a random operator that is not run again does not advance
the random stream. It is used for compiled blocks: there the policy is compiled into the graph.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from meshwright.core.devices import CPU, device_in_use, is_accelerator
from meshwright.core.errors import UnsupportedError
from meshwright.core.torch_private import TorchDispatchMode, by_values, schema_of, tree_map
from meshwright.distributed.memory.live import storage_of, tensors_in
from meshwright.planning.recompute import KEPT, OPERATOR, is_fresh, operators, policy_function

# --- turn names of operators into a policy of ``torch.utils.checkpoint``

Policy = Callable[..., CheckpointPolicy]
"""Type of a policy: (context, operator, *args, **kwargs) → whether to save or recompute the result."""

SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
WORDS = {
    "attention": (
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
    ),
    "matmuls": ("aten.mm.default", "aten.addmm.default", "aten._scaled_mm.default", "aten._grouped_mm.default"),
    "topk": ("aten.topk.default",),
}
"""Operators by the word that names them. Linear layers are mm, or addmm with a bias. Batched products (bmm) have no
word: in attention computed step by step their results are as large as the sequence squared."""


class OperatorPolicy:
    """The operators of a region's forward whose results are saved.

    Args:
        keep: words of ``planning.recompute.KEPT``, names of operators, or "module:function".
        every: distance between saved results of the matrix products of "matmuls": each ``every``-th is saved.
    """

    def __init__(self, keep: tuple[str, ...], every: int):
        where = "techniques.checkpoint_keep"
        named = [name for word in keep if word in WORDS and word != "matmuls" for name in WORDS[word]]
        named += [word for word in keep if word not in KEPT and ":" not in word]
        self.keeps_exchanges, self.keeps_attention = "collectives" in keep, "attention" in keep
        self.every = every
        self._always = {form for name in named for form in operators(name, where)}
        self._products = (
            {form for name in WORDS["matmuls"] for form in operators(name, where)} if "matmuls" in keep else set()
        )
        self._products -= self._always
        self._functions = [policy_function(word, where) for word in keep if ":" in word]

    def asks_about(self, operator: Any) -> bool:
        """Return whether the operator's results may be saved at all."""
        return bool(self._functions) or operator in self._always or operator in self._products

    def start(self) -> Policy:
        """Return the policy of one forward, which counts that forward's matrix products."""
        products = 0

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            nonlocal products
            if operator in self._products:
                products += 1
                if products % self.every == 0:
                    return CheckpointPolicy.MUST_SAVE
            if operator in self._always:
                return CheckpointPolicy.MUST_SAVE
            for function in self._functions:  # the first that wants to save decides
                answer = function(context, operator, *args, **kwargs)
                # older versions of torch lack these two
                if getattr(answer, "name", "") in ("MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD"):
                    raise UnsupportedError(
                        f"techniques.checkpoint_keep: {function.__name__} wants {operator} offloaded; a policy can save"
                        f" or recompute. For host memory set techniques.activation_checkpointing = offload."
                    )
                if answer is True or answer in SAVED:
                    if not (isinstance(operator, OPERATOR) and is_fresh(operator)):
                        raise UnsupportedError(
                            f"techniques.checkpoint_keep: {function.__name__} wants to save {operator}, which has no"
                            f" result of its own: it writes into its inputs or gives a view of them"
                        )
                    return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return policy


# --- read and restore the states of torch's random streams


@by_values
def drawn_number() -> int:
    """Draw a number below 2^62 from the CPU's stream."""
    return int(torch.randint(2**62, (1,)))


@by_values
def streams() -> dict[str, torch.Tensor]:
    """Return the states of the CPU's stream and, once this process has used its accelerator, of that one's."""
    found = {CPU: torch.get_rng_state()}
    if is_accelerator(device := device_in_use()):
        found[device] = torch.get_device_module(device).get_rng_state()
    return found


@by_values
def restore_streams(states: dict[str, torch.Tensor]) -> None:
    for device, state in states.items():
        (torch.get_device_module(device) if is_accelerator(device) else torch).set_rng_state(state)


# --- save results of operators and collectives for a recomputation, chosen by a policy


class _Running(threading.local):
    """The regions that run on this thread, in forward or recomputation, the innermost last."""

    modes: list[Region] | None = None


_running = _Running()

Made = TypeVar("Made")
EXCHANGE, ATTENTION = "exchange", "attention"


def exchanged(send: Callable[..., Tensor], *args: Any, into: Tensor | None = None) -> Tensor:
    """Return the tensor that ``send(*args)`` receives from other ranks, and writes ``into`` a given one.

    A recomputation whose policy saves exchanges sends nothing, and returns the tensor received in the forward.
    """
    if torch.compiler.is_compiling():
        return send(*args)
    modes = _running.modes
    return modes[-1].exchange(functools.partial(send, *args), into) if modes else send(*args)


@contextmanager
def not_counted() -> Iterator[None]:
    """Send messages that a recomputation does not send, because what they found is remembered.

    Results are handed back by their numbers: one message more in the forward, and the others would be another's.
    """
    modes, _running.modes = _running.modes, []
    try:
        yield
    finally:
        _running.modes = modes or []


def exchanging(begin: Callable[[], Callable[[], Tensor]]) -> Callable[[], Tensor]:
    """Begin an exchange with other ranks, unless it is recomputed, and return what waits for their tensors."""
    if torch.compiler.is_compiling():
        return begin()
    modes = _running.modes
    return modes[-1].begin(begin) if modes else begin()


def attended(compute: Callable[[], Made], *, exchanges: bool = False) -> Made:
    """Compute an attention of several steps; a recomputation whose policy saves attention returns the saved result.

    Args:
        exchanges: whether the steps send messages, so that a policy that saves exchanges saves the result too.
    """
    if torch.compiler.is_compiling():
        return compute()
    modes = _running.modes
    return modes[-1].attention(compute, exchanges) if modes else compute()


def leaving(output: Any) -> Any:
    """Return a region's output, after copying saved results that share its storage: the caller may write into them."""
    if modes := _running.modes:
        with modes[-1].aside():
            modes[-1].results.before_write(tensors_in(output))
    return output


def contexts(policy: OperatorPolicy) -> tuple[Any, Any]:
    """Return a checkpoint's ``context_fn`` pair: a context for the forward, and one for its recomputation."""
    if torch.compiler.is_compiling():
        return create_selective_checkpoint_contexts(policy.start())
    results = Results(policy)
    return Region(results), Region(results, recomputes=True)


class SavedResult:
    """One saved result; ``streams``: the state of the random streams after it, if it drew random numbers."""

    def __init__(self, made: Any, drew: bool):
        self.made = tree_map(lambda value: value.detach() if isinstance(value, Tensor) else value, made)
        self.streams = streams() if drew else None


class Results:
    """The saved results of one forward of a region, until its recomputation takes them.

    The key of a result is its operator, the shapes of the arguments and the number of the call among equal ones. A
    result is copied only before an operator writes into it.
    """

    def __init__(self, policy: OperatorPolicy):
        self.policy = policy
        self.ask = policy.start()
        self._found: dict[tuple, SavedResult] = {}
        self._lying: dict[int, list[SavedResult]] = {}

    def keep(self, key: tuple, made: Any, *, drew: bool = False) -> None:
        kept = self._found[key] = SavedResult(made, drew)
        for tensor in tensors_in(kept.made):
            self._lying.setdefault(id(storage_of(tensor)), []).append(kept)

    def take(self, key: tuple) -> SavedResult | None:
        return self._found.pop(key, None)

    def before_write(self, tensors: list[Tensor]) -> None:
        """Copy the saved results that share storage with these tensors, which an operator will write into."""
        for tensor in tensors if self._lying else ():
            for kept in self._lying.pop(id(storage_of(tensor)), ()):
                kept.made = tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, kept.made)

    def close(self) -> None:
        """End the forward: from now on no write can change a saved result."""
        self._lying = {}


class Region(TorchDispatchMode):
    """Saves results in a region's forward, or returns them in its recomputation."""

    def __init__(self, results: Results, *, recomputes: bool = False):
        super().__init__()
        self.results, self.recomputes = results, recomputes
        self._calls: Counter[tuple] = Counter()
        self._aside = False

    def __enter__(self) -> Any:
        self._calls.clear()
        _running.modes = _running.modes or []
        _running.modes.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        if not self.recomputes:
            self.results.close()
        assert _running.modes is not None
        _running.modes.pop()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        asks = not self._aside and self.results.policy.asks_about(func)
        if self.recomputes:
            kept = self.results.take(self._key(func, args)) if asks else None
            if kept is None:
                return func(*args, **kwargs)
            if kept.streams is not None:
                restore_streams(kept.streams)
            return kept.made
        for place, name in written_by(func):
            self.results.before_write(tensors_in(args[place] if place < len(args) else kwargs.get(name)))
        made = func(*args, **kwargs)
        if asks:
            key = self._key(func, args)
            context = SelectiveCheckpointContext(is_recompute=False)
            context.op_output = made  # an argument in newer versions of torch
            if self.results.ask(context, func, *args, **kwargs) in SAVED:
                self.results.keep(key, made, drew=torch.Tag.nondeterministic_seeded in func.tags)
        return made

    def exchange(self, send: Callable[[], Tensor], into: Tensor | None) -> Tensor:
        """Exchange a tensor; see ``exchanged``."""
        if not self.results.policy.keeps_exchanges:
            return send()
        made = self._once(EXCHANGE, send)
        return made if into is None or made is into else into.copy_(made)

    def begin(self, begin: Callable[[], Callable[[], Tensor]]) -> Callable[[], Tensor]:
        """Begin an exchange; see ``exchanging``."""
        key = self._key(EXCHANGE, ()) if self.results.policy.keeps_exchanges else None
        if key is not None and (kept := self.results.take(key)) is not None:
            return lambda: kept.made
        with self.aside():
            wait = begin()

        def finish() -> Tensor:
            with self.aside():
                made = wait()
            if key is not None and not self.recomputes:
                self.results.keep(key, made)
            return made

        return finish

    def attention(self, compute: Callable[[], Any], exchanges: bool) -> Any:
        """Compute an attention; see ``attended``."""
        policy = self.results.policy
        keeps = policy.keeps_attention or (exchanges and policy.keeps_exchanges)
        return self._once(ATTENTION, compute) if keeps else compute()

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        key = self._key(name, ())
        if self.recomputes and (kept := self.results.take(key)) is not None:
            return kept.made
        with self.aside():
            made = make()
        if not self.recomputes:
            self.results.keep(key, made)
        return made

    def _key(self, name: Any, args: tuple) -> tuple:
        """Return the key of a call: operator, shapes, and occurrence number."""
        key = (name, *((tensor.shape, tensor.dtype) for tensor in tensors_in(args)))
        self._calls[key] += 1
        return (*key, self._calls[key])

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude the operators run inside from the region's forward."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before


@functools.cache
def written_by(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the arguments that an operator writes into; all arguments of a collective, whose schema does not tell."""
    if (schema := schema_of(func)) is None:
        return ()
    sends = func.namespace == "c10d"
    is_written = [sends or (a.alias_info is not None and a.alias_info.is_write) for a in schema.arguments]
    return tuple(
        (place, a.name) for place, (a, yes) in enumerate(zip(schema.arguments, is_written, strict=True)) if yes
    )
