"""Temporary stub."""


def demo() -> None:
    """Stub."""
