"""Fixtures: a client of the served examples, and the held-out digits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.http as triton

from flowserve.testing.serve import Served


@pytest.fixture(scope="session")
def client(served_graphs: Served) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(served_graphs.address, concurrency=8, network_timeout=120) as made:
        yield made


@pytest.fixture(scope="session")
def held_out_digits(root: Path) -> list[dict[str, Any]]:
    examples: list[dict[str, Any]] = json.loads((root / "graphs/digit/held_out.json").read_text())
    return examples
