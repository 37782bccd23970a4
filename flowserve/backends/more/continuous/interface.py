"""The interface that an engine with continuous batching implements, so that backend.py can make a backend of it.

A `ContinuousLibrary` is known without importing the engine's package: `start` imports it, in the process that runs the
engine. An object of such a class is pickled into worker processes: it has no state of its own. A `ContinuousEngine` is
used on the thread of its asyncio loop, except for `read`. The engine decides the contents of requests and responses
(`ContinuousCall`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from flowserve.backends.library.interface import ModelSource
from flowserve.config.types import InstanceGroup
from flowserve.values import Array, Request, TensorSpec


class ContinuousCall(Protocol):
    """One request of an engine. `seats`: the number of sequences that it occupies there, at least 1. `is_streaming`:
    whether responses are sent as soon as there is output; else one at the end.
    """

    seats: int
    is_streaming: bool

    def add(self, output: Any) -> bool:
        """Take one item of `ContinuousEngine.generate`. Returns whether it is the last."""

    def response(self) -> Mapping[str, Array]:
        """The outputs by name, with all items that were added since the last response."""


C = TypeVar("C", bound=ContinuousCall)


class ContinuousEngine(Protocol[C]):
    """A running engine. `seats`: the number of sequences that it computes at the same time."""

    seats: int

    def read(self, inputs: Mapping[str, Array], request: Request) -> C:
        """The call of a request; `inputs` are the given ones. On any thread. Raises Invalid."""

    def generate(self, call: C) -> AsyncGenerator[Any, None]:
        """Compute a call, item by item. Raises ValueError for a call that the engine refuses, anything else for a
        failure. May be cancelled, or closed before its end: then the call is aborted.
        """

    async def abort(self, call: C) -> None:
        """Abort a call. No effect if the engine does not have it."""

    def has_ended(self) -> bool:
        """Whether the engine is broken, so that only a new one can compute."""

    def close(self) -> None:
        """Free all resources. Called once."""


class ContinuousLibrary(Protocol):
    """An engine's package. `name`: the backend's name; `title`: the package's, in messages. `requirement`: what to
    install for it; `modules`: one of them is needed. `inputs` and `outputs`: the tensors of every model. `ignored`:
    parameters of Triton without effect here, each with the reason.
    """

    name: str
    title: str
    requirement: str
    modules: Sequence[str]
    default_filename: str
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    ignored: Mapping[str, str]

    def check(self, source: ModelSource) -> None:
        """Read the model's file without the package. Raises Problems."""

    async def start(self, source: ModelSource, group: InstanceGroup, *, owns_process: bool) -> ContinuousEngine[Any]:
        """Start an engine for an instance of this group. `owns_process`: nothing else runs in this process. Raises
        anything.
        """
