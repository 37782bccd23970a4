"""Sequences: admission errors, control values, slots and states, as Triton has them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.triton_models import python_config, spec, write_model

pytestmark = pytest.mark.server

X, Y = spec("X", "INT32", "1"), spec("Y", "INT64", "5")

# Answers START, END, READY, CORRID and the input. A negative input makes it sleep for so many milliseconds.
TELLS = """
def execute(self, requests):
    responses = []
    for request in requests:
        x = given(request, "X")
        told = [given(request, name) for name in ("START", "END", "READY", "ID")]
        row = [-1 if one is None else int(one.flat[0]) for one in told]
        if row[2] == 8:  # an empty slot has a request too, whose input is undefined
            time.sleep(max(0.0, -float(x.min()) / 1000))
        responses.append(respond(Y=np.array([[*row, int(x.flat[0])]], np.int64)))
    return responses
"""

CONTROLS = """
control_input [
  { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
  { name: "END" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } ] },
  { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 7, 8 ] } ] },
  { name: "ID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
]
"""
IDLE = "max_sequence_idle_microseconds: 60000000"


def sequences(text: str, size: int = 4) -> tuple[str, str]:
    return f"max_batch_size: {size}", f"sequence_batching {{ {text} }}"


MODELS = {
    "direct": sequences(f"direct {{ }} {CONTROLS} {IDLE}"),
    "oldest": sequences(f"oldest {{ max_candidate_sequences: 4 }} {CONTROLS} {IDLE}"),
    "free": sequences(f"direct {{ }} {IDLE}"),  # without controls
    "pair": sequences(f"direct {{ }} {CONTROLS} {IDLE}"),
    "idle": sequences("direct { } max_sequence_idle_microseconds: 200000", 1),
    "one_slot": sequences(f"direct {{ }} {CONTROLS} {IDLE}", 1),
}


class Server:
    def __init__(self, url: str, pool: ThreadPoolExecutor) -> None:
        self._client = httpx.Client(base_url=f"{url}/v2/", timeout=15, verify=False)
        self.pool = pool

    def close(self) -> None:
        self._client.close()

    def ask(
        self, model: str, sequence: int | str | None, value: int = 1, *, start: bool = False, end: bool = False,
        rows: int = 1, **more: Any,
    ) -> httpx.Response:  # fmt: skip
        named = {} if sequence is None else {"sequence_id": sequence}
        parameters = {**named, "sequence_start": start, "sequence_end": end, **more}
        tensor = {"name": "X", "shape": [rows, 1], "datatype": "INT32", "data": [value] * rows}
        return self._client.post(f"models/{model}/infer", json={"inputs": [tensor], "parameters": parameters})

    def tells(self, *arguments: Any, **named: Any) -> list[int]:
        reply = self.ask(*arguments, **named)
        data: list[int] = reply.json()["outputs"][0]["data"]
        return data


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, triton_like: Callable[..., str]) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("sequences")
    for name, more in MODELS.items():
        write_model(repository, name, python_config([X], [Y], *more), TELLS)
    with ThreadPoolExecutor(8) as pool:
        server = Server(triton_like(repository), pool)
        yield server
        server.close()


def error(reply: httpx.Response) -> tuple[int, str]:
    text: str = reply.json()["error"]
    return reply.status_code, text.partition("] ")[2] or text


# ------------------------------------------------------------------------------------------------------ admission


@pytest.mark.parametrize("model", ["direct", "oldest", "free"])
def test_a_request_has_one_row_an_id_and_a_start(server: Server, model: str) -> None:
    rows = "must specify batch-size 1 due to requirements of sequence batcher"
    status, text = error(server.ask(model, 1, start=True, rows=2))
    assert (status, text.startswith(f"inference request to model '{model}' {rows}")) == (400, True)
    for nothing in (None, 0, ""):
        status, text = error(server.ask(model, nothing, start=True))
        assert (status, text.startswith(f"inference request to model '{model}' must specify a non-zero")) == (400, True)
    status, text = error(server.ask(model, 77))
    start = f"inference request for sequence 77 to model '{model}' must specify the START flag on the first request of"
    assert (status, text.startswith(f"{start} the sequence")) == (400, True)


def test_a_sequence_that_ended_must_start_again(server: Server) -> None:
    assert server.ask("free", 5, start=True).status_code == 200
    assert server.ask("free", 5).status_code == 200
    assert server.ask("free", 5, end=True).status_code == 200
    status, text = error(server.ask("free", 5))
    assert (status, "must specify the START flag" in text) == (400, True)
    assert server.ask("free", 5, start=True, end=True).status_code == 200


def test_an_id_has_the_type_of_the_models_control(server: Server, on_triton: bool) -> None:
    reply = server.ask("direct", "name", start=True, end=True)
    if on_triton and reply.status_code == 200:
        pytest.skip("2.51 takes an id of another type")
    status, text = error(reply)
    assert status == 400
    assert text.startswith("sequence batching control 'ID' data-type is 'BYTES', but model 'direct' expects 'UINT64'")
    assert server.ask("free", "name", start=True, end=True).status_code == 200  # without a control, both types


def test_a_number_and_its_text_are_two_sequences(server: Server) -> None:
    assert server.ask("free", 9, start=True).status_code == 200
    assert server.ask("free", "9").status_code == 400
    assert server.ask("free", 9, end=True).status_code == 200


def test_an_id_of_text_has_at_most_128_characters(server: Server, on_triton: bool) -> None:
    assert server.ask("free", "n" * 128, start=True, end=True).status_code == 200
    reply = server.ask("free", "n" * 129, start=True, end=True)
    assert reply.status_code == (501 if on_triton else 400)
    assert "string correlation ID cannot be longer than 128 characters" in reply.json()["error"]


def test_a_sequence_that_starts_twice_goes_on(server: Server) -> None:
    for flags in ({"start": True}, {}, {"start": True}, {}, {"end": True}):
        assert server.ask("direct", 12, **flags).status_code == 200


# ------------------------------------------------------------------------------------------------------ controls


@pytest.mark.parametrize("model", ["direct", "oldest", "one_slot"])
def test_control_tensors_have_the_values_of_each_request(server: Server, model: str) -> None:
    assert server.tells(model, 3, 10, start=True) == [1, 0, 8, 3, 10]
    assert server.tells(model, 3, 11) == [0, 0, 8, 3, 11]
    assert server.tells(model, 3, 12, end=True) == [0, 1, 8, 3, 12]
    assert server.tells(model, 4, 13, start=True, end=True) == [1, 1, 8, 4, 13]


def test_control_tensors_are_no_inputs_of_the_model(server: Server) -> None:
    told = server._client.get("models/direct").json()
    assert [tensor["name"] for tensor in told["inputs"]] == ["X"]
    tensor = {"name": "X", "shape": [1, 1], "datatype": "INT32", "data": [1]}
    body = {"inputs": [tensor, {**tensor, "name": "START"}], "parameters": {"sequence_id": 1, "sequence_start": True}}
    assert server._client.post("models/direct/infer", json=body).status_code == 400


# ------------------------------------------------------------------------------------------------------ slots


def test_an_idle_sequence_is_forgotten(server: Server) -> None:
    assert server.ask("idle", 1, start=True).status_code == 200
    time.sleep(1.0)
    status, text = error(server.ask("idle", 1))
    assert (status, "must specify the START flag" in text) == (400, True)


def test_a_sequence_without_a_slot_waits_for_the_end_of_another(server: Server) -> None:
    assert server.ask("one_slot", 1, start=True).status_code == 200
    waits = server.pool.submit(server.tells, "one_slot", 2, 20, start=True, end=True)
    time.sleep(0.3)
    assert not waits.done()
    assert server.tells("one_slot", 1, 10, end=True) == [0, 1, 8, 1, 10]
    assert waits.result(30) == [1, 1, 8, 2, 20]


def test_a_waiting_sequence_ends_with_its_timeout(server: Server) -> None:
    assert server.ask("one_slot", 1, start=True).status_code == 200
    reply = server.ask("one_slot", 2, start=True, timeout=200_000)
    status, text = error(reply)
    assert (status, "timeout of the corresponding sequence has been expired" in text) == (503, True)
    assert server.ask("one_slot", 1, end=True).status_code == 200


def test_requests_of_two_sequences_run_in_one_batch(server: Server) -> None:
    """Two sequences in two slots; while a third keeps the instance busy, one request of each arrives."""
    for sequence in (21, 22, 23):
        assert server.ask("pair", sequence, start=True).status_code == 200
    before = server._client.get("models/pair/stats").json()["model_stats"][0]["execution_count"]
    running = server.pool.submit(server.ask, "pair", 23, -400)
    time.sleep(0.1)
    both = [server.pool.submit(server.tells, "pair", sequence, 5) for sequence in (21, 22)]
    assert [one.result()[3:] for one in both] == [[21, 5], [22, 5]]
    assert running.result().status_code == 200
    after = server._client.get("models/pair/stats").json()["model_stats"][0]["execution_count"]
    assert after - before == 2
    for sequence in (21, 22, 23):
        assert server.ask("pair", sequence, end=True).status_code == 200
