"""What is compared besides tensors: routes, random numbers, rows, float8 products."""
