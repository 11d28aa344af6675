"""Check on a small copy what a layout takes for granted of a model: rows that add up, a forward that changes no state."""
