"""The `flowserve` command, which `python -m flowserve` is too. Nothing is decided here."""

from __future__ import annotations

import sys

from flowserve.cli.interrupts import silent_interrupts


def main() -> int:
    """As `flowserve.cli.main.main`, which is imported first."""
    with silent_interrupts():
        from flowserve.cli.main import main
    return main()


if __name__ == "__main__":
    sys.exit(main())
