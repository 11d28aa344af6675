"""Check on a small copy what a layout assumes of a model: rows that add up, a forward that changes no state."""
