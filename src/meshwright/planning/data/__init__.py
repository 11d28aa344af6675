"""Decide data parallelism: ZeRO stages and the units whose parameters travel together."""
