"""The model whose code a thread executes.

Decides which facts of that model pb_utils knows (its name, its folders, its connection to the server) and when, which
of its modules are removed from `sys.modules` afterwards, and how the classes and constants of pb_utils show themselves.
Log messages, imports and calls of other models read it. It does not import models (source.py) and does not talk to the
server (`BlsClient` in base.py).

Callers: the python backend enters a `ModelScope` around every call into a model; the modules of pb_utils read `active`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeVar

from flowserve.backends.base import BlsClient

# The Python files of a model by path, read once when it was loaded and sent to each process that runs it.
Code = Mapping[str, bytes]
NO_CODE: Final[Code] = {}


_COMPILED: Final = "c_python_backend_utils"  # Triton's compiled module, in which its classes are
_K = TypeVar("_K", bound=type)


def shown_as(name: str) -> Callable[[_K], _K]:
    """The class has Triton's name for it, in `repr`, in errors, and wherever a model reads it."""

    def renamed(kind: _K) -> _K:
        kind.__module__ = _COMPILED
        kind.__qualname__ = name
        kind.__name__ = name.rpartition(".")[2]
        return kind

    return renamed


@shown_as("TritonModelException")
class TritonModelException(Exception):
    """Raised by Triton inside models; models may raise it themselves."""


class Constant(Enum):
    """Base of Triton's enumerations. Their members are equal to their numbers without being such, as those of pybind11
    are: JSON has no form of them.
    """

    def __int__(self) -> int:
        return int(self.value)

    __index__ = __int__

    def __eq__(self, other: object) -> bool:
        return int(self) == (int(other) if isinstance(other, Constant) else other)

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return f"<{self}: {self.value}>"

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


@dataclass(frozen=True, slots=True, eq=False)
class ModelContext:
    """One model as its code sees it: its name; the folders that its imports search; its files as they were when it was
    loaded; its connection to the server, if it has one; and whether it may call other models now.
    """

    model: str
    folders: tuple[str, ...]
    code: Code = field(default_factory=dict)
    caller: BlsClient | None = None
    may_call: bool = False


class _Active(threading.local):
    """The model whose code this thread executes. None on threads that a model has started, unless the process is that
    model's (`own_process`).
    """

    context: ModelContext | None = None
    owns_process = False

    def __init__(self) -> None:
        self.siblings: list[str] = []  # modules imported from beside the model, to be removed from sys.modules

    @property
    def model(self) -> str:
        """The model's name, or ""."""
        return "" if self.context is None else self.context.model


active = _Active()


def own_process(context: ModelContext) -> None:
    """This process runs one model only: all its threads execute its code, and modules that it imports stay imported. So
    do processes that the model forks: one that it has forked in `initialize` may call other models, as it does not
    return from there.
    """
    _Active.context = context
    _Active.owns_process = True
    os.register_at_fork(after_in_child=lambda: active.__dict__.pop("context", None))


class ModelScope:
    """Context manager around calls into a model: `active` is this model. May be entered repeatedly."""

    __slots__ = ("_before", "_context")

    def __init__(self, context: ModelContext) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._before = active.context
        active.context = self._context

    def __exit__(self, *_: object) -> None:
        active.context = self._before
        if active.siblings:
            names = tuple(active.siblings)
            active.siblings.clear()
            for name in list(sys.modules):
                if name.partition(".")[0] in names:
                    sys.modules.pop(name, None)


def caller_for(purpose: str) -> BlsClient:
    """The connection of this thread's model to the server. Raises TritonModelException, naming `purpose`, if there is
    none.
    """
    context = active.context
    if context is None or context.caller is None:
        raise TritonModelException(
            f"{purpose}: this is possible in initialize, execute and finalize, on the model's own thread, and, in a "
            "model with a process of its own, on threads that it has started"
        )
    return context.caller
