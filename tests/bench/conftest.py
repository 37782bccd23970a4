"""Lets these tests import `bench`, which is in the source tree and not in the installed package."""

from __future__ import annotations

import sys
from pathlib import Path

# `python -m pytest` has the source tree on its path, the plain `pytest` of tox has not.
ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
