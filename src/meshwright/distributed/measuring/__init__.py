"""Measure the speeds of this machine: products, attention, memory, the host, messages between its ranks."""
