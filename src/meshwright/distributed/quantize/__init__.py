"""Hold frozen weights in 4 bits, and compute with them."""
