"""Tell what parameters are for, from the modules that hold them."""
