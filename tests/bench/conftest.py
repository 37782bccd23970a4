"""Lets these tests import `bench`, which is no part of the installed package: it stands beside it in the source tree."""

from __future__ import annotations

import sys
from pathlib import Path

# `python -m pytest` has the source tree on its path, the plain `pytest` of tox has not.
ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
