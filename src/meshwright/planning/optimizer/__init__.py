"""The optimizer's state, decided: how many bits, and where."""
