"""Forecast a planned step on a measured machine from its recorded operators."""

from __future__ import annotations

from meshwright.core.devices import is_accelerator
from meshwright.core.errors import UnsupportedError
from meshwright.distributed.recording.steps import record_steps
from meshwright.introspection.facts import ModelFacts
from meshwright.planning.plan import Plan
from meshwright.planning.values import Batch
from meshwright.simulation.hardware.profile import MachineProfile
from meshwright.simulation.operators.forecast import StepForecast, forecast_step


def forecast_of_operators(
    facts: ModelFacts, plan: Plan, batch: Batch, profile: MachineProfile, *, max_norm: float = 0.0
) -> StepForecast:
    """Record a step of a plan's ranks without running it, price it by a profile, and return its seconds.

    Args:
        max_norm: norm of the gradients above which a run clips them; 0: never.

    Raises:
        UnsupportedError: the model cannot be recorded, or computes on an accelerator, beside whose work the host and
            messages run: these are not simulated.
        ConfigError: the profile lacks a dtype, or messages.
    """
    if is_accelerator(profile.device):
        raise UnsupportedError(
            f"a step on {profile.device} is not forecast from its operators, since host and messages run beside them"
        )
    return forecast_step(record_steps(facts, plan, batch, max_norm=max_norm), profile)
