"""Data parallelism, decided: ZeRO stages and the units whose parameters travel together."""
