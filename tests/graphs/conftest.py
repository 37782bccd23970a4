"""What the tests of the examples share: a client of the served examples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tritonclient.http as triton

from flowserve.testing.serve import Served


@pytest.fixture(scope="session")
def client(served_graphs: Served) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(served_graphs.address, concurrency=8, network_timeout=120) as made:
        yield made
