"""Read facts off any ``nn.Module``, on meta or not: parameters, ties, buffers, repeated blocks; change nothing."""
