"""Requests, sequences, cached responses and ensembles of a version while other versions of its model change."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.versions import ALL, FAILS, MODEL, Folder, Server, both, latest, settle, specific, until

pytestmark = pytest.mark.server

ENSEMBLE = """\
platform: "ensemble"
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ 1 ] }} ]
output [ {{ name: "Y" data_type: TYPE_INT64 dims: [ 4 ] }} ]
ensemble_scheduling {{ step [ {{
  model_name: "{step}" model_version: {version}
  input_map {{ key: "X" value: "X" }} output_map {{ key: "Y" value: "Y" }}
}} ] }}
"""

# Changes of which nothing concerns version 1.
OF_OTHERS: dict[str, Callable[[Folder], object]] = {
    "added": lambda m: m.version(3),
    "changed": lambda m: m.version(2, 7),
    "removed": lambda m: m.remove("2"),
    "renamed": lambda m: (m.path / "2").rename(m.path / "3"),
    "policy": lambda m: m.config(specific(1) + m.more),
    "broken": lambda m: m.version(3, 0, FAILS),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, triton_like: Callable[..., str]) -> Iterator[tuple[Path, Server]]:
    """A repository, and its server in mode explicit."""
    repository = tmp_path_factory.mktemp("in_use")
    url = triton_like(repository, "--model-control-mode=explicit", "--cache-config=local,size=4194304")
    with closing(Server(url)) as server:
        yield repository, server


@pytest.fixture
def make(served: tuple[Path, Server]) -> Iterator[Callable[..., Folder]]:
    """`make(name, more="")`: a loaded model with versions 1 and 2. It is unloaded at the end of the test."""
    repository, server = served
    made: list[Folder] = []

    def make(name: str, more: str = "", **options: Any) -> Folder:
        folder = Folder(repository / name, more=more, **options)
        folder.version(1)
        folder.version(2)
        folder.config(ALL + more)
        settle(server, name)
        made.append(folder)
        return folder

    yield make
    for folder in made:
        server.unload(folder.name)


@pytest.mark.parametrize("strategy", ["direct", "oldest"])
@pytest.mark.parametrize("case", OF_OTHERS)
def test_an_open_sequence_goes_on(
    served: tuple[Path, Server], make: Callable[..., Folder], case: str, strategy: str
) -> None:
    _, server = served
    more = f"sequence_batching {{ {strategy} {{ }} max_sequence_idle_microseconds: 60000000 }}"
    folder = make(f"sequence-{strategy}-{case}", more, batch=1)
    name = folder.name
    first = server.ask(name, 1, rows=1, sequence_id=5, sequence_start=True)
    OF_OTHERS[case](folder)
    assert (server.load(name) == "") == (case != "broken")
    second = server.ask(name, 1, rows=1, sequence_id=5)
    last = server.ask(name, 1, rows=1, sequence_id=5, sequence_end=True)
    assert [second, last] == [[first[0], first[1] + more, *first[2:]] for more in (1, 2)]


@pytest.mark.parametrize("case", OF_OTHERS)
def test_cached_responses_stay(served: tuple[Path, Server], make: Callable[..., Folder], case: str) -> None:
    _, server = served
    folder = make(f"cached-{case}", "response_cache { enable: true }")
    first = server.ask(folder.name, 1)
    assert server.ask(folder.name, 1) == first
    OF_OTHERS[case](folder)
    server.load(folder.name)
    assert server.ask(folder.name, 1) == first
    assert server.ask(folder.name, 1, sleep=0.001)[:2] == [first[0], first[1] + 1]


@pytest.mark.parametrize(
    ("change", "fates"),
    [
        (lambda m: m.version(2, 7), ("kept", "new", "new")),
        (lambda m: m.version(1, 7), ("new", "kept", "kept")),
        (lambda m: m.version(3), ("kept", "kept", "new")),
        (lambda m: m.remove("1"), ("gone", "kept", "kept")),
        (lambda m: m.remove("2"), ("kept", "gone", "older")),
        (lambda m: m.config(latest(1)), ("gone", "kept", "kept")),
        (lambda m: m.version(3, 0, FAILS), ("kept", "kept", "kept")),
        (lambda m: m.write("shared.py", ""), ("new", "new", "new")),
    ],
    ids=["changed-latest", "changed", "added", "removed", "removed-latest", "policy", "broken", "shared"],
)
def test_ensembles_use_the_new_version_where_it_changed(
    served: tuple[Path, Server],
    make: Callable[..., Folder],
    request: pytest.FixtureRequest,
    change: Callable[[Folder], object],
    fates: tuple[str, ...],
) -> None:
    repository, server = served
    folder = make(f"step-{request.node.callspec.id}")
    names = []
    for version in (1, 2, -1):
        name = f"{folder.name}-{version}"
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(ENSEMBLE.format(step=folder.name, version=version))
        assert server.load(name) == ""
        names.append(name)
    before = [server.ask(name) for name in names]
    change(folder)
    server.load(folder.name)
    after = [server.ask(name) for name in names]
    drawn = {answer[0]: which for answer, which in zip(before, ("older", "kept", "kept"), strict=True)}
    found = ["gone" if len(answer) == 1 else drawn.get(answer[0], "new") for answer in after]
    assert ("kept" if found[0] == "older" else found[0], *found[1:]) == fates
    for name in names:
        server.unload(name)


@pytest.mark.parametrize("is_ensemble", [False, True], ids=["model", "ensemble"])
@pytest.mark.parametrize(
    ("change", "next_tag"),
    [(lambda m: m.version(3, 3), 3), (lambda m: m.version(2, 7), 7), (lambda m: m.remove("2"), 1)],
    ids=["added", "changed", "removed"],
)
def test_a_request_in_flight_finishes_on_the_version_where_it_began(
    served: tuple[Path, Server],
    make: Callable[..., Folder],
    request: pytest.FixtureRequest,
    change: Callable[[Folder], object],
    next_tag: int,
    is_ensemble: bool,
) -> None:
    repository, server = served
    folder = make(f"flight-{request.node.callspec.id}")
    folder.version(1, 1)
    folder.version(2, 2)
    assert server.load(folder.name) == ""
    name = folder.name
    if is_ensemble:
        name = f"{folder.name}-e"
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(ENSEMBLE.format(step=folder.name, version=-1))
        assert server.load(name) == ""
    before = server.ask(name)
    with ThreadPoolExecutor() as pool:
        flight = pool.submit(server.ask, name, sleep=4.0)
        time.sleep(0.5)
        change(folder)
        assert server.load(folder.name) == ""
        assert not flight.done()
        assert server.ask(name)[3] == next_tag
        assert flight.result() == [before[0], before[1] + 1, *before[2:]]
    if is_ensemble:
        server.unload(name)


@pytest.mark.parametrize("execution", ["process", "thread", "inline"])
def test_no_request_is_lost_while_other_versions_come_and_go(
    served: tuple[Path, Server], make: Callable[..., Folder], execution: str, on_triton: bool
) -> None:
    if on_triton and execution != "process":
        pytest.skip("Triton runs each Python model in a process")
    _, server = served
    folder = make(f"loop-{execution}", execution=execution)
    name = folder.name
    answers: list[list[int]] = []
    is_over = threading.Event()

    def ask() -> None:
        with closing(Server(server.url)) as own:
            while not is_over.is_set():
                answers.append(own.ask(name, 1))

    with ThreadPoolExecutor() as pool:
        loop = pool.submit(ask)
        try:
            for change in (
                lambda m: m.version(3),
                lambda m: m.version(2, 7),
                lambda m: m.remove("2"),
                lambda m: m.version(3, 0, FAILS),
                both(lambda m: m.version(2, 8), lambda m: m.remove("3")),
                lambda m: m.config(specific(1)),
                lambda m: m.config(ALL),
            ):
                so_far = len(answers)
                change(folder)
                server.load(name)
                until(partial(_has_more, answers, so_far + 2))
        finally:
            is_over.set()
        loop.result()
    assert [answer[1:2] for answer in answers] == [[answers[0][1] + index] for index in range(len(answers))]
    assert {(answer[0], answer[2]) for answer in answers} == {(answers[0][0], answers[0][2])}
    assert server.counted(name, 1) == answers[-1][1]


def _has_more(answers: list[list[int]], count: int) -> bool:
    return len(answers) > count


def test_a_version_is_loaded_again_while_its_former_load_drains(
    served: tuple[Path, Server], make: Callable[..., Folder]
) -> None:
    _, server = served
    folder = make("drain")
    one, two = server.ask("drain", 1), server.ask("drain", 2)
    with ThreadPoolExecutor() as pool:
        flight = pool.submit(server.ask, "drain", 1, sleep=8.0)
        time.sleep(0.5)
        folder.remove("1")
        assert server.load("drain") == ""
        assert not flight.done()
        assert server.states("drain") == {"1": "UNLOADING", "2": "READY"}
        assert server.ask("drain", 1) == [503]
        folder.version(1, 7)
        assert server.load("drain") == ""
        assert not flight.done()
        assert server.ask("drain", 1)[1::2] == [1, 7]
        assert flight.result() == [one[0], one[1] + 1, *one[2:]]
    assert server.ask("drain", 2)[:2] == [two[0], two[1] + 1]
    assert server.states("drain") == {"1": "READY", "2": "READY"}


def test_several_loads_at_once_load_a_changed_version_once(
    served: tuple[Path, Server], make: Callable[..., Folder]
) -> None:
    _, server = served
    folder = make("at_once")
    one = server.ask("at_once", 1)
    folder.version(2, 7, "time.sleep(0.5)")
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(server.load, ["at_once"] * 4)) == [""] * 4
    two = server.ask("at_once", 2)
    assert two[1::2] == [1, 7]
    assert server.ask("at_once", 1) == [one[0], one[1] + 1, *one[2:]]


def test_an_unload_while_a_version_is_loaded_ends_with_nothing_served(
    served: tuple[Path, Server], make: Callable[..., Folder]
) -> None:
    _, server = served
    folder = make("unloaded")
    folder.version(2, 7, "time.sleep(3)")
    with ThreadPoolExecutor() as pool:
        load = pool.submit(server.load, "unloaded")
        time.sleep(1)
        assert len(server.ask("unloaded", 1)) > 1
        server.unload("unloaded")
        load.result()
    until(lambda: set(server.states("unloaded").values()) == {"UNAVAILABLE"})
    assert server.ask("unloaded", 1) == [503]
    folder.version(2)
    assert server.load("unloaded") == ""
    assert [server.ask("unloaded", version)[1] for version in (1, 2)] == [1, 1]


def test_a_first_load_with_a_version_that_fails_serves_none_and_the_index_tells_which_failed(
    served: tuple[Path, Server],
) -> None:
    repository, server = served
    folder = Folder(repository / "first")
    for version in (1, 2, 3):
        folder.version(version, 0, FAILS if version == 2 else "pass")
    folder.config()
    assert server.load("first").startswith("load failed for model 'first': version 2 is at UNAVAILABLE state: ")
    until(lambda: set(server.states("first").values()) == {"UNAVAILABLE"})
    reasons = server.reasons("first")
    assert "told to fail" in reasons.pop("2")
    assert reasons == {"1": "unloaded", "3": "unloaded"}
    assert [server.ask("first", version) for version in (1, 2, 3)] == [[503]] * 3
    folder.version(2)
    assert server.load("first") == ""
    assert [server.ask("first", version)[1] for version in (1, 2, 3)] == [1, 1, 1]
    assert server.reasons("first") == {}


JSON = {
    "backend": "python",
    "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [1]}],
    "output": [{"name": "Y", "data_type": "TYPE_INT64", "dims": [4]}],
    "parameters": {"execution": {"string_value": "process"}},
    "version_policy": {"all": {}},
}


def fates(server: Server, name: str, before: list[list[int]]) -> list[str]:
    after = [server.ask(name, version) for version in (1, 2)]
    return [
        "gone" if len(new) == 1 else "kept" if old[0] == new[0] else "new"
        for old, new in zip(before, after, strict=True)
    ]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (JSON, ["kept", "kept"]),
        ({**JSON, "version_policy": {"specific": {"versions": [1, 2]}}}, ["kept", "kept"]),
        ({**JSON, "version_policy": {"latest": {"num_versions": 1}}}, ["gone", "kept"]),
        ({**JSON, "version_policy": {"specific": {"versions": [1]}}}, ["kept", "gone"]),
        ({**JSON, "parameters": {**JSON["parameters"], "a": {"string_value": "b"}}}, ["new", "new"]),  # type: ignore[dict-item]
        ({**JSON, "dynamic_batching": {}, "max_batch_size": 0, "parameters": {}}, ["new", "new"]),
    ],
    ids=["same", "same-versions", "latest", "specific", "parameter", "fields"],
)
def test_a_configuration_in_a_load_call_counts_by_its_meaning(
    served: tuple[Path, Server],
    make: Callable[..., Folder],
    request: pytest.FixtureRequest,
    config: dict[str, Any],
    expected: list[str],
) -> None:
    _, server = served
    name = make(f"override-{request.node.callspec.id}").name
    before = [server.ask(name, version) for version in (1, 2)]
    assert server.load(name, config=json.dumps(config)) == ""
    assert fates(server, name, before) == expected


def brought(*tags: int) -> dict[str, str]:
    """Files of a load call: a version for each tag."""
    texts = [MODEL.format(tag=tag, initialize="pass", shape="(4,)") for tag in tags]
    return {f"file:{number}/model.py": base64.b64encode(text.encode()).decode() for number, text in enumerate(texts, 1)}


@pytest.mark.parametrize(
    ("files", "expected"),
    [(brought(0, 0), ["kept", "kept"]), (brought(0, 5), ["kept", "new"]), (brought(0), ["kept", "gone"])],
    ids=["same", "changed", "removed"],
)
def test_files_in_load_calls_are_compared_by_version(
    served: tuple[Path, Server],
    make: Callable[..., Folder],
    request: pytest.FixtureRequest,
    files: dict[str, str],
    expected: list[str],
    on_triton: bool,
) -> None:
    if on_triton:
        pytest.skip("Triton ignores the files of a load call whose configuration is the one that is served")
    _, server = served
    name = make(f"files-{request.node.callspec.id}").name
    own = [server.ask(name, version) for version in (1, 2)]
    assert server.load(name, config=json.dumps(JSON), **brought(0, 0)) == ""
    assert fates(server, name, own) == ["new", "new"]  # from another place than the repository
    before = [server.ask(name, version) for version in (1, 2)]
    assert server.load(name, config=json.dumps(JSON), **files) == ""
    assert fates(server, name, before) == expected
    if "new" in expected:
        assert server.ask(name, 2)[3] == 5
    assert server.load(name) == ""
    assert fates(server, name, before) == ["new", "new"]


def test_a_removed_version_is_not_ready_rather_than_unknown(
    served: tuple[Path, Server], make: Callable[..., Folder]
) -> None:
    _, server = served
    folder = make("asked")
    folder.remove("1")
    assert server.load("asked") == ""
    for version, status, text in ((1, 503, "is not at ready state"), (9, 404, "is not found")):
        reply = httpx.get(f"{server.url}/v2/models/asked/versions/{version}", verify=False)
        assert reply.status_code == status
        assert reply.json()["error"].startswith(f"Request for unknown model: 'asked' version {version} {text}")
        ready = httpx.get(f"{server.url}/v2/models/asked/versions/{version}/ready", verify=False)
        assert ready.status_code != 200
    assert httpx.get(f"{server.url}/v2/models/asked", verify=False).json()["versions"] == ["2"]
