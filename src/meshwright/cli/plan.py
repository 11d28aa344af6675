"""``meshwright plan [CONFIG.toml | RUN] [--gpus 64 --gpu h100] [--key=value …]``: show what a config becomes on a
mesh of any size, without process group, GPU or data.
"""

from __future__ import annotations

from meshwright.core.devices import check_device_type, device_memory, local_device
from meshwright.core.errors import ConfigError
from meshwright.introspection.cluster import Cluster
from meshwright.training.optim.fine_tuning import of_forecast

from . import foresee
from .arguments import read_config, take_option


def run(argv: list[str]) -> int:
    """Print the plan, the bytes that a step sends, and its memory estimate.

    With ``--gpus N --gpu CARD`` the answer is about GPUs that need not be here: the memory and time of the config's
    layout, or, where the config leaves its layout open, the best of all layouts and the TOML to train with.
    ``--per-node N`` of them on a host, ``--link ib400`` between hosts (Gb/s for each GPU), ``--pin tp<=8`` (again for
    more) to keep parts of a layout, ``--profile FILE`` in place of ``--gpu`` for a machine that ``meshwright measure``
    measured, ``--json`` for programs, ``--html FILE`` for a page with pictures, ``--with FILE`` for figures of
    ``meshwright rehearse`` in place of those foreseen, ``--dry-run`` for the first layout's memory by the run's own
    code beside the forecast; ``--imbalance 1.3``: tokens of the fullest expert rank over the mean, ``--straggler 1.1``:
    time of the slowest rank over the others'. More: docs/foresight.md.

    Without them: ``--world N`` ranks, ``--per-node N`` of them on a host, ``--device``, ``--json``; ``--trust`` runs
    code that the config names.
    """
    world, argv = take_option(argv, "--world", int)
    per_node, argv = take_option(argv, "--per-node", int)
    device, argv = take_option(argv, "--device", str)
    as_json, argv = "--json" in argv, [word for word in argv if word != "--json"]
    asked, argv = foresee.take(argv)
    _check(world, per_node, device)
    if asked is not None and (world is not None or device is not None):
        raise ConfigError("--gpus and --gpu stand for --world and --device: leave these out")
    told = f"{__doc__}\n\n{run.__doc__}"
    config = read_config(argv, prog="meshwright plan", description=told)
    if not as_json and (taken := of_forecast(config)):
        print(f"{taken}\n", flush=True)
    if asked is not None:
        return foresee.run(config, asked, per_node or 0, as_json=as_json)
    from meshwright.planning.explain import table
    from meshwright.training.build import batch_of, estimated_memory, facts_of, plan_run
    from meshwright.training.capacity import Capacity, whether_it_fits
    from meshwright.training.launch import process_count
    from meshwright.training.metrics.memory import host_memory
    from meshwright.training.model_source import model_source
    from meshwright.training.tokenizer import planned_tokenizer

    tokenizer = planned_tokenizer(config)
    cluster = Cluster(world or process_count(config), per_node or 0, device or local_device())
    source, batch = model_source(config, tokenizer), batch_of(config, tokenizer)
    facts = facts_of(source)
    plan = plan_run(config, facts, cluster)
    if as_json:
        print(plan.to_json())
        return 0
    try:
        plan_run(config, facts, cluster, batch)
    except ConfigError:
        print(f"{table(plan)}\n", flush=True)  # the plan holds for any batch; the refusal of this one follows
        raise
    estimate = estimated_memory(config, facts, plan, batch)
    fits = ""
    if cluster.device == local_device():
        # of ranks that are only planned it is not known which share a host: one alone counts
        ranks = per_node or (1 if world else cluster.world)
        here = Capacity(cluster.device, device_memory(cluster.device), host_memory(), ranks)
        fits = whether_it_fits(facts, plan, batch, here, estimate)
    print(table(plan, batch, estimate, whether_it_fits=fits))
    return 0


def _check(world: int | None, per_node: int | None, device: str | None) -> None:
    """Raise ConfigError for an impossible cluster."""
    for name, value in (("--world", world), ("--per-node", per_node)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} = {value}: there is at least 1")
    if device is not None:
        check_device_type(device, "--device")
