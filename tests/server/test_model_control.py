"""Loading, reloading and unloading through Triton's own client, on real servers with repositories that change."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from flowserve.testing.serve import Served
from tests.support.forked import serving

Client: TypeAlias = triton.InferenceServerClient
Serve = Callable[..., Served]
MakeFile = Callable[[str, float], bytes]
Text = Callable[..., str]

EXPLICIT = "--model-control-mode=explicit"
POLL = ("--model-control-mode=poll", "--repository-poll-secs=1")


@contextmanager
def client_of(served: Served) -> Iterator[Client]:
    with Client(served.address, concurrency=8, network_timeout=60, connection_timeout=60) as client:
        yield client


def elsewhere(served: Served, call: Callable[[Client], Any]) -> Any:
    """With a client of its own: one belongs to the thread that made it."""
    with client_of(served) as client:
        return call(client)


def ask(client: Client, model: str, version: str = "") -> float:
    given = triton.InferInput("IN", [1, 4], "FP32").set_data_from_numpy(np.ones((1, 4), np.float32))
    return float(client.infer(model, [given], version).as_numpy("OUT")[0, 0])


def refusal(call: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[int, str]:
    with pytest.raises(InferenceServerException) as raised:
        call(*arguments, **named)
    return int(raised.value.status()), str(raised.value.message())


def rows(client: Client) -> dict[str, dict[str, str]]:
    """The index by name; of several versions the last."""
    return {row["name"]: row for row in client.get_model_repository_index()}


def until(condition: Callable[[], object], what: str, within_s: float = 30) -> None:
    """Ask again until it holds; nothing tells us when another process has come that far."""
    patience = time.monotonic() + within_s
    while time.monotonic() < patience:
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(f"never: {what}")


class Repository:
    """A folder of models that multiply by a number, which tests change: ONNX files, and one `model.py` or another."""

    def __init__(self, folder: Path, make_arithmetic: MakeFile, make_ensemble: Text, make_python: Any) -> None:
        self.folder = folder
        self.arithmetic = make_arithmetic
        self._ensemble = make_ensemble
        self._python = make_python
        folder.mkdir()

    def write(self, path: str, content: str | bytes) -> None:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)

    def put(self, name: str, factor: float, version: int = 1) -> None:
        self.write(f"{name}/{version}/model.onnx", self.arithmetic("Mul", factor))

    def put_chain(self, name: str, *models: str) -> None:
        """An ensemble that sends IN through the models and answers OUT."""
        tensors = ["IN", *(f"t{i}" for i in range(1, len(models))), "OUT"]
        steps = [(model, {"IN": tensors[i]}, {"OUT": tensors[i + 1]}) for i, model in enumerate(models)]
        self.write(f"{name}/config.pbtxt", self._ensemble(["IN"], ["OUT"], steps, max_batch_size=4))
        (self.folder / name / "1").mkdir(exist_ok=True)

    def put_python(self, name: str, body: str, before: str = "") -> None:
        text = self._python(body)["1/model.py"]
        self.write(
            f"{name}/1/model.py", text.replace("class TritonPythonModel:", f"class TritonPythonModel:\n{before}")
        )
        spec = "data_type: TYPE_FP32 dims: [ 4 ]"
        config = f'max_batch_size: 16\ninput [ {{ name: "IN" {spec} }} ]\noutput [ {{ name: "OUT" {spec} }} ]\n'
        self.write(f"{name}/config.pbtxt", config)


@pytest.fixture
def repository(tmp_path: Path, make_arithmetic: MakeFile, make_ensemble: Text, make_python: Any) -> Repository:
    return Repository(tmp_path / "models", make_arithmetic, make_ensemble, make_python)


class Explicit(Repository):
    """A repository that is empty when a test begins, and a server of it in mode explicit that has nothing loaded. Its
    index still has models that earlier tests unloaded.
    """

    served: Served

    def load(self, *names: str) -> Served:
        """Load models as `--load-model` does at the start of a server; each counts as loaded by name."""
        with client_of(self.served) as client:
            for name in names:
                client.load_model(name)
        return self.served

    def clear(self) -> None:
        with client_of(self.served) as client:
            for row in client.get_model_repository_index():
                if row.get("state") not in (None, "UNAVAILABLE") or row.get("reason") != "unloaded":
                    client.unload_model(row["name"])
            shutil.rmtree(self.folder)
            self.folder.mkdir()
            assert client.is_server_ready()


@pytest.fixture(scope="module")
def explicit_server(
    tmp_path_factory: pytest.TempPathFactory, make_arithmetic: MakeFile, make_ensemble: Text, make_python: Any
) -> Iterator[Explicit]:
    folder = tmp_path_factory.mktemp("explicit") / "models"
    explicit = Explicit(folder, make_arithmetic, make_ensemble, make_python)
    with serving(explicit.folder, EXPLICIT) as explicit.served:
        yield explicit


@pytest.fixture
def explicit(explicit_server: Explicit) -> Iterator[Explicit]:
    """One server for all tests that leave it as it was."""
    yield explicit_server
    explicit_server.clear()


@pytest.fixture(scope="module", autouse=True)
def polling(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    make_arithmetic: MakeFile,
    make_ensemble: Text,
    make_python: Any,
) -> Iterator[dict[str, Future[None]]]:
    """Both tests of polling mostly wait for time to pass: they start with the first test of this file and run beside
    the others.
    """
    asked = any("polling_" in item.name for item in request.session.items if item.path == request.path)
    with ThreadPoolExecutor(2) as pool:

        def begin(story: Callable[[Repository], None]) -> Future[None]:
            folder = tmp_path_factory.mktemp("polling") / "models"
            return pool.submit(story, Repository(folder, make_arithmetic, make_ensemble, make_python))

        yield {story.__name__: begin(story) for story in (_follows, _survives) if asked}


# ------------------------------------------------------------------------------------------------------------ explicit


def test_explicit_mode_loads_only_named_models_and_their_steps(repository: Repository, serve: Serve) -> None:
    repository.put("step", 2)
    repository.put("other", 3)
    repository.put_chain("chain", "step", "step")
    with client_of(serve(repository.folder, EXPLICIT, "--load-model=chain")) as client:
        assert client.is_server_ready()
        assert ask(client, "chain") == 4
        assert rows(client)["other"] == {"name": "other"}
        assert {row["name"] for row in _ready_rows(client)} == {"chain", "step"}
        client.load_model("other")
        assert ask(client, "other") == 3
        assert {row["name"] for row in _ready_rows(client)} == {"chain", "other", "step"}


def _ready_rows(client: Client) -> list[dict[str, str]]:
    """The extension's response to {"ready": true}; the client has no call for it."""
    answer = client._post(
        request_uri="v2/repository/index", request_body='{"ready": true}', headers=None, query_params=None
    )
    found: list[dict[str, str]] = json.loads(answer.read())
    return found


def test_a_star_loads_all_models_and_no_name_none(repository: Repository, serve: Serve) -> None:
    repository.put("a", 2)
    repository.put("b", 3)
    with client_of(serve(repository.folder, EXPLICIT, "--load-model=*")) as client:
        assert [ask(client, "a"), ask(client, "b")] == [2, 3]
    with client_of(serve(repository.folder, EXPLICIT)) as client:
        assert client.is_server_ready()
        assert refusal(ask, client, "a")[0] == 404


def test_a_request_for_an_unloaded_model_gets_an_error_that_says_how_to_load_it(control_server: Served) -> None:
    with client_of(control_server) as client:
        assert refusal(ask, client, "later") == (
            404,
            (
                "Request for unknown model: 'later' is not found (it is in the model repository, but not loaded: "
                "a client's load_model('later') or POST /v2/repository/models/later/load loads it)"
            ),
        )
        assert refusal(ask, client, "late")[1] == "Request for unknown model: 'late' is not found"


@pytest.mark.fault("L1")
def test_an_unknown_name_cannot_be_loaded_and_is_not_in_the_index(explicit: Explicit) -> None:
    with client_of(explicit.load()) as client:
        before = client.get_model_repository_index()
        assert refusal(client.load_model, "nope") == (
            400,
            "failed to load 'nope', failed to poll from model repository: there is no folder 'nope' in it",
        )
        explicit.put("detect_faces", 2)
        (explicit.folder / "empty").mkdir()
        for name, why in {
            "detect_face": "there is no folder 'detect_face' in it (did you mean 'detect_faces'?)",
            "empty": "its folder holds neither config.pbtxt nor a version folder",
            "no" * 100: f"there is no folder '{'no' * 100}' in it",
        }.items():
            assert refusal(client.load_model, name)[1].endswith(f"failed to poll from model repository: {why}")
        assert [row["name"] for row in client.get_model_repository_index()] == [
            *(row["name"] for row in before),
            "detect_faces",
        ]
        shutil.rmtree(explicit.folder / "detect_faces")
        (explicit.folder / "empty").rmdir()
        assert client.get_model_repository_index() == before
        assert client.is_server_ready()
        client.unload_model("nope")


@pytest.mark.fault("L2")
def test_a_load_error_is_400_and_its_reason_is_in_the_index(explicit: Explicit) -> None:
    explicit.write("unreadable/config.pbtxt", 'backend: "onnxruntime')
    explicit.write("unreadable/1/model.onnx", b"")
    explicit.write("versionless/config.pbtxt", 'backend: "onnxruntime"')
    explicit.put_python("backendless", "")
    config = (explicit.folder / "backendless/config.pbtxt").read_text()
    explicit.write("backendless/config.pbtxt", f'backend: "nobody_has_it" {config}')
    explicit.put_python("raises", 'return answer(OUT=given("IN"))', "    def initialize(self, args):\n        1 / 0\n")
    explicit.put("good", 2)
    with client_of(explicit.load("good")) as client:
        for name, reason in {
            "unreadable": "unreadable/config.pbtxt:1",
            "versionless": "at least one version must be available under the version policy of model 'versionless'",
            "backendless": "nobody_has_it",
            "raises": "ZeroDivisionError",
        }.items():
            status, text = refusal(client.load_model, name)
            is_unread = name == "unreadable"  # Triton does not know then which model it is
            begin = f"failed to load '{name}', failed to poll" if is_unread else f"load failed for model '{name}': "
            assert (status, text.startswith(begin)) == (400, True)
            assert reason in text
            row = rows(client)[name]
            assert row["state"] == "UNAVAILABLE"
            assert reason in row["reason"]
            assert str(explicit.folder) not in text + row["reason"]
            assert client.is_server_ready(), "what never served is not missed"
        assert ask(client, "good") == 2
        explicit.put_python("raises", 'return answer(OUT=given("IN"))')
        client.load_model("raises")
        assert ask(client, "raises") == 1


@pytest.mark.fault("L3")
def test_a_failed_reload_keeps_the_old_version_and_the_index_has_the_reason(explicit: Explicit) -> None:
    explicit.put("m", 2)
    with client_of(explicit.load("m")) as client:
        explicit.write("m/1/model.onnx", b"no model")
        status, text = refusal(client.load_model, "m")
        assert (status, text[:27]) == (400, "load failed for model 'm': ")
        assert ask(client, "m") == 2
        row = rows(client)["m"]
        assert row["state"] == "READY"
        assert row["reason"].startswith("the last load failed, the one before it serves on: ")
        assert client.is_server_ready()
        explicit.put("m", 3)
        client.load_model("m")
        assert ask(client, "m") == 3
        assert "reason" not in rows(client)["m"]


def test_an_unchanged_model_is_not_loaded_again(explicit: Explicit, tmp_path: Path) -> None:
    counter = tmp_path / "loads"
    explicit.put_python(
        "m",
        'return answer(OUT=given("IN"))',
        f"    def initialize(self, args):\n        open({str(counter)!r}, 'a').write('x')\n",
    )
    with client_of(explicit.load("m")) as client:
        os.utime(explicit.folder / "m/1/model.py")
        client.load_model("m")
        assert counter.read_text() == "x"
        explicit.write("m/config.pbtxt", "# a comment\n" + (explicit.folder / "m/config.pbtxt").read_text())
        client.load_model("m")
        assert counter.read_text() == "x"
        explicit.write("m/shared.py", "")
        client.load_model("m")
        assert counter.read_text() == "xx"


@pytest.mark.fault("L4", "E11")
def test_twenty_reloads_under_load_fail_no_request_and_each_runs_on_one_generation(explicit: Explicit) -> None:
    explicit.put("step", 2)
    explicit.put_chain("chain", "step", "step", "step")
    served = explicit.load("chain")
    over = threading.Event()
    seen: set[float] = set()

    def keep_asking() -> int:
        count = 0
        with client_of(served) as client:
            while not over.is_set():
                seen.add(ask(client, "chain"))
                count += 1
        return count

    with client_of(served) as client, ThreadPoolExecutor(3) as clients:
        counts = [clients.submit(keep_asking) for _ in range(3)]
        try:
            for number in range(3, 23):
                explicit.put("step", number)
                client.load_model("step")
                assert ask(client, "chain") == number**3
        finally:
            over.set()
        assert all(count.result() > 20 for count in counts)
        (statistics,) = client.get_inference_statistics("chain")["model_stats"]
        assert statistics["inference_stats"]["fail"]["count"] == 0
    assert seen <= {float(number**3) for number in range(2, 23)}


@pytest.mark.fault("L5")
def test_loads_and_unloads_of_one_name_from_three_clients_end_in_a_defined_state(explicit: Explicit) -> None:
    explicit.put("step", 2)
    explicit.put_chain("chain", "step")
    served = explicit.load()

    def churn(_: int) -> None:
        with client_of(served) as client:
            for _ in range(10):
                client.load_model("chain")
                client.unload_model("chain", unload_dependents=True)
                client.load_model("step")

    with ThreadPoolExecutor(3) as clients:
        list(clients.map(churn, range(3)))
    with client_of(served) as client:
        assert rows(client)["step"]["state"] == "READY"
        assert rows(client)["chain"] == {"name": "chain", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
        client.load_model("chain")
        assert ask(client, "chain") == 2


@pytest.mark.fault("L6")
def test_an_unload_waits_for_requests_in_flight_and_refuses_new_ones_meanwhile(
    explicit: Explicit, tmp_path: Path
) -> None:
    go, begun = tmp_path / "go", tmp_path / "begun"
    explicit.put_python(
        "slow",
        f"""
        import pathlib
        pathlib.Path({str(begun)!r}).touch()
        while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)
        return answer(OUT=given("IN"))
        """,
    )
    served = explicit.load("slow")
    with client_of(served) as client, ThreadPoolExecutor(2) as pool:
        answer = pool.submit(elsewhere, served, lambda other: ask(other, "slow"))
        until(begun.exists, "the request runs")
        unload = pool.submit(elsewhere, served, lambda other: other.unload_model("slow"))
        until(lambda: rows(client)["slow"]["state"] == "UNLOADING", "it is being unloaded")
        status, text = refusal(ask, client, "slow")
        assert (status, text) == (503, "Request for unknown model: 'slow' is not at ready state: unloaded")
        assert client.is_server_ready(), "an unload is no failure"
        assert not unload.done()
        go.touch()
        assert answer.result(30) == 1
        unload.result(30)
        assert rows(client)["slow"] == {"name": "slow", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}


@pytest.mark.fault("L7")
def test_unload_dependents_unloads_steps_without_another_user(explicit: Explicit) -> None:
    for name in ("own", "shared", "named"):
        explicit.put(name, 2)
    explicit.put_chain("a", "own", "shared", "named")
    explicit.put_chain("b", "shared")
    with client_of(explicit.load("a", "b")) as client:
        client.load_model("named")
        client.unload_model("a", unload_dependents=True)
        states = {name: rows(client)[name]["state"] for name in ("a", "own", "shared", "b", "named")}
        assert states == {
            "a": "UNAVAILABLE",
            "own": "UNAVAILABLE",
            "shared": "READY",
            "b": "READY",
            "named": "READY",
        }
        client.unload_model("b")
        assert ask(client, "shared") == 2, "without unload_dependents the steps stay"


@pytest.mark.fault("E6", "E12")
def test_an_ensemble_with_an_unloaded_step_is_unavailable_until_it_is_loaded(explicit: Explicit) -> None:
    explicit.put("step", 2)
    explicit.put_chain("chain", "step")
    explicit.put_chain("outer", "chain", "step")
    with client_of(explicit.load("outer")) as client:
        assert ask(client, "outer") == 4
        client.unload_model("step")
        for name in ("chain", "outer"):
            assert not client.is_model_ready(name)
            status, text = refusal(ask, client, name)
            assert status == 503
            assert "depends on 'step' which is not valid" in text
            assert "unloaded" in text
            assert rows(client)[name]["state"] == "UNAVAILABLE"
        assert client.is_server_ready()
        explicit.put("step", 3)
        client.load_model("step")
        assert ask(client, "outer") == 9
        assert ask(client, "chain") == 3


@pytest.mark.fault("E11")
def test_an_ensemble_that_contradicts_its_step_is_unavailable_until_they_agree(explicit: Explicit) -> None:
    explicit.put("step", 2)
    explicit.put("other", 2)
    explicit.put_chain("chain", "step")
    with client_of(explicit.load("chain", "other")) as client:
        fits = (explicit.folder / "step/1/model.onnx").read_bytes()
        explicit.put_python("step", 'return answer(OUT=given("IN"))')
        config = (explicit.folder / "step/config.pbtxt").read_text()
        explicit.write("step/config.pbtxt", config.replace("dims: [ 4 ]", "dims: [ 5 ]"))
        (explicit.folder / "step/1/model.onnx").unlink()
        client.load_model("step")
        status, text = refusal(ask, client, "chain")
        assert status == 503
        assert "inconsistent shape" in text
        assert not client.is_server_ready(), "something that should serve does not"
        assert ask(client, "other") == 2
        (explicit.folder / "step/config.pbtxt").unlink()
        (explicit.folder / "step/1/model.py").unlink()
        explicit.write("step/1/model.onnx", fits)
        client.load_model("step")
        assert ask(client, "chain") == 2
        assert client.is_server_ready()


def test_an_ensemble_with_an_invalid_new_configuration_keeps_the_old_one(explicit: Explicit) -> None:
    explicit.put("step", 2)
    explicit.put_chain("chain", "step", "step")
    with client_of(explicit.load("chain")) as client:
        explicit.put_chain("chain", "step", "missing")
        status, text = refusal(client.load_model, "chain")
        assert status == 400
        assert "not available or ambiguous: missing" in text
        assert ask(client, "chain") == 4
        assert "missing" in rows(client)["chain"]["reason"]


def test_a_step_and_its_ensemble_are_replaced_together(explicit: Explicit) -> None:
    explicit.put("step", 2)
    explicit.put_chain("chain", "step")
    with client_of(explicit.load("chain")) as client:
        explicit.put("step", 3)
        explicit.put("more", 5)
        explicit.put_chain("chain", "step", "more")
        client.load_model("chain")
        assert ask(client, "chain") == 15


@pytest.mark.fault("L8")
@pytest.mark.parametrize("mode", ["none", "poll"])
def test_only_mode_explicit_lets_clients_load_and_unload(repository: Repository, serve: Serve, mode: str) -> None:
    repository.put("m", 2)
    with client_of(serve(repository.folder, f"--model-control-mode={mode}")) as client:
        for call in (client.load_model, client.unload_model):
            status, text = refusal(call, "m")
            assert status == 503
            assert text.startswith("explicit model load / unload is not allowed if polling is enabled")
        assert ask(client, "m") == 2


@pytest.mark.fault("L9", "L10")
def test_a_version_policy_decides_which_versions_a_load_serves(explicit: Explicit) -> None:
    for version in (1, 2, 3):
        explicit.put("m", version * 10, version)
    for no_version in ("abc", "04", "0", "-1"):
        explicit.write(f"m/{no_version}/model.onnx", b"no model")
    with client_of(explicit.load("m")) as client:

        def versions() -> list[int]:
            index = client.get_model_repository_index()
            return [int(row["version"]) for row in index if (row["name"], row["state"]) == ("m", "READY")]

        def serves(policy: str) -> list[int]:
            explicit.write("m/config.pbtxt", f"version_policy: {{ {policy} }}")
            client.load_model("m")
            found = versions()
            assert [ask(client, "m", str(version)) for version in found] == [version * 10 for version in found]
            for version in {1, 2, 3} - set(found):
                assert refusal(ask, client, "m", str(version))[0] == 503
            assert ask(client, "m") == max(found) * 10
            return found

        assert versions() == [3]
        assert refusal(ask, client, "m", "2")[0] == 404  # it was never to be served
        assert serves("all { }") == [1, 2, 3]
        assert serves("latest { num_versions: 2 }") == [2, 3]
        assert serves("specific { versions: [ 1, 3 ] }") == [1, 3]
        explicit.put("m", 50, 5)
        assert serves("all { }") == [1, 2, 3, 5]


@pytest.mark.fault("L11")
def test_with_one_broken_model_at_the_start_others_serve_and_the_server_is_not_ready(
    repository: Repository, serve: Serve
) -> None:
    repository.put("good", 2)
    repository.write("broken/1/model.onnx", b"no model")
    with client_of(serve(repository.folder, EXPLICIT, "--load-model=*", "--exit-on-error=false")) as client:
        assert ask(client, "good") == 2
        assert not client.is_server_ready()
        repository.put("broken", 3)
        client.load_model("broken")
        assert client.is_server_ready()
    repository.write("broken/1/model.onnx", b"no model")
    lenient = ("--exit-on-error=false", "--strict-readiness=false")
    with client_of(serve(repository.folder, *lenient)) as client:
        assert client.is_server_ready()


# ----------------------------------------------------------------------------------------------------------- overrides


def onnx_config(**more: Any) -> str:
    return json.dumps({"backend": "onnxruntime", "max_batch_size": 16, **more})


def test_a_configuration_override_applies_until_the_next_load(explicit: Explicit) -> None:
    explicit.put("m", 2)
    explicit.put("m", 3, version=2)
    with client_of(explicit.load("m")) as client:
        client.load_model("m", config=onnx_config(version_policy={"specific": {"versions": [1]}}))
        assert ask(client, "m") == 2
        assert client.get_model_config("m")["version_policy"]["specific"]["versions"] == [1]
        client.load_model("m")
        assert ask(client, "m") == 3


def test_uploaded_files_may_have_a_new_model_name_and_are_removed_at_unload(
    repository: Repository, tmp_path: Path
) -> None:
    private = tmp_path / "private"
    private.mkdir()
    repository.put("m", 2)
    own = {"TMPDIR": str(private)}
    with (
        serving(repository.folder, EXPLICIT, "--load-model=m", environment=own) as served,
        client_of(served) as client,
    ):
        files = {"file:1/model.onnx": repository.arithmetic("Mul", 7), "file:3/model.onnx": b"unused"}
        client.load_model("new", config=onnx_config(version_policy={"specific": {"versions": [1]}}), files=files)
        assert ask(client, "new") == 7
        client.load_model("m", config=onnx_config(), files={"file:1/model.onnx": repository.arithmetic("Mul", 8)})
        assert ask(client, "m") == 8
        assert len(list(private.iterdir())) == 2
        assert all(folder.stat().st_mode & 0o077 == 0 for folder in private.iterdir())
        client.unload_model("new")
        client.load_model("m")
        assert ask(client, "m") == 2
        until(lambda: not list(private.iterdir()), "the private folders are gone")
        client.load_model("m", config=onnx_config(), files={"file:1/model.onnx": repository.arithmetic("Mul", 9)})
        assert len(list(private.iterdir())) == 1
        assert served.stop() == 0
    assert not list(private.iterdir())


@pytest.mark.fault("L12", "Z1")
@pytest.mark.parametrize(
    "path", ["../../x", "1/../../../x", "/../x", "", "1//x", "1/" + "y" * 256, "1/a\0b", "1\\x", ".", "1/a\nb"]
)
def test_an_uploaded_file_outside_its_folder_is_refused_and_not_written(
    control_server: Served, private: Path, make_arithmetic: MakeFile, path: str
) -> None:
    around = private.parent
    before = sorted(around.rglob("*"))
    with client_of(control_server) as client:
        files = {"file:1/model.onnx": make_arithmetic("Mul", 7), f"file:{path}": b"x"}
        status, text = refusal(client.load_model, "m", config=onnx_config(), files=files)
        assert status == 400
        assert "does not name a file in the model's folder" in text
        assert ask(client, "m") == 2
        assert client.is_server_ready()
    assert sorted(around.rglob("*")) == before


@pytest.mark.fault("L13", "Z1")
@pytest.mark.parametrize(
    "name", ["..", "%2e%2e", "a%00b", "a%0d%0aX:%201", "%20", "n" * 300, "a%2fb", "a%5cb", ".", "%2e%2e%2f%2e%2e%2fetc"]
)
def test_an_invalid_model_name_is_refused_without_header_injection(control_server: Served, name: str) -> None:
    lines = _post(control_server, f"/v2/repository/models/{name}/load", b"").split(b"\r\n")
    assert lines[0].split()[1] in (b"400", b"404")
    assert not any(line.lower().startswith(b"x:") for line in lines)
    with client_of(control_server) as client:
        assert client.is_server_live()
        assert list(rows(client)) == ["later", "m"]


def _post(served: Served, path: str, body: bytes) -> bytes:
    """The response to exactly this path; clients would normalise it."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        connection.sendall(head.encode() + body)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.fault("L14")
@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"config": "{"}, "Invalid config override: "),
        ({"config": '{"no_such_field": 1}'}, "m/config: no_such_field: Invalid config override: Message type"),
        (
            {"config": '{"max_batch_size": 4, "input": [{"name": "IN", "dims": [0]}]}'},
            "m/config: input[0].dims[0]: model input",
        ),
        ({"config": 7}, "the parameter 'config' is a string"),
        ({"config": "{}", "file:1/model.onnx": "%%%"}, "the parameter 'file:1/model.onnx' is not base64"),
        ({"config": "{}", "file:1/model.onnx": 1}, "the parameter 'file:1/model.onnx' is a string of base64"),
        ({"file:1/model.onnx": base64.b64encode(b"x").decode()}, "failed to load 'm', failed to poll from model repo"),
        (
            {"config": "{}", "file:model.onnx": base64.b64encode(b"x").decode()},
            "no file of the call is in a version folder: not 'file:model.onnx', but 'file:1/model.onnx'",
        ),
        ({"colour": "red"}, "unexpected error on creating Triton parameter: 'colour' is not known here"),
        ([], "'parameters' is a JSON object"),
    ],
)
def test_an_override_that_cannot_be_read_is_refused_and_the_old_model_serves(
    control_server: Served, parameters: Any, said: str
) -> None:
    url = f"{control_server.base_url}/v2/repository/models/m/load"
    answer = httpx.post(url, json={"parameters": parameters}, timeout=30, trust_env=False, verify=False)
    assert (answer.status_code, said in answer.json()["error"]) == (400, True), answer.text
    with client_of(control_server) as client:
        assert ask(client, "m") == 2


@pytest.mark.fault("W10")
def test_a_load_call_with_too_many_files_is_refused_before_they_are_decoded(control_server: Served) -> None:
    invalid = dict.fromkeys([f"file:1/{n}" for n in range(10_001)], "%%%")
    began = time.monotonic()
    answer = _load(control_server, invalid)
    assert time.monotonic() - began < 2
    said = "a load call has at most 10000 'file:' parameters, and this one has 10001; put the model into the repository"
    assert answer == (400, f"{said} instead")
    del invalid["file:1/0"]
    assert _load(control_server, invalid) == (
        400,
        "the parameter 'file:1/1' is not base64: Only base64 data is allowed",
    )


def _load(served: Served, parameters: dict[str, str]) -> tuple[int, str]:
    url = f"{served.base_url}/v2/repository/models/m/load"
    answer = httpx.post(url, json={"parameters": parameters}, timeout=30, trust_env=False, verify=False)
    return answer.status_code, str(answer.json()["error"])


@pytest.mark.parametrize(
    ("verb", "key"), [("load", "config"), ("load", "file:1/model.onnx"), ("unload", "unload_dependents")]
)
def test_a_parameter_outside_the_parameters_object_is_refused(control_server: Served, verb: str, key: str) -> None:
    url = f"{control_server.base_url}/v2/repository/models/m/{verb}"
    answer = httpx.post(url, json={key: "{}"}, timeout=30, trust_env=False, verify=False)
    said = f'\'{key}\' is a parameter: {{"parameters": {{"{key}": ...}}}}'
    assert (answer.status_code, answer.json()["error"]) == (400, said)


def test_a_repository_name_in_a_repository_call_is_refused(control_server: Served) -> None:
    for path in ("index", "models/m/load", "models/m/unload"):
        answer = httpx.post(
            f"{control_server.base_url}/v2/repository/some/{path}", timeout=30, trust_env=False, verify=False
        )
        assert answer.status_code == 501
        assert answer.json()["error"].startswith("'repository_name' specification is not supported")


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `control_server` puts its private folders."""
    folder = tmp_path_factory.mktemp("control") / "private"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def control_server(private: Path, make_arithmetic: MakeFile) -> Iterator[Served]:
    """One server in mode explicit that has `m`, and `later` in its repository, for tests that change nothing."""
    folder = private.parent / "models"
    for name in ("m", "later"):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1/model.onnx").write_bytes(make_arithmetic("Mul", 2))
    with serving(folder, EXPLICIT, "--load-model=m", environment={"TMPDIR": str(private)}) as served:
        yield served


# ------------------------------------------------------------------------------------------------------------ the page


def test_the_examples_of_the_page_on_model_control_work(repository: Repository, serve: Serve, root: Path) -> None:
    page = (root / "docs/model-control.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 7
    repository.put("double", 2)
    repository.put_chain("chain", "double", "double")
    with client_of(serve(repository.folder, EXPLICIT)) as client:
        names = {
            "client": client,
            "infer": lambda model: ask(client, model),
            "write": repository.write,
            "double": repository.arithmetic("Mul", 2),
            "triple": repository.arithmetic("Mul", 3),
            "InferenceServerException": InferenceServerException,
        }
        for number, example in enumerate(examples):
            exec(compile(example, f"docs/model-control.md, example {number}", "exec"), names)
            if not client.is_model_ready("double"):
                repository.put("double", 2)


# ---------------------------------------------------------------------------------------------------- models that hang


@pytest.mark.fault("L15")
def test_a_model_that_hangs_during_load_blocks_neither_others_nor_shutdown(
    repository: Repository, serve: Serve
) -> None:
    hangs = "    def initialize(self, args):\n        while True: time.sleep(1)\n"
    repository.put_python("hangs", 'return answer(OUT=given("IN"))', hangs)
    repository.put("good", 2)
    repository.put("later", 3)
    served = serve(repository.folder, EXPLICIT, "--load-model=good", "--exit-timeout-secs=5")
    with client_of(served) as client, ThreadPoolExecutor(1) as pool:
        load = pool.submit(elsewhere, served, lambda other: refusal(other.load_model, "hangs"))
        until(lambda: rows(client)["hangs"].get("state") == "LOADING", "it is being loaded")
        client.load_model("later")
        assert [ask(client, "good"), ask(client, "later")] == [2, 3]
        assert client.is_server_ready()
        client.unload_model("hangs")
        status, text = load.result(30)
        assert status == 400
        assert "its process was killed: it was unloaded while it was loading" in text
        load = pool.submit(elsewhere, served, lambda other: refusal(other.load_model, "hangs"))
        until(lambda: rows(client)["hangs"].get("state") == "LOADING", "it is being loaded again")
        served.process.send_signal(signal.SIGTERM)
        status, text = load.result(30)
        assert status == 503
        assert text.startswith("Server is stopping")
    assert served.process.wait(30) == 0


@pytest.mark.fault("L16")
def test_a_repository_that_disappears_unloads_nothing_and_fails_the_next_load(
    repository: Repository, serve: Serve
) -> None:
    repository.put("m", 2)
    with client_of(serve(repository.folder, EXPLICIT, "--load-model=m")) as client:
        repository.folder.rename(repository.folder.parent / "elsewhere")
        status, text = refusal(client.load_model, "m")
        assert status == 400
        assert text.startswith("failed to load 'm', failed to poll from model repository: it cannot be read")
        assert str(repository.folder.parent) not in text
        assert ask(client, "m") == 2
        assert rows(client)["m"]["state"] == "READY"
        (repository.folder.parent / "elsewhere").rename(repository.folder)
        client.load_model("m")


# -------------------------------------------------------------------------------------------------------------- polling


def test_polling_applies_changes_of_the_repository(polling: dict[str, Future[None]]) -> None:
    polling["_follows"].result()


@pytest.mark.fault("C14", "L16")
def test_polling_ignores_incomplete_files_and_tolerates_a_missing_repository(
    polling: dict[str, Future[None]],
) -> None:
    polling["_survives"].result()


def _follows(repository: Repository) -> None:
    repository.put("m", 2)
    repository.put_chain("chain", "m")
    with serving(repository.folder, *POLL) as served, client_of(served) as client:
        assert ask(client, "chain") == 2
        repository.put("m", 3)
        repository.put("new", 5)
        until(lambda: ask(client, "chain") == 3, "the new file serves")
        until(lambda: "new" in rows(client) and rows(client)["new"]["state"] == "READY", "a new model serves")
        repository.put("m", 4, version=2)
        shutil.rmtree(repository.folder / "new")
        until(lambda: ask(client, "chain") == 4, "the new version serves")
        until(lambda: "new" not in rows(client), "what is gone is unloaded, and not in the index any more")
        assert refusal(ask, client, "new") == (404, "Request for unknown model: 'new' is not found")
        assert client.is_server_ready()
        repository.put("new", 6)
        repository.write("m/2/model.onnx", b"no model")
        until(lambda: "reason" in rows(client)["m"], "the broken file was looked at")
        until(lambda: "new" in rows(client) and rows(client)["new"]["state"] == "READY", "what came back serves")
        assert ask(client, "m") == 4


def _survives(repository: Repository) -> None:
    repository.put("m", 2)
    with serving(repository.folder, *POLL) as served, client_of(served) as client:
        whole = repository.arithmetic("Mul", 3)
        target = repository.folder / "m/1/model.onnx"
        with target.open("wb") as stream:
            for at in range(0, len(whole), len(whole) // 12):  # for longer than a poll and the quiet time after it
                stream.write(whole[at : at + len(whole) // 12])
                stream.flush()
                time.sleep(0.2)
                assert ask(client, "m") == 2
                assert "reason" not in rows(client)["m"]
        until(lambda: ask(client, "m") == 3, "the whole file serves")
        repository.folder.rename(repository.folder.parent / "elsewhere")
        lost = "; nothing is unloaded, what is loaded serves on"
        until(lambda: lost in served.log, "the loss is noticed")
        assert ask(client, "m") == 3
        (repository.folder.parent / "elsewhere").rename(repository.folder)
        repository.put("m", 4)
        until(lambda: ask(client, "m") == 4, "it is followed again")
        assert "the model repository can be read again" in served.log
        shutil.rmtree(repository.folder / "m")
        until(lambda: rows(client) == {}, "an empty one is one without models, as on Triton")
        assert "no model is left in the model repository, so that all are unloaded: 1" in served.log


# --------------------------------------------------------------------------------------------------------- many cycles


@pytest.mark.slow
def test_repeated_loading_and_unloading_leaks_no_resources(repository: Repository, serve: Serve, cycles: int) -> None:
    repository.put("step", 2)
    repository.put_python("python", 'return answer(OUT=given("IN"))')
    repository.put_chain("chain", "step", "python")
    served = serve(repository.folder, EXPLICIT)
    process = Path(f"/proc/{served.pid}")
    if not process.exists():
        pytest.skip("counts threads and descriptors in /proc")

    def counted() -> tuple[int, int]:
        return len(list((process / "task").iterdir())), len(list((process / "fd").iterdir()))

    def resident() -> int:
        return int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with client_of(served) as client:

        def cycle() -> None:
            client.load_model("chain")
            assert ask(client, "chain") == 2
            client.unload_model("chain", unload_dependents=True)

        for _ in range(10):
            cycle()
        threads, descriptors = counted()
        memory = resident()
        for _ in range(cycles):
            cycle()
        until(lambda: counted()[0] <= threads + 2, f"no more than {threads} threads: {counted()}")
        until(lambda: counted()[1] <= descriptors + 2, f"no more than {descriptors} descriptors: {counted()}")
        assert resident() - memory < 16 << 20, "memory grew"
