"""Order, simulate, draw, read and write pipeline schedules as data, without a process group."""
