"""`--sim-seeds N`: the number of simulated servers."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sim-seeds", type=int, default=300, help="how many simulated servers to run (default: 300)")
