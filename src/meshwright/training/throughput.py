"""Measure tokens per second and model FLOPs utilisation (PaLM, appendix B; Chowdhery et al. 2022)."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from meshwright.core.dtypes import duration_text
from meshwright.core.errors import ConfigError
from meshwright.simulation.cards import half_peak

# --- count FLOPs of training and model FLOPs utilisation


def training_flops_per_token(
    matmul_parameters: int,
    *,
    n_layers: int,
    dim_attention: int,
    seq_len: float,
    frozen_matmul_parameters: int = 0,
) -> float:
    """Count the training FLOPs of a token, forward and backward: ``6 * N + 12 * n_layers * dim_attention * seq_len``.

    * 6 per parameter: 2 (multiply and add) in the forward, 2 for the gradient of its input, 2 for its own. A frozen
      parameter has no gradient of its own and counts 4.
    * The attention term is the two products of queries with keys and of probabilities with values, over the WHOLE
      sequence: as in PaLM, the masked half counts, although a causal kernel skips it. Figures compare with published
      ones; at long sequences they flatter a causal kernel by up to twice its attention share.
    * Recomputation for activation checkpointing does not count: this gives MFU, not hardware utilisation (HFU).

    Args:
        matmul_parameters: trainable parameters that enter a matrix product for each token: only the routed share of
            experts; without the input embedding (a lookup), norms and biases; with the output head, even if tied.
        n_layers: layers with attention.
        dim_attention: n_heads * head_dim, the width of all query heads together.
        seq_len: tokens of one sequence; of sequences of several lengths, that of the sequence which a token stands in
            on the average.
        frozen_matmul_parameters: the same count for parameters that need no gradient.
    """
    return 6.0 * matmul_parameters + 4.0 * frozen_matmul_parameters + 12.0 * n_layers * dim_attention * seq_len


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the dense FLOP/s of one device, from its data sheet.

    None if no figure is known, as for every CPU and every MIG slice.

    Args:
        device_name: as torch gives it, such as ``"NVIDIA H100 80GB HBM3"``.
        dtype: dtype of the matrix products: ``"bfloat16"`` or ``"float16"``. Others have no figure here: float32
            depends on whether TF32 is on, and float8 runs are reported against the bfloat16 peak.
    """
    if re.search(r"\bMIG\b", device_name) or dtype not in ("bfloat16", "float16"):
        return None
    return half_peak(device_name, dtype)


def mfu(tokens_per_second: float, flops_per_token: float, peak: float | None, world: int) -> float | None:
    """Return the model FLOPs utilisation, a fraction: observed tokens per second over those at all devices' peak.

    Args:
        tokens_per_second: speed of the whole run, all ranks together.
        flops_per_token: from :func:`training_flops_per_token`.
        peak: FLOP/s of one device from :func:`peak_flops`; None gives None.
        world: number of devices.

    Raises:
        ConfigError: ``world`` or ``peak`` not above 0.
    """
    if peak is None:
        return None
    if world < 1 or peak <= 0:
        raise ConfigError(f"mfu needs 1 device or more and a peak above 0, not {world} and {peak}")
    return tokens_per_second * flops_per_token / (peak * world)


# --- measure tokens per second over the last steps, and the time that is left


class Throughput:
    """Mean speed of the last ``window`` steps.

    The caller adds the seconds of a step alone: data, forward, backward, optimizer. Validation and saving are not
    added, so they neither lower the speed nor enter the estimate. The first step, which pays for allocation and
    compilation, counts only until there is a second.
    """

    def __init__(self, window: int = 20):
        self._steps: deque[tuple[int, float, int]] = deque(maxlen=window)
        self._added = 0

    def add(self, row_lengths: Sequence[int], seconds: float) -> None:
        """Add a step: the tokens of its rows over all ranks, without padding, and its wall-clock seconds."""
        if self._added == 1:
            self._steps.clear()
        self._steps.append((sum(row_lengths), seconds, sum(length * length for length in row_lengths)))
        self._added += 1

    @property
    def row_length(self) -> float:
        """Tokens of the row that a token of the window stands in, on the average; 0.0 before the first step."""
        tokens = sum(t for t, *_ in self._steps)
        return sum(squares for *_, squares in self._steps) / tokens if tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over the window; 0.0 before the first step."""
        seconds = sum(s for _, s, _ in self._steps)
        return sum(t for t, *_ in self._steps) / seconds if seconds > 0 else 0.0

    @property
    def seconds_per_step(self) -> float:
        """Mean seconds of a step over the window; 0.0 before the first step."""
        return sum(s for _, s, _ in self._steps) / len(self._steps) if self._steps else 0.0

    def eta_seconds(self, remaining_steps: int) -> float | None:
        """Estimate the seconds of ``remaining_steps`` more steps at this speed; None before the first step."""
        return self.seconds_per_step * remaining_steps if self._steps else None


# --- time the phases before the first step


class StartupTimeline:
    """Named phases of a start, in the order in which they first ran, with their wall-clock seconds.

    Example::

        timeline = StartupTimeline()
        with timeline.phase("weights"):
            model.materialise()
        timeline.line()  # "weights 0.2 s"

    Args:
        on_phase: called with the name of each phase as it begins.
    """

    def __init__(self, on_phase: Callable[[str], object] | None = None) -> None:
        self._seconds: dict[str, float] = {}
        self._on_phase = on_phase

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, in order; a copy."""
        return dict(self._seconds)

    def record(self, name: str, seconds: float) -> None:
        """Add ``seconds`` that were measured elsewhere; those of one name are summed."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body, also when it raises. Phases do not nest: an inner one would be counted twice."""
        if self._on_phase is not None:
            self._on_phase(name)
        began = time.perf_counter()
        try:
            yield
        finally:
            self.record(name, time.perf_counter() - began)

    def line(self) -> str:
        """Return all phases in one line: ``"imports 1.9 s · process group 0.3 s · data 0.8 s"``."""
        return " · ".join(f"{name} {duration_text(seconds)}" for name, seconds in self._seconds.items())
