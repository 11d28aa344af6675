"""Run one optimizer step: its batch, its loss, and the parts of the model that it needs."""
