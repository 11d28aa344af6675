"""``meshwright plan [CONFIG.toml | RUN] [--gpus 64 --gpu h100] [--key=value …]``: show what a config becomes on a
mesh of any size, without process group, GPU or data.

It prints the plan, the bytes that a step sends, and its memory estimate. With --gpus N --gpu CARD the answer is about
GPUs that need not be here: the memory and time of the config's layout, or, where the config leaves its layout open, the
best of all layouts and the TOML to train with. More: docs/rent.md.
"""

from __future__ import annotations

from meshwright.core.config import take_flags
from meshwright.core.devices import check_device_type, device_memory, local_device
from meshwright.core.errors import ConfigError
from meshwright.introspection.cluster import Cluster
from meshwright.training.fine_tuning import of_forecast

from . import foresee
from .arguments import read_config
from .foresee import PlanOptions

OPTIONS = (PlanOptions,)


def run(argv: list[str]) -> int:
    """Print the plan, or the forecast; ``argv`` is what ``read_config`` takes, and the verb's own flags."""
    options, argv = take_flags(PlanOptions, argv)
    if options.device:
        check_device_type(options.device, "--device")
    is_forecast = foresee.is_asked(options)
    if is_forecast and (options.world is not None or options.device):
        raise ConfigError("--gpus and --gpu stand for --world and --device: leave these out")
    config = read_config(argv, prog="meshwright plan", description=__doc__ or "", trusted=options.trust)
    if not options.json and (taken := of_forecast(config)):
        print(f"{taken}\n", flush=True)
    if is_forecast:
        return foresee.run(config, options)
    from meshwright.planning.explain import table
    from meshwright.training.build import batch_of, estimated_memory, facts_of, plan_run
    from meshwright.training.capacity import Capacity, whether_it_fits
    from meshwright.training.launch import process_count
    from meshwright.training.memory import host_memory
    from meshwright.training.model_source import model_source, planned_tokenizer

    tokenizer = planned_tokenizer(config)
    cluster = Cluster(options.world or process_count(config), options.per_node or 0, options.device or local_device())
    source, batch = model_source(config, tokenizer), batch_of(config, tokenizer)
    facts = facts_of(source)
    plan = plan_run(config, facts, cluster)
    if options.json:
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
        ranks = options.per_node or (1 if options.world else cluster.world)
        here = Capacity(cluster.device, device_memory(cluster.device), host_memory(), ranks)
        fits = whether_it_fits(facts, plan, batch, here, estimate)
    print(table(plan, batch, estimate, whether_it_fits=fits))
    return 0
