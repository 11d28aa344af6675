"""Apply expert parallelism, and route the tokens of a step."""
