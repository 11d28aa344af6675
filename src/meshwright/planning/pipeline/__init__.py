"""Pipeline parallelism, decided: stages, schedules, messages."""
