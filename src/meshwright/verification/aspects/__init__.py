"""Compare more than tensors: routes, random numbers, rows, float8 products."""
