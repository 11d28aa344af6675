"""picotron: its own Llama with the same weights, in a checkout on ``PYTHONPATH``. It clips no gradients."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist

from .problem import ROWS, TOKENS, Question, mean

PACKAGES: list[str] = []
SIZES = {"ddp": "dp_size", "tensor": "tp_size", "pipeline": "pp_size", "context": "cp_size"}
NAMES = {
    "model.embed_tokens": "embedding",
    "model.layers": "decoder_layers",
    "self_attn.o_proj": "attention.out_proj",
    "self_attn": "attention",
    "model.norm": "final_norm",
    "lm_head": "final_proj",
}
KERNELS = {
    "flash_attn_interface": "flash_attn_func",
    "layers.rotary": "apply_rotary_emb",
    "ops.triton.layer_norm": "layer_norm_fn",
}
"""What it imports of flash_attn, though it calls them on GPUs alone."""


def build(question: Question):
    if question.layout not in SIZES:
        raise NotImplementedError(f"no {question.layout}")
    if question.max_norm or question.recomputes:
        raise NotImplementedError("no clipping and no recomputation: ask it --with nothing, or accumulate")
    cpu = question.device == "cpu"
    os.environ |= {"FLASH_ATTEN": str(int(not cpu)), "DEVICE": question.device, "DTYPE": "float32"}
    os.environ["CONTEXT_PARALLEL"] = str(int(question.layout == "context"))
    if cpu:
        leave_out_kernels()
        torch.cuda.synchronize = lambda _device=None: None  # its pipeline waits for a GPU behind each message
    import picotron.process_group_manager as groups
    from picotron.data_parallel.data_parallel import DataParallelBucket
    from picotron.model import Llama
    from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel, train_step_pipeline_1f1b
    from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel

    sizes = dict.fromkeys(SIZES.values(), 1) | {SIZES[question.layout]: question.world}
    if not hasattr(groups, "process_group_manager"):
        groups.setup_process_group_manager(**sizes)
    config = SimpleNamespace(**question.config.to_dict(), rope_theta=question.config.rope_parameters["rope_theta"])
    model = Llama(config)
    if question.layout == "tensor":
        model = apply_tensor_parallel(model)
    if question.layout == "pipeline":
        model = PipelineParallel(model, config)
    question.give_weights(model.to(question.device), NAMES)
    if question.layout in ("ddp", "context"):
        model = DataParallelBucket(model)
    optimizer = question.optimizer(model.parameters())
    shape = (ROWS * question.world, TOKENS, config.hidden_size)
    cut = slice(None)
    if question.layout == "context":
        cut = slice(question.rank * TOKENS // question.world, (question.rank + 1) * TOKENS // question.world)

    def step(parts) -> float:
        optimizer.zero_grad()
        if question.layout == "pipeline":
            loss = train_step_pipeline_1f1b(model, Rows(parts), shape, question.device, torch.float32)
        else:
            loss = 0.0
            for number, part in enumerate(parts):
                model.require_backward_grad_sync = number == len(parts) - 1
                share = mean(model(input_ids=part["tokens"][:, cut]), part["labels"][:, cut]) / len(parts)
                share.backward()
                loss += share.item()
        if question.layout != "tensor":
            total = torch.tensor(loss, device=question.device)
            dist.all_reduce(total)
            loss = total.item() / (1 if question.layout == "pipeline" else question.world)
        optimizer.step()
        if isinstance(model, DataParallelBucket):
            model.reset()
        return loss

    return step


class Rows:
    """The microbatches of a step, as its pipeline asks for them."""

    def __init__(self, parts) -> None:
        self.grad_acc_steps, self.parts = len(parts), iter(parts)

    def __next__(self) -> dict[str, torch.Tensor]:
        part = next(self.parts)
        return {"input_ids": part["tokens"], "target_ids": part["labels"], "position_ids": torch.arange(TOKENS)}


def leave_out_kernels() -> None:
    """Stand in for flash_attn while picotron is imported, where it is not installed."""
    try:
        import flash_attn  # noqa: F401
    except ModuleNotFoundError:
        paths = {f"flash_attn.{path}": name for path, name in KERNELS.items()}
        packages = {path.rpartition(".")[0] for path in paths} | {"flash_attn.ops"}
        sys.modules |= {path: ModuleType(path) for path in packages}
        sys.modules |= {path: SimpleNamespace(**{name: None}) for path, name in paths.items()}
        import picotron.model  # noqa: F401

        for path in packages | set(paths):
            del sys.modules[path]
