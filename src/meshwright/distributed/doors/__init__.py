"""Public calls of other systems' users. Each ends in ``order.apply``."""
