"""Sample text from a run's checkpoint, in one process."""

from __future__ import annotations

from pathlib import Path

import meshwright.checkpoint as checkpoint
from meshwright.core.devices import local_device
from meshwright.data.text.tokenizers import encode_prompt
from meshwright.distributed.parallelize import parallelize
from meshwright.introspection.cluster import Cluster
from meshwright.planning.build import plan as make_plan
from meshwright.planning.layout import Layout
from meshwright.planning.techniques import Precision, Techniques
from meshwright.training.config import Config
from meshwright.training.model_source import model_source, with_kept_model
from meshwright.training.tokenizer import own_tokenizer

from .base import weights_beside_adapters
from .folder import RunFolder


class Sampler:
    """A run's model, read from its latest checkpoint (or that of ``step``) onto this machine's device, in the dtype
    of its master weights.

    Args:
        base: folder of the weights beside which the run's adapters stand.

    Raises:
        ConfigError: the run has no checkpoint yet, or none of that step; or ``base`` is not of its adapters.
        IntegrityError: the checkpoint is damaged.
    """

    def __init__(self, folder: Path, config: Config, step: int | None = None, base: Path | None = None):
        path = RunFolder(folder).checkpoint(step)
        weights = weights_beside_adapters(folder, config, base)
        config = with_kept_model(config, folder)
        self.tokenizer = own_tokenizer(config, folder)
        source = model_source(config, self.tokenizer)
        master = config.techniques.precision.master
        asked = config.techniques
        requested = Techniques(
            precision=Precision(master, master, master), freeze=asked.freeze, quantize_frozen=asked.quantize_frozen
        )
        plan = make_plan(source, Layout(dp_shard=1), cluster=Cluster(1, 0, local_device()), techniques=requested)
        if weights is None and config.model.hf:
            weights = checkpoint.to_be_loaded
        self.model = parallelize(source, None, plan=plan, weights=weights)
        checkpoint.load(self.model, path)

    def continue_text(self, prompt: str, tokens: int, *, temperature: float, seed: int) -> str:
        """Return the prompt and at most ``tokens`` more tokens, up to the end of the document."""
        ids = [int(i) for i in encode_prompt(self.tokenizer, prompt)]
        more = self.model.generate(ids, tokens, temperature=temperature, seed=seed, stop=self.tokenizer.end_of_document)
        return self.tokenizer.decode([*ids, *more])
