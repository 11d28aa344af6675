"""Provide NeMo AutoModel's path and names for laying Hugging Face models onto a mesh (from ``doors``)."""

from .doors.huggingface import (
    HAVE_NVFSDP,
    fsdp2_strategy_parallelize,
    get_hf_tp_shard_plan,
    import_classes_from_paths,
    nvfsdp_strategy_parallelize,
    to_cpu,
    translate_to_torch_parallel_style,
)

__all__ = [
    "HAVE_NVFSDP",
    "fsdp2_strategy_parallelize",
    "get_hf_tp_shard_plan",
    "import_classes_from_paths",
    "nvfsdp_strategy_parallelize",
    "to_cpu",
    "translate_to_torch_parallel_style",
]
