"""Have functions of other modules note their arguments or results, or draw what needs no luck.

Like the recorder, this file is loaded by its path into whatever environment the script has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from meshwright.observation.sketches import local_of

DROPOUTS = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
ATTENTION = "scaled_dot_product_attention"
NO_KEY = -1e4
"""Least number added to a score that leaves a key in sight."""
DRAWS = ("rand", "rand_like", "randn", "randn_like", "bernoulli")
CHOICES = ("randint", "multinomial")
"""Draws of what has no mean: they are noted outside of models, where rows are made."""


def before(home: Any, name: str, note: Any) -> None:
    """Have a function of torch note its arguments first."""
    plain = getattr(home, name)

    @wraps(plain)
    def noted(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return plain(*args, **kwargs)

    setattr(home, name, noted)


def after(home: Any, name: str, note: Any) -> None:
    """Have a function of torch note its result, with its arguments."""
    plain = getattr(home, name)

    @wraps(plain)
    def noted(*args: Any, **kwargs: Any) -> Any:
        found = plain(*args, **kwargs)
        note(found, *args, **kwargs)
        return found

    setattr(home, name, noted)


def keep_identity(home: Any, name: str) -> None:
    """Have a function of torch be found under its name while it runs, which classes of masks compare it with."""
    plain = getattr(home, name)

    @wraps(plain)
    def itself(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if torch.compiler.is_compiling() or all(type(tensor) is Tensor for tensor in tensors):
            return plain(*args, **kwargs)
        patched = getattr(home, name)
        setattr(home, name, plain)
        try:
            return plain(*args, **kwargs)
        finally:
            setattr(home, name, patched)

    setattr(home, name, itself)


def without_harm(recorder: Any, note: Callable[..., Any]) -> Callable[..., Any]:
    """Have a note that fails end the recording of its process, and not the script."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        try:
            return note(*args, **kwargs)
        except Exception as error:  # noqa: BLE001
            recorder.closed = True
            where = f"rank {recorder.met[0]}: nothing is recorded from step {recorder.n_done + 1} on"
            print(f"meshwright observe: {where}, for {error!r}; the script goes on", file=sys.stderr, flush=True)
            return None

    return noted


def expected(found: Tensor) -> Tensor:
    """Replace numbers by 0.5, which a comparison with a rate of less than a half keeps, or 0 of a normal draw."""
    if found.is_floating_point() and not found.is_meta:
        with torch.no_grad():
            found.fill_(0.5 if bool((found >= 0).all()) else 0.0)
    return found


def instead(home: Any, name: str, recorder: Any) -> None:
    """Have a function that draws random numbers note its generator's state, and return a value that needs no luck.

    Masks that ranks draw each for themselves are no difference then; that each draws what it should is seen by the
    states. The numbers are drawn all the same, so that what is drawn later stays as it is.
    """
    plain = getattr(home, name)
    names = (
        ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        if name == ATTENTION
        else ("input", "p", "training", "inplace")
    )

    @wraps(plain)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs if name not in DRAWS else kwargs
        if torch.compiler.is_compiling() and name in DROPOUTS and not recorder.closed:
            return plain(**{**given, "p": 0.0})
        if torch.compiler.is_compiling() or not recorder.inside():
            if name in DRAWS and not torch.compiler.is_compiling():
                recorder.drew_outside(kwargs.get("generator"))
            return plain(*args, **kwargs)
        rate = given.get("dropout_p", given.get("p", 0.5 if name in DROPOUTS else 0.0))
        if name not in DRAWS and not (given.get("training", True) and rate):
            return plain(*args, **kwargs)
        draw = recorder.drew(given.get("generator"))
        found = plain(*args, **kwargs)
        draw["n"] = local_of(found).numel()
        if name == ATTENTION:
            return plain(**{**given, "dropout_p": 0.0})
        return given["input"] if name in DROPOUTS else expected(found)

    setattr(home, name, drawn)


def note_draws(recorder: Any, quiet: Any) -> None:
    """Have torch's functions that draw random numbers note their generators' states."""
    functional = torch.nn.functional
    for home, names in ((functional, (*DROPOUTS, ATTENTION)), (torch, DRAWS)):
        for name in names:
            instead(home, name, recorder)
    for name in CHOICES:
        before(torch, name, quiet(lambda *_, generator=None, **options: recorder.drew_outside(generator, "chosen")))


@torch.no_grad()
def keys_by_mask(query: Any, key: Any, mask: Any = None, is_causal: bool = False) -> Tensor:
    """Count the keys that a mask leaves in sight of each query, (rows, queries)."""
    query, n = local_of(query), key.shape[-2]
    counts = torch.tensor(float(n))
    if is_causal:
        counts = torch.arange(1, query.shape[-2] + 1).clamp(max=n).float()
    elif mask is not None:
        mask = local_of(mask)
        counts = (mask if mask.dtype == torch.bool else mask > NO_KEY).sum(-1).float() * (n / mask.shape[-1])
    return by_query(counts.cpu().expand(torch.broadcast_shapes(counts.shape, query.shape[:-1])))


def by_query(counts: Tensor) -> Tensor:
    """Average (rows, …, queries) over what is in between."""
    return counts.reshape(len(counts) if counts.dim() > 1 else 1, -1, counts.shape[-1]).mean(1)


def count_keys(recorder: Any) -> None:
    """Have attention tell the recorder how many keys each query sees, by the mask or by the weights that are not 0."""

    def of_mask(query: Any, key: Any, value: Any, mask: Any = None, *rest: Any, **named: Any) -> None:
        mask = named.get("attn_mask", mask)
        is_plain = mask is None or type(mask) is Tensor or hasattr(mask, "placements")
        if not torch.compiler.is_compiling() and is_plain and recorder.attends(query):
            is_causal = rest[1] if len(rest) > 1 else named.get("is_causal", False)
            scale = float(named.get("scale") or query.shape[-1] ** -0.5)
            recorder.sees(keys_by_mask(query, key, mask, is_causal), scale)

    def of_weights(found: Any, *args: Any, **kwargs: Any) -> None:
        seen = recorder.sketched.get(id(args[0]), [None])[0] if args else None
        if seen is not None and seen() is args[0]:
            return  # a module gives the scores: a router
        if not torch.compiler.is_compiling() and recorder.attends(found) and found.dim() > 2:
            recorder.sees(by_query((local_of(found.detach()) != 0).sum(-1).float().cpu()))

    before(torch.nn.functional, ATTENTION, of_mask)
    for home in (torch, Tensor):
        after(home, "softmax", of_weights)


def note_compilation(recorder: Any, cuts: bool) -> None:
    """Have ``torch.compile`` tell the recorder, and allow graphs that are cut where modules are recorded."""
    plain = torch.compile

    @wraps(plain)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        model = args[0] if args else kwargs.get("model")
        recorder.compiles = True
        recorder.cuts = recorder.cuts or isinstance(getattr(model, "__self__", model), torch.nn.Module)
        return plain(*args, **(kwargs | {"fullgraph": False} if cuts else kwargs))

    torch.compile = compiled
