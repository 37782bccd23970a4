"""Fixtures of the tests of models in processes: an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from flowserve.runtime.engine.engine import open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.processes import forkservers
from tests.support import forked
from tests.support.processes import ServedInProcesses


@pytest.fixture(autouse=True)
def unlimited_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the engine ends only when no decision is left, not after its time limit, even on a busy machine."""
    monkeypatch.setattr("flowserve.runtime.engine.engine.STEP_NS_MAX", 1 << 62)


@pytest.fixture(scope="module", autouse=True)
def quick_forkservers(request: pytest.FixtureRequest) -> Iterator[None]:
    """The forkservers of engines do not import their modules again, but in the tests of forkservers themselves."""
    with pytest.MonkeyPatch.context() as patch:
        if forked.IS_POSSIBLE and not request.module.__name__.endswith("test_children"):
            patch.setattr(forkservers, "start", forked.start_forkserver)
        yield


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[ServedInProcesses]:
    async with open_engine(EngineOptions()) as engine:
        yield ServedInProcesses(engine, tmp_path)
