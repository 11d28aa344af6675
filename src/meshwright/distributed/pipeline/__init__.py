"""Apply pipeline parallelism: cut a model into stages, and run them in a schedule's order."""
