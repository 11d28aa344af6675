"""Test on a small copy what layouts assume: rows add up, and a forward changes no state."""
