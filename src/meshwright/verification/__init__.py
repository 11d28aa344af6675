"""Compare a layout with one process: losses, gradients, parameters, and where they first differ."""
