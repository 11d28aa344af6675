"""Apply float8 training."""
