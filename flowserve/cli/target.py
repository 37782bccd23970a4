"""What "module:graph" means where a repository could be named: a graph that is written in Python.

Decided here: that modules are looked for in the current folder too, and what is said where there is no such graph.
Graphs are known by what they can do, so that their room may use this one.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Protocol, TypeGuard

from flowserve.config.suggest import did_you_mean
from flowserve.errors import FlowserveError, Invalid, NotFound
from flowserve.repository.override import PrivateFolder


class Writable(Protocol):
    """What can be made a repository of files for this process; flowserve.Graph."""

    name: str

    def write_private(self) -> PrivateFolder: ...


class Target:
    """The graph of "module:graph" as a repository at `path`, which exists as long as this object."""

    def __init__(self, word: str) -> None:
        """Blocks while the module is imported. Raises FlowserveError; a module's own failure becomes one."""
        module, _, attribute = word.partition(":")
        self._graph = _find(module, attribute)
        self._private = self._graph.write_private()
        self.path, self.name = self._private.path, self._graph.name


def _find(module: str, attribute: str) -> Writable:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        raise NotFound(f"there is no folder '{module}:{attribute}', and no module '{error.name}' to import") from error
    except FlowserveError:  # what is wrong with what it declares, with its lines
        raise
    except Exception as error:
        raise Invalid(f"module '{module}' cannot be imported: {type(error).__name__}: {error}") from error
    graphs = {name: value for name, value in vars(found).items() if _is_graph(value)}
    if attribute not in graphs:
        hint = did_you_mean(attribute, graphs) or f"it has {', '.join(graphs) or 'none'}"
        raise NotFound(f"module '{module}' has no graph '{attribute}' ({hint})")
    return graphs[attribute]


def _is_graph(value: object) -> TypeGuard[Writable]:
    # Asked of the class: a module may hold objects that have any attribute one asks for.
    return callable(getattr(type(value), "write_private", None))
