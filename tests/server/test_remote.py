"""Models that another server runs: responses, batches, and the behaviour while that server cannot be reached."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from flowserve.testing.serve import DidNotServe, Served
from tests.server.conftest import write_model
from tests.support.forked import serving

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]

MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            {made}
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", made)]))
        return answers
"""
DOUBLE = MODEL.format(made="made = array * 2")
SHOUT = MODEL.format(made="made = np.array([one.upper() for one in array.ravel()], np.object_).reshape(array.shape)")
TIMEOUT = MODEL.format(made="made = array * 0 + request.timeout()")
SLOW = MODEL.format(made="import time; time.sleep(0.8); made = array * 2")
RAISE = MODEL.format(made="raise ValueError('no such thing')")
REFUSE = MODEL.format(made="error = pb_utils.TritonError('no such thing', {})").replace(
    'InferenceResponse([pb_utils.Tensor("Y", made)])', "InferenceResponse(error=error)"
)
REFUSALS = {"invalid": ("INVALID_ARG", 400, 500), "busy": ("UNAVAILABLE", 503, 503)}


def config(dtype: str = "FP32", rows: int = 8, more: str = "") -> str:
    tensors = f'[ {{ name: "%s" data_type: TYPE_{dtype} dims: [ -1 ] }} ]'
    return f"max_batch_size: {rows} input {tensors % 'X'} output {tensors % 'Y'} {more}\n"


PYTHON = 'backend: "python" dynamic_batching { max_queue_delay_microseconds: 20000 }'


def remote(port: int, more: str = "") -> str:
    """The shortest valid configuration of a model at this port."""
    url = f'parameters {{ key: "url" value {{ string_value: "127.0.0.1:{port}" }} }}'
    return f'parameters {{ key: "execution" value {{ string_value: "remote" }} }} {url} {more}\n'


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The repository and the gRPC port of the other server."""
    folder = tmp_path_factory.mktemp("there")
    write_model(folder, "double", config(more=PYTHON), {"1/model.py": DOUBLE})
    write_model(folder, "shout", config("STRING", more=PYTHON), {"1/model.py": SHOUT})
    write_model(folder, "one", config(rows=0, more='backend: "python"'), {"1/model.py": DOUBLE})
    write_model(folder, "raise", config(more=PYTHON), {"1/model.py": RAISE})
    write_model(folder, "timeout", config(more=PYTHON), {"1/model.py": TIMEOUT})
    write_model(folder, "slow", config(more=PYTHON), {"1/model.py": SLOW})
    for name, (code, *_) in REFUSALS.items():
        source = REFUSE.format(f"pb_utils.TritonError.{code}")
        write_model(folder, name, config(more=PYTHON), {"1/model.py": source})
    return folder, free_port()


@pytest.fixture(scope="module")
def other(there: tuple[Path, int]) -> Iterator[Served]:
    folder, port = there
    with serving(folder, "--allow-grpc", "true", "--grpc-port", str(port)) as one:
        yield one


@pytest.fixture(scope="module")
def served(other: Served, there: tuple[Path, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, port = tmp_path_factory.mktemp("here"), there[1]
    for name in ("double", "shout", "one", "raise", "timeout"):
        write_model(folder, name, remote(port), {"1/.gitkeep": ""})
    for name in ("raise", *REFUSALS):
        named = f'parameters {{ key: "model_name" value {{ string_value: "{name}" }} }} max_batch_size: 4 '
        named += "dynamic_batching { max_queue_delay_microseconds: 800000 }"
        write_model(folder, f"{name}_together", remote(port, named), {"1/.gitkeep": ""})
    steps = "".join(
        f'step {{ model_name: "{model}" model_version: -1 input_map {{ key: "X" value: "{x}" }} '
        f'output_map {{ key: "Y" value: "{y}" }} }}'
        for model, x, y in (("double", "X", "t"), ("double", "t", "Y"))
    )
    ensemble = config(more=f'platform: "ensemble" ensemble_scheduling {{ {steps} }}')
    write_model(folder, "twice", ensemble, {"1/.gitkeep": ""})
    with serving(folder) as one:
        yield one


def ask(served: Served, model: str, data: Any, datatype: str = "FP32") -> httpx.Response:
    shape = [*np.shape(data)]
    body = {"inputs": [{"name": "X", "shape": shape, "datatype": datatype, "data": data}]}
    return httpx.post(f"{served.base_url}/v2/models/{model}/infer", json=body, timeout=30, verify=False)


def answer(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    (output,) = response.json()["outputs"]
    return np.array(output["data"]).reshape(output["shape"]).tolist()


def test_a_model_on_another_server_takes_over_its_configuration_and_answers(served: Served) -> None:
    assert answer(ask(served, "double", [[1.0, 2.0], [3.0, 4.0]])) == [[2, 4], [6, 8]]
    assert answer(ask(served, "one", [1.5, 2.5, 3.5])) == [3, 5, 7]
    assert answer(ask(served, "shout", [["a", "grün"]], "BYTES")) == [["A", "GRüN"]]
    assert answer(ask(served, "twice", [[1.0]])) == [[4]]
    found = httpx.get(f"{served.base_url}/v2/models/double/config", verify=False).json()
    assert (found["max_batch_size"], found["backend"]) == (8, "remote")


def test_the_configuration_of_the_page_is_complete(other: Served, there: tuple[Path, int], tmp_path: Path) -> None:
    page = (ROOT / "docs/remote-models.md").read_text()
    (text,) = re.findall(r'```pbtxt title="classify/config.pbtxt"\n(.*?)```', page, re.DOTALL)
    text = text.replace("10.0.0.5:8001", f"127.0.0.1:{there[1]}")
    write_model(tmp_path, "double", text, {"1/.gitkeep": ""})
    with serving(tmp_path) as served:
        assert answer(ask(served, "double", [[1.0]])) == [[2]]


def test_requests_travel_in_batches(served: Served, other: Served) -> None:
    def executions() -> int:
        stats = httpx.get(f"{other.base_url}/v2/models/double/stats", verify=False).json()["model_stats"][0]
        return int(stats["execution_count"])

    before = executions()
    with ThreadPoolExecutor(32) as pool:
        found = [*pool.map(lambda number: answer(ask(served, "double", [[float(number)]])), range(96))]
    assert found == [[[2.0 * number]] for number in range(96)]
    assert executions() - before < 60


def test_the_statistics_have_what_the_other_server_counted(served: Served, other: Served) -> None:
    def counted(one: Served) -> dict[str, Any]:
        (row,) = httpx.get(f"{one.base_url}/v2/models/double/stats", verify=False).json()["model_stats"]
        return dict(row)

    def counted_there() -> dict[str, Any]:
        (row,) = httpx.get(f"{served.base_url}/flowserve/models/double/stats", verify=False).json()["graph_stats"]
        return dict(row.get("there", {}))

    def agrees() -> bool:
        there, own = counted_there(), counted(other)
        return bool(there) and (there["execution_count"], there["success"]["count"]) == (
            own["execution_count"],
            own["inference_stats"]["success"]["count"],
        )

    answer(ask(served, "double", [[1.0]]))
    end = time.monotonic() + 20
    while not agrees():  # each call returns the result that the previous one requested
        assert time.monotonic() < end
        time.sleep(0.05)
    assert counted_there()["compute_infer"]["ns"] > 0


def test_the_timeout_of_a_request_goes_along(served: Served) -> None:
    body = {"inputs": [{"name": "X", "shape": [1, 1], "datatype": "FP32", "data": [7.0]}]}
    url = f"{served.base_url}/v2/models/timeout/infer"
    assert answer(httpx.post(url, json=body, timeout=30, verify=False)) == [[0]]
    assert answer(httpx.post(url, json={**body, "parameters": {"timeout": 5_000_000}}, timeout=30, verify=False)) == [
        [5_000_000]
    ]


class Relay:
    """A proxy for another port, whose connections can be cut."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._open += near, far
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with one, suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
        with suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """End all connections; new ones are relayed."""
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()


def test_a_batch_whose_connection_ends_is_sent_again_only_if_the_model_is_pure(
    other: Served, there: tuple[Path, int], tmp_path: Path
) -> None:
    relay = Relay(there[1])
    names = {"cautious": "", "pure": 'parameters { key: "pure" value { string_value: "true" } }'}
    for name, more in names.items():
        named = f'parameters {{ key: "model_name" value {{ string_value: "slow" }} }} {more}'
        write_model(tmp_path, name, remote(relay.port, named), {"1/.gitkeep": ""})
    try:
        with serving(tmp_path) as here, ThreadPoolExecutor(1) as thread:
            for name in names:
                waiting = thread.submit(ask, here, name, [[3.0]])
                time.sleep(0.4)
                relay.cut()
                found = waiting.result(30)
                if name == "pure":
                    assert answer(found) == [[6]]
                else:
                    assert found.status_code == 503
                    assert "cannot be reached" in found.text
                    assert answer(ask(here, name, [[2.0]])) == [[4]]  # later ones are served
    finally:
        relay.close()


def test_errors_of_the_other_server_name_it(served: Served, there: tuple[Path, int]) -> None:
    failed = ask(served, "raise", [[1.0]])
    assert failed.status_code == 500
    assert f"model 'raise' at grpc://127.0.0.1:{there[1]}" in failed.json()["error"]
    assert "no such thing" in failed.json()["error"]


@pytest.mark.parametrize(
    ("name", "alone", "together"), [("raise", 500, 500), *((name, *codes) for name, (_, *codes) in REFUSALS.items())]
)
def test_the_text_of_the_other_server_reaches_only_the_client_of_a_request_alone_in_its_batch(
    served: Served, name: str, alone: int, together: int
) -> None:
    with ThreadPoolExecutor(4) as pool:
        shared = [*pool.map(lambda _: ask(served, f"{name}_together", [[1.0]]), range(4))]
    assert {one.status_code for one in shared} == {together}
    assert not any("no such thing" in one.text for one in shared)
    assert all(f"model '{name}' at grpc://" in one.json()["error"] for one in shared)
    assert "no such thing" in served.log
    failed = ask(served, f"{name}_together", [[1.0]])
    assert failed.status_code == alone
    assert "no such thing" in failed.json()["error"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('parameters { key: "execution" value { string_value: "remote" } }', "has no `url`"),
        (remote(1).replace("127.0.0.1:1", "http://somewhere:8000"), "it is the gRPC port of the other server"),
        (remote(0).replace("127.0.0.1:0", "127.0.0.1:{closed}"), "cannot be reached"),
        ("{remote} " + config(rows=16), "max_batch_size 16 of model 'double' is more than the 8 of model 'double'"),
        ("{remote} " + config("INT32"), "is TYPE_INT32 in the configuration, but the model provides TYPE_FP32"),
        ("{remote} " + config().replace('"X"', '"IN"'), "unexpected inference input 'IN', allowed inputs are: X"),
        ("{remote} sequence_batching { }", "is a model of sequences, which cannot run on another server"),
        ('{remote} backend: "python"', "a model on another server has execution"),
        ('{remote} parameters { key: "model_name" value { string_value: "tripple" } }', "tripple"),
        (
            '{remote} parameters { key: "model_version" value { string_value: "two" } }',
            "a version is a positive number",
        ),
    ],
)
def test_a_model_that_cannot_be_there_is_refused_with_the_reason(
    other: Served, there: tuple[Path, int], tmp_path: Path, text: str, said: str
) -> None:
    text = text.replace("{remote}", remote(there[1])).replace("{closed}", str(free_port()))
    write_model(tmp_path, "double", text, {"1/.gitkeep": ""})
    with pytest.raises(DidNotServe) as caught, serving(tmp_path):
        pass
    assert said in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_server_that_goes_away_is_unavailable_and_serves_again_when_it_is_back(
    there: tuple[Path, int], tmp_path: Path
) -> None:
    port = free_port()
    write_model(tmp_path, "double", remote(port), {"1/.gitkeep": ""})
    arguments = ("--allow-grpc", "true", "--grpc-port", str(port))
    with serving(there[0], *arguments) as one, serving(tmp_path) as served:
        assert answer(ask(served, "double", [[1.0]])) == [[2]]
        one.stop()
        away = ask(served, "double", [[1.0]])
        assert away.status_code == 503
        assert "cannot be reached" in away.json()["error"]
        assert httpx.get(f"{served.base_url}/v2/models/double/ready", verify=False).status_code == 400
        with serving(there[0], *arguments):
            deadline = time.monotonic() + 20
            while ask(served, "double", [[1.0]]).status_code != 200:
                assert time.monotonic() < deadline
                time.sleep(0.2)
            assert httpx.get(f"{served.base_url}/v2/models/double/ready", verify=False).status_code == 200
