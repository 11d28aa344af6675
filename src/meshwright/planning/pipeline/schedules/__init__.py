"""Pipeline schedules as data: which rank does what, in which order; simulated, drawn, read and written without a process group."""
