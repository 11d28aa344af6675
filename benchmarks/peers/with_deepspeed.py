"""DeepSpeed: ZeRO-2 and 3, and its engine without sharding."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .problem import RATE, ROWS, Question, mean

PACKAGES = ["deepspeed"]
STAGES = {"zero3": 3, "zero2": 2, "ddp": 0}


def build(question: Question):
    import deepspeed

    if question.layout not in STAGES:
        raise NotImplementedError(f"its {question.layout} wants a model written for it, or is for inference")
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": question.microbatches,
        "zero_optimization": {"stage": STAGES[question.layout]},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **({"gradient_clipping": question.max_norm} if question.max_norm else {}),
    }
    model = question.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step(parts) -> float:
        loss = torch.zeros((), device=question.device)
        for part in parts:
            share = mean(engine(input_ids=part["tokens"]).logits, part["labels"])
            engine.backward(share)
            engine.step()
            loss = loss + share.detach() / len(parts)
        dist.all_reduce(loss)
        return float(loss / question.world)

    return step
