"""Describe devices, links and clusters by the data sheets of public cards."""
