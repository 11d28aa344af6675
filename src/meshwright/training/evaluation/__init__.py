"""Evaluate a trained model on text, on any layout."""
