"""Runs batches on an open file of a library.

Decides that one call of the library computes a whole batch, that a batch without rows is not computed at all (not every
library takes one), and the errors of a library that raises. Callers: backend.py makes the instances, the runtime runs
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flowserve.backends.base import ClockNs, Results, Work
from flowserve.backends.library.interface import Library, Program
from flowserve.backends.library.run import BatchRun, Execute, Feed
from flowserve.backends.library.tensors import ModelTensors
from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, ModelFailed, model_raised, told


class LibraryInstance:
    """`open_program` opens the file, or returns it if another instance of the process has opened it, with the
    configuration that its tensors follow.
    """

    def __init__(self, library: Library, open_program: Callable[[], tuple[ModelConfig, Program]]) -> None:
        self._library = library
        self._open_program = open_program
        self._session: Execute
        self._model: ModelTensors
        self._run: BatchRun

    def open(self) -> None:
        config, program = self._open_program()
        self._model = ModelTensors(config, program.signature, strings_are_text=self._library.strings_are_text)
        self._session = program.session()
        self._run = BatchRun(self._model, self._execute if self._model.is_batching else self._session, self._failed)

    def run(self, work: Work, clock: ClockNs) -> Results:
        if self._model.ragged is not None:
            return self._model.ragged.run(self._run.run, work, clock)
        return self._run.run(work, clock)

    def close(self) -> None:
        """The file is closed with its last reference."""
        del self._run, self._session

    def _execute(self, names: list[str], feed: Feed) -> Sequence[Any]:
        if len(next(iter(feed.values()), ((),))):
            return self._session(names, feed)
        specs = {spec.name: spec for spec in self._model.outputs}
        made = []
        for name in names:
            spec = specs[name]
            dims = spec.dims if spec.reshape is None else spec.reshape
            made.append(np.empty((0, *(max(dim, 0) for dim in dims)), spec.dtype.numpy))
        return made

    def _failed(self, error: Exception, members: int) -> ModelFailed:
        where, text = f"model '{self._model.name}' failed", str(error)
        if not isinstance(error, FlowserveError):
            where, text = f"{where}: {self._library.title}", self._library.explain(error)
        if members > 1:  # only the log has the text
            return model_raised(f"{where}: {told(error, text, members)}", error)
        return ModelFailed(f"{where}: {text}")
