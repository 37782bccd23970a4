"""Fixtures for pytest, enabled by `pytest_plugins = ["flowserve.testing.plugin"]` in a conftest.py.

Decides that engines and servers which a test started are closed with the test. The plugin is not registered as an entry
point, so that installing flowserve does not change other projects' pytest runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from flowserve.authoring.engine import Engine, EngineSource
from flowserve.testing.serve import Served, serving


@pytest.fixture
def flowserve_engine() -> Iterator[Callable[..., Engine]]:
    """`flowserve_engine(source, ...)`: an open engine in this process; arguments as those of `flowserve.Engine`."""
    with ExitStack() as stack:

        def start(*sources: EngineSource, **options: Any) -> Engine:
            return stack.enter_context(Engine(*sources, **options))

        yield start


@pytest.fixture
def flowserve_server() -> Iterator[Callable[..., Served]]:
    """`flowserve_server(repository, "--option", ...)`: `flowserve run` in a process of its own, on a free port. A
    repository's folder, or "module:graph".
    """
    with ExitStack() as stack:

        def start(repository: str | Path, *options: str) -> Served:
            return stack.enter_context(serving(Path(repository), *options))

        yield start
