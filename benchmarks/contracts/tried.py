"""What every contract is tried with: items and their job on ranks, models, the one plain process, refusals that name
what to change.
"""

from __future__ import annotations

import copy
import importlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright import MeshwrightError
from meshwright.distributed import DistributedConfig, init_distributed
from meshwright.distributed.mesh import data_position
from meshwright.models.decoder_config import DecoderConfig

IDS = 64
TOKENS = torch.arange(48).reshape(4, 12) * 7 % 61
CLOSE = 1e-5
"""Largest relative error of a gradient in float32; ``BFLOAT16`` where the computation is in bfloat16."""
BFLOAT16 = 5e-2
LIMIT_SEC = 20
"""Longest that a collective may take: ranks that wait for one that failed give up."""
SMALL = DecoderConfig(vocab_size=IDS, dim=32, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=48, max_seq_len=32)


# --- items


@dataclass(frozen=True)
class Item:
    """A line of a contract.

    Attributes:
        contract: what the other system's document promises, in few words.
        world: ranks that try it.
        reason: why this library differs on purpose; empty: it does not.
        check: returns evidence (text, or a relative error), raises where the promise (or the documented difference)
            does not hold.
    """

    number: str
    contract: str
    world: int
    reason: str
    check: Callable[..., object]


@dataclass
class Items:
    """Items of one document, by number."""

    letter: str
    of: str
    found: dict[str, Item] = field(default_factory=dict)

    def __call__(
        self, number: int | str, contract: str, *, world: int = 1, reason: str = ""
    ) -> Callable[[Callable], Callable]:
        def keep(check: Callable) -> Callable:
            key = f"{self.letter}{number}" if isinstance(number, int) else number
            assert key not in self.found, key
            self.found[key] = Item(key, contract, world, reason, check)
            return check

        return keep


class ItemFailed(Exception):
    """The first item of a job that did not hold, and what came before it."""

    is_echo = False

    def __init__(self, number: str, text: str, before: list):
        super().__init__(number, text, before)
        self.number, self.text, self.before = number, text, before


@dataclass
class Here:
    """Meshes of a job on its ranks, by layout."""

    known: dict[tuple, DeviceMesh | None] = field(default_factory=dict)

    def mesh(self, **sizes: int) -> Any:
        key = tuple(sorted(sizes.items()))
        if key not in self.known:
            self.known[key] = init_distributed(
                DistributedConfig(**{"dp_shard": 1} | sizes, nccl_timeout_sec=LIMIT_SEC), seed=42
            )
        return self.known[key]


def attempt(module: str, numbers: list[str]) -> list[tuple[str, object, float]]:
    """A rank's job: (number, evidence, seconds) of every item, in turn."""
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    items, here, found = importlib.import_module(module).ITEMS.found, Here(), []
    if items[numbers[0]].world > 1:
        here.mesh(dp_shard=items[numbers[0]].world)
    for number in numbers:
        start = time.perf_counter()
        torch.manual_seed(0)
        try:
            evidence = items[number].check(*([here] if items[number].check.__code__.co_argcount else []))
        except Exception as error:  # noqa: BLE001  (whatever is raised is the outcome)
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:600] + _where(error)
            raise ItemFailed(number, text, found) from None
        found.append(
            (number, evidence if isinstance(evidence, float) else str(evidence or "holds"), time.perf_counter() - start)
        )
    return found


def _where(error: BaseException) -> str:
    trace, lines = error.__traceback__, []
    while trace is not None:
        lines.append(f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}")
        trace = trace.tb_next
    return f" [{' < '.join(reversed(lines[-3:]))}]"


# --- checks


def same(found: object, wanted: object) -> None:
    assert found == wanted, f"found {found!r}, wanted {wanted!r}"


def near(found: float, wanted: float, bound: float = 1e-6) -> str:
    assert abs(found - wanted) <= bound * abs(wanted), f"found {found}, wanted {wanted}"
    return f"{found:.7g} = {wanted:.7g}"


def refused(action: Callable[[], object], *words: str, kind: type[BaseException] = MeshwrightError) -> str:
    """The sentence of an error of the library's own that has these words.

    A raw error of torch or Python's goes through.
    """
    try:
        made = action()
    except kind as error:
        text = str(error)
        missing = [word for word in words if word not in text]
        assert not missing, f"{type(error).__name__} does not say {missing}: {text}"
        return f"{type(error).__name__}: {text[:90]}"
    raise AssertionError(f"accepted: {type(made).__name__}")


@contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Environment variables as given, inside; None: not set."""
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@contextmanager
def heard() -> Iterator[list[str]]:
    """What the library logs inside."""
    lines: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("meshwright")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


# --- models, and what one process makes of them


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": IDS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(
        LlamaConfig(**sizes | {"num_key_value_heads": 2, "use_cache": False, "tie_word_embeddings": False} | changes)
    )


class ForgeBlock(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = ForgeAttention(dim)
        self.mlp = ForgeMLP(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ForgeAttention(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k_proj, self.v_proj = nn.Linear(dim, dim // 2, bias=False), nn.Linear(dim, dim // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, 8)).transpose(1, 2) for w in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(-2)
        )


class ForgeMLP(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(*s, bias=False) for s in ((dim, 48), (dim, 48), (48, dim))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Forge(nn.Module):
    """A decoder with the submodule names of KempnerForge's Transformer."""

    def __init__(self, tied: bool = False, layers: int = 2, dim: int = 32):
        super().__init__()
        torch.manual_seed(0)
        self.config = type("Config", (), {"vocab_size": IDS})()
        self.token_embedding = nn.Embedding(IDS, dim)
        self.layers = nn.ModuleDict({str(i): ForgeBlock(dim) for i in range(layers)})
        self.norm, self.output_head = nn.RMSNorm(dim), nn.Linear(dim, IDS, bias=False)
        nn.init.normal_(self.token_embedding.weight, std=0.1)
        if tied:
            self.output_head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens)
        for block in self.layers.values():
            x = block(x)
        return self.output_head(self.norm(x))


def logits_of(model: nn.Module, rows: Tensor) -> Tensor:
    made = model(rows)
    return made if isinstance(made, Tensor) else made.logits


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """A mean loss, as users of these systems bring it."""
    return F.cross_entropy(logits_of(model, rows)[:, :-1].float().flatten(0, 1), rows[:, 1:].flatten())


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> dict[str, Tensor]:
    clean = lambda name: name.replace("module.", "", 1) if name.startswith("module.") else name  # noqa: E731
    return {clean(n): whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor], bound: float = CLOSE) -> float:
    """The largest relative error of a gradient.

    Those that are nothing but rounding are measured by the largest of all.
    """
    same(sorted(found), sorted(wanted))
    most = max(float(g.norm()) for g in wanted.values())
    errors = {
        n: float((found[n].double() - g.double()).norm() / max(float(g.norm()), 1e-4 * most)) for n, g in wanted.items()
    }
    name = max(errors, key=lambda n: errors[n])
    assert errors[name] <= bound, f"gradient of {name} differs by {errors[name]:.2g}"
    return errors[name]


def rows_of(mesh: DeviceMesh | None, tokens: Tensor = TOKENS) -> Tensor:
    """This rank's rows, by its place on the data axes."""
    rank, ranks = data_position(mesh)
    return tokens[rank * len(tokens) // ranks : (rank + 1) * len(tokens) // ranks]


def against_one(
    model: nn.Module,
    plain: nn.Module,
    mesh: DeviceMesh | None,
    *,
    bound: float = CLOSE,
    loss: Callable[[nn.Module, Tensor], Tensor] = loss_of,
    tokens: Tensor = TOKENS,
) -> float:
    """Relative error of every gradient after one backward against ``plain``, which sees all rows in one process."""
    plain = copy.deepcopy(plain)
    loss(plain, tokens).backward()
    loss(model, rows_of(mesh, tokens)).backward()
    return worst(gradients(model), gradients(plain), bound)
