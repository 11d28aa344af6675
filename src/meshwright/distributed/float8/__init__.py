"""float8 training applied."""
