"""The examples in the documentation of backends work as described."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowserve.backends import registry
from flowserve.backends.base import Backend, ModelFiles, Results, Work
from flowserve.backends.library.backend import LibraryBackend
from flowserve.backends.library.interface import Library
from flowserve.config.types import InstanceGroup, ModelConfig
from flowserve.errors import Invalid
from flowserve.memory.assemble import gather
from flowserve.memory.column import scatter
from flowserve.memory.pool import HOST
from flowserve.repository.layout import ModelFolder, find_models
from flowserve.repository.read import examine
from tests.support.backends import Opened, Repository, config_of, spec, values

Open = Callable[..., Opened]


def read(repository: Repository) -> dict[str, ModelConfig]:
    """All models of the repository, completed by their files as in the server."""

    def complete(config: ModelConfig, folder: ModelFolder, version: int) -> Any:
        return registry.find(config.backend).complete(config, ModelFiles(folder.repository, folder.path, version))

    folders = find_models([repository.path]).folders
    return {folder.name: examine(folder, registry.default_files(), complete).valid().config for folder in folders}


@pytest.fixture
def models(repository: Repository, root: Path, opened: Open) -> dict[str, Opened]:
    """The models of docs/python-models.md: each code block follows the name of its file."""
    page = (root / "docs/python-models.md").read_text()
    files = re.findall(r"^`([\w/.]+)`\n\n```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    for path, text in files:
        name, _, file = path.partition("/")
        repository.write(name, file, text)
    return {name: opened(config) for name, config in read(repository).items()}


def text(*words: str) -> np.ndarray:
    return np.array([[word.encode()] for word in words], object)


def test_the_shout_example_shouts_and_refuses_only_the_empty_text(models: dict[str, Opened]) -> None:
    results = models["shout"].run({"TEXT": text("hello")}, {"TEXT": text("")}, {"TEXT": text("a", "b")})
    assert values(results) == [[[b"HELLO!"]], None, [[b"A!"], [b"B!"]]]
    assert [(m, type(error), str(error)) for m, error in results.errors.items()] == [(1, Invalid, "nothing to shout")]


def test_the_count_example_needs_no_configuration(models: dict[str, Opened]) -> None:
    config = models["count"].config
    assert config.max_batch_size == 16
    assert config.dynamic_batching is not None
    assert values(models["count"].run({"VALUES": np.zeros((2, 3), np.float32)})) == [[[3], [3]]]


def test_the_example_of_a_third_party_backend_serves(
    repository: Repository, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (root / "docs/backends.md").read_text()
    namespace: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0], namespace)
    backend: Backend = namespace["ScaleBackend"]()
    repository.write("m", "1/scale.txt", "2.5")
    config = config_of("scale", inputs=[spec("x")], outputs=[spec("y")], max_batch_size=4)
    model = backend.load(config, repository.files(), {})
    served = Opened(config, model, model.instance("m_0", InstanceGroup("m", "KIND_CPU")))
    assert values(served.run({"x": np.ones((1, 4), np.float32)})) == [[[2.5] * 4]]


def test_the_example_of_a_library_has_all_that_the_template_reads(root: Path) -> None:
    """With JAX itself it runs in test_real_libraries.py."""
    page = (root / "docs/write-a-backend.md").read_text()
    namespace: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0], namespace)
    backend = namespace["make_backend"]()
    assert isinstance(backend, LibraryBackend)
    wanted = {*Library.__annotations__, *(name for name in vars(Library) if not name.startswith("_"))}
    assert {name for name in vars(namespace["Jax"]) if not name.startswith("_")} == wanted


def test_a_backend_written_for_the_first_interface_serves(repository: Repository) -> None:
    class Instance:
        def open(self) -> None: ...

        def run(self, work: Work, clock: Any) -> Results:
            x, copied = gather(work.inputs[0], HOST)
            return Results([scatter(2 * x, work.rows)], gathered_ns=clock(), computed_ns=clock(), copied=[copied])

        def close(self) -> None: ...

    config = config_of("scale", inputs=[spec("x")], outputs=[spec("y")], max_batch_size=4)
    served = Opened(config, None, Instance())  # type: ignore[arg-type]
    assert values(served.run({"x": np.ones((1, 4), np.float32)})) == [[[2] * 4]]


def test_the_table_of_backends_agrees_with_the_registry(root: Path) -> None:
    rows = re.findall(r"^\| `(\w+)`.*\| `([\w.]+)`", (root / "docs/backends.md").read_text(), re.MULTILINE)
    assert dict(rows).items() >= registry.default_files().items()
