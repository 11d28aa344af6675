"""A layout against one process: losses, gradients, parameters, and where they first differ."""
