"""Account for the memory of a step, measured or estimated by a dry run."""
