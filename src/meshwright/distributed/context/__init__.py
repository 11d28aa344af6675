"""Apply context parallelism: rows cut over ranks, and attention over whole rows."""
