"""Describe devices, links and clusters: data sheets of public cards, and profiles measured on the spot."""
