"""Read facts off any ``nn.Module``, on meta or not, without changing it."""
