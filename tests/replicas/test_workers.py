"""`flowserve run --workers N`: several servers behind one port, as clients and operators see them."""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton

from flowserve.testing.serve import DidNotServe, Served
from tests.support.forked import serving

pytestmark = [pytest.mark.server, pytest.mark.slow]

ONE = """
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
# The process that answers, plus IN.
PID = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        out = []
        for request in requests:
            number = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().ravel()[0])
            if number < 0:
                time.sleep(-number / 1000)
            out.append(np.array([[os.getpid()]], np.int32))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", one)]) for one in out]
"""
# The sum of a sequence, and the process that has it.
SUM = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        number = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().ravel()[0])
        which = request.correlation_id()
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self.sums[which] = 0
        self.sums[which] = self.sums.get(which, 0) + number  # 0: a slot of the batch without a request
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[self.sums[which]]], np.int32))])
"""
# As many responses as the sum of the sequence.
STREAM = """
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        for request in requests:
            number = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().ravel()[0])
            which = request.correlation_id()
            if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                self.sums[which] = 0
            self.sums[which] += number
            sender, last = request.get_response_sender(), self.sums[which] - 1
            is_with_last = number < 0  # the final flag comes with the last response, else alone
            for place in range(last + 1):
                response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[place]], np.int32))])
                sender.send(response, FINAL if is_with_last and place == last else 0)
            if not is_with_last:
                sender.send(flags=FINAL)
        return None
"""
SEQUENCES = "sequence_batching { max_sequence_idle_microseconds: 600000000 }"


def model(folder: Path, name: str, code: str, more: str = "", *, batch: int = 4) -> None:
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(f'backend: "python"\nmax_batch_size: {batch}\n{ONE}\n{more}\n')
    (folder / name / "1" / "model.py").write_text(code)


@contextmanager
def workers(
    folder: Path, *options: str, count: int = 2, environment: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """A server with all of its workers ready."""
    given = ("--workers", str(count), "--python-execution", "inline", "--exit-timeout-secs", "2", *options)
    with serving(folder, *given, environment=environment) as served:
        until(lambda: served.log.count("is ready") >= count, served)
        yield served


def until(is_so: Callable[[], object], served: Served | None = None, within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end, served.log if served else "too late"
        time.sleep(0.02)


def tensor(number: int, kind: Any = triton) -> Any:
    made = kind.InferInput("IN", [1, 1], "INT32")
    made.set_data_from_numpy(np.array([[number]], np.int32))
    return made


def ask(client: Any, name: str, number: int = 0, **more: Any) -> int:
    return int(client.infer(name, [tensor(number)], **more).as_numpy("OUT")[0, 0])


class Connections:
    """Clients of one server, each with a connection of its own. They are opened one after the other, so that they are
    spread over the workers as the parent says: a connection for a look at the server, between two of them, could take
    the turn of the second.
    """

    def __init__(self, served: Served, count: int) -> None:
        self._stack = ExitStack()
        self.clients: list[Any] = []
        for _ in range(count):
            client = triton.InferenceServerClient(served.address, network_timeout=60.0)
            self.clients.append(self._stack.enter_context(client))
            assert client.is_server_live()

    def __enter__(self) -> list[Any]:
        return self.clients

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def get(served: Served, path: str, port: int = 0) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port or served.port, timeout=30)
    connection.request("GET", path)
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    assert response.status == 200, body
    return body


def metric(served: Served, line: str) -> float:
    return sum(float(one.rpartition(" ")[2]) for one in get(served, "/metrics").splitlines() if one.startswith(line))


def workers_of(served: Served) -> list[int]:
    """The process ids of the workers."""
    found = subprocess.run(["pgrep", "-P", str(served.pid)], capture_output=True, text=True, check=False).stdout
    return sorted(map(int, found.split()))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return write_repository(tmp_path / "models")


def write_repository(folder: Path) -> Path:
    model(folder, "pid", PID)
    model(folder, "sum", SUM, SEQUENCES)
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server for the tests that end no worker, with HTTP and gRPC."""
    folder = write_repository(tmp_path_factory.mktemp("shared") / "models")
    model(folder, "stream", STREAM, f"{SEQUENCES}\nmodel_transaction_policy {{ decoupled: true }}", batch=0)
    config = folder / "stream" / "config.pbtxt"
    config.write_text(config.read_text().replace("dims: [ 1 ]", "dims: [ 1, 1 ]"))
    options = "--allow-grpc", "true", "--grpc-port", "0", "--allow-client-shm", "true"
    with workers(folder, *options) as served:
        yield served


# ---------------------------------------------------------------------------------------------- connections


def test_connections_are_spread_evenly_and_each_stays_where_it_is(shared: Served) -> None:
    with Connections(shared, 8) as clients:
        where = [ask(one, "pid") for one in clients]
        assert sorted(Counter(where).values()) == [4, 4]
        assert sorted(set(where)) == workers_of(shared)
        assert [ask(one, "pid") for one in clients] == where


def test_a_worker_with_fewer_connections_gets_the_next(repository: Path) -> None:
    with workers(repository) as served:
        with Connections(served, 8) as clients:
            first = ask(clients[0], "pid")
            for one in clients[1:]:
                ask(one, "pid")
            for one in clients:
                if ask(one, "pid") == first:
                    one.close()
            until(lambda: metric(served, "flowserve_http_connections") <= 5)
            with Connections(served, 2) as more:
                assert [ask(one, "pid") for one in more] == [first] * 2


def test_a_connection_for_each_request_is_served(shared: Served) -> None:
    seen: Counter[int] = Counter()
    for _ in range(40):
        with Connections(shared, 1) as (client,):
            seen[ask(client, "pid")] += 1
    assert len(seen) == 2
    assert min(seen.values()) >= 10


# ---------------------------------------------------------------------------------------------- life


def test_a_killed_worker_is_started_again_while_the_other_serves(repository: Path) -> None:
    with workers(repository) as served, Connections(served, 2) as clients:
        by_worker = {ask(one, "pid"): one for one in clients}
        (dies, _), (lives, client) = sorted(by_worker.items())
        os.kill(dies, signal.SIGKILL)
        assert [ask(client, "pid") for _ in range(20)] == [lives] * 20
        with Connections(served, 4) as more:  # none waits for the one that is gone
            assert {ask(one, "pid") for one in more} == {lives}
        until(lambda: served.log.count("is ready") >= 3, served)
        assert re.search(r"worker \d ended by SIGKILL; it is started again", served.log)
        until(lambda: len(workers_of(served)) == 2)
        with Connections(served, 4) as more:
            assert {ask(one, "pid") for one in more} == set(workers_of(served)) != {dies, lives}


def test_a_worker_that_does_not_answer_is_killed_and_started_again(repository: Path) -> None:
    with workers(repository, "--worker-timeout-secs", "3") as served, Connections(served, 2) as clients:
        (hangs, _), (lives, client) = sorted({ask(one, "pid"): one for one in clients}.items())
        os.kill(hangs, signal.SIGSTOP)
        until(lambda: re.search(r"worker \d has not answered for 3 s: it is killed", served.log), served)
        until(lambda: served.log.count("is ready") >= 3, served)
        assert ask(client, "pid") == lives
        until(lambda: len(workers_of(served)) == 2 and hangs not in workers_of(served))
        assert served.log.count("it is killed") == 1
        with Connections(served, 2) as more:
            assert {ask(one, "pid") for one in more} == set(workers_of(served))


def test_requests_under_way_are_answered_after_a_stop_signal(repository: Path) -> None:
    options = "--python-execution", "thread", "--exit-timeout-secs", "30"
    with workers(repository, *options) as served, Connections(served, 2) as clients:
        answers = [one.async_infer("pid", [tensor(-1500)]) for one in clients]
        until(lambda: first_frame(served, "pid")["server"]["in_flight"] == 2)
        assert served.stop() == 0
        assert len({int(one.get_result().as_numpy("OUT")[0, 0]) for one in answers}) == 2
    assert not workers_of(served)


# Waits in `execute`, or while it is loaded, until FOLDER/go exists; FOLDER has a file for each process that waits.
HELD = (
    PID
    + """
    def hold(self):
        open(os.path.join(FOLDER, str(os.getpid())), "w").close()
        while not os.path.exists(os.path.join(FOLDER, "go")):
            time.sleep(0.01)
"""
)
HELD_IN_EXECUTE = HELD.replace("execute(self, requests):", "execute(self, requests):\n        self.hold()")
HELD_IN_LOADING = HELD + "\n    def initialize(self, args):\n        self.hold()\n"


def held(repository: Path, code: str, folder: Path) -> Path:
    """A model "held", and its folder."""
    folder.mkdir()
    model(repository, "held", code.replace("FOLDER", repr(str(folder))))
    return folder


def waiting(folder: Path) -> set[int]:
    return {int(path.name) for path in folder.iterdir()}


def all_new_get(served: Served, worker: int) -> bool:
    with Connections(served, 4) as clients:
        try:
            return {ask(one, "pid") for one in clients} == {worker}
        except triton.InferenceServerException:  # that it stops
            return False


def test_a_worker_that_is_asked_to_stop_alone_gets_no_new_connection(repository: Path, tmp_path: Path) -> None:
    folder = held(repository, HELD_IN_EXECUTE, tmp_path / "held")
    options = "--python-execution", "thread", "--exit-timeout-secs", "60"
    with workers(repository, *options) as served, Connections(served, 2) as clients:
        stops, stays = (ask(one, "pid") for one in clients)
        answer = clients[0].async_infer("held", [tensor(0)])
        until(lambda: waiting(folder) == {stops}, served)
        os.kill(stops, signal.SIGTERM)
        until(lambda: all_new_get(served, stays), served, 20)
        (folder / "go").touch()
        assert int(answer.get_result().as_numpy("OUT")[0, 0]) == stops
        until(partial(is_ready_more_than, served, 2), served)


def test_a_stop_signal_to_each_process_is_one_stop_signal(repository: Path) -> None:
    """As of systemd, to a whole control group."""
    options = "--python-execution", "thread", "--exit-timeout-secs", "30"
    with workers(repository, *options) as served, Connections(served, 2) as clients:
        answers = [one.async_infer("pid", [tensor(-1500)]) for one in clients]
        until(lambda: first_frame(served, "pid")["server"]["in_flight"] == 2)
        for one in workers_of(served):
            os.kill(one, signal.SIGTERM)
        assert served.stop() == 0
        assert len({int(one.get_result().as_numpy("OUT")[0, 0]) for one in answers}) == 2


def test_a_second_stop_signal_ends_every_process_at_once(repository: Path) -> None:
    with workers(repository, "--python-execution", "thread") as served, Connections(served, 2) as clients:
        processes = workers_of(served)
        for one in clients:
            one.async_infer("pid", [tensor(-20_000)])
        until(lambda: first_frame(served, "pid")["server"]["in_flight"] == 2)
        served.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        began = time.monotonic()
        assert served.stop(signal.SIGINT) != 0
        assert time.monotonic() - began < 5
        until(lambda: not any(map(is_alive, processes)))


def test_workers_end_when_their_parent_is_killed(repository: Path) -> None:
    with workers(repository) as served:
        processes = workers_of(served)
        served.process.kill()
        served.process.wait()
        until(lambda: not any(map(is_alive, processes)))


def test_a_folder_that_a_killed_parent_left_is_removed_by_the_next_server(repository: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:  # a short path, as sockets need
        with workers(repository, environment={"TMPDIR": folder}) as served:
            (left,) = Path(folder).glob("flowserve-workers-*")
            served.process.kill()
        with workers(repository, environment={"TMPDIR": folder}) as served:
            until(lambda: not left.exists(), served)
        until(lambda: not [*Path(folder).glob("flowserve-workers-*")])


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def test_models_that_cannot_be_loaded_are_reported_once_and_the_server_ends(repository: Path) -> None:
    (repository / "pid" / "config.pbtxt").write_text('backend: "python"\nmax_batch_size: none\n')
    with pytest.raises(DidNotServe) as ended, serving(repository, "--workers", "3"):
        pass
    assert ended.value.status == 1
    assert ended.value.log.count("failed to load pid") <= 1
    assert "started again" not in ended.value.log
    assert "config.pbtxt:2" in ended.value.log


def test_a_port_in_use_ends_the_start(repository: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(DidNotServe) as ended, serving(repository, "--workers", "2", "--http-port", port):
            pass
        assert "address already in use" in ended.value.log
        grpc = "--allow-grpc", "true", "--grpc-port", port
        with pytest.raises(DidNotServe) as ended, serving(repository, "--workers", "2", *grpc):
            pass
        assert "address already in use" in ended.value.log.lower()


def test_a_folder_for_temporary_files_that_is_too_deep_ends_the_start(repository: Path, tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    environment = {"TMPDIR": str(deep)}
    with pytest.raises(DidNotServe) as ended, serving(repository, "--workers", "2", environment=environment):
        pass
    assert f"too long for sockets: {deep}" in ended.value.log
    assert not [*deep.iterdir()]


# ---------------------------------------------------------------------------------------------- figures


def test_metrics_statistics_and_the_live_page_are_those_of_all_workers(repository: Path) -> None:
    options = "--metrics-port", "0"
    with workers(repository, *options) as served, Connections(served, 2) as clients:
        for _ in range(5):
            assert len({ask(one, "pid") for one in clients}) == 2
        name = 'nv_inference_request_success{model="pid",version="1"}'
        (line,) = [line for line in served.lines if line.startswith("metrics on ")]
        for port in (0, int(line.rpartition(":")[2].removesuffix("/metrics"))):
            (found,) = [one for one in get(served, "/metrics", port).splitlines() if one.startswith(name)]
            assert found == f"{name} 10"
        for path in ("/v2/models/stats", "/v2/models/pid/stats", "/v2/models/pid/versions/1/stats"):
            rows = {row["name"]: row for row in json.loads(get(served, path))["model_stats"]}
            assert rows["pid"]["inference_stats"]["success"]["count"] == 10
            assert rows["pid"]["batch_stats"][0]["compute_infer"]["count"] == 10
            assert rows["pid"]["last_inference"] <= time.time() * 1000
        (row,) = json.loads(get(served, "/flowserve/models/pid/stats"))["graph_stats"]
        assert (row["version"], row["nodes"][0]["batch_count"]) == ("1", 10)
        until(lambda: shown_total(served) == 10)
        assert first_frame(served, "pid")["graph"]["nodes"][0]["instances"] == 2


def first_frame(served: Served, name: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    connection.request("GET", f"/live/events?name={name}&version=1")
    response = connection.getresponse()
    while not (line := response.readline()).startswith(b"data:"):
        pass
    connection.close()
    return json.loads(line.removeprefix(b"data:"))


def test_no_counter_decreases_when_a_worker_ends(repository: Path) -> None:
    with workers(repository) as served, Connections(served, 2) as clients:
        where = {ask(one, "pid"): one for one in clients}
        for one in clients:
            for _ in range(4):
                ask(one, "pid")
        line = 'nv_inference_request_success{model="pid",version="1"}'
        bucket = 'flowserve_request_duration_seconds_count{model="pid",version="1"}'
        assert (metric(served, line), metric(served, bucket)) == (10, 10)
        assert statistics(served, "pid") == 10
        assert first_frame(served, "pid")["deployments"]
        os.kill(min(where), signal.SIGKILL)
        until(lambda: re.search("ended by SIGKILL", served.log), served)
        assert (metric(served, line), metric(served, bucket)) == (10, 10)
        until(lambda: served.log.count("is ready") >= 3, served)
        with Connections(served, 2) as more:
            for one in more:
                ask(one, "pid")
        assert (metric(served, line), metric(served, bucket)) == (12, 12)
        assert statistics(served, "pid") == 12
        until(lambda: shown_total(served) == 12)  # a page that opens soon after another shows what that one read
        assert metric(served, "nv_inference_pending_request_count") == 0


def shown_total(served: Served) -> int:
    (row,) = [one for one in first_frame(served, "pid")["deployments"] if one["name"] == "pid"]
    return int(row["total"])


def statistics(served: Served, name: str) -> int:
    (row,) = json.loads(get(served, f"/v2/models/{name}/stats"))["model_stats"]
    return int(row["inference_stats"]["success"]["count"])


def test_each_worker_writes_its_own_trace_file(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    traced = ("level=TIMESTAMPS", "rate=1", f"triton,file={file}")
    options = [word for one in traced for word in ("--trace-config", one)]
    with workers(repository, *options) as served, Connections(served, 2) as clients:
        for one in clients:
            ask(one, "pid")
        assert served.stop() == 0
    for number in (1, 2):
        assert json.loads((tmp_path / f"trace-worker{number}.json").read_text())
    assert not file.exists()


# ---------------------------------------------------------------------------------------------- models and settings


FLAKY = (
    PID
    + """
    def initialize(self, args):
        import pathlib
        mark = pathlib.Path(FOLDER)
        mark.mkdir(exist_ok=True)
        (mark / str(os.getpid())).touch()
        if FAILS and len(list(mark.iterdir())) > 1:
            raise ValueError("only one of us may have it")
"""
)


def index(client: Any) -> dict[str, str]:
    return {row["name"]: row.get("state", "") for row in client.get_model_repository_index()}


def test_a_load_is_put_in_force_by_all_workers_or_by_none(repository: Path, tmp_path: Path) -> None:
    def write(folder: str, *, fails: bool) -> None:
        code = FLAKY.replace("FOLDER", repr(str(tmp_path / folder))).replace("FAILS", str(fails))
        (repository / "flaky" / "1" / "model.py").write_text(code)

    model(repository, "flaky", "")
    write("first", fails=True)
    options = "--model-control-mode", "explicit", "--load-model", "pid"
    with workers(repository, *options) as served, Connections(served, 2) as clients:
        assert len({ask(one, "pid") for one in clients}) == 2
        with pytest.raises(Exception, match="only one of us may have it"):
            clients[0].load_model("flaky")
        assert len([*(tmp_path / "first").iterdir()]) == 2  # both tried
        for one in clients:
            assert index(one)["flaky"] != "READY"
            assert not one.is_model_ready("flaky")
        write("second", fails=False)
        clients[1].load_model("flaky")
        assert len({ask(one, "flaky") for one in clients}) == 2
        write("third", fails=True)  # a reload that fails leaves what serves
        with pytest.raises(Exception, match="only one of us may have it"):
            clients[0].load_model("flaky")
        assert len({ask(one, "flaky") for one in clients}) == 2
        clients[0].unload_model("flaky")
        for one in clients:
            assert not one.is_model_ready("flaky")


def post(connection: http.client.HTTPConnection, path: str, body: Any) -> Any:
    connection.request("POST", f"/v2/{path}", json.dumps(body))
    response = connection.getresponse()
    text = response.read()
    assert response.status == 200, text
    return json.loads(text or "null")


def test_a_load_goes_on_although_the_worker_that_was_asked_for_it_ends(repository: Path, tmp_path: Path) -> None:
    folder = held(repository, HELD_IN_LOADING, tmp_path / "held")
    options = "--model-control-mode", "explicit", "--load-model", "pid", "--python-execution", "thread"
    number = {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1, 1], "data": [0]}]}
    with workers(repository, *options) as served, ExitStack() as stack:
        asking, other = (http.client.HTTPConnection("127.0.0.1", served.port, timeout=60) for _ in range(2))
        dies, lives = (post(one, "models/pid/infer", number)["outputs"][0]["data"][0] for one in (asking, other))
        stack.callback(asking.close)
        stack.callback(other.close)
        asking.request("POST", "/v2/repository/models/held/load", "{}")
        until(lambda: waiting(folder) == {dies, lives}, served)
        os.kill(dies, signal.SIGKILL)
        with pytest.raises(ConnectionError):
            asking.getresponse()
        (folder / "go").touch()
        post(other, "repository/models/held/load", {})
        until(partial(is_ready_more_than, served, 2), served)
        with Connections(served, 3) as fresh:
            assert {ask(one, "held") for one in fresh} == set(workers_of(served))


def is_ready_more_than(served: Served, count: int) -> bool:
    return served.log.count("is ready") > count


def test_what_clients_loaded_and_set_is_there_in_a_worker_that_starts_later(repository: Path) -> None:
    model(repository, "late", PID)
    options = "--model-control-mode", "explicit", "--load-model", "pid"
    code = PID.replace("os.getpid()", "4711")
    config = {
        "backend": "python",
        "max_batch_size": 4,
        "input": [{"name": "IN", "data_type": "TYPE_INT32", "dims": [1]}],
        "output": [{"name": "OUT", "data_type": "TYPE_INT32", "dims": [1]}],
    }
    with workers(repository, *options) as served, Connections(served, 2) as clients:
        clients[0].load_model("late")
        clients[1].load_model("sent", config=json.dumps(config), files={"file:1/model.py": code.encode()})
        clients[0].unload_model("pid")
        clients[0].update_log_settings({"log_verbose_level": 1})
        clients[1].update_trace_settings(settings={"trace_rate": "77"})
        for one in workers_of(served):
            count = served.log.count("is ready")
            os.kill(one, signal.SIGKILL)
            until(partial(is_ready_more_than, served, count), served)
        with Connections(served, 2) as fresh:
            assert len({ask(one, "late") for one in fresh}) == 2
            assert [ask(one, "sent") for one in fresh] == [4711, 4711]
            for one in fresh:
                assert not one.is_model_ready("pid")
                assert one.get_log_settings()["log_verbose_level"] == 1
                assert one.get_trace_settings()["trace_rate"] == "77"


def is_gone(client: Any, name: str) -> bool:
    return not client.is_model_ready(name)


def test_a_changed_repository_is_followed_by_all_workers(repository: Path) -> None:
    options = "--model-control-mode", "poll", "--repository-poll-secs", "1"
    with workers(repository, *options) as served, Connections(served, 2) as clients:
        model(repository, "new", PID)
        for one in clients:
            until(partial(one.is_model_ready, "new"), served)
        assert len({ask(one, "new") for one in clients}) == 2
        assert served.log.count("ready new") == 2 - 1  # the second worker's informational lines are not written
        os.kill(workers_of(served)[0], signal.SIGKILL)  # the one that looked, perhaps
        until(lambda: served.log.count("is ready") >= 3, served)
        for path in sorted((repository / "new").rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        (repository / "new").rmdir()
        with Connections(served, 2) as fresh:
            for one in fresh:
                until(partial(is_gone, one, "new"), served)


@contextmanager
def region(key: str, size: int) -> Iterator[None]:
    path = Path(f"/dev/shm{key}")
    path.write_bytes(bytes(size))
    try:
        yield
    finally:
        path.unlink()


def test_shared_memory_of_clients_is_registered_everywhere(shared: Served) -> None:
    key = f"/flowserve-test-{os.getpid()}"
    with Connections(shared, 2) as clients, region(key, 64):
        clients[0].register_system_shared_memory("numbers", key, 64)
        given = triton.InferInput("IN", [1, 1], "INT32")
        given.set_shared_memory("numbers", 4)
        assert len({int(one.infer("pid", [given]).as_numpy("OUT")[0, 0]) for one in clients}) == 2
        clients[1].unregister_system_shared_memory("numbers")
        for one in clients:
            assert one.get_system_shared_memory_status() == []
            with pytest.raises(Exception, match="numbers"):
                one.infer("pid", [given])


# ---------------------------------------------------------------------------------------------- sequences


def test_a_sequence_stays_on_its_worker_whichever_connection_is_used(shared: Served) -> None:
    with Connections(shared, 4) as clients:
        assert len({ask(one, "pid") for one in clients}) == 2
        for number, first in enumerate(clients, 1):
            assert ask(first, "sum", 1, sequence_id=number, sequence_start=True) == 1
        for number in range(1, 5):
            assert [ask(one, "sum", 1, sequence_id=number) for one in clients] == [2, 3, 4, 5]
        for number, last in enumerate(reversed(clients), 1):
            assert ask(last, "sum", 10, sequence_id=number, sequence_end=True) == 15
        with pytest.raises(Exception, match="must specify the START flag"):
            ask(clients[0], "sum", 1, sequence_id=1)
        assert ask(clients[0], "sum", 3, sequence_id="text", sequence_start=True) == 3
        assert [ask(one, "sum", 1, sequence_id="text") for one in clients] == [4, 5, 6, 7]


def test_the_response_of_another_worker_has_each_header_once(shared: Served) -> None:
    data = {"name": "IN", "datatype": "INT32", "shape": [1, 1], "data": [1]}
    totals = []
    for n in range(4):  # each connection goes to the worker with fewer of them
        parameters = {"sequence_id": 77, "sequence_start": n == 0, "sequence_end": n == 3}
        body = json.dumps({"inputs": [data], "parameters": parameters})
        with ExitStack() as stack:
            connections = [http.client.HTTPConnection("127.0.0.1", shared.port, timeout=30) for _ in range(2)]
            for one in connections:
                stack.callback(one.close)
                one.request("GET", "/v2/health/live")
                one.getresponse().read()
            connection = connections[n % 2]
            connection.request("POST", "/v2/models/sum/infer", body)
            response = connection.getresponse()
            names = [name.lower() for name, _ in response.getheaders()]
            assert len(names) == len(set(names)), names
            totals.append(json.loads(response.read())["outputs"][0]["data"][0])
    assert totals == [1, 2, 3, 4]


def test_a_sequence_that_begins_again_is_where_it_was(shared: Served) -> None:
    with Connections(shared, 2) as clients:
        for _ in range(3):
            for one in clients:
                assert ask(one, "sum", 1, sequence_id=5, sequence_start=True) == 1
                assert [ask(other, "sum", 1, sequence_id=5) for other in clients] == [2, 3]


def test_the_end_of_a_worker_is_the_end_of_its_sequences(repository: Path) -> None:
    with workers(repository) as served, Connections(served, 2) as clients:
        where = {ask(one, "pid"): one for one in clients}
        (dies, first), (_, second) = sorted(where.items())
        assert ask(first, "sum", 1, sequence_id=9, sequence_start=True) == 1
        assert ask(second, "sum", 1, sequence_id=9) == 2
        os.kill(dies, signal.SIGKILL)
        until(lambda: "ended by SIGKILL" in served.log, served)
        with pytest.raises(Exception, match=r"START flag|has ended"):
            ask(second, "sum", 1, sequence_id=9)
        assert ask(second, "sum", 1, sequence_id=9, sequence_start=True) == 1


def grpc_client_of(served: Served, channels: int) -> list[Any]:
    """Clients over gRPC, each with a connection of its own."""
    return [
        triton_grpc.InferenceServerClient(
            served.grpc_address, channel_args=[("grpc.use_local_subchannel_pool", 1), ("grpc.client", number)]
        )
        for number in range(channels)
    ]


def of_both_workers(served: Served, stack: ExitStack) -> tuple[Any, Any]:
    """Two clients over gRPC whose connections are on different workers."""
    by_worker: dict[int, Any] = {}
    for client in grpc_client_of(served, 24):
        stack.callback(client.close)
        answer = client.infer("pid", [tensor(0, triton_grpc)]).as_numpy("OUT")[0, 0]
        by_worker.setdefault(int(answer), client)
        if len(by_worker) == 2:
            one, other = by_worker.values()
            return one, other
    raise AssertionError("all connections are on one worker")


def test_a_sequence_over_grpc_stays_on_its_worker(shared: Served) -> None:
    with ExitStack() as stack:
        clients = of_both_workers(shared, stack)

        def add(client: Any, number: int, **more: Any) -> int:
            return int(client.infer("sum", [tensor(number, triton_grpc)], **more).as_numpy("OUT")[0, 0])

        for first, number in zip(clients, (1, 2), strict=True):
            assert add(first, 1, sequence_id=number, sequence_start=True) == 1
        for number in (1, 2):
            assert [add(one, 1, sequence_id=number) for one in (*clients, *clients)] == [2, 3, 4, 5]
        with Connections(shared, 2) as others:  # and over HTTP
            assert [ask(one, "sum", 1, sequence_id=1) for one in others] == [6, 7]
        assert add(clients[1], 1, sequence_id=1, sequence_end=True) == 8
        with pytest.raises(Exception, match="must specify the START flag"):
            add(clients[0], 1, sequence_id=1)


def test_a_stream_over_grpc_keeps_the_order_of_a_sequence_that_is_elsewhere(shared: Served) -> None:
    with ExitStack() as stack:
        one, other = of_both_workers(shared, stack)
        one.infer("sum", [tensor(0, triton_grpc)], sequence_id=1, sequence_start=True)
        received: queue.Queue[Any] = queue.Queue()
        other.start_stream(lambda result, error: received.put(error or result))
        for number in range(1, 30):
            other.async_stream_infer("sum", [tensor(1, triton_grpc)], sequence_id=1, request_id=str(number))
            other.async_stream_infer("pid", [tensor(0, triton_grpc)], request_id=f"p{number}")
        seen = [received.get(timeout=20) for _ in range(58)]
        assert [one.get_response().id for one in seen] == [f"{p}{n}" for n in range(1, 30) for p in ("", "p")]
        assert [int(one.as_numpy("OUT")[0, 0]) for one in seen[::2]] == [*range(1, 30)]
        # Several responses to each request, in the order of the sequence, with and without an empty final one.
        stream = partial(other.async_stream_infer, "stream", sequence_id=1)
        stream([tensor(2, triton_grpc)], request_id="a", sequence_start=True)
        stream([tensor(1, triton_grpc)], request_id="b", enable_empty_final_response=True)
        stream([tensor(-1, triton_grpc)], request_id="c", enable_empty_final_response=True)
        stream([tensor(-1, triton_grpc)], request_id="d", sequence_end=True)
        texts = []
        for _ in range(2 + 4 + 2 + 1):
            result = received.get(timeout=20)
            out, message = result.as_numpy("OUT"), result.get_response()
            is_final = message.parameters["triton_final_response"].bool_param
            texts.append((message.id, None if out is None else int(out.ravel()[0]), is_final))
        of_a = [("a", 0, False), ("a", 1, False)]
        of_b = [("b", 0, False), ("b", 1, False), ("b", 2, False), ("b", None, True)]
        assert texts == [*of_a, *of_b, ("c", 0, False), ("c", 1, True), ("d", 0, True)]
        other.async_stream_infer("sum", [tensor(1, triton_grpc)], sequence_id=77, request_id="bad")
        assert "must specify the START flag" in str(received.get(timeout=20))
        other.stop_stream()


def test_statistics_and_settings_over_grpc_are_those_of_all_workers(shared: Served) -> None:
    with ExitStack() as stack:
        one, other = of_both_workers(shared, stack)
        before = statistics(shared, "pid")
        for client in (one, other):
            client.infer("pid", [tensor(0, triton_grpc)])
            (row,) = client.get_inference_statistics("pid").model_stats
        assert row.inference_stats.success.count == before + 2
        one.update_log_settings({"log_verbose_level": 1})
        assert other.get_log_settings().settings["log_verbose_level"].uint32_param == 1


def test_words_of_the_command_line_are_checked(repository: Path) -> None:
    for given, text in (("0", "0"), ("many", "'many'")):
        with pytest.raises(DidNotServe) as ended, serving(repository, "--workers", given):
            pass
        assert f"expected a whole number from 1 to 256, got {text}, or auto" in ended.value.log
    with serving(repository, "--workers", "auto") as served:
        assert get(served, "/v2")
