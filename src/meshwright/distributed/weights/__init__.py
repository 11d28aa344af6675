"""Make weights, place them on ranks, and read whole tensors off them."""
