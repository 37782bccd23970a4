"""Fixtures: a model repository in a temporary folder, and instances that are closed with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowserve.config.types import ModelConfig
from tests.support.backends import Opened, Repository, open_instance


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


@pytest.fixture
def opened(repository: Repository) -> Iterator[Callable[..., Opened]]:
    """`opened(config)` loads the model and opens an instance."""
    started: list[Opened] = []

    def start(config: ModelConfig, instance: str = "", **options: str) -> Opened:
        started.append(open_instance(repository, config, instance, **options))
        return started[-1]

    yield start
    for each in started:
        each.instance.close()
        each.model.close()
