"""Provide the public calls of other systems' users, each of which ends in ``order.apply``."""
