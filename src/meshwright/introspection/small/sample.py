"""Make a small copy of a model to measure: fp64, on the CPU, random weights, few blocks, but all kinds of them."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.names import clean, is_within, owner, pattern
from meshwright.core.record import recall, remember
from meshwright.core.torch_private import resetting
from meshwright.introspection.blocks import Hints, hints_of, repeated_blocks
from meshwright.introspection.calls import watching
from meshwright.introspection.constructor import built, on_meta
from meshwright.introspection.images import ImageArguments, length_for, pictured, sizes_of
from meshwright.introspection.module_kinds import compute_experts_one_by_one
from meshwright.introspection.signature import IMAGES_PER_ROW, SWITCHED_OFF, Signature, core_of, logits_of
from meshwright.introspection.small.configs import Small, key_of_text, smaller
from meshwright.introspection.source import builder_of

from .copies import carry_functions, codes_in, compute_wide, copy_of, grafted

Answer = TypeVar("Answer")
ROWS, SEQ = 2, 6
LONG = 509
"""Tokens of the rows in which it is seen whether tokens meet far apart, and what begins at a length or a place."""
LARGEST_COST = 1_000_000_000
"""Tokens times parameters beyond which rows are shorter than ``LONG``."""
LOOPED = 500
"""Calls of torch beyond those of short rows for which rows are shorter than ``LONG`` too: loops over tokens."""
REPEATED = 16
"""Number of repetitions of a sample's rows if many features are pushed in one run, each in rows of its own."""
LARGEST = 20_000_000
"""Number of parameters beyond which a model is not measured."""
NOT_CARRIED = ("training", "gradient_checkpointing")
"""Switches of modules that a small copy sets itself."""


@dataclass
class Sample:
    """A model to be measured.

    Attributes:
        model: the copy, in fp64 on the CPU, in evaluation mode.
        blocks: paths of the sample's repeated blocks.
        inputs: keyword arguments of forwards to watch: plain, and (if the model takes one) with a padding mask.
        heads: ratio of the original model's number of heads to the sample's.
        pictured: keyword arguments of a forward with images, of a model that takes them; None: none could be made.
        of_images: paths of the outermost modules that a forward of tokens alone does not call, and of parameters
            outside of them that are read with images alone.
        branches: forwards to rehearse stages with, once they were listed (``introspection/stages.py``).
    """

    model: nn.Module
    blocks: tuple[str, ...]
    inputs: tuple[dict[str, Any], ...]
    heads: int = 1
    pictured: dict[str, Any] | None = None
    of_images: tuple[str, ...] = ()
    branches: list[Any] = field(default_factory=list)

    @property
    def repeated(self) -> dict[str, Any]:
        """The plain inputs, with each row repeated many times."""
        return {
            key: value.repeat(REPEATED, 1) if isinstance(value, Tensor) else value
            for key, value in self.inputs[0].items()
        }

    @cached_property
    def long(self) -> dict[str, Any]:
        """The plain inputs, with rows as long as the copy takes them."""
        name, tokens = next(iter(self.inputs[0].items()))
        places = torch.randint(SEQ, (LONG,), generator=torch.Generator().manual_seed(0))

        def made(length: int) -> dict[str, Any]:
            return self.inputs[0] | {name: tokens[:, places[:length]]}

        return made(longest_row(self.model, lambda length: self.model(**made(length))))


def samples_of(model: nn.Module, ranks: int, *, few_experts: bool = False) -> Iterator[Sample]:
    """Yield copies of ``model``, on meta or not, that can be measured, small ones first; then refuse it as too large.

    Args:
        ranks: size of the tensor axis.
        few_experts: reduce large numbers of experts in a layer.
    """
    failed, takes = list[Exception](), Signature.of(model).takes
    core = core_of(model)
    kind, config = type(core), getattr(core, "config", None)
    if config is not None:  # the same class built from small copies of its config
        of_text = bool(key_of_text(config))  # then a block's number is among the blocks of its own stack
        blocks, places = repeated_blocks(model), [0]
        for first, *_ in kinds_of(model).values():
            places.append([path for path in blocks if not of_text or owner(path) == owner(first)].index(first))
        for small in smaller(config, max(2, 1 + max(places)), ranks, few_experts=few_experts):
            if (made := _constructed(model, kind, small, failed)) is not None:
                yield _sample(made, takes, small.heads)
    yield _sample(_copied(model, failed), takes, 1)


def on_samples(
    model: nn.Module, ranks: int, measure: Callable[[Sample], Answer], failed: str, *, few_experts: bool = False
) -> Answer:
    """Return what ``measure`` gives of the smallest copy that it can measure; else ``failed`` begins the refusal."""
    trouble: UnsupportedError | None = None
    try:
        for sample in samples_of(model, ranks, few_experts=few_experts):
            try:
                return measure(sample)
            except UnsupportedError as error:  # does not hold for the model: the next copy is larger
                trouble = error
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001  (whatever a model's code raises when it is called in parts)
                trouble = UnsupportedError(f"{failed} ({type(error).__name__}: {error})")
    except UnsupportedError as error:
        raise trouble or error from None
    raise trouble or UnsupportedError(f"{type(model).__name__} could not be measured")


def _sample(made: nn.Module, arguments: dict[str, str | None], heads: int) -> Sample:
    known = (*arguments.values(), *SWITCHED_OFF)
    if others := [name for name in Signature.of(made).required if name not in known]:
        raise UnsupportedError(
            f"the forward of {type(made).__name__} requires {', '.join(others)} beside token ids, and models are"
            f" measured on small copies that are called with token ids alone. Set layout.tp = 1 and layout.pp = 1."
        )
    made = made.double().eval()
    config: Any = getattr(made, "config", None)
    compute_experts_one_by_one(config)  # the copy's own config
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(random_like(parameter, generator))
            parameter.requires_grad_()  # frozen parameters are rehearsed too
    tokens = torch.randint(0, ids_of(made), (ROWS, SEQ), generator=generator)
    tokens[:, -1] = tokens[0, 0]  # an id that occurs twice: its gradients must add up
    known = Signature.of(made).arguments
    switches = {switch: False for switch in SWITCHED_OFF if switch in known}
    inputs: tuple[dict[str, Any], ...] = ({(arguments["tokens"] or "tokens"): tokens, **switches},)
    if "attention_mask" in known:
        mask = torch.ones(tokens.shape, dtype=torch.int64)
        mask[1, -2:] = 0
        inputs = (*inputs, inputs[0] | {"attention_mask": mask})
    compute_wide(made, inputs[0])
    images = ImageArguments.of(made)
    if images is None:
        return Sample(made, repeated_blocks(made), inputs, heads)
    of_images = uncalled(made, inputs[0])
    blocks = tuple(path for path in repeated_blocks(made) if not any(is_within(path, own) for own in of_images))
    shown: dict[str, Any] | None = None  # two rows, with two images and one; None where no images can be made
    if sizes := sizes_of(made, images):
        name, counts = next(iter(inputs[0])), (2, 1)
        length = length_for(counts, sizes) + SEQ
        rows = torch.randint(0, ids_of(made), (len(counts), length), generator=generator)
        batch = pictured(rows, counts, images, sizes, generator)
        del batch[IMAGES_PER_ROW]
        shown = {name: batch.pop("tokens"), **{key: value for key, value in inputs[0].items() if key != name}, **batch}
        try:
            with torch.no_grad():
                made(**shown)
        except Exception:  # noqa: BLE001  (a model's code may need other arguments)
            shown = None
    if shown is not None:
        read = _read(made, shown) - _read(made, inputs[0])
        of_images += tuple(sorted(name for name in read if not any(is_within(name, module) for module in of_images)))
    return Sample(made, blocks, inputs, heads, shown, of_images)


class _Calls(TorchFunctionMode):
    """Counts the calls of torch."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def longest_row(model: nn.Module, run: Callable[[int], object]) -> int:
    """Return the tokens of the longest rows with which a copy runs, up to ``LONG`` and at bounded cost."""

    def fails(length: int) -> bool:
        try:
            with torch.no_grad():
                run(length)
        except Exception:  # noqa: BLE001  (whatever a model's code raises: tables of positions end)
            return True
        return False

    def calls(length: int) -> int:
        with torch.no_grad(), _Calls() as seen:
            run(length)
        return seen.count

    cost = ROWS * sum(parameter.numel() for parameter in model.parameters())
    most = max(SEQ, min(LONG, LARGEST_COST // cost))
    most = most if not fails(most) else SEQ + bisect_left(range(SEQ + 1, most), True, key=fails)
    more = count - calls(SEQ) if (count := calls(most)) > LOOPED else 0
    return most if more <= LOOPED else SEQ + (most - SEQ) * LOOPED // more


def uncalled(model: nn.Module, inputs: dict[str, Any]) -> tuple[str, ...]:
    """List the outermost modules with parameters that a forward does not call, nor anything inside them."""
    called: set[str] = set()
    with torch.no_grad(), watching(model.named_modules(), after=lambda path, *_: called.add(path)):
        model(**inputs)
    found: list[str] = []
    for raw, module in model.named_modules():
        path = clean(raw)
        is_known = any(is_within(path, other) for other in found)
        is_called = any(is_within(other, path) for other in called)
        if not is_known and not is_called and next(module.parameters(), None) is not None:
            found.append(path)
    return tuple(found)


def _read(model: nn.Module, inputs: dict[str, Any]) -> set[str]:
    """Return the names of the parameters that the logits depend on."""
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(logits_of(model(**inputs)).sum(), list(named.values()), allow_unused=True)
    return {clean(name) for name, gradient in zip(named, gradients, strict=True) if gradient is not None}


def ids_of(model: nn.Module) -> int:
    """Return the number of token ids that the config states, or that the smallest embedding takes."""
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if config is not None and key_of_text(config) else config
    stated = getattr(config, "vocab_size", None)
    return stated if isinstance(stated, int) else min(tables, default=2)


def random_like(like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw values at which nothing saturates: matrices preserve their inputs' size, vectors are around one."""
    drawn = torch.randn(like.shape, dtype=like.dtype, generator=generator)
    return 1 + 0.3 * drawn if like.dim() < 2 else drawn / like.shape[-1] ** 0.5


def _constructed(model: nn.Module, kind: type[nn.Module], small: Small, failed: list[Exception]) -> nn.Module | None:
    """Build the same class from a small config, in the wrappers and with the hints of the model and its layers.

    None where the small model is made of other blocks, is not small or fails; errors are added to ``failed``.

    Raises:
        UnsupportedError: its forward replaces modules: the new ones would be measured, and the old ones cut.
    """

    def built_like() -> nn.Module:
        made = grafted(model, kind(config))
        # truths and names that were set behind the constructor, where all blocks of the model agree on them
        modules, alike = dict(core_of(model).named_modules()), defaultdict[str, list[nn.Module]](list)
        for path, module in modules.items():
            alike[pattern(path)].append(module)
        for path, module in core_of(made).named_modules():
            for name, value in vars(module).items() if path in modules else ():
                if type(value) in (bool, str) and name not in NOT_CARRIED and not name.startswith("_"):
                    first, *others = (vars(other).get(name) for other in alike[pattern(path)])
                    if type(first) is type(value) and all(other == first for other in others):
                        setattr(module, name, first)
        if recall(model, Hints) is not None:
            remember(made, hints_of(model))
        return made

    try:
        config = small.build()
        with on_meta():
            numel = sum(p.numel() for p in kind(config).parameters())
            if layouts_of(built_like()).keys() != layouts_of(model).keys() or numel > LARGEST:
                return None
        with torch.device("cpu"), torch.no_grad():
            made = built_like()
            before = {path: type(module) for path, module in made.named_modules()}
            made.eval()(torch.zeros((1, 2), dtype=torch.int64))
    except Exception as error:  # noqa: BLE001  (the class may need other arguments, or refuse the config)
        failed.append(error)
        return None
    path = next((path for path, module in made.named_modules() if before.get(path) is not type(module)), None)
    if path is not None:
        was = before[path].__name__ if path in before else "nothing"
        raise UnsupportedError(
            f"{kind.__name__} replaces modules in its forward: {path} was {was} and became"
            f" {type(made.get_submodule(path)).__name__}, so what would be cut is not what computes. Configure the"
            " model so that it is built with the modules that it uses."
        )
    return made


def kinds_of(model: nn.Module) -> dict[tuple, list[str]]:
    """Group the paths of blocks by class, parameters' shapes and own functions."""
    found: dict[tuple, list[str]] = {}
    for path in repeated_blocks(model):
        block = model.get_submodule(path)
        # sorted: a forward that takes a parameter out and puts it back, as peft's does, changes the order
        shapes = sorted((clean(name), tuple(p.shape)) for name, p in block.named_parameters())
        key = (type(block), tuple(shapes), codes_in(block))
        found.setdefault(key, []).append(path)
    return found


def layouts_of(model: nn.Module) -> dict[tuple, list[str]]:
    """Group the paths of blocks by class, parameter names and functions, since a sample may have other widths."""
    found: dict[tuple, list[str]] = {}
    for (kind, shapes, codes), paths in kinds_of(model).items():
        found.setdefault((kind, tuple(name for name, _ in shapes), codes), []).extend(paths)
    return found


def _copied(model: nn.Module, failed: list[Exception]) -> nn.Module:
    """Copy the module itself; rebuild one on meta with weights, or give it memory and its modules' initial values."""
    if (size := sum(p.numel() for p in model.parameters())) > LARGEST:
        name = type(model).__name__
        if failed:
            why = f"{name}(config) failed for its config with fewer features: {type(failed[0]).__name__}: {failed[0]}"
        elif getattr(core_of(model), "config", None) is not None:
            why = "from its config with fewer features came no smaller model that is made of the same"
        else:
            why = "none could be built: let its class take a config that it keeps as .config"
        raise UnsupportedError(
            f"{name} has {size:,} parameters; its structure is measured on a copy of up to {LARGEST:,}, and {why}"
        )
    made = copy_of(model)
    if not any(parameter.is_meta for parameter in made.parameters()):
        return made.cpu()
    if (build := builder_of(model)) is not None:
        made, memo = built(build, 0), dict[int, Any]()
        pairs = list(zip(model.modules(), made.modules(), strict=True))
        memo.update({id(before): after for before, after in pairs})
        for before, after in pairs:
            carry_functions(before, after, memo)
        if recall(model, Hints) is not None:
            remember(made, hints_of(model))
        return made
    made.to_empty(device="cpu")
    for module in reversed(list(made.modules())):
        reset: Callable[[], object] | None = resetting(module)
        if callable(reset):
            reset()
        elif module._buffers:
            raise UnsupportedError(
                f"{type(module).__name__} was built on meta with buffers and has no reset_parameters() that fills them,"
                f" so the structure of {type(model).__name__} cannot be measured; give it one, hand over the function"
                " that builds the model, or build it on the CPU"
            )
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = next(other for other, p in model.named_parameters(remove_duplicate=False) if p is parameter)
        if first != name:  # to_empty unties
            path, _, last = name.rpartition(".")
            setattr(made.get_submodule(path), last, made.get_parameter(first))
    return made
