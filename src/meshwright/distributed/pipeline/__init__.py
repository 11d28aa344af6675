"""Apply pipeline parallelism: cut a model into stages, and work in a schedule's order."""
