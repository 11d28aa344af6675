"""Check on a small copy the assumptions of a layout about a model: rows add up, a forward changes no state."""
