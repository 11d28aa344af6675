"""Offer the calls of other systems' users.

Each ends in ``lay_out.lay_out_module``, which ends in ``order.apply``.
"""
