"""A config whose forecasts tests ask for: our 8B, with a tokenizer that needs no files."""

CONFIG = """
[model]
size = "8B"
[data]
tokenizer = "ids:128256:128001"
seq_len = 4096
[batch]
global_batch = 64
"""
