"""What loading a model would refuse, found without loading it: for those who only look.

Decided here: what can be known without running anything: whether every version's file is what the configuration says,
and whether the files beside it (warm-up samples, first states of sequences) hold enough. What a backend can tell is its
own affair, and so is what it needs for that; one that says nothing is taken to be right.
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
    """Blocks while files are read. Raises Problems with all that is wrong."""
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
        raise Problems([*dict.fromkeys(problems)])  # versions are often wrong alike


@contextmanager
def _noting(problems: list[Problem], config: ModelConfig, path: str) -> Iterator[None]:
    """`path` is the field that is meant where a failure does not say."""
    try:
        yield
    except FlowserveError as error:
        found = error.problems if isinstance(error, Problems) else (Problem(str(error)),)
        problems += [one if one.place else replace(one, place=config.source.place(path)) for one in found]


def _read_samples(read: ReadModel) -> None:
    if read.config.warmup:
        from flowserve.runtime.warmup import read_samples  # which knows engines; few models have samples

        read_samples(read.config, read.folder.path)


def _inner(read: ReadModel) -> ModelConfig:
    """The configuration that the backend is loaded with."""
    if read.config.sequence is None:
        return read.config
    from flowserve.runtime.sequence_ports import SequencePorts

    return SequencePorts(read.config, read.folder.path).inner
