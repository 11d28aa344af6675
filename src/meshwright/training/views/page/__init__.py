"""A run as one HTML page: its curves, what happened, its config and its plan. It needs no network and trusts no file. Torch-free."""
