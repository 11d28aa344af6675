"""Pipeline parallelism applied: a model cut into stages, and the work of a step done in a schedule's order."""
