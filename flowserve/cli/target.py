"""The argument "module:graph" in place of a repository: a graph written in Python.

Decides that modules are also searched in the current folder, and the messages for a missing graph. Does not import the
Graph class: graphs are recognised by their methods, so that `authoring` can import this package. Callers: `main`,
`check`, `graph`, `authoring`.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeGuard

from flowserve.config.suggest import did_you_mean
from flowserve.errors import FlowserveError, Invalid, NotFound, Place, Problem, Problems

if TYPE_CHECKING:
    from flowserve.repository.override import PrivateFolder
    from flowserve.runtime.loading.reading import Reading


class PythonGraph(Protocol):
    """The methods of flowserve.Graph that commands use: read it, or write it as a repository for this process."""

    name: str

    def reading(self) -> Reading: ...

    def write_private(self) -> PrivateFolder: ...


def is_target(path: Path) -> bool:
    """Whether this is "module:graph" and not a folder. Raises Invalid for a module without a graph name."""
    if ":" in str(path):
        return not os.path.exists(path)
    if os.path.isfile(file := path if path.suffix == ".py" else Path(f"{path}.py")) and not os.path.isdir(path):
        raise Invalid(f"'{path}' is a module, and no folder of models; name a graph in it: {_spelling(file)}")
    return False


def refuse_among(repositories: Sequence[Path]) -> None:
    """Raises FlowserveError if one of several repositories is a graph in Python, which cannot be combined with others:
    the graph's own error, if it has one, else Invalid. Blocks while its module is imported.
    """
    for path in repositories if len(repositories) > 1 else ():
        if is_target(path):
            find_graph(str(path))
            raise Invalid(
                f"'{path}' is a graph in Python, and stands alone: only folders can be named together; its save() "
                "makes a folder of it (flowserve.Engine takes several graphs and folders)"
            )


def find_graph(word: str) -> PythonGraph:
    """The graph of "module:graph". Blocks while the module is imported. Raises FlowserveError, also for an exception of
    the module itself.
    """
    module, _, attribute = word.partition(":")
    if attribute.startswith("/"):  # Path has reduced two slashes to one: s3://bucket/models
        raise NotFound(
            f"'{module}:/{attribute}' is no folder here; `flowserve check` and `flowserve run` read repositories in "
            "stores, into folders below --repository-cache"
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    if "/" in module or module.endswith(".py"):
        wanted = _spelling(Path(module), attribute)
        raise Invalid(f"there is no folder '{word}'; a graph in Python is named as its module is imported: {wanted}")
    try:
        found = import_module(module)
    except FlowserveError:  # an error in a declaration, with its lines
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            hint = did_you_mean(module, [file.stem for file in Path().glob("*.py")], "'")
            hint = hint or "modules are searched in the current folder, and among the installed ones"
            raise NotFound(f"there is no folder '{word}', and no module '{error.name}' to import ({hint})") from error
        text = f"module '{module}' cannot be imported: {type(error).__name__}: {error}"
        is_missing = isinstance(error, ModuleNotFoundError)
        hint = (
            f"install it in the Python environment at {sys.prefix}, or write it beside the module" if is_missing else ""
        )
        raise Problems([Problem(text, _culprit(error), hint=hint)]) from error
    graphs = {name: value for name, value in vars(found).items() if is_graph(value)}
    if attribute not in graphs:
        if not graphs and hasattr(found, attribute):
            kind = type(getattr(found, attribute)).__name__
            hint = f"'{attribute}' is of type {kind}; flowserve.Graph makes a graph"
        else:
            hint = did_you_mean(attribute, graphs) or f"it has {', '.join(graphs) or 'none'}"
        raise NotFound(f"module '{module}' has no graph '{attribute}' ({hint})")
    return graphs[attribute]


def _spelling(file: Path, attribute: str = "") -> str:
    module, folder = file.name.removesuffix(".py"), str(file.parent)
    return f"'{module}:{attribute or 'NAME'}'" + ("" if folder == "." else f", in the folder '{folder}'")


def _culprit(error: Exception) -> Place | None:
    """The innermost line of the user's own code; None if none is in or below the current folder."""
    here = Path.cwd()
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_relative_to(here):
        return Place(Path(error.filename).relative_to(here).as_posix(), error.lineno or 1, error.offset or 1)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_relative_to(here) and "site-packages" not in file.parts:
            return Place(file.relative_to(here).as_posix(), frame.lineno or 1, (frame.colno or 0) + 1)
    return None


def is_graph(value: object) -> TypeGuard[PythonGraph]:
    # Checked on the class: a module may contain objects whose instances have every attribute.
    return callable(getattr(type(value), "write_private", None))
