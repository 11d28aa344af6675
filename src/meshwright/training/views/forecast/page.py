"""Write a forecast's page: the layouts of the answer, and of the first its mesh, memory and step in time."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from meshwright.planning.plan import Plan
from meshwright.planning.traffic import resolved
from meshwright.planning.values import Batch
from meshwright.simulation.search.answer import HEADS, figures, row
from meshwright.simulation.search.search import Candidate
from meshwright.simulation.workload.timeline import memory_over_step, step_timeline
from meshwright.training.views.page.frame import framed, table, tiles

from .areas import memory_figure
from .lanes import lanes_figure
from .mesh import mesh_figure
from .picture import gigabytes
from .scatter import scatter_figure


def forecast_page(
    shown: Sequence[Candidate], front: Sequence[Candidate], plan: Plan, batch: Batch, toml: str = ""
) -> str:
    """Return a forecast as an HTML page.

    Args:
        shown: candidates that the command prints, the first of which is drawn.
        front: candidates of which no other is both faster and smaller.
        plan: the first candidate's.
        batch: the step's, with the first candidate's microbatch.
        toml: keys of a config that train with the first, where it was searched.
    """
    first = shown[0]
    job, machines = first.job, first.job.machines
    timeline = step_timeline(job, first.time)
    name = f"{job.architecture.name} on {machines.gpus} {machines.device.name}"
    about = (
        f"{machines.per_node} GPUs per node, {job.rows} rows of {job.seq_len} tokens per step. A forecast from data"
        " sheets and shapes alone: nothing was run on a GPU."
    )
    body = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="soft">{escape(about)}</p>',
        _tiles(first),
        f"<h2>Layouts</h2>{table(HEADS, [row(one) for one in shown])}",
        scatter_figure(shown, front),
        f"<h2>The first: {escape(str(job.layout))}</h2>",
        memory_figure(first, memory_over_step(job, first.memory, timeline)),
        lanes_figure(first, timeline),
        mesh_figure(job, plan, resolved(plan, batch)),
    ]
    if toml:
        body.append(f"<h2>To train with the first</h2><pre>{escape(toml)}</pre>")
    return framed(name, body)


def _tiles(first: Candidate) -> str:
    values, device = figures(first), first.job.machines.device
    return tiles(
        [
            ("memory per GPU", f"{values['mem_gb']:.1f} of {gigabytes(device.memory_bytes)}"),
            ("the card", "has room" if first.fits else "is too small"),
            ("step", f"{values['step_s']:.2f} s"),
            ("tokens/s/GPU", f"{values['tok_s_gpu']:,.0f}"),
            ("MFU", f"{values['mfu']:.1%}"),
            ("tokens a day", f"{values['tokens_per_day'] / 1e9:.2f} billion"),
            ("GPU hours for a billion tokens", f"{values['gpu_hours_per_billion_tokens']:,.0f}"),
        ]
    )
