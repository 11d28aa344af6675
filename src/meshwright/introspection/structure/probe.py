"""Measure in one block which features of which layers move which others.

All linear layers' outputs are held at recorded values, one output feature of one of them is pushed at one token, and
the inputs of all of them are watched. Features that move are *directly* influenced. The direct influence is
block-sparse exactly where a block can be cut: features of one head move together, features of an MLP alone.

A module that takes one tensor and returns a linear layer's output plus multiples of what pairs of linear layers give
of the same tensor is itself linear: it is measured in that layer's place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.names import is_within, owner
from meshwright.core.record import with_arguments
from meshwright.introspection.adapted_model import host_of_magnitude
from meshwright.introspection.calls import Call, watching
from meshwright.introspection.small.copies import copy_of

# --- find linear layers with adapters: pairs of linear layers, whose output is added to that of a host

TOLERANCE = 1e-8
"""Relative tolerance, in fp64, between a module's output and the sum of its layers' outputs."""

SCALED = "lengths of whole rows are trained there (DoRA: adapters.kind = dora); lora and rslora are cut"
"""Why layers are not cut beside which lengths of rows are trained."""


@dataclass(frozen=True)
class Adapted:
    """A linear layer with adapters, by paths within the block.

    Attributes:
        host: the linear layer.
        around: the module that adds the adapters' outputs to the host's.
        pairs: (first, second) linear layer of each active adapter.
        idle: modules with parameters inside that were not called: adapters that are switched off.
    """

    host: str
    around: str
    pairs: tuple[tuple[str, str], ...]
    idle: tuple[str, ...] = ()

    @property
    def linears(self) -> tuple[str, ...]:
        return tuple(path for pair in self.pairs for path in pair)


def find_adapted(block: nn.Module, calls: dict[str, list[Call]], linears: dict[str, bool]) -> tuple[Adapted, ...]:
    """Find adapted linear layers; ``linears``: path -> whether the weight is stored (in, out)."""
    found: list[Adapted] = []
    for around in calls:
        inside = [path for path in linears if path != around and is_within(path, around)]
        if not around or len(inside) < 3 or len(inside) % 2 == 0 or len(calls[around]) != 1:
            continue
        call = calls[around][0]
        taken, given = call.entered, call.left
        if taken is None or given is None or not isinstance(call.output, Tensor):
            continue
        takes = [path for path in inside if _equal(calls[path][0].entered, taken)]
        pairs = [
            (a, b)
            for a in takes
            for b in inside
            if b not in takes and next(iter(calls[b][0].tensors.values()), None) is calls[a][0].output
        ]
        hosts = [path for path in takes if path not in {a for a, _ in pairs}]
        if len(hosts) != 1 or sorted((*hosts, *(path for pair in pairs for path in pair))) != sorted(inside):
            continue
        (host,) = hosts
        if any(block.get_submodule(path)._parameters.get("bias") is not None for pair in pairs for path in pair):
            continue
        module = block.get_submodule(around)
        idle = {owner(name) for name, _ in module.named_parameters(around)} - set(inside)
        if any(path in calls or path == around for path in idle):
            continue
        # the module's output is the host's plus a nonzero multiple of each of the others
        outputs = [calls[path][0].left for path in (host, *(b for _, b in pairs))]
        whole = [output for output in outputs if output is not None and output.shape == given.shape]
        if len(whole) < len(outputs):
            continue
        rest, *columns = ((given - whole[0]).reshape(-1, 1), *(output.reshape(-1, 1) for output in whole[1:]))
        added = torch.cat(columns, dim=1)
        times = torch.linalg.lstsq(added, rest).solution
        if not (added @ times - rest).norm() <= TOLERANCE * given.norm() or not bool((times != 0).all()):
            continue
        if not any(is_within(other.around, around) or is_within(around, other.around) for other in found):
            found.append(Adapted(host, around, tuple(pairs), tuple(sorted(idle))))
    return tuple(found)


def _equal(tensor: Tensor | None, other: Tensor) -> bool:
    return tensor is not None and tensor.shape == other.shape and torch.equal(tensor, other)


def find_others(block: nn.Module, calls: dict[str, list[Call]], linears: list[str]) -> Iterator[str]:
    """Describe the modules that wrap a linear layer, own other parameters, change its output, and are not adapters."""
    scaled: list[str] = []
    for host in linears:
        around = owner(host)
        if not around or len(calls.get(around, ())) != 1 or len(calls[around][0].tensors) != 1:
            continue
        taken, given, entered = calls[around][0].entered, calls[around][0].left, calls[host][0].entered
        if taken is None or given is None or not _equal(entered, taken) or calls[host][0].output.shape != given.shape:
            continue
        beside = [
            name
            for name, _ in block.get_submodule(around).named_parameters()
            if not is_within(f"{around}.{name}", host)
        ]
        if any(host_of_magnitude(f"{around}.{name}") for name in beside):
            scaled.append(around)
            continue
        try:
            with torch.no_grad():
                last = block.get_submodule(around)(taken[..., -1:, :]) if beside else None
        except Exception:  # noqa: BLE001  (whatever the model's code raises when it is given one token, and that alone)
            continue
        if isinstance(last, Tensor) and torch.allclose(last, given[..., -1:, :], rtol=1e-5, atol=1e-8):
            yield (
                f"{around} has {', '.join(beside)} beside {host.removeprefix(around + '.')}, and what it gives is not"
                f" that layer's output and multiples of what pairs of linear layers without bias give"
            )
    if scaled:
        yield f"{', '.join(scaled)} {'stay' if len(scaled) > 1 else 'stays'} whole: {SCALED}"


# --- hold outputs of a block's modules at recorded values, while features of one of them are pushed

PUSHED = 1
"""The token that is pushed: not the first, which attends to nothing but itself, whatever its query."""
ROUNDING = 1e-9
"""Relative tolerance, in fp64; smaller changes are no influence: a rerouted token reorders the sums of experts."""


class HeldOutputs:
    """The modules of a block whose outputs are held; features of one of them may be pushed."""

    def __init__(self, probe: Probe):
        self.probe = probe
        self.rest: dict[str, Tensor] = {}
        self._pushed: tuple[str, tuple[int, ...], float] | None = None
        self._seen: dict[str, Tensor] = {}
        self._least: dict[str, Tensor] = {}
        self.watched: set[str] | None = None
        """Modules whose inputs are compared; None: all."""

    @property
    def pairs(self) -> int:
        """The number of pairs of rows."""
        return self.probe.shape[0] // 2

    def push(self, path: str, *features: int, times: float = 1.0) -> None:
        """Push features until the next push, each in a pair of rows of its own; a single feature in all rows."""
        self._pushed = (path, features if len(features) > 1 else features * self.pairs, times)

    def keeps_pairs_apart(self, path: str) -> bool:
        """Return whether a push in the first pair of rows moves no other row."""
        if self.pairs == 1:
            return False
        self._pushed = (path, (0,), 1.0)
        return not any(places[2:].any() for places in self.moved().values())

    def inputs(self) -> dict[str, Tensor]:
        """Run the block, and return the input of each module."""
        self._seen.clear()
        self.probe.rerun()
        return dict(self._seen)

    def moved(self) -> dict[str, Tensor]:
        """Run the block, and return where inputs of modules differ from those at rest: (rows, seq, features) bool."""
        found: dict[str, Tensor] = {}
        for path, value in self.inputs().items():
            if (rest := self.rest.get(path)) is None:
                raise self.probe.passed_over(path)
            if value.shape == rest.shape:
                if (least := self._least.get(path)) is None:
                    least = self._least[path] = ROUNDING * rest.abs().flatten(0, -2).amax(0)
                found[path] = self.probe._by_token((value.sub_(rest).abs_() <= least).logical_not_())  # NaN has moved
        return found

    def hook(self, path: str) -> Callable[..., Tensor]:
        recorded = self.probe.output_of(path)
        amount = 2 * recorded.abs().max() + 0.37  # past every kink, up in one row and down in the next
        up_and_down = torch.stack([amount, -amount])

        def hold(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Tensor:
            if self.watched is None or path in self.watched:
                for entered in (*args, *kwargs.values()):
                    if isinstance(entered, Tensor):
                        self._seen[path] = entered.clone()
                        break
            kept = recorded.clone()
            if self._pushed is not None and self._pushed[0] == path:
                _, features, times = self._pushed
                by_token = self.probe._by_token(kept)
                for pair, feature in enumerate(features):
                    by_token[2 * pair : 2 * pair + 2, PUSHED, feature] += times * up_and_down
            return kept

        return hold


# --- measure in one block which features of which layers move which others

MOST_EFFORT = 4e8
"""Largest product of pushed and watched features: one to two minutes on a core."""


@dataclass
class Reach:
    """The input features of a consumer that each output feature of a producer moves.

    Attributes:
        places: (features of the producer, features of the consumer) bool.
        later: (features of the producer,) bool: whether the feature moves them at later tokens too.
    """

    places: Tensor
    later: Tensor


Influence = dict[tuple[str, str], Reach]
"""Reach by (producer, consumer)."""


@dataclass
class Probe:
    """One block of a model in fp64 on the CPU, with a recorded call.

    Attributes:
        block: the module.
        calls: path within the block -> its calls, in order of first call; "" is the block itself.
        linears: path -> whether the layer's weight is stored (in, out); adapters' layers are not among them.
        adapted: linear layers with adapters, by path. Their calls are those of the modules around them.
        beside: the adapters' layers, as ``linears``.
        residual: argument of the block that is the residual stream, by name or position; None: found by its shape.
        wide: a probe of the same block with the rows repeated many times, to push many features in one run.
        name: path of the block in its model.
    """

    block: nn.Module
    calls: dict[str, list[Call]]
    wide: Probe | None = None
    residual: int | str | None = None
    name: str = ""
    linears: dict[str, bool] = field(init=False)
    adapted: dict[str, Adapted] = field(init=False)
    beside: dict[str, bool] = field(init=False)

    def __post_init__(self) -> None:
        ways = {path: way for path, calls in self.calls.items() if (way := self._orientation(path, calls)) is not None}
        self.adapted = {found.host: found for found in find_adapted(self.block, self.calls, ways)}
        self.beside = {path: ways[path] for found in self.adapted.values() for path in found.linears}
        self.linears = {path: way for path, way in ways.items() if path not in self.beside}
        self.calls = self.calls | {host: self.calls[found.around] for host, found in self.adapted.items()}

    @cached_property
    def call(self) -> Call:
        return self.calls[""][0]

    @cached_property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and of tokens in a row."""
        assert self.call.entered is not None
        rows, tokens = self.call.entered.shape[:2]
        return rows, tokens

    @property
    def hidden(self) -> int | str:
        """The argument of the block that is the residual stream."""
        if self.residual is not None:
            names, key = list(inspect.signature(self.block.forward).parameters), self.residual
            name = names[key] if isinstance(key, int) and key < len(names) else key
            found = next(
                (k for k in (names.index(name) if name in names else key, name) if k in self.call.tensors), None
            )
            if found is None:
                raise ConfigError(
                    f"hints: residual = {key!r}: the blocks ({type(self.block).__name__}) are given no such tensor;"
                    f" their forward takes {', '.join(names)}"
                )
            return found
        for key, value in self.call.tensors.items():
            if value.is_floating_point() and value.dim() == 3:
                return key
        given = ", ".join(str(tuple(value.shape)) for value in self.call.tensors.values()) or "no tensors"
        raise UnsupportedError(
            f"its blocks ({type(self.block).__name__}) are given {given}, none of them (rows, seq, features): what"
            " flows between them cannot be cut. Set layout.tp = 1 and layout.pp = 1."
        )

    def refuse_slow(self) -> None:
        """Raise UnsupportedError where measuring takes minutes, since each feature is pushed and each input watched.

        The effort is counted and not timed, since all ranks must decide alike.
        """
        given, watched = {path: self.output_of(path).shape[-1] for path in self.linears}, 0
        for path in self.linears:
            entered = self.calls[path][0].entered
            watched += 0 if entered is None else entered.shape[-1]
        if (effort := sum(given.values()) * watched) > MOST_EFFORT:
            widest = max(given, key=lambda path: given[path])
            raise UnsupportedError(
                f"its blocks ({type(self.block).__name__}) have {sum(given.values()):,} features in {len(given)} linear"
                f" layers, {given[widest]:,} of them in {widest}: to find out which go together takes minutes (effort"
                f" {effort:.1e}, at most {MOST_EFFORT:.0e}). A small copy takes a moment: give the model a .config with"
                " the usual names (hidden_size, num_attention_heads, num_key_value_heads, head_dim, intermediate_size)."
                " Or set layout.tp = 1 and layout.pp = 1."
            )

    def module(self, path: str) -> nn.Module:
        return self.block.get_submodule(path)

    def place_of(self, path: str) -> str:
        """Return the module with a linear layer's full output: the one that adds the adapters', if there are any."""
        return self.adapted[path].around if path in self.adapted else path

    def passed_over(self, path: str) -> UnsupportedError:
        """Return the refusal of a module that one forward calls, and another of the same tokens does not."""
        return UnsupportedError(
            f"some forwards pass over {self.name}.{path}, and others of the same tokens do not: the block decides by"
            " random draws, so what goes together in it is unknown. Set layout.tp = 1 and layout.pp = 1."
        )

    def output_of(self, path: str) -> Tensor:
        if path not in self.calls:
            raise self.passed_over(path)
        result = self.calls[path][0].left
        assert result is not None
        return result

    def _orientation(self, path: str, calls: list[Call]) -> bool | None:
        """Classify a module called once with all tokens: y = x Wᵀ + b (False), y = x W + b (True), else None."""
        module = self.module(path)
        weight = module._parameters.get("weight")
        x, result, bias = calls[0].entered, calls[0].left, module._parameters.get("bias")
        if (
            weight is None
            or weight.dim() != 2
            or len(calls) != 1
            or x is None
            or result is None
            or not x.is_floating_point()
        ):
            return None
        entered = self.calls[""][0].entered if "" in self.calls else None
        if not isinstance(calls[0].output, Tensor) or (
            entered is not None and x[..., 0].numel() != entered.shape[:2].numel()
        ):
            return None
        for transposed in (False, True):
            matrix = weight if transposed else weight.T
            if x.shape[-1] == matrix.shape[0] and result.shape == (*x.shape[:-1], matrix.shape[1]):
                expected = x @ matrix if bias is None else x @ matrix + bias
                if torch.allclose(expected, result, rtol=1e-5, atol=1e-8):
                    return transposed
        return None

    def rerun(self, change: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Compute the block's output for its recorded arguments, with changed hidden states."""
        given = {} if change is None else {self.hidden: change(self.call.tensors[self.hidden])}
        args, kwargs = with_arguments(self.call.args, self.call.kwargs, given)
        output = self.block(*args, **kwargs)
        return output[0] if isinstance(output, (tuple, list)) else output

    def influence(self, producers: list[str], held: list[str]) -> Influence:
        """Measure how each output feature of ``producers`` moves the inputs of ``held``, whose outputs are held."""
        if self.wide is not None:
            return self.wide.influence(producers, held)
        found: Influence = {}
        plain = [path for path in self.calls if path in self.linears and path not in self.adapted]  # by their calls
        with self._holding(held) as state:
            at_once = state.pairs if producers and state.keeps_pairs_apart(producers[0]) else 1
            for producer in producers:
                features = self.output_of(producer).shape[-1]
                # linear layers that are called before the producer are not reached
                before = plain[: plain.index(producer) + 1] if producer in plain else []
                state.watched = {path for path in held if path not in before}
                for start in range(0, features if state.watched else 0, at_once):
                    pushed = range(start, min(start + at_once, features))
                    state.push(producer, *pushed)
                    self._note(found, producer, features, pushed, state.moved())
        return found

    def influence_of_tensor(self, name: str, tensor: Tensor, held: list[str]) -> list[Influence]:
        """Find, for each dim of a parameter or buffer, how its slices move the inputs of ``held``.

        ``name`` is the producer. The list is empty if the tensor as a whole moves nothing.
        """
        values = tensor.detach() if tensor.dim() else tensor.detach().view(1)
        drawn = torch.rand(values.shape, generator=torch.Generator().manual_seed(0), dtype=values.dtype)
        amounts = drawn + 0.37  # all different, so that no sum of them is zero
        found: list[Influence] = []
        with self._holding(held) as state:
            if not any(places.any() for places in self._moved_by(state, values, amounts).values()):
                return []
            for dim, size in enumerate(values.shape):
                found.append({})
                for index in range(size):
                    moved = self._moved_by(state, values.select(dim, index), amounts.select(dim, index))
                    self._note(found[-1], name, size, range(index, index + 1), moved)
        return found

    def _moved_by(self, state: HeldOutputs, values: Tensor, amounts: Tensor) -> dict[str, Tensor]:
        before = values.clone()
        values.add_(amounts)
        try:
            return state.moved()
        finally:
            values.copy_(before)

    def _note(self, found: Influence, producer: str, features: int, pushed: range, moved: dict[str, Tensor]) -> None:
        """Record the inputs that one run moved.

        Args:
            features: number of the producer's features.
            pushed: the pushed features: one in all rows, or each in a pair of rows of its own.
            moved: (rows, seq, features) bool for each consumer's input.
        """
        for consumer, places in moved.items():
            # (pushes, rows, seq, features)
            by_push = places[None] if len(pushed) == 1 else places.unflatten(0, (-1, 2))[: len(pushed)]
            columns = by_push.flatten(1, 2).any(1)
            if consumer != producer and columns.any():
                if (reach := found.get((producer, consumer))) is None:
                    reach = Reach(
                        torch.zeros((features, columns.shape[1]), dtype=torch.bool),
                        torch.zeros(features, dtype=torch.bool),
                    )
                    found[producer, consumer] = reach
                reach.places[pushed.start : pushed.stop] = columns
                reach.later[pushed.start : pushed.stop] = by_push[:, :, PUSHED + 1 :].flatten(1).any(1)

    def is_linear(self, producer: str, feature: int, consumer: str, held: list[str]) -> bool:
        """Return whether twice the push moves the consumer's input twice as far."""
        far = []
        with self._holding(held) as state:
            for times in (1.0, 2.0):
                state.push(producer, *[feature] * state.pairs, times=times)
                far.append(state.inputs()[consumer] - state.rest[consumer])
        return torch.allclose(far[1], 2 * far[0], rtol=1e-4, atol=1e-6)

    def _by_token(self, tensor: Tensor) -> Tensor:
        """View a tensor as (rows, seq, features), whether or not its leading token dims are flattened."""
        return tensor.view(*self.shape, tensor.shape[-1])

    @contextmanager
    def giving(self, outputs: dict[str, Tensor]) -> Iterator[None]:
        """Replace modules' outputs, whatever they compute."""
        places = {self.place_of(path): kept for path, kept in outputs.items()}
        watched = ((path, self.module(path)) for path in places)
        with watching(watched, after=lambda path, *_: places[path].clone()):
            yield

    @contextmanager
    def _holding(self, held: list[str]) -> Iterator[HeldOutputs]:
        """Hold the outputs of ``held`` at their recorded values, and compute nothing inside them."""
        state = HeldOutputs(self)
        with torch.no_grad(), ExitStack() as stack:
            for path in held:
                module, output = self.module(self.place_of(path)), self.output_of(path)
                stack.callback(module.register_forward_hook(state.hook(path), with_kwargs=True).remove)
                own = {name: value for name, value in vars(module).items() if name == "forward"}
                stack.callback(vars(module).update, own)
                module.forward = lambda *args, output=output, **kwargs: output
                stack.callback(vars(module).pop, "forward")
            state.rest = state.inputs()
            yield state


def record(
    model: nn.Module,
    inputs: dict[str, Any],
    blocks: list[str],
    wide: dict[str, Probe] | None = None,
    residual: int | str | None = None,
) -> tuple[dict[str, Probe], dict[str, list[Call]]]:
    """Run the model once for a Probe of each block (with its wide one) and the calls outside the blocks, in order."""
    inside: dict[str, dict[str, list[Call]]] = {block: {} for block in blocks}
    outside: dict[str, list[Call]] = {}

    def note(path: str, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        home = next((block for block in blocks if is_within(path, block)), None)
        calls, own = (outside, path) if home is None else (inside[home], path[len(home) + 1 :])
        calls.setdefault(own, []).append(Call.of(args, kwargs, output))

    with torch.no_grad(), watching(model.named_modules(), after=note):
        model(**inputs)
    probes = {
        block: Probe(model.get_submodule(block), calls, (wide or {}).get(block), residual, block)
        for block, calls in inside.items()
        if "" in calls
    }
    return probes, outside


# --- find parallel norms of one tensor, each of which alone feeds some of a block's layers


def side_by_side(probe: Probe, gathers: tuple[tuple[str, ...], ...], hidden: int | str) -> tuple[str, ...]:
    """Return the module before each group of ``gathers`` if all take the block's input itself; else nothing.

    Each module acts on every token by itself, in the same way in training, and its output goes only to its group. So
    each rank may compute it from the gathered input, if all the layers after it are.
    """
    entered, norms = probe.call.tensors[hidden], list[str]()
    for paths in gathers if len(gathers) > 1 else ():
        taken = next(iter(probe.calls[paths[0]][0].tensors.values()))
        gave = [path for path, calls in probe.calls.items() if path and len(calls) == 1 and calls[0].output is taken]
        if not gave or taken is entered:
            return ()
        call = probe.calls[gave[0]][0]
        takes_it_alone = len(call.args) == 1 and not call.kwargs and call.args[0] is entered
        if not takes_it_alone or taken.shape != entered.shape or any(probe.module(gave[0]).children()):
            return ()
        # in training mode some of the tokens alone give the same outputs as among all
        assert call.entered is not None and call.left is not None
        half = call.entered.shape[1] // 2
        with torch.no_grad():
            found = copy_of(probe.module(gave[0])).train()(call.entered[:, :half].clone())
        if not torch.allclose(found, call.left[:, :half], rtol=1e-9, atol=1e-12):
            return ()
        norms.append(gave[0])
    if len(set(norms)) < max(len(gathers), 2):
        return ()
    # nobody else reads them: they may return NaN, where the layers after them return recorded values
    given = {path: probe.output_of(path) for paths in gathers for path in paths}
    given |= {path: torch.full_like(probe.output_of(path), torch.nan) for path in norms}
    with torch.no_grad(), probe.giving(given):
        found = probe.rerun()
    return tuple(norms) if probe.call.left is not None and torch.equal(found, probe.call.left) else ()
