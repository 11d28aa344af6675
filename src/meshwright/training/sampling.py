"""Text from a run's checkpoint, in one process."""

from __future__ import annotations

from pathlib import Path

import meshwright.checkpoint as checkpoint
from meshwright.core.errors import ConfigError
from meshwright.distributed.parallelize import parallelize
from meshwright.introspection.cluster import Cluster, local_device
from meshwright.planning.build import plan as make_plan
from meshwright.planning.layout import Layout
from meshwright.planning.techniques import Precision, Techniques

from .build import decoder_config
from .config import Config
from .run_folder import RunFolder
from .tokenizer import kept_tokenizer, run_tokenizer


class Sampler:
    """A run's model, read from its latest checkpoint (or that of ``step``) onto this machine's device, in the dtype at rest.

    Raises:
        ConfigError: the run has no checkpoint yet, or none of that step.
        IntegrityError: the checkpoint is damaged.
    """

    def __init__(self, folder: Path, config: Config, step: int | None = None):
        checkpoints = RunFolder(folder).checkpoints
        path = checkpoints.latest() if step is None else checkpoints.of_step(step)
        if path is None or not path.is_dir():
            steps = ", ".join(map(str, checkpoints.steps())) or "none"
            raise ConfigError(f"{folder} has no checkpoint{'' if step is None else f' of step {step}'}; steps that are there: {steps}")
        self.tokenizer = kept_tokenizer(folder) or run_tokenizer(config)
        model_config = decoder_config(config, self.tokenizer)
        master = config.techniques.precision.master
        wishes = Techniques(precision=Precision(master, master, master))
        plan = make_plan(model_config, Layout(dp_shard=1), cluster=Cluster(1, 0, local_device()), techniques=wishes)
        self.model = parallelize(model_config, None, plan=plan)
        checkpoint.load(self.model, path)

    def continue_text(self, prompt: str, tokens: int, *, temperature: float, seed: int) -> str:
        """The prompt and at most ``tokens`` more tokens, up to the end of the document."""
        ids = [int(i) for i in self.tokenizer.encode(prompt)]
        more = self.model.generate(ids, tokens, temperature=temperature, seed=seed, stop=self.tokenizer.end_of_document)
        return self.tokenizer.decode([*ids, *more])
