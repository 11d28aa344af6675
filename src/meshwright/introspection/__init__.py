"""Facts about any ``nn.Module``, on meta or not: parameters, ties, buffers, repeated blocks. Nothing here changes a model."""
