"""float8 training, decided."""
