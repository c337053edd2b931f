"""Reuse of prefixes: which pages hold the K and V of which token ids, and which of them are kept how long."""
