"""`python -m vmmkv` is the command `vmmkv`."""

from .cli import main

main()
