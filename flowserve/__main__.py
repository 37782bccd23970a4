"""`python -m flowserve`: the same door as the `flowserve` command. Nothing is decided here."""

from __future__ import annotations

import sys

from flowserve.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
