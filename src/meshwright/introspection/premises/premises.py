"""Observe on a small copy, before first use, the effects of a forward besides the logits of each row's tokens.

Ranks have other rows, microbatches cut them, recomputation and pipelines call a forward more often than one process
does. None of this matters to a forward that is a function of weights and rows. So the small copy runs in training
mode with every random draw fixed: rows together and in halves, two batches, several calls, and again with each number
that Python reads off the data inverted (a condition on a rare token then takes its other branch).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.names import clean
from meshwright.core.torch_private import accumulation_hooks, gradient_hooks
from meshwright.introspection.calls import tracking
from meshwright.introspection.constructor import seeded
from meshwright.introspection.images import ImageArguments, length_for, pictured, rows_of, sizes_of
from meshwright.introspection.module_kinds import BATCH_NORMS
from meshwright.introspection.small.copies import copy_of
from meshwright.introspection.small.sample import ids_of, random_like, samples_of

from .playing import EXTREMES, ROWS, HeldRandomness, Play, called, parts, played

# --- read the numbers that modules count in, and set them far ahead

FAR = 1_000_000
"""Increment of a counter of calls, to see a behaviour that begins late."""


def numbers(model: nn.Module) -> dict[str, float]:
    """Return the numbers that modules hold as attributes."""
    return {
        f"{clean(path)}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in (int, float)
    }


# --- find users' hooks on parameters

LARGEST_GRADIENT = 1 << 24
"""Elements of a parameter beyond which its hooks are not tried."""


def lies_on_mesh(model: nn.Module) -> bool:
    """Return whether a model is laid out, at least in part: some of its parameters are DTensors."""
    return any(hasattr(parameter, "placements") for parameter in model.parameters())


@dataclass(frozen=True)
class HookFact:
    """A hook on a parameter.

    ``kind``: "gradient", or "accumulated" for a hook that is called with the parameter once its gradient is there.
    ``adds_up``: on random numbers, the hook of a sum was the sum of the hooks.
    """

    parameter: str
    kind: str
    adds_up: bool = False


def hooks_of(model: nn.Module) -> tuple[HookFact, ...]:
    """List the user's hooks on parameters; none if the model is laid out in part, with meshwright's among them."""
    if lies_on_mesh(model):
        return ()
    found = []
    for name, parameter in model.named_parameters():
        if hooks := gradient_hooks(parameter):
            found.append(HookFact(clean(name), "gradient", _add_up(hooks, parameter)))
        if accumulation_hooks(parameter):
            found.append(HookFact(clean(name), "accumulated"))
    return tuple(found)


def _add_up(hooks: list[Any], parameter: nn.Parameter) -> bool:
    def called(gradient: Tensor) -> Tensor:
        for hook in hooks:
            given = hook(gradient)
            gradient = gradient if given is None else given
        return gradient

    if parameter.is_meta or parameter.numel() > LARGEST_GRADIENT:
        return False
    try:
        with seeded(0), torch.no_grad():
            one, other = (
                torch.randn(parameter.shape, dtype=parameter.dtype, device=parameter.device) for _ in range(2)
            )
            together, apart = called(one + other), called(one.clone()) + called(other.clone())
    except Exception:  # noqa: BLE001  (a hook of the user's; one that cannot be tried has not been seen to add up)
        return False
    return bool(torch.allclose(together, apart, rtol=1e-3, atol=1e-4 * float(together.abs().max())))


# --- observe on a small copy, before first use, the effects of a forward besides the logits of each row's tokens

LENGTHS = (32, 6, 2)
"""Tokens per row to try, longest first: together, rows should have every id of a small vocabulary."""
LARGEST_COST = 500_000_000
"""Largest product of parameters and tokens of a forward; a larger copy runs with shorter rows."""
SAME = 1e-12
"""Relative tolerance for the same rows under the same weights."""
DIFFERENT = 1e-5
"""Relative tolerance in fp64 with random weights; models that compute in fp32 inside agree to about 1e-7."""
READS = 24
"""The largest number of inverted numbers, one at a time."""
MOST_BESIDE = 6
"""Number of rows beside those that are compared with themselves alone."""
GRADIENT = "the gradient of"
"""Prefix of the place where rows mix in a gradient alone."""
SEEDS = 24
"""Number of seeds under which coins fall on both sides, unless one has hardly a chance."""


@dataclass(frozen=True)
class WrittenState:
    """A parameter or buffer that a forward writes.

    Attributes:
        by_data: what is written depends on what the rows are.
        by_number: it depends on how many there are.
        again: it is written anew in each call.
    """

    name: str
    by_data: bool
    by_number: bool = False
    again: bool = True


@dataclass(frozen=True)
class Premises:
    """The observations of a model's forward, under global names.

    Attributes:
        mixes_rows: where a row's logits or gradients begin to depend on other rows (module and class), or "".
        decides_by_batch: where Python reads a truth or a number off the values of several rows by which several rows'
            results differ (module, class and line), or "".
        parameters: parameters that a forward writes.
        buffers: buffers that a forward writes.
        changes: attributes (or "outputs") by which a later call differs from the first, other than by buffers.
        counts_rows: those of ``changes`` that grow by the number of rows.
        remembers: whether an earlier batch changes a later one's results, other than by buffers.
        conditional: parameters to which some rows give a gradient and others give none.
        unused: parameters to which no row that was tried gives a gradient.
        sparse: parameters whose gradients are sparse tensors.
        generators: modules that go on drawing from a ``torch.Generator`` of their own in each call.
        losses: places of the model's own losses in its output.
        unknown: why the observation failed; else "".
    """

    mixes_rows: str = ""
    decides_by_batch: str = ""
    parameters: tuple[WrittenState, ...] = ()
    buffers: tuple[WrittenState, ...] = ()
    changes: tuple[str, ...] = ()
    counts_rows: tuple[str, ...] = ()
    remembers: bool = False
    conditional: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    generators: tuple[str, ...] = ()
    unknown: str = ""

    @property
    def idle(self) -> tuple[str, ...]:
        """Parameters that may get no gradient: a condition that no tried batch met may use the unused ones too."""
        return (*self.conditional, *self.unused)


def play(model: nn.Module) -> Premises:
    """Observe a model's forward on a small copy, without communication or calls of the model itself."""
    kept = {parameter: parameter.grad for parameter in model.parameters()}
    for parameter in kept:
        parameter.grad = None
    try:
        found = _on_copies(model)
        if any(parameter.grad is not None for parameter in kept):
            return Premises(unknown="a copy of it computes with the model's own parameters")
        return found
    finally:
        for parameter, gradient in kept.items():
            parameter.grad = gradient


def _on_copies(model: nn.Module) -> Premises:
    trouble: Exception | None = None
    try:
        for sample in samples_of(model, 1):
            # a model in evaluation mode as a whole is put in training mode, which will come
            evaluating = {path for path, module in model.named_modules() if model.training and not module.training}
            sample.model.train()
            for path, module in sample.model.named_modules():
                module.training = path not in evaluating
            cost = ROWS * sum(parameter.numel() for parameter in sample.model.parameters())
            for length in (length for length in LENGTHS if length == LENGTHS[-1] or length * cost <= LARGEST_COST):
                try:
                    return _seen(sample.model, length)
                except Exception as error:  # noqa: BLE001  (whatever a model's code raises: a shorter row, or a larger copy, may do)
                    trouble = error
    except Exception as error:  # noqa: BLE001
        trouble = trouble or error
    norms = ((clean(path), m) for path, m in model.named_modules() if isinstance(m, BATCH_NORMS) and m.training)
    norm = next((f"{path} ({type(m).__name__})" for path, m in norms), "")
    return Premises(mixes_rows=norm, unknown=f"{type(trouble).__name__}: {trouble}".splitlines()[0])


def _seen(model: nn.Module, length: int) -> Premises:
    ids = ids_of(model)
    # as many ids as there can be; halves begin with different ids, even and odd, and one id stands in all rows
    spread = torch.randperm(ids, generator=torch.Generator().manual_seed(0))[: ROWS * length]
    first = spread.repeat(-(-ROWS * length // len(spread)))[: ROWS * length].view(ROWS, length).clone()
    first[:, -2] = ids - 1
    first[:, 0] = torch.tensor([0, 1, 3, 2]) % ids
    second = ((first[:1] + 1) % ids).repeat(ROWS, 1)  # one row
    together = played(model, first)
    if not any(bool(value.isfinite().all()) for value in together.outputs.values()):
        raise ValueError("its output is not finite on made-up weights")
    halves = [played(model, first[:2], offset=0), played(model, first[2:], offset=2)]
    plays = [together, *halves, *_more_plays(model, first, together)]
    given = [set(play.gradients) for play in plays]
    ever, always = set.union(*given), set.intersection(*given)
    # ``if tokens.max() > 60`` decides for several rows; nothing depends on ``if chosen.any()`` before computing chosen
    # tokens. Rows of few ids are tried too, since those of all may meet every condition.
    decides = (_moved(model, first, together, halves) or _beside_others(model, first)) if together.decides else ""
    if together.decides and not decides:
        with contextlib.suppress(Exception):  # whatever a model's code raises of few ids
            few = ((ids // 2 + torch.arange(ROWS)) % ids)[:, None].expand_as(first).clone()
            apart = [played(model, few[:2], offset=0), played(model, few[2:], offset=2)]
            decides = _moved(model, few, played(model, few), apart)
    found = Premises(
        mixes_rows=_mixing(together, halves),
        decides_by_batch=decides,
        conditional=tuple(name for name in together.names if name in ever - always),
        unused=tuple(name for name in together.names if name not in ever),
        sparse=together.sparse,
        losses=together.losses,
    )
    found = _with_state(model, first, second, found)
    # rows with images, of a model for which they can be made: whether they mix, and what they use
    images = ImageArguments.of(model)
    sizes = () if images is None else sizes_of(model, images)
    if images is None or not sizes:
        return found
    counts = (2, 1, 1, 1)
    need = length_for(counts, sizes) + 2
    tokens = first.repeat(1, -(-need // length))[:, :need]
    batch = pictured(tokens, counts, images, sizes, torch.Generator().manual_seed(0))

    def play_of(start: int, stop: int, offset: int | None = None) -> Play:
        rows = rows_of(batch, start, stop)
        return played(model, rows.pop("tokens"), offset=offset, beside=rows)

    together, halves = play_of(0, ROWS), [play_of(0, 2, 0), play_of(2, ROWS, 2)]
    return replace(
        found,
        mixes_rows=found.mixes_rows or _mixing(together, halves),
        unused=tuple(name for name in found.unused if name not in together.gradients),
    )


# --- rows


def _differ(found: Tensor, wanted: Tensor, floor: float = 1e-12, *, least: float = DIFFERENT) -> bool:
    """Return whether finite values differ beyond rounding of the largest element, or of ``floor`` if larger."""
    if found.shape != wanted.shape:
        return True
    if not found.numel():
        return False
    both = found.isfinite() & wanted.isfinite()
    wide = torch.promote_types(torch.promote_types(found.dtype, wanted.dtype), torch.float64)
    found, wanted = (value.to(wide).where(both, 0.0) for value in (found, wanted))
    return bool((found - wanted).abs().max() > least * max(float(wanted.abs().max()), floor))


def _mixing(together: Play, halves: list[Play]) -> str:
    """Return the place where rows begin to depend on each other; "" if they do not."""
    depends = any(
        _differ(half.outputs[name], _half(value, number, ROWS) if half.outputs[name].shape != value.shape else value)
        for number, half in enumerate(halves)
        for name, value in together.outputs.items()
        if name in half.outputs
    )
    if depends:
        # name the first module whose inputs are equal with and without the other rows, and whose outputs differ

        def equal(path: str, place: int) -> bool:
            return not any(
                _differ(found, _half(whole, number, ROWS) if found.shape != whole.shape else whole)
                for number, half in enumerate(halves)
                for found, whole in zip(half.seen.get(path, ([], []))[place], together.seen[path][place], strict=False)
            )

        path = next((path for path in together.seen if path and equal(path, 0) and not equal(path, 1)), "")
        return f"{path} ({together.kinds[path]})" if path else f"{together.kinds['']} itself"
    floor = 1e-8 * max(
        (float(gradient.abs().max()) for gradient in together.gradients.values() if gradient.numel()), default=1.0
    )
    for name, gradient in together.gradients.items():
        parts = [half.gradients[name] for half in halves if name in half.gradients]
        if not parts or _differ(torch.stack(parts).sum(0), gradient, floor):
            return f"{GRADIENT} {name}"
    return ""


def _moved(model: nn.Module, tokens: Tensor, together: Play, halves: list[Play]) -> str:
    """Read other values that further rows could give, where a number is none of a half's, or a truth has a sign."""
    of_halves = {(read[:3], reading.number) for half in halves for read, reading in half.reads.items()}
    for read, reading in [*together.reads.items()][:READS]:
        is_known = isinstance(reading.value, bool) and reading.sign != 0
        close = partial(math.isclose, reading.number or 0.0, rel_tol=SAME, abs_tol=SAME)
        is_of_half = any(place == read[:3] and number is not None and close(number) for place, number in of_halves)
        if not is_known and (reading.number is None or is_of_half):
            continue
        for value in reading.others():
            with contextlib.suppress(Exception):  # whatever a model's code raises of a wrong number
                play = played(model, tokens, turned=read, instead=value)
                moved = {
                    row
                    for name, value in together.outputs.items()
                    if name in play.outputs and value.dim() and play.outputs[name].shape[1:] == value.shape[1:]
                    for row in range(min(len(value), len(play.outputs[name]), ROWS))
                    if _differ(play.outputs[name][row], value[row])
                }
                if len(moved) > 1:
                    return _place(together, read)
    return ""


def _beside_others(model: nn.Module, first: Tensor) -> str:
    """Compare rows of low, high and mixed ids alone and beside many rows of each of these kinds."""
    ids, length = ids_of(model), first.shape[1]
    low, high = torch.zeros_like(first[:1]), torch.full_like(first[:1], ids - 1)
    low[:, -1], high[:, -1] = 1 % ids, max(ids - 2, 0)
    spread = (torch.arange(MOST_BESIDE * length) * 7 % ids).view(MOST_BESIDE, length)
    rows = [low, high, first[:1]]
    with contextlib.suppress(Exception):  # whatever a model's code raises of few ids, or of one row
        alone = [played(model, row) for row in rows]
        for others in (low.expand(MOST_BESIDE, -1), high.expand(MOST_BESIDE, -1), spread):
            beside = played(model, torch.cat([*rows, others]))
            for number, play in enumerate(alone):
                if any(
                    _differ(beside.outputs[name][number], value[0])
                    for name, value in play.outputs.items()
                    if len(value) == 1 and beside.outputs.get(name, value).shape[1:] == value.shape[1:]
                ):
                    return _place(beside, next(iter((*beside.reads, *beside.sizes)), None))
    return ""


def _place(play: Play, read: Any) -> str:
    if read is None:
        return f"{play.kinds['']} itself"
    file, line, path, *_ = read
    inside = f"{path} ({play.kinds[path]})" if path else f"{play.kinds['']} itself"
    return f"{inside}, at {Path(file).name}:{line}"


def _half(value: Tensor, number: int, rows: int) -> Tensor:
    """Return the rows of one half, also where rows and tokens are one dim."""
    size = len(value) // 2
    return value[number * size : (number + 1) * size] if value.dim() and len(value) % rows == 0 else value


def _more_plays(model: nn.Module, first: Tensor, together: Play) -> Iterator[Play]:
    """Run a model that branches on its data on few tokens, with other weights (other routes), and inverted reads."""
    levels = [*EXTREMES, *((place + 0.5) / SEEDS for place in range(SEEDS))]
    for seed, level in enumerate(levels, 2) if together.tosses else ():
        try:
            yield played(model, first, level=level, seed=seed)
        except Exception:  # noqa: BLE001  (whatever a model's code raises of a coin that always falls on one side)
            continue
    if not together.decides:
        return
    few = [token.expand(1, 2).clone() for token in (first[:1, :1], first[-1:, 1:2])]
    redrawn = []
    for seed in (1, 2):  # other weights, and biases near zero
        made, generator = copy_of(model), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                parameter.copy_(
                    random_like(parameter, generator) - (1.0 if name.endswith("bias") and parameter.dim() < 2 else 0.0)
                )
        redrawn.append(made)
    tries: list[tuple[nn.Module, Tensor, Any]] = [
        (made, tokens, None) for made in (model, *redrawn) for tokens in (first, *few)
    ]
    tries += [(model, first, read) for read in [*together.reads][:READS]]
    for made, tokens, turned in tries[1:]:
        try:
            yield played(made, tokens, turned=turned)
        except Exception:  # noqa: BLE001  (two tokens may be too few, and an inverted number may be a wrong index)
            continue


# --- state


def _with_state(model: nn.Module, first: Tensor, second: Tensor, found: Premises) -> Premises:
    made, other, fewer = copy_of(model), copy_of(model), copy_of(model)
    before = _state(made)
    drawn: dict[str, bytes] = {}
    once, counted = _outputs(made, first, drawn), numbers(made)
    after = _state(made)
    twice, state = _outputs(made, first), _state(made)
    counts = tuple(path for path, value in numbers(made).items() if path in counted and value != counted[path])
    _outputs(fewer, second[: ROWS // 2])  # the same row, less often
    by_number = tuple(path for path, value in numbers(fewer).items() if value != counted.get(path, value))
    _outputs(made, second)
    later = _outputs(made, first)
    _outputs(other, second)
    instead, of_fewer = _state(other), _state(fewer)
    behind_another = _outputs(other, first)
    written = {
        name: WrittenState(
            name,
            by_data=_differ(instead.get(name, value), after[name]),
            by_number=name in of_fewer and name in instead and _differ(of_fewer[name], instead[name]),
            again=name in state and _differ(state[name], after[name]),
        )
        for name, value in before.items()
        if name in after and _differ(after[name], value)
    }
    parameters = {clean(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = tuple(w for name, w in written.items() if name not in parameters and (w.by_data or w.again))
    changed, explained = _unlike(once, twice) or _unlike(twice, later), bool(buffers)
    if counts and not changed:
        for path, module in made.named_modules():
            for name in [name for name in vars(module) if f"{clean(path)}.{name}".lstrip(".") in counts]:
                setattr(module, name, vars(module)[name] + FAR)
        changed = _unlike(later, _outputs(made, first))
    going_on: tuple[str, ...] = ()
    if drawn:  # from generators of modules' own: which of them go on in a second call

        def states() -> dict[str, bytes]:
            held = HeldRandomness(first)
            with tracking(made.named_modules(), held.within), held, torch.no_grad():
                called(made, first)
            return held.generators

        earlier, following = states(), states()
        going_on = tuple(path for path, generator in earlier.items() if following.get(path) != generator)
    return replace(
        found,
        parameters=tuple(w for name, w in written.items() if name in parameters),
        buffers=buffers,
        changes=(counts or ("outputs",)) if changed and not explained else (),
        counts_rows=tuple(path for path in counts if path in by_number) if changed else (),
        remembers=_unlike(twice, behind_another) and not explained,
        generators=going_on,
    )


def _outputs(model: nn.Module, tokens: Tensor, drawn: dict[str, bytes] | None = None) -> dict[str, Tensor]:
    held = HeldRandomness(tokens)
    held.generators = held.generators if drawn is None else drawn
    with held, torch.no_grad():
        output, _ = called(model, tokens)
        return {name: value.clone() for name, value in parts(output, len(tokens))[0].items()}


def _unlike(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    """Compare runs of one batch and model: no sum changes its order, so almost nothing may differ."""
    return any(_differ(found[name], wanted[name], least=SAME) for name in found.keys() & wanted.keys())


def _state(model: nn.Module) -> dict[str, Tensor]:
    both = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {clean(name): tensor.detach().clone() for name, tensor in both}
