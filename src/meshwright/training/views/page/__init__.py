"""Show a run as one HTML page: curves, events, config and plan.

The page needs no network and trusts no file.
"""
