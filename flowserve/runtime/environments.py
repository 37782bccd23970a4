"""Python environments that models bring along: how one comes to be there, who shares it, how long it stays.

Decided here: that an environment is unpacked and started once for all models that want the same one as it is now, and
goes with the last of them; and how its Python is started: activated, as on Triton. Which one a model means is
repository/environment.py's, how an archive is unpacked backends/child/unpack.py's, what its processes do theirs.
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
from flowserve.backends.child import task, unpack
from flowserve.config.environments import ENVIRONMENT
from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, Invalid, Unavailable
from flowserve.repository.environment import environment_of, python_in, unusable
from flowserve.runtime.children import Children, Spawn
from flowserve.runtime.forkservers import ForkServer, Interpreter
from flowserve.runtime.task_answers import answer_of
from flowserve.temporary import UNPACKED, claim, give_up
from flowserve.values import DType

log = logging.getLogger("flowserve.load")

# A shell, because activating runs scripts that set variables. The folder of its programs comes first even where such a
# script does not know that the environment has been moved; its libraries come first as on Triton, for its Python only.
# It would find our arguments as its own, and may set them.
_ACTIVATE: Final = """
flowserve_told=("$@")
set --
. "$0"
set -- "${flowserve_told[@]}"
[ "${PATH%%:*}" = "$1" ] || PATH="$1:$PATH"
LD_LIBRARY_PATH="$2${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export PATH LD_LIBRARY_PATH
shift 2
exec "$@"
"""
# The server's own, which would be wrong for any other Python.
_NOT_ITS: Final[Mapping[str, None]] = {"PYTHONHOME": None}

# What an environment is, and how it is now: another one lies there as soon as any of it is another.
Key = tuple[Any, ...]


class Environment:
    """Is there, and its Python runs, for as long as somebody has this object. `spawn` starts a process in it. `facts`:
    what its Python says of itself.
    """

    def __init__(self, spawn: Spawn, facts: Mapping[str, Any], end: Callable[[], object]) -> None:
        self.spawn = spawn
        self.facts = facts
        self.end = weakref.finalize(self, _in_a_thread, end)


class Environments:
    """Those of a server. On any thread; entering one blocks."""

    def __init__(self, children: Children) -> None:
        self._children = children
        self._turns = threading.Condition()
        self._opening: set[Key] = set()  # by one at a time: whoever is second finds what the first made
        self._known: weakref.WeakValueDictionary[Key, Environment] = weakref.WeakValueDictionary()
        self._coming: dict[str, Callable[[str], object]] = {}  # what ends that which comes for a model, with a reason

    def enter(self, config: ModelConfig, folder: Path) -> Environment | None:
        """What the model in `folder` is to run in, as it lies there now; None for the server's own environment. Raises
        Problems where it cannot run there.
        """
        path = environment_of(config, folder)
        if path is None:
            return None
        try:
            key = _key_of(path)
            with self._turn(key, config.name):
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
        """Nobody wants any more what comes for that model: whoever waits for it is told so."""
        end = self._coming.get(model)
        if end is not None:
            end(why)

    def close(self) -> None:
        """Nothing of them is left when this process has ended, whoever still has one. After that of `children`, which
        ends what is coming.
        """
        _in_a_thread(self._end_all)

    def _end_all(self) -> None:
        with self._turns:
            self._turns.wait_for(lambda: not self._opening)
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
            undo.callback(_end, forkserver)
            with self._ended_by(forkserver.hang_up, config.name):
                facts = forkserver.start()
            log.info("model '%s' runs in Python %s of %s", config.name, facts["python"], written)
            return Environment(partial(self._children.spawn, forkserver=forkserver), facts, undo.pop_all().close)

    def _unpacked(self, model: str, archive: Path, undo: ExitStack) -> Path:
        """The folder that it was unpacked into. `undo` removes it."""
        try:
            folder, lock = claim(UNPACKED)
        except OSError as error:
            raise Invalid(f"there is no folder that it can be unpacked into: {error.strerror}") from None
        undo.callback(give_up, folder, lock)
        job = pickle.dumps(Remote(unpack.ENTRY, (str(archive), folder)))
        child = self._children.spawn("unpack", task.ENTRY, job, log_name=model)
        with self._ended_by(lambda why: child.kill(why=why), model):
            answer_of(child)
        return Path(folder)

    @contextmanager
    def _turn(self, key: Key, model: str) -> Iterator[None]:
        """Nobody else opens this one meanwhile. Raises Unavailable where the wait for that is given up."""
        given_up: list[str] = []

        def end(why: str) -> None:
            with self._turns:
                given_up.append(why)
                self._turns.notify_all()

        with self._ended_by(end, model), self._turns:
            self._turns.wait_for(lambda: given_up or key not in self._opening)
            if given_up or self._children.is_closed:
                raise Unavailable(given_up[0] if given_up else "the server is ending")
            self._opening.add(key)
        try:
            yield
        finally:
            with self._turns:
                self._opening.discard(key)
                self._turns.notify_all()

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
    """Raises OSError, Invalid."""
    if not path.is_dir():
        return path, _stamp(path)
    # What is installed into a folder shows in its packages' times.
    return path, _stamp(python_in(path)), *map(_stamp, sorted(path.glob("lib/python3*/site-packages")))


def _stamp(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _end(forkserver: ForkServer) -> None:
    forkserver.hang_up()
    forkserver.wait()


def _in_a_thread(end: Callable[[], object]) -> None:
    """It takes a moment, and whoever is the last to let go may be the event loop. The process does not end before."""
    try:
        threading.Thread(target=end, name="end of an environment").start()
    except RuntimeError:  # the interpreter ends
        end()
