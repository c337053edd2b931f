"""The command `vmmkv`, which needs the extra `vmmkv[cli]`."""

import sys


def main() -> None:
    """Runs the command line; where the extra is not installed, says so and exits with 1."""
    try:
        from .app import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f'vmmkv: {error.name} is not installed; run: pip install "vmmkv[cli]"')
    run()
