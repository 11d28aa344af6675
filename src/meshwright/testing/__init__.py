"""Tools for tests of code that trains on GPUs: a pretend GPU for machines without one."""
