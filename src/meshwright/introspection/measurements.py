"""Learn facts about a model by running small copies of it, each question once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import nn

from meshwright.core.errors import UnsupportedError
from meshwright.core.names import SECTIONS
from meshwright.core.record import recall, remember
from meshwright.introspection.constructor import seeded
from meshwright.introspection.small.configs import text_config
from meshwright.introspection.small.copies import rows_of_token_table
from meshwright.introspection.structure.structure import Measured, measured

from .blocks import NONE, hints_of
from .images import ImageArguments
from .mixing.measure import measure_mixing
from .mixing.values import Mixing
from .mixing.whole import copy_without_values
from .premises import premises
from .premises.premises import Premises, lies_on_mesh
from .roles import dtypes_of_calls, find_homes, find_readers
from .small.sample import Sample, samples_of
from .structure.experts import RouterLoss, Stack, asks_for_router_loss, measure_router_loss, measure_stacks

Answer = TypeVar("Answer")


class Measurements:
    """The answers about one model, and the plans that were proven on it.

    The model remembers this object, so every ModelFacts of the model has the same one.

    Attributes:
        hints: the model's, with which the questions were answered.
        proven: plans that a rehearsal found equal to one process, with the settings of the rehearsal.
        refused: by plan, why some kinds of batches are refused; "" for those that are not.
    """

    def __init__(self, model: nn.Module | None = None):
        self._model = None if model is None else weakref.ref(model)
        self.hints = NONE if model is None else hints_of(model)
        self._answers: dict[Hashable, object] = {}
        self.proven: set[Hashable] = set()
        self.refused: dict[Hashable, dict[str, str]] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> Measurements:
        return Measurements()  # the copy of a model is another model

    def __reduce__(self) -> tuple[type[Measurements], tuple[()]]:
        return Measurements, ()

    @property
    def model(self) -> nn.Module | None:
        """The model, as long as other code holds a reference to it."""
        return None if self._model is None else self._model()

    def token_ids(self) -> int | None:
        """Return the number of token ids that the model takes, as stated or by its table; None where nobody knows."""
        model = self.model
        if model is None:
            return None
        return self._once("token ids", lambda: stated(model, "vocab_size") or rows_of_token_table(model))

    def structure(self, ranks: int) -> Measured:
        """Measure on a small copy how the model can be cut among ``ranks``."""
        cannot = "cannot be cut inside its blocks or between them"
        model = self._at_hand(f"this model {cannot}")
        if stated(model, "vocab_size") is None and not any(
            isinstance(module, nn.Embedding) for module in model.modules()
        ):
            raise UnsupportedError(
                f"{type(model).__name__} {cannot}: it has no nn.Embedding and says nowhere how many token ids it"
                f" takes (config.vocab_size)"
            )
        return self._once(("structure", ranks), lambda: measured(model, ranks))

    def stacks(self, ranks: int) -> tuple[Stack, ...]:
        """List the stacks of experts, after a small copy has shown that ``ranks`` can share them out."""
        model = self.model
        assert model is not None
        return self._once(("stacks", ranks), lambda: measure_stacks(model, ranks))

    def mixing(self) -> Mixing:
        """Find the calls by which the model's tokens see each other."""
        model = self._at_hand("rows of this model cannot be cut")
        return self._once("mixing", lambda: measure_mixing(model))

    def sample(self, ranks: int = 1) -> Sample:
        """Return the smallest copy of the model that computes and has heads for so many ranks.

        The copy is to be copied before it is changed. A model that is laid out cannot be copied any more: ask before.
        """
        model = self._at_hand("a small copy cannot be made")
        return self._once(("sample", ranks), lambda: next(samples_of(model, ranks)))

    def without_values(self) -> nn.Module:
        """Return a copy of the model without values; a model that is laid out cannot be copied any more: ask before."""
        model = self.model
        assert model is not None
        return self._once("without values", lambda: copy_without_values(model))

    def images(self) -> ImageArguments | None:
        """Return how the model takes images beside tokens; None if it takes none."""
        model = self.model
        return None if model is None else self._once("images", lambda: ImageArguments.of(model))

    def image_modules(self) -> tuple[str, ...]:
        """List the outermost modules that a forward of tokens alone does not call, of a model that takes images.

        A model that is laid out cannot be copied any more: ask before.
        """
        takes_images = self.images() is not None
        return (self._of_sample("image modules", lambda sample: sample.of_images) or ()) if takes_images else ()

    def weight_readers(self) -> dict[str, str]:
        """Map patterns of linear layers to the code that reads their weights; empty where no copy can be called."""
        return self._of_sample("weight readers", find_readers) or {}

    def homes(self) -> dict[str, str]:
        """Map patterns of parameters to those of the modules that use them; empty where no copy can be called."""
        return self._of_sample("homes", find_homes) or {}

    def dtypes_of_calls(self, dtypes: tuple[tuple[str, str], ...]) -> dict[str, frozenset[str]]:
        """Map patterns of modules to the floating dtypes that they take and return; empty where no copy can be called.

        Args:
            dtypes: (pattern of a parameter or buffer, dtype in which it computes).
        """
        return self._of_sample(("dtypes of calls", dtypes), lambda sample: dtypes_of_calls(sample, dict(dtypes))) or {}

    def router_loss(self) -> RouterLoss | None:
        """Return the routers' loss that a transformers model's config includes in its loss; None for no loss."""
        model = self.model
        if model is None or not asks_for_router_loss(model):
            return None
        return self._once("router loss", lambda: measure_router_loss(model))

    def premises(self) -> Premises:
        """Observe on a small copy what the forward does besides giving each row's tokens their logits.

        For a model that was laid out in part, the premises measured before are returned.
        """
        model = self.model
        if model is None:
            return Premises(unknown="the model itself is not at hand")
        if "premises" not in self._answers and lies_on_mesh(model):
            return Premises(unknown="the model is laid out in part already")
        return self._once("premises", lambda: premises.play(model))

    def _at_hand(self, cannot: str) -> nn.Module:
        if (model := self.model) is None:
            raise UnsupportedError(f"{cannot}: the model itself is not at hand")
        return model

    def _of_sample(self, question: Hashable, measure: Callable[[Sample], Answer]) -> Answer | None:
        """Measure something of the small copy; None where none can be made."""
        try:
            return self._once(question, lambda: measure(self.sample()))
        except UnsupportedError:
            return None

    def _once(self, question: Hashable, measure: Callable[[], Answer]) -> Answer:
        if question not in self._answers:
            with seeded(0):
                self._answers[question] = measure()
        return self._answers[question]  # type: ignore[return-value]


def measurements_of(model: nn.Module) -> Measurements:
    """Return the model's measurements, made on demand; a copy of a model is measured anew, and one with new hints."""
    known = recall(model, Measurements)
    if known is None or known.model is not model or known.hints != hints_of(model):
        known = Measurements(model)
        remember(model, known)
    return known


def stated(model: Any, *keys: str) -> int | None:
    """Return the first of these keys' values that is a positive integer in ``model.config`` or a section of it."""
    config = text_config(model)
    places = [config, *(getattr(config, name, None) for name in SECTIONS)]
    found = (getattr(place, key, None) for place in places for key in keys)
    return next((value for value in found if isinstance(value, int) and value > 0), None)
