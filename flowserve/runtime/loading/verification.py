"""Finds, without loading a model, the problems that loading it would report.

Decides what can be checked without running code: that each version's file matches the configuration, and that the files
next to it (warm-up samples, initial states of sequences) hold enough data. A backend decides what it checks and what it
needs for that; a backend without checks accepts every file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from flowserve.backends import registry
from flowserve.backends.base import ModelFiles, Verifies
from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, Problem, Problems
from flowserve.repository.read import ReadModel, refusals


def verify(read: ReadModel) -> None:
    """Blocks while files are read. Raises Problems with all problems."""
    if read.config.is_ensemble:
        return
    problems: list[Problem] = []
    with _noting(problems, read.config, "model_warmup"):
        _read_samples(read)
    with _noting(problems, read.config, "sequence_batching"):
        inner = _inner(read)
        backend = registry.find(inner.backend)
        if isinstance(backend, Verifies):
            for version in read.versions:
                try:
                    backend.verify(inner, ModelFiles(read.folder.repository, read.folder.path, version))
                except FlowserveError as error:
                    problems += refusals(error, read.folder, version, inner, registry.default_files())
    if problems:
        raise Problems([*dict.fromkeys(problems)])  # versions often have the same problem


@contextmanager
def _noting(problems: list[Problem], config: ModelConfig, path: str) -> Iterator[None]:
    """Collect problems; `path` is the field of a failure that names none."""
    try:
        yield
    except FlowserveError as error:
        found = error.problems if isinstance(error, Problems) else (Problem(str(error)),)
        problems += [one if one.place else replace(one, place=config.source.place(path)) for one in found]


def _read_samples(read: ReadModel) -> None:
    if read.config.warmup:
        from flowserve.runtime.loading.warmup import read_samples  # imports the engine; few models have samples

        read_samples(read.config, read.folder.path)


def _inner(read: ReadModel) -> ModelConfig:
    """The configuration that the backend receives."""
    if read.config.sequence is None:
        return read.config
    from flowserve.runtime.workers.state import SequenceAdapter

    return SequenceAdapter(read.config, read.folder.path).inner
