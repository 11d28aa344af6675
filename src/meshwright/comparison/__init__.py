"""What two computations are compared by: sketches of what modules compute, one measure of equality, findings with their places."""
