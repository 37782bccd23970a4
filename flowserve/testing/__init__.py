"""Tools for testing graphs: re-exports only. docs/testing-graphs.md describes their use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowserve.simulation.records import Arrival, Simulation
    from flowserve.testing.fakes import Faked, FakeModel
    from flowserve.testing.serve import Served, serving
    from flowserve.testing.simulation import Clients, simulate

# Imported on first use: a test that simulates needs no server.
_WHERE = {
    "Arrival": "flowserve.simulation.records",
    "Clients": "flowserve.testing.simulation",
    "FakeModel": "flowserve.testing.fakes",
    "Faked": "flowserve.testing.fakes",
    "Served": "flowserve.testing.serve",
    "Simulation": "flowserve.simulation.records",
    "serving": "flowserve.testing.serve",
    "simulate": "flowserve.testing.simulation",
}

__all__ = ["simulate", "Arrival", "Clients", "Simulation", "Faked", "FakeModel", "serving", "Served"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'flowserve.testing' has no attribute '{name}'")
