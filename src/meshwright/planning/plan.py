"""Define the Plan: one frozen value from which techniques read all decisions."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field

from meshwright.core.axes import WORLD_AXES, Axis
from meshwright.core.errors import ConfigError
from meshwright.introspection.structure.experts import RouterLoss
from meshwright.planning.context.plan import ContextPlan
from meshwright.planning.experts import ExpertPlan
from meshwright.planning.float8 import Float8Plan
from meshwright.planning.layout import Shares
from meshwright.planning.optimizer import OptimizerPlan
from meshwright.planning.pipeline.plan import PipelinePlan
from meshwright.planning.quantize import QuantizePlan
from meshwright.planning.tensor.plan import TensorPlan
from meshwright.planning.values import Collective, DataParallel, LossPlan, ParameterPlan, PrecisionPlan, Unit


@dataclass(frozen=True)
class Plan:
    """Everything decided about a layout, for any batch.

    Attributes:
        stage_units: the units of each pipeline stage.
        premises_known: whether a small copy showed what the forward does besides each row's own output.
    """

    model: str
    device: str
    mesh: tuple[tuple[str, int], ...]
    parameters: tuple[ParameterPlan, ...]
    units: tuple[Unit, ...]
    data: DataParallel
    precision: PrecisionPlan
    frozen: tuple[str, ...] = ()
    activation_checkpointing: str = "none"
    checkpointed: tuple[str, ...] = ()
    checkpoint_keep: tuple[str, ...] = ()
    checkpoint_keep_every: int = 1
    activation_memory_budget: float | None = None
    compiled: tuple[str, ...] = ()
    compile_options: tuple[tuple[str, str | bool], ...] = ()
    collectives: tuple[Collective, ...] = ()
    tensor: TensorPlan | None = None
    context: ContextPlan | None = None
    pipeline: PipelinePlan | None = None
    stage_units: tuple[tuple[Unit, ...], ...] = ()
    experts: ExpertPlan | None = None
    loss: LossPlan | None = None
    router_loss: RouterLoss | None = None
    float8: Float8Plan | None = None
    quantize: QuantizePlan | None = None
    optimizer: OptimizerPlan = field(default_factory=OptimizerPlan)
    premises_known: bool = False
    notes: tuple[str, ...] = field(default=())

    def size(self, axis: Axis | str) -> int:
        """Return the size of a mesh axis (1 if the mesh has none of that name)."""
        return dict(self.mesh).get(str(axis), 1)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the mesh axes, and of ep, which is no axis of the mesh."""
        return dict(self.mesh) | {Axis.EP.value: 1 if self.experts is None else self.experts.ranks}

    @property
    def world(self) -> int:
        return math.prod(self.size(axis) for axis in WORLD_AXES)

    @property
    def data_ranks(self) -> int:
        """Number of ranks that hold different samples."""
        return self.shares.data_ranks

    @property
    def shares(self) -> Shares:
        """The axes along which ranks hold other samples, tokens, parameters and experts."""
        return Shares(
            dict(self.mesh),
            self.data.technique == "fully_shard",
            self.tensor is not None and self.tensor.sequence_parallel,
            self.data.replicates_tokens,
        )

    @property
    def sends_again(self) -> tuple[str, ...]:
        """Paths of the modules whose recomputed forward sends its messages again in backward."""
        keeps = self.activation_checkpointing == "offload" or "collectives" in self.checkpoint_keep
        return () if keeps else self.checkpointed

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read the plan that ``to_json`` wrote; ConfigError if the text is not one."""
        from meshwright.core.config import from_dict

        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"this text is not a plan: it is no JSON ({error})") from None
        return from_dict(cls, values, where="plan")

    def diff(self, other: Plan) -> list[str]:
        """List one line per leaf that differs, "path: here -> there"; empty for equal plans."""
        return list(_differences("", json.loads(self.to_json()), json.loads(other.to_json())))


def _differences(path: str, here, there):
    if isinstance(here, dict) and isinstance(there, dict):
        for key in here:
            yield from _differences(f"{path}.{key}" if path else key, here[key], there[key])
    elif isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        for i, (a, b) in enumerate(zip(here, there, strict=True)):
            yield from _differences(f"{path}[{i}]", a, b)
    elif here != there:
        yield f"{path}: {here} -> {there}"
