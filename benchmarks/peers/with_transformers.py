"""Transformers' own tensor parallelism: ``from_pretrained(…, tp_plan="auto")``."""

from __future__ import annotations

import os
import tempfile

import torch.distributed as dist

from .bare import loop
from .problem import Question

PACKAGES = ["transformers"]


def build(question: Question):
    from transformers import LlamaForCausalLM

    if question.layout != "tensor":
        raise NotImplementedError(f"no {question.layout} of its own for a loop: its Trainer lends accelerate's")
    said = [tempfile.mkdtemp() if question.rank == 0 else None]
    dist.broadcast_object_list(said)
    folder = said[0]
    if question.rank == 0:
        question.model().save_pretrained(folder)
    dist.barrier()
    os.environ.setdefault("LOCAL_RANK", str(question.rank))
    model = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto", dtype="float32")
    model.train()
    if question.recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return loop(question, model)
