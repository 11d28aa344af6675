"""Register model transforms: typed configs by name, and their order in a chain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from typing import Any, ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from meshwright.core.config import from_dict
from meshwright.core.errors import ConfigError, nearest
from meshwright.distributed import order
from meshwright.distributed.data import accumulation
from meshwright.distributed.optimizer.parameter_groups import make_parameter_groups
from meshwright.planning.plan import Plan


class ModelTransform(ABC):
    """One step of the chain: a typed config, a context, and ``apply(model) -> model``.

    Attributes:
        config: an instance of the config class that the transform was registered with.
        context: the surroundings of the transform, by the keys of ``CONTEXT``.
        registered_name: the name under which its class is registered.
    """

    registered_name: ClassVar[str] = ""
    CONTEXT: ClassVar[tuple[str, ...]] = ("device_mesh", "layout", "seed", "is_restart", "collective", "device")
    """The keys that ``build_model_transform`` takes beside the config.

    A mesh, or a ``Layout`` to make one from; the seed of initial weights; whether a run resumes; an object with a
    mesh (``.mesh`` or ``.device_mesh``) instead of the mesh itself; the device to which a model with weights is moved
    first. A user's class may name more.
    """

    def __init__(self, config: Any, **context: Any):
        if unknown := sorted(set(context) - set(self.CONTEXT)):
            raise ConfigError(
                f"{type(self).__name__} is given {unknown[0]}=, which no transform"
                f" reads.{nearest(unknown[0], self.CONTEXT)} Legal: {', '.join(self.CONTEXT)}."
            )
        if (collective := context.pop("collective", None)) is not None:
            if context.get("device_mesh") is not None:
                raise ConfigError("a transform takes device_mesh= or collective=, not both")
            found = (getattr(collective, name, None) for name in ("mesh", "device_mesh"))
            context["device_mesh"] = next((mesh for mesh in found if isinstance(mesh, DeviceMesh)), None)
            if context["device_mesh"] is None:
                raise ConfigError(
                    f"collective= is a {type(collective).__name__} without a mesh (.mesh, a DeviceMesh): give"
                    f" device_mesh= instead"
                )
        self.config, self.context = config, context

    @abstractmethod
    def apply(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        """Change the model, usually in place, and return it or its replacement."""


class BaseDistributedTransform(ModelTransform):
    """A transform with Optimus-DL's arguments and attributes: ``cfg``, ``collective`` and ``device``."""

    def __init__(self, cfg: Any, collective: Any = None, device: Any = None, **context: Any):
        super().__init__(cfg, collective=collective, **({} if device is None else {"device": device}), **context)
        self.cfg, self.collective, self.device = cfg, collective, device


class DDPWrappedModel(DistributedDataParallel):
    """torch's DDP with methods for loops; ``equip`` adds ``accumulation_context`` and ``make_parameter_groups``."""

    def fully_shard(self, **options: Any) -> Any:
        """Pass the call on to the wrapped model's own ``fully_shard``."""
        return self.module.fully_shard(**options)


@dataclass(frozen=True)
class _Registered:
    name: str
    config_class: type
    transform: type[ModelTransform]
    before: tuple[str, ...]
    after: tuple[str, ...]


_REGISTRY: dict[str, _Registered] = {}
BUILT_IN = ("float8", "ddp", "fully_shard", "tensor_parallel", "expert_parallel", "activation_checkpoint", "compile")
_ELSEWHERE = {
    **dict.fromkeys(BUILT_IN, "meshwright.distributed.transforms"),
    "context_parallel": "meshwright.distributed.transforms",
    "load_weights": "meshwright.checkpoint.huggingface",
}
"""Transforms whose modules are imported, and so registered, on request: some need a floor above this one."""


def register_model_transform(
    name: str, config_class: type, *, before: Iterable[str] = (), after: Iterable[str] = ()
) -> Callable[[type[ModelTransform]], type[ModelTransform]]:
    """Return a class decorator that registers a transform under ``name``, with its config dataclass.

    Args:
        before, after: names of transforms between which it belongs. Without either it precedes all built-in ones.

    Raises:
        ConfigError: the name is taken by another class, the config class is no dataclass, or a neighbour is unknown.
    """
    if not is_dataclass(config_class):
        raise ConfigError(f"the config class of transform '{name}' ({config_class.__name__}) must be a dataclass")
    for other in (*before, *after):
        _known(other)

    def register(transform: type[ModelTransform]) -> type[ModelTransform]:
        if transform.__module__ != _ELSEWHERE.get(name, transform.__module__):
            _known(name)
        taken = _REGISTRY.get(name)
        if taken is not None and _path(taken.transform) != _path(transform):
            raise ConfigError(f"the transform name '{name}' is taken by {_path(taken.transform)}; choose another")
        transform.registered_name = name
        _REGISTRY[name] = _Registered(name, config_class, transform, tuple(before), tuple(after))
        return transform

    return register


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def build_model_transform(name: str | Any, config: Any = None, **context: Any) -> ModelTransform:
    """Build the transform of that name with its config (its config class's instance, a dict, or None: defaults).

    A config that says its name under ``_name``, as Optimus-DL's do, may be given alone, in the name's place.

    Raises:
        ConfigError: an unknown name or key (with the nearest valid one), or a value of the wrong type.
    """
    if not isinstance(name, str):
        given, second = name, config
        is_mapping = isinstance(given, Mapping)
        name = given.get("_name") if is_mapping else getattr(given, "_name", None)
        if second is not None or not isinstance(name, str) or not name:
            raise ConfigError(
                f"build_model_transform takes a name and its config, or one config with its name under _name, not"
                f" {given!r}" + (f" and {second!r}" if second is not None else "")
            )
        config = _without_name(given) if is_mapping else given
    entry = _known(name)
    if config is None:
        config = {}
    if isinstance(config, Mapping):
        config = from_dict(entry.config_class, dict(config), where=name)
    if not isinstance(config, entry.config_class):
        raise ConfigError(
            f"transform '{name}' takes a {entry.config_class.__name__} or a dict of it, not {type(config).__name__}"
        )
    return entry.transform(config, **context)


def apply_model_transforms(
    model: nn.Module, configs: Mapping[str, Any] | Sequence[Mapping[str, Any]], **context: Any
) -> nn.Module:
    """Build and apply several transforms, in the fixed order, whatever the order of ``configs``.

    The returned module has ``accumulation_context`` and ``make_parameter_groups`` in any case.

    Args:
        configs: name -> config, or a list of configs with their name under ``_name``.

    Raises:
        ConfigError: an unknown name or key, or a request that cannot be met; the model is untouched then.
    """
    if not isinstance(configs, Mapping):
        rows, configs = configs, {}
        for place, row in enumerate(rows):
            if not isinstance(row, Mapping) or not isinstance(name := row.get("_name"), str):
                raise ConfigError(
                    f"transforms[{place}] = {row!r} has no _name: each is a mapping such as {{'_name': 'fully_shard',"
                    f" ...}}"
                )
            if name in configs:
                raise ConfigError(f"transforms[{place}]: {name} is in the list twice; a transform is applied once")
            configs[name] = _without_name(row)
    for transform in [build_model_transform(name, configs[name], **context) for name in in_order(configs)]:
        before, model = model, transform.apply(model)
        for method in EQUIPMENT:  # a transform that wraps the model must not hide them
            if not hasattr(model, method) and hasattr(before, method):
                object.__setattr__(model, method, getattr(before, method))
    return model if hasattr(model, "accumulation_context") else equip(model, None)


def _without_name(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "_name"}


def in_order(names: Iterable[str]) -> list[str]:
    """Sort names by the order of application; raise ConfigError for unknown ones and contradictory requests."""
    wanted = list(names)
    follows: dict[str, set[str]] = {name: set() for name in wanted}  # name -> those that must come earlier
    built_in = [name for name in order.NAMES if name in wanted]
    for earlier, later in zip(built_in, built_in[1:], strict=False):
        follows[later].add(earlier)
    for name in wanted:
        entry = _known(name)
        if name in order.NAMES:
            continue
        free = not entry.before and not entry.after
        for other in built_in if free else entry.before:
            if other in follows:
                follows[other].add(name)
        follows[name] |= {other for other in entry.after if other in follows}
    done: list[str] = []
    while len(done) < len(wanted):
        ready = next((name for name in wanted if name not in done and follows[name] <= set(done)), None)
        if ready is None:
            stuck = ", ".join(name for name in wanted if name not in done)
            raise ConfigError(
                f"the transforms {stuck} cannot be ordered: their before= and after= wishes contradict each other"
            )
        done.append(ready)
    return done


def _known(name: str) -> _Registered:
    if name not in _REGISTRY and name in _ELSEWHERE:
        import_module(_ELSEWHERE[name])
    if name not in _REGISTRY:
        known = sorted({*_REGISTRY, *_ELSEWHERE})
        raise ConfigError(
            f"'{name}' is not a registered model transform.{nearest(name, known)} Registered: {', '.join(known)}."
        )
    return _REGISTRY[name]


EQUIPMENT = ("accumulation_context", "make_parameter_groups")


def equip(model: nn.Module, plan: Plan | None) -> nn.Module:
    """Give a module the methods that loops call: ``accumulation_context`` and ``make_parameter_groups``."""

    def accumulation_context(is_last_microbatch: bool) -> AbstractContextManager[None]:
        return nullcontext() if plan is None else accumulation.context(model, plan, is_last_microbatch)

    def groups(**options: Any) -> list[dict[str, Any]]:
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        own = getattr(type(inner), "make_parameter_groups", None)
        return own(inner, **options) if own is not None else make_parameter_groups(inner.named_parameters(), **options)

    object.__setattr__(model, "accumulation_context", accumulation_context)
    object.__setattr__(model, "make_parameter_groups", groups)
    return model
