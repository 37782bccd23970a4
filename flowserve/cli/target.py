"""What "module:graph" means where a repository could be named: a graph that is written in Python.

Decided here: that modules are looked for in the current folder too, and what is said where there is no such graph.
Graphs are known by what they can do, so that their room may use this one.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeGuard

from flowserve.config.suggest import did_you_mean
from flowserve.errors import FlowserveError, Invalid, NotFound

if TYPE_CHECKING:
    from flowserve.repository.override import PrivateFolder
    from flowserve.runtime.reading import Reading


class PythonGraph(Protocol):
    """What can be read, or made a repository of files for this process; flowserve.Graph."""

    name: str

    def reading(self) -> Reading: ...

    def write_private(self) -> PrivateFolder: ...


def is_target(path: Path) -> bool:
    """Whether this is no folder but "module:graph"."""
    return ":" in str(path) and not path.exists()


def find_graph(word: str) -> PythonGraph:
    """The graph of "module:graph". Blocks while the module is imported. Raises FlowserveError; a module's own failure
    becomes one.
    """
    module, _, attribute = word.partition(":")
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


def _is_graph(value: object) -> TypeGuard[PythonGraph]:
    # Asked of the class: a module may hold objects that have any attribute one asks for.
    return callable(getattr(type(value), "write_private", None))
