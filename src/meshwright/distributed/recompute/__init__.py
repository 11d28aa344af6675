"""Apply activation checkpointing, activation offload and per-block compilation."""
