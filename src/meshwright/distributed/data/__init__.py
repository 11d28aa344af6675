"""Data parallelism applied: DDP, FSDP2, HSDP, and gradient accumulation."""
