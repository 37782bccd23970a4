"""Entry point of the `flowserve` command and of `python -m flowserve`."""

from __future__ import annotations

import sys

from flowserve.cli.interrupts import silent_interrupts


def main() -> int:
    """Import and run `flowserve.cli.main.main`."""
    with silent_interrupts():
        from flowserve.cli.main import main
    return main()


if __name__ == "__main__":
    sys.exit(main())
