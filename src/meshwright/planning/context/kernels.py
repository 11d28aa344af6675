"""Choose the kernel that computes an attention's products and softmax on a rank.

Attention goes in blocks of plain torch on any device. Where a mask's rows are runs of causal or full queries, a fused
kernel that returns the logarithms of its sums takes these instead: parts of keys are computed apart and merged by them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.core.devices import CPU, CUDA
from meshwright.introspection.mixing.arithmetic import Arithmetic
from meshwright.introspection.mixing.values import Caller, Sizes


@dataclass(frozen=True)
class Need:
    """The demands of one attention on a kernel.

    Attributes:
        device: its type.
        dtype: of queries, keys and values, by torch's name ("bfloat16").
        key_features, value_features: of one head.
        has_cap: scores have a soft cap.
        has_sinks: the logarithms have gradients.
    """

    device: str
    dtype: str
    key_features: int
    value_features: int
    has_cap: bool = False
    has_sinks: bool = False

    @classmethod
    def of(cls, device: str, dtype: str, sizes: Sizes, arithmetic: Arithmetic) -> Need:
        return cls(
            device, dtype, sizes.key_features, sizes.value_features, bool(arithmetic.cap), bool(arithmetic.sinks)
        )


@dataclass(frozen=True)
class Kernel:
    """A kernel, and what it takes.

    Attributes:
        name: as plans print it.
        device: where it runs; "": anywhere.
        dtypes: of queries, keys and values.
        widens: it is given these in at least fp32, as their products are summed.
        multiple: features of a head are a multiple of this many.
        largest: most features of a head; 0: any number.
        same_features: a head's values have as many features as its keys.
        plain_scores: scores have neither a soft cap nor sinks.
    """

    name: str
    device: str = ""
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32", "float64")
    widens: bool = True
    multiple: int = 1
    largest: int = 0
    same_features: bool = False
    plain_scores: bool = True

    def obstacles(self, need: Need) -> Iterator[str]:
        """Yield why the kernel cannot compute an attention."""
        features = (need.key_features, need.value_features)
        if self.device not in ("", need.device):
            yield f"runs on {self.device} alone"
        if need.dtype not in self.dtypes:
            yield f"takes {', '.join(self.dtypes)}, not {need.dtype}"
        if any(n % self.multiple for n in features):
            yield f"takes heads of a multiple of {self.multiple} features, not {max(features)}"
        if self.largest and max(features) > self.largest:
            yield f"takes heads of at most {self.largest} features, not {max(features)}"
        if self.same_features and need.key_features != need.value_features:
            yield f"takes keys and values of equal heads, not {need.key_features} and {need.value_features} features"
        if self.plain_scores and need.has_cap:
            yield "has no soft cap"
        if self.plain_scores and need.has_sinks:
            yield "gives logarithms no gradient, which sinks need"


BLOCKS = Kernel("blocks", plain_scores=False)
CPU_FLASH = Kernel(f"{CPU} flash", CPU, same_features=True)
CUDA_FLASH = Kernel(
    f"{CUDA} flash", CUDA, ("bfloat16", "float16"), widens=False, multiple=8, largest=256, same_features=True
)
CUDA_EFFICIENT = Kernel(f"{CUDA} efficient", CUDA, ("bfloat16", "float16", "float32"), widens=False, multiple=8)
KERNELS = (CPU_FLASH, CUDA_FLASH, CUDA_EFFICIENT, BLOCKS)
"""In order of preference; the last one takes every attention."""


def choose_kernel(need: Need) -> tuple[Kernel, str]:
    """Return the first kernel that takes an attention, and the reason."""
    refused: list[str] = []
    for kernel in KERNELS:
        obstacles = list(kernel.obstacles(need))
        if not obstacles:
            rest = "" if kernel is BLOCKS else "for runs of causal or full queries, blocks for others"
            return kernel, "; ".join([*([rest] if rest else []), *refused]) or f"none is fused on {need.device}"
        if kernel.device == need.device:
            refused.append(f"{kernel.name} {' and '.join(obstacles)}")
    raise AssertionError("blocks take every attention")


def kernel_of(caller: Caller, device: str, dtype: str) -> str:
    """Describe the kernel of one attention, and the reason."""
    if caller.arithmetic is None:
        return "the model's own code, since it computes scores in a way of its own"
    kernel, why = choose_kernel(Need.of(device, dtype, caller.sizes, caller.arithmetic))
    return f"{kernel.name}, {why}" if kernel is not BLOCKS else f"{kernel.name}: {why}"
