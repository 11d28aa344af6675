"""Compare two computations: sketches of module outputs, one measure of equality, findings with their places."""
