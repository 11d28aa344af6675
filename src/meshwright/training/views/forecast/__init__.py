"""Draw a forecast as one HTML page: candidates, mesh, memory over a step and the step of each pipeline rank.

The page needs no network, no script and no time stamp: the same answer gives the same bytes. Torch-free.
"""
