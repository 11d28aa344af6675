"""Compute attention of the keys that a rank has: in blocks, or by fused kernels on runs of queries."""
