"""Expert parallelism applied, and the routing of a step."""
