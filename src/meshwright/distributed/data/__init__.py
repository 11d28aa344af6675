"""Apply data parallelism: DDP, FSDP2, HSDP, and gradient accumulation."""
