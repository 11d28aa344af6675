"""Price operators on one device: a roofline with the shape of products, and the host that launches them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from meshwright.core.errors import ConfigError

TILES = ((256, 128, 1.0), (128, 128, 0.96), (128, 64, 0.86), (64, 64, 0.7))
"""Tiles (rows, columns) of a matrix product's kernels, with their speed relative to the largest: smaller tiles load
more operands per product. The effect is described in NVIDIA's Matrix Multiplication Background User's Guide; the
fractions are assumed."""
RAMP = 0.63
"""Depth k, over the FLOPs that a device computes for each byte that it moves, at which the begin and end of a product's
tile (first operands in, result out) take as long as its products: 96 on an A100, where it was assumed; twice as deep
where products are twice as fast."""


ALIGNED = ((64, 1.0), (32, 0.97), (16, 0.88), (8, 0.72))
"""Speed of products by the power of two that divides their dims: rows of operands that begin within a line of memory
are loaded in smaller pieces (the same guide; the fractions are assumed)."""


def aligned(dim: float) -> float:
    """Return the relative speed of products with this dim."""
    return next((speed for power, speed in ALIGNED if dim % power == 0), 0.5)


@dataclass(frozen=True)
class AttentionSpeed:
    """Fractions of the peak of half-precision products that an attention kernel reaches with heads of 128."""

    forward: float
    backward: float


@dataclass(frozen=True, eq=False)
class Device:
    """One device's speeds.

    Attributes:
        name: name by which users ask for the device.
        kind: device type of torch.
        memory_bytes: memory that the allocator can use.
        flops: dense products per second by dtype, in FLOP/s, by the data sheet or measured.
        efficiency: fraction of ``flops`` that large products reach, by dtype.
        bandwidth: bytes per second of device memory.
        bandwidth_efficiency: fraction of it that memory-bound kernels reach.
        multiprocessors: units that tiles of a product are distributed to; 0: products of any shape are equally fast.
        kernel_s: seconds from a kernel's end to the next one's begin.
        host_operator_s: seconds of the host per operator that it launches.
        context_bytes: memory that the driver takes in each process.
        attention: speeds of attention kernels by name.
        source: where the figures are from.
    """

    name: str
    kind: str
    memory_bytes: float
    flops: Mapping[str, float]
    bandwidth: float
    efficiency: Mapping[str, float] = field(default_factory=dict)
    bandwidth_efficiency: float = 0.85
    multiprocessors: int = 0
    kernel_s: float = 2e-6
    host_operator_s: float = 5e-6
    context_bytes: float = 0.0
    attention: Mapping[str, AttentionSpeed] = field(default_factory=dict)
    source: str = ""

    def speed(self, dtype: str) -> float:
        """Return the FLOP/s of large products in ``dtype``.

        Raises:
            ConfigError: the device has no products in this dtype.
        """
        if dtype not in self.flops:
            legal = ", ".join(self.flops)
            raise ConfigError(f"{self.name} has no figure for products in {dtype}. Legal are {legal}.")
        return self.flops[dtype] * self.efficiency.get(dtype, self.efficiency.get("default", 0.75))

    @cached_property
    def half(self) -> str:
        """The dtype of half-precision products: bfloat16 where the device has it."""
        return next((dtype for dtype in ("bfloat16", "float16") if dtype in self.flops), next(iter(self.flops)))

    def product_s(
        self, rows: float, columns: float, depth: float, dtype: str, element_bytes: float = 2.0, number: float = 1
    ) -> float:
        """Return the seconds of ``number`` products (rows, depth) x (depth, columns), launched as one group.

        The tiles of a group share the multiprocessors (CUTLASS' grouped GEMM), so that only the group's last wave is
        not full.
        """
        return _product_s(self, rows, columns, depth, dtype, element_bytes, number)

    def utilization(self, rows: float, columns: float, depth: float, dtype: str, number: float) -> float:
        """Return the fraction of large products' speed that ``number`` products of this shape reach."""
        ramp = depth / (depth + RAMP * self.flops[dtype] / self.bandwidth) * min(aligned(columns), aligned(depth))
        if not self.multiprocessors:
            return ramp
        return ramp * max(self._filled(rows, columns, number, *tile) for tile in TILES)

    def _filled(self, rows: float, columns: float, number: float, height: int, width: int, speed: float) -> float:
        """Return the fraction of the multiprocessors' time that computes elements of the result, for one tile size."""
        tiles = math.ceil(number * math.ceil(rows / height) * math.ceil(columns / width))
        waves = math.ceil(tiles / self.multiprocessors)
        return speed * number * rows * columns / (waves * self.multiprocessors * height * width)

    def traffic_s(self, moved: float) -> float:
        """Return the seconds in which ``moved`` bytes are read or written."""
        return moved / (self.bandwidth * self.bandwidth_efficiency)

    def attention_s(self, flops: float, kernel: str, *, backward: bool, head_dim: int) -> float:
        """Return the seconds of a fused attention kernel for ``flops`` products, the masked ones left out.

        Heads narrower than 128 fill the units less: at 64, FlashAttention-2 (arXiv 2307.08691, figures 4 to 6) reaches
        about 0.87 of its speed at 128.
        """
        speed = self.attention.get(kernel, AttentionSpeed(0.5, 0.4))
        fraction = speed.backward if backward else speed.forward
        narrow = 1.0 if head_dim >= 128 else 0.74 + 0.26 * head_dim / 128
        return flops / (self.flops[self.half] * fraction * narrow) + self.kernel_s


@lru_cache(maxsize=100_000)
def _product_s(
    on: Device, rows: float, columns: float, depth: float, dtype: str, element_bytes: float, number: float
) -> float:
    if min(rows, columns, depth) <= 0:
        return 0.0
    flops = 2.0 * number * rows * columns * depth
    compute = flops / (on.speed(dtype) * on.utilization(rows, columns, depth, dtype, number))
    moved = number * ((rows * depth + depth * columns) * element_bytes + rows * columns * 2.0)
    return max(compute, on.traffic_s(moved)) + on.kernel_s
