"""A change of one version of a model, and what it does to the other versions.

Every model answers with a number that it drew in `initialize`, the count of its requests and its process. So an answer
tells whether a version was loaded anew. All changes are made on one server, each on a model of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import tritonclient.grpc as grpc_triton
from tritonclient.utils import InferenceServerException

from tests.support.triton_like import free_port
from tests.support.versions import ALL, CONFIG, FAILS, Folder, Server, both, latest, settle, specific, until

pytestmark = pytest.mark.server

KEPT, NEW, GONE, UNKNOWN = "kept", "new", "gone", "unknown"


@dataclass(frozen=True)
class Change:
    """What is changed, and what becomes of versions 1, 2 and 3. `before`: of the folder, beside versions 1 and 2."""

    change: Callable[[Folder], object]
    versions: tuple[str, str, str]
    before: Callable[[Folder], object] = lambda folder: None
    fails: str = ""


CHANGES: Final = {
    "nothing": Change(lambda m: None, (KEPT, KEPT, UNKNOWN)),
    "added": Change(lambda m: m.version(3), (KEPT, KEPT, NEW)),
    "changed": Change(lambda m: m.version(2, 7), (KEPT, NEW, UNKNOWN)),
    "removed": Change(lambda m: m.remove("1"), (GONE, KEPT, UNKNOWN)),
    "removed-latest": Change(lambda m: m.remove("2"), (KEPT, GONE, UNKNOWN)),
    "renamed": Change(lambda m: (m.path / "2").rename(m.path / "3"), (KEPT, GONE, NEW)),
    "added-and-removed": Change(both(lambda m: m.version(3), lambda m: m.remove("2")), (KEPT, GONE, NEW)),
    "file-added-to-version": Change(lambda m: m.write("2/weights.txt", "w"), (KEPT, NEW, UNKNOWN)),
    "file-in-folder-of-version": Change(
        lambda m: m.write("2/parts/a.txt", "w2"),
        (KEPT, NEW, UNKNOWN),
        before=lambda m: m.write("2/parts/a.txt", "w1"),
    ),
    "policy-latest": Change(lambda m: m.config(latest(1)), (GONE, KEPT, UNKNOWN)),
    "policy-specific": Change(lambda m: m.config(specific(1)), (KEPT, GONE, UNKNOWN)),
    "policy-all": Change(lambda m: m.config(), (NEW, KEPT, UNKNOWN), before=lambda m: m.config(latest(1))),
    "policy-same-versions": Change(lambda m: m.config(specific(1, 2)), (KEPT, KEPT, UNKNOWN)),
    "added-under-latest": Change(lambda m: m.version(3), (UNKNOWN, GONE, NEW), before=lambda m: m.config(latest(1))),
    "added-under-latest-two": Change(lambda m: m.version(3), (GONE, KEPT, NEW), before=lambda m: m.config(latest(2))),
    "changed-but-not-chosen": Change(
        lambda m: m.version(1, 7), (UNKNOWN, KEPT, UNKNOWN), before=lambda m: m.config(specific(2))
    ),
    "added-but-not-chosen": Change(
        lambda m: m.version(3), (KEPT, KEPT, UNKNOWN), before=lambda m: m.config(specific(1, 2))
    ),
    "comment": Change(lambda m: m.config(f"{ALL} # a comment"), (KEPT, KEPT, UNKNOWN)),
    "order-of-fields": Change(
        lambda m: m.write("config.pbtxt", ALL + CONFIG.format(execution=m.execution, more="", batch=m.batch)),
        (KEPT, KEPT, UNKNOWN),
    ),
    "parameter": Change(
        lambda m: m.config(ALL + ' parameters { key: "a" value { string_value: "b" } }'), (NEW, NEW, UNKNOWN)
    ),
    "parameter-and-version": Change(
        both(lambda m: m.config(ALL + ' parameters { key: "a" value { string_value: "b" } }'), lambda m: m.version(3)),
        (NEW, NEW, NEW),
    ),
    "shared-module-added": Change(lambda m: m.write("shared.py", ""), (NEW, NEW, UNKNOWN)),
    "shared-module-changed": Change(
        lambda m: m.write("shared.py", "x = 2"), (NEW, NEW, UNKNOWN), before=lambda m: m.write("shared.py", "")
    ),
    "shared-file-in-folder": Change(
        lambda m: m.write("initial_state/zero", "22"),
        (NEW, NEW, UNKNOWN),
        before=lambda m: m.write("initial_state/zero", "1"),
    ),
    "shared-file-removed": Change(
        lambda m: (m.path / "shared.py").unlink(), (NEW, NEW, UNKNOWN), before=lambda m: m.write("shared.py", "")
    ),
    "broken-added": Change(lambda m: m.version(3, 0, FAILS), (KEPT, KEPT, GONE), fails="3"),
    "broken-changed": Change(
        both(lambda m: m.version(2, 0, FAILS), lambda m: m.version(1, 7)), (KEPT, KEPT, UNKNOWN), fails="2"
    ),
    "broken-added-one-removed": Change(
        both(lambda m: m.version(3, 0, FAILS), lambda m: m.remove("1")), (KEPT, KEPT, GONE), fails="3"
    ),
}


# Changes after which Triton has other answers.
UNSEEN = {
    "shared-file-removed": "Triton does not notice that a file was removed, and serves what is not there any more"
}


@dataclass
class Outcome:
    """What three versions of one model answered before and after a change, and their statistics."""

    before: list[list[int]] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=dict)
    error: str = ""

    @property
    def drawn(self) -> list[int]:
        return [answer[0] for answer in self.before]

    def fate(self, index: int) -> str:
        before, after = self.before[index], self.after[index]
        if len(after) == 1:
            return {503: GONE, 404: UNKNOWN}[after[0]]
        return KEPT if before[0] == after[0] else NEW


def make(repository: Path, name: str, execution: str, change: Change) -> Folder:
    folder = Folder(repository / name, execution)
    folder.version(1)
    folder.version(2)
    folder.config()
    change.before(folder)
    return folder


def is_serving(server: Server, name: str) -> bool:
    """Whether a model serves, and is not being loaded: it may be polled while it is written."""
    states = server.states(name)
    return "2" in states and set(states.values()) == {"READY"}


def ask_all(server: Server, name: str) -> list[list[int]]:
    return [server.ask(name, version) for version in (1, 2, 3)]


@pytest.fixture(scope="module")
def explicit(
    tmp_path_factory: pytest.TempPathFactory, triton_like: Callable[..., str]
) -> Iterator[tuple[Path, Server, str]]:
    """A repository, its server in mode explicit, and the address of gRPC."""
    repository, port = tmp_path_factory.mktemp("explicit"), free_port()
    options = ("--allow-grpc=true", f"--grpc-port={port}", "--cache-config=local,size=4194304")
    url = triton_like(repository, "--model-control-mode=explicit", *options)
    with closing(Server(url)) as server:
        yield repository, server, f"127.0.0.1:{port}"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("case", CHANGES)
def test_a_load_call_loads_the_versions_that_changed_and_no_others(
    explicit: tuple[Path, Server, str], case: str, protocol: str, on_triton: bool
) -> None:
    if on_triton and case in UNSEEN:
        pytest.skip(UNSEEN[case])
    repository, server, grpc_address = explicit
    change = CHANGES[case]
    folder = make(repository, f"{case}-{protocol}", "process", change)
    settle(server, folder.name)
    found = Outcome(before=ask_all(server, folder.name))
    change.change(folder)
    if protocol == "http":
        found.error = server.load(folder.name)
    else:
        with grpc_triton.InferenceServerClient(grpc_address) as client:
            try:
                client.load_model(folder.name)
            except InferenceServerException as error:
                found.error = error.message()
    observe(server, folder.name, found)
    server.unload(folder.name)
    check(found, change)
    begin = f"load failed for model '{folder.name}': version {change.fails} is at UNAVAILABLE state: "
    assert found.error.startswith(begin) if change.fails else found.error == ""


def observe(server: Server, name: str, found: Outcome) -> None:
    found.after = ask_all(server, name)
    found.counted = [server.counted(name, version) for version in (1, 2, 3)]
    until(lambda: "LOADING" not in server.states(name).values())  # Triton tries a version that failed again
    found.states = server.states(name)


def check(found: Outcome, change: Change) -> None:
    assert tuple(map(found.fate, range(3))) == change.versions
    for index, fate in enumerate(change.versions):
        before, after = found.before[index], found.after[index]
        if fate == KEPT:
            assert after[1:3] == [before[1] + 1, before[2]]  # its state goes on, in the same process
            assert found.counted[index] == after[1]
        state = found.states.get(str(index + 1))
        assert state in {KEPT: ("READY",), NEW: ("READY",), GONE: ("UNLOADING", "UNAVAILABLE"), UNKNOWN: (None,)}[fate]


@pytest.fixture(scope="module", params=["process", "thread", "inline"])
def polled(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    triton_like: Callable[..., str],
    on_triton: bool,
) -> dict[str, Outcome]:
    """What every change did in mode poll."""
    if on_triton and request.param != "process":
        pytest.skip("Triton runs each Python model in a process")
    repository = tmp_path_factory.mktemp(request.param)
    with closing(Server(triton_like(repository, "--model-control-mode=poll", "--repository-poll-secs=1"))) as server:
        folders = {case: make(repository, case, request.param, change) for case, change in CHANGES.items()}
        for case in CHANGES:
            until(partial(is_serving, server, case), 300)
        found = {case: Outcome(before=ask_all(server, case)) for case in CHANGES}
        for _ in range(10 if on_triton else 0):  # it takes the `__pycache__` that the first load left for a change
            time.sleep(5)
            later = {case: Outcome(before=ask_all(server, case)) for case in CHANGES}
            before, found = found, later
            if all(one.drawn == before[case].drawn for case, one in found.items()):
                break
        for case, change in CHANGES.items():
            change.change(folders[case])

        def is_done(case: str) -> bool:
            states = server.states(case)
            for index, fate in enumerate(CHANGES[case].versions):
                if fate == GONE and states.get(str(index + 1)) != "UNAVAILABLE":
                    return False
                if fate == NEW and server.ask(case, index + 1)[0] in (404, 503, found[case].before[index][0]):
                    return False
            return True

        for case in CHANGES:
            with suppress(AssertionError):
                until(partial(is_done, case))
        time.sleep(3)  # two polls
        for case, outcome in found.items():
            observe(server, case, outcome)
    return found


@pytest.mark.parametrize("case", CHANGES)
def test_polling_loads_the_versions_that_changed_and_no_others(
    polled: dict[str, Outcome], case: str, on_triton: bool
) -> None:
    if on_triton and case in UNSEEN:
        pytest.skip(UNSEEN[case])
    check(polled[case], CHANGES[case])
