"""Addresses: reserved ranges, which frame lies where, and changes of that."""
