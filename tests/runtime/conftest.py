"""What the tests of models in processes share: an engine to put them into."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flowserve.runtime.engine.opening import open_engine
from flowserve.runtime.engine.options import EngineOptions
from tests.support.processes import ServedInProcesses


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[ServedInProcesses]:
    async with open_engine(EngineOptions()) as engine:
        yield ServedInProcesses(engine, tmp_path)
