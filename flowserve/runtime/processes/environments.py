"""Python environments of models: how one is created, which models share it, and when it is removed.

Decides that an environment is unpacked and started once for all models that use it in its present state, and is removed
with the last of them; and that its Python is started activated, as on Triton. `repository/read.py` finds a
model's environment, `backends/worker/unpack.py` unpacks an archive.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from flowserve.backends.base import Remote
from flowserve.backends.worker import unpack
from flowserve.backends.worker.messages import RUN_TASK
from flowserve.config.parameters import ENVIRONMENT
from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, Invalid, Unavailable
from flowserve.repository.read import environment_of, python_in, unusable
from flowserve.runtime.processes.children import Children, SpawnChild, task_result
from flowserve.runtime.processes.forkservers import Interpreter
from flowserve.temporary import UNPACKED, claim, give_up
from flowserve.values import DType

log = logging.getLogger("flowserve.load")

# A shell, since activation runs scripts that set variables. The environment's programs come first even if its script
# has the path from before it was moved; its libraries come first as on Triton, for its Python only. The script must not
# see these arguments as its own, and may change them.
_ACTIVATE: Final = """
flowserve_arguments=("$@")
set --
. "$0"
set -- "${flowserve_arguments[@]}"
[ "${PATH%%:*}" = "$1" ] || PATH="$1:$PATH"
LD_LIBRARY_PATH="$2${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export PATH LD_LIBRARY_PATH
shift 2
exec "$@"
"""
# A setting of the server's own Python, invalid for any other.
_NOT_ITS: Final[Mapping[str, None]] = {"PYTHONHOME": None}

# The path and state of an environment: a change of either makes it another environment.
Key = tuple[Any, ...]


class Environment:
    """A started environment; removed when this object is freed. `spawn` starts a process in it. `facts`: the properties
    that its Python reported.
    """

    def __init__(self, spawn: SpawnChild, facts: Mapping[str, Any], end: Callable[[], object]) -> None:
        self.spawn = spawn
        self.facts = facts
        self.end = weakref.finalize(self, _in_a_thread, end)


class Environments:
    """The environments of a server. On any thread; `enter` blocks."""

    def __init__(self, children: Children) -> None:
        self._children = children
        self._changed = threading.Condition()
        self._opening: set[Key] = set()  # being opened, each by one thread; the others wait for it
        self._known: weakref.WeakValueDictionary[Key, Environment] = weakref.WeakValueDictionary()
        self._coming: dict[str, Callable[[str], object]] = {}  # by model: aborts the opening in progress, with a reason

    def enter(self, config: ModelConfig, folder: Path) -> Environment | None:
        """The environment for the model in `folder`, in its present state; None for the server's own. Raises Problems
        if the model cannot run there.
        """
        path = environment_of(config, folder)
        if path is None:
            return None
        try:
            key = _key_of(path)
            with self._exclusive(key, config.name):
                found = self._known.get(key)
                if found is None:
                    found = self._known[key] = self._open(config, path)
        except OSError as error:
            raise unusable(config, f"it cannot be read: {error.strerror}") from None
        except FlowserveError as error:
            raise unusable(config, str(error)) from None
        if not found.facts["has_bf16"] and any(spec.dtype is DType.BF16 for spec in (*config.inputs, *config.outputs)):
            raise unusable(config, "tensors of type TYPE_BF16 need the package ml_dtypes, which it has not")
        return found

    def give_up(self, model: str, why: str) -> None:
        """Abort the opening of an environment for this model: `enter` raises an error with `why`."""
        end = self._coming.get(model)
        if end is not None:
            end(why)

    def close(self) -> None:
        """Remove all environments before this process ends, even those still referenced. Called after `close` of
        `children`, which ends the openings in progress.
        """
        _in_a_thread(self._end_all)

    def _end_all(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._opening)
        for environment in [*self._known.values()]:
            environment.end()

    def _open(self, config: ModelConfig, path: Path) -> Environment:
        written = config.parameters[ENVIRONMENT]
        with ExitStack() as undo:
            folder = path
            if not path.is_dir():
                log.info("model '%s': unpacking %s", config.name, written)
                folder = self._unpacked(config.name, path, undo)
            forkserver = self._children.forkserver(_interpreter(folder, python_in(folder)))
            undo.callback(forkserver.wait)
            undo.callback(forkserver.hang_up)
            with self._ended_by(forkserver.hang_up, config.name):
                facts = forkserver.start()
            log.info("model '%s' runs in Python %s of %s", config.name, facts["python"], written)
            return Environment(partial(self._children.spawn, forkserver=forkserver), facts, undo.pop_all().close)

    def _unpacked(self, model: str, archive: Path, undo: ExitStack) -> Path:
        """Unpack an archive. Returns the folder, which `undo` removes."""
        try:
            folder, lock = claim(UNPACKED)
        except OSError as error:
            raise Invalid(f"there is no folder that it can be unpacked into: {error.strerror}") from None
        undo.callback(give_up, folder, lock)
        job = pickle.dumps(Remote(unpack.ENTRY, (str(archive), folder)))
        child = self._children.spawn("unpack", RUN_TASK, job, log_name=model)
        with self._ended_by(lambda why: child.kill(why=why), model):
            task_result(child)
        return Path(folder)

    @contextmanager
    def _exclusive(self, key: Key, model: str) -> Iterator[None]:
        """Open this environment exclusively. Raises Unavailable if the wait is aborted."""
        given_up: list[str] = []

        def end(why: str) -> None:
            with self._changed:
                given_up.append(why)
                self._changed.notify_all()

        with self._ended_by(end, model), self._changed:
            self._changed.wait_for(lambda: given_up or key not in self._opening)
            if given_up or self._children.is_closed:
                raise Unavailable(given_up[0] if given_up else "the server is ending")
            self._opening.add(key)
        try:
            yield
        finally:
            with self._changed:
                self._opening.discard(key)
                self._changed.notify_all()

    @contextmanager
    def _ended_by(self, end: Callable[[str], object], model: str) -> Iterator[None]:
        self._coming[model] = end
        try:
            yield
        finally:
            self._coming.pop(model, None)


def _interpreter(folder: Path, python: Path) -> Interpreter:
    programs, libraries, activate = python.parent, folder / "lib", folder / "bin/activate"
    shell = shutil.which("bash")
    if shell is None or not activate.is_file():
        firsts = {"PATH": programs, "LD_LIBRARY_PATH": libraries}
        variables = {name: ":".join(filter(None, (str(one), os.environ.get(name)))) for name, one in firsts.items()}
        return Interpreter((str(python),), {**_NOT_ITS, **variables}, str(libraries))
    command = (shell, "-c", _ACTIVATE, str(activate), str(programs), str(libraries), str(python))
    return Interpreter(command, _NOT_ITS, str(libraries))


def _key_of(path: Path) -> Key:
    """The key of the environment at `path`. Raises OSError, Invalid."""
    if not path.is_dir():
        return path, _stamp(path)
    # Installing a package changes the time of the folder of packages.
    return path, _stamp(python_in(path)), *map(_stamp, sorted(path.glob("lib/python3*/site-packages")))


def _stamp(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _in_a_thread(end: Callable[[], object]) -> None:
    """Run `end` on a thread, since it blocks and the last reference may be dropped on the event loop. No daemon thread:
    the process ends after it.
    """
    try:
        threading.Thread(target=end, name="end of an environment").start()
    except RuntimeError:  # the interpreter ends
        end()
