"""Requests that a model reschedules until they are complete, as clients see them; decoupled models of sequences."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton

from flowserve.testing.serve import Served
from tests.support.forked import serving

CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "ROWS" data_type: TYPE_INT32 dims: [ 1 ] } ]
parameters { key: "execution" value { string_value: "%s" } }
%s
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
ITERATIVE = "sequence_batching { iterative_sequence: true oldest { max_candidate_sequences: %d } %s }"
STATE = 'state { input_name: "OLD" output_name: "NEW" data_type: TYPE_INT32 dims: [ 1 ] }'
HEAD = """
import os, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
AGAIN = pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE


def value(request, name="IN"):
    return int(pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0, 0])


def response(**values):
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor(name, np.array([[value]], np.int32)) for name, value in values.items()]
    )


class TritonPythonModel:
    def initialize(self, args):
        self.left, self.threads = {}, []

"""
# Responds with IN - 1, IN - 2, ... 0, one number per execution, and the execution's number of rows. It keeps its own
# state.
COUNTS = (
    HEAD
    + """
    def execute(self, requests):
        time.sleep(0.004)
        for request in requests:
            which = request.correlation_id()
            if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                self.left[which] = value(request)
            self.left[which] -= 1
            if self.left[which] == 665:
                os._exit(3)
            sender = request.get_response_sender()
            sender.send(response(OUT=self.left[which], ROWS=len(requests)))
            if self.left[which]:
                request.set_release_flags(AGAIN)
            else:
                sender.send(flags=FINAL)
"""
)
# Responds once, with IN squared, after IN executions. The server keeps its state.
SQUARES = (
    HEAD
    + """
    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        count, total = value(request), value(request, "OLD") + value(request)
        pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[:] = -1  # it finds it as it was
        if total < count * count:
            request.set_release_flags(AGAIN)
            return response(NEW=total)
        return response(OUT=total, NEW=total)
"""
)
# As COUNTS, with state that the server keeps and that is in every response.
COUNTS_WITH_STATE = (
    HEAD
    + """
    def execute(self, requests):
        for request in requests:
            done = value(request, "OLD") + 1
            sender = request.get_response_sender()
            sender.send(response(OUT=value(request) - done, ROWS=len(requests), NEW=done))
            if done < value(request):
                request.set_release_flags(AGAIN)
            else:
                sender.send(flags=FINAL)
"""
)
# 0: a thread responds while the request runs again. 1: complete, but rescheduled nevertheless. 2: no final flag.
THREADS = (
    HEAD
    + """
    def execute(self, requests):
        for request in requests:
            if not request.flags():
                continue
            case, sender = value(request), request.get_response_sender()
            if case == 0:
                threading.Thread(target=self.later, args=(sender,)).start()
            elif case == 1:
                sender.send(response(OUT=7), FINAL)
            request.set_release_flags(AGAIN)

    def later(self, sender):
        time.sleep(0.05)
        sender.send(response(OUT=5))
        sender.send(flags=FINAL)
"""
)
GIVES_BACK = (
    HEAD
    + """
    def execute(self, requests):
        for request in requests:
            request.set_release_flags(AGAIN)
        return [response(OUT=1) for _ in requests]
"""
)
# Each request of a sequence gets IN responses, each with the number of responses of the sequence so far.
REPEATS = (
    HEAD
    + """
    def execute(self, requests):
        for request in requests:
            sender, total = request.get_response_sender(), value(request, "OLD")
            for _ in range(value(request)):
                total += 1
                sender.send(response(OUT=total, NEW=total))
            sender.send(flags=FINAL)
"""
)
# Calls the page's model with IN, and responds with its number of steps.
ASKS = (
    HEAD
    + """
    def execute(self, requests):
        return [response(OUT=self.ask(value(request)), ROWS=1) for request in requests]

    def ask(self, number):
        given = pb_utils.Tensor("FROM", np.array([[number]], np.int64))
        asked = pb_utils.InferenceRequest(model_name="steps", requested_output_names=["STEPS"], inputs=[given])
        return int(pb_utils.get_output_tensor_by_name(asked.exec(), "STEPS").as_numpy()[0, 0])
"""
)
PLACES = ["process", "thread"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, add_model: Callable[..., Path], root: Path) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("iterative")

    def add(name: str, place: str, code: str, *more: str) -> None:
        add_model(folder, f"{name}_{place}", CONFIG % (place, "\n".join(more)), {"1/model.py": code})

    for place in PLACES:
        add("counts", place, COUNTS, DECOUPLED, ITERATIVE % (4, ""))
        add("squares", place, SQUARES, ITERATIVE % (8, STATE))
        add("state", place, COUNTS_WITH_STATE, DECOUPLED, f"sequence_batching {{ iterative_sequence: true {STATE} }}")
        add("threads", place, THREADS, DECOUPLED, ITERATIVE % (4, ""))
        add("asks", place, ASKS, "sequence_batching { }")
    add("squares", "inline", SQUARES, ITERATIVE % (8, STATE))
    add("wrong", "thread", GIVES_BACK, ITERATIVE % (4, ""))
    add("dynamic", "thread", GIVES_BACK, "dynamic_batching { }")
    add("repeats", "process", REPEATS, DECOUPLED, f"sequence_batching {{ {STATE} }}")
    zero = 'inputs { key: "IN" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } }'
    warm_up = f'model_warmup {{ name: "w" batch_size: 2 {zero} }}'
    add("warm", "thread", COUNTS_WITH_STATE, DECOUPLED, ITERATIVE % (4, STATE), warm_up)
    page = (root / "docs/iterative.md").read_text()
    for name, config, code in zip(("numbers", "steps"), blocks(page, "pbtxt"), blocks(page, "python"), strict=True):
        add_model(folder, name, config, {"1/model.py": code})
    with serving(folder, "--allow-grpc", "true", "--grpc-port", "0") as served:
        yield served


def blocks(page: str, kind: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [text for one, text in found if one == kind]


def stream(served: Served, model: str, number: int, output: str = "OUT", **more: Any) -> list[Any]:
    """The value of an output in each event of generate_stream, or its error."""
    url = f"{served.base_url}/v2/models/{model}/generate_stream"
    with httpx.stream("POST", url, json={"IN": number, **more}, timeout=30, trust_env=False, verify=False) as answer:
        events = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line]
    return [event.get(output, event.get("error")) for event in events]


def infer(served: Served, model: str, number: int, **parameters: Any) -> tuple[int, Any]:
    tensor = {"name": "IN", "shape": [1, 1], "datatype": "INT32", "data": [number]}
    body = {"inputs": [tensor], "parameters": parameters}
    url = f"{served.base_url}/v2/models/{model}/infer"
    answer = httpx.post(url, json=body, timeout=30, trust_env=False, verify=False)
    told = answer.json()
    return answer.status_code, told.get("error") or told["outputs"][0]["data"][0]


@pytest.mark.parametrize("place", PLACES)
def test_an_iterative_request_is_run_until_done_in_batches_with_later_ones(served: Served, place: str) -> None:
    """A long request runs until its client disconnects; a later one completes meanwhile."""
    url = f"{served.base_url}/v2/models/counts_{place}/generate_stream"
    rows: list[int] = []
    is_done = threading.Event()

    def read() -> None:
        with httpx.stream("POST", url, json={"IN": 100_000}, timeout=30, trust_env=False, verify=False) as answer:
            for line in answer.iter_lines():
                if line:
                    rows.append(json.loads(line.removeprefix("data: "))["ROWS"])
                if is_done.is_set() and rows[-1] == 1:
                    return

    with ThreadPoolExecutor(1) as clients:
        long = clients.submit(read)
        while len(rows) < 3:
            assert not long.done(), long.exception()
            time.sleep(0.005)
        try:
            assert stream(served, f"counts_{place}", 4) == [3, 2, 1, 0]
        finally:
            is_done.set()
        long.result()
    assert len(rows) < 100_000
    assert (rows[0], rows.count(2), rows[-1]) == (1, 4, 1)


@pytest.mark.parametrize("place", [*PLACES, "inline"])
def test_an_iterative_model_responds_once_at_its_end_and_keeps_its_state(served: Served, place: str) -> None:
    with ThreadPoolExecutor(8) as clients:
        numbers = [5, 1, 9, 3, 2, 7, 4, 6]
        answers = clients.map(lambda number: infer(served, f"squares_{place}", number), numbers)
        assert [*answers] == [(200, number * number) for number in numbers]


@pytest.mark.parametrize("place", PLACES)
def test_the_state_output_of_an_execution_is_the_state_input_of_the_next(served: Served, place: str) -> None:
    """The strategy is direct, so that there are gaps between the rows."""
    with ThreadPoolExecutor(4) as clients:
        numbers = [2, 6, 1, 4, 3]
        answers = clients.map(lambda number: stream(served, f"state_{place}", number), numbers)
        assert [*answers] == [[*range(number - 1, -1, -1)] for number in numbers]


@pytest.mark.parametrize("place", PLACES)
def test_a_response_sender_outlives_its_execution(served: Served, place: str) -> None:
    model = f"threads_{place}"
    assert stream(served, model, 0) == [5]
    assert stream(served, model, 1) == [7]
    (said,) = stream(served, model, 2)
    assert "let go of a response sender without sending TRITONSERVER_RESPONSE_COMPLETE_FINAL" in said


@pytest.mark.parametrize("place", PLACES)
def test_a_model_of_sequences_calls_one_of_iterative_sequences(served: Served, place: str) -> None:
    assert infer(served, f"asks_{place}", 27, sequence_id=1, sequence_start=True, sequence_end=True) == (200, 111)


def test_an_iterative_request_with_a_sequence_id_needs_the_start_flag(served: Served) -> None:
    assert infer(served, "squares_thread", 3, sequence_id=7, sequence_start=True) == (200, 9)
    assert infer(served, "squares_thread", 3, sequence_id="seven", sequence_start=True) == (200, 9)
    status, text = infer(served, "squares_thread", 3, sequence_id=7)
    assert status == 400
    assert "inference request for sequence 7 to model 'squares_thread' must specify the START flag" in text


@pytest.mark.parametrize("place", PLACES)
def test_a_connection_closed_at_any_moment_frees_its_slot(served: Served, place: str) -> None:
    """Eight concurrent requests, of which four have a slot; each disconnects after a number of received bytes."""

    def leave(after: int) -> None:
        connection = http.client.HTTPConnection(served.address, timeout=30)
        connection.request("POST", f"/v2/models/counts_{place}/generate_stream", b'{"IN": 100000}')
        connection.getresponse().read(after)
        connection.close()

    with ThreadPoolExecutor(8) as clients:
        for left in [clients.submit(leave, 40 * (n % 7)) for n in range(56)]:
            left.result()
    assert stream(served, f"counts_{place}", 2) == [1, 0]


@pytest.mark.fault("Q12")
def test_a_dead_process_fails_its_requests_and_new_ones_are_served(served: Served) -> None:
    url = f"{served.base_url}/v2/models/counts_process/generate_stream"
    with httpx.stream("POST", url, json={"IN": 100_000}, timeout=30, trust_env=False, verify=False) as answer:
        lines = answer.iter_lines()
        assert "OUT" in next(lines)
        assert "exit status 3" in stream(served, "counts_process", 666)[-1]
        assert "exit status 3" in [line for line in lines if line][-1]
    assert stream(served, "counts_process", 2) == [1, 0]


def test_a_rescheduled_request_gets_no_response(served: Served) -> None:
    status, text = infer(served, "wrong_thread", 1)
    assert status == 500
    assert "message: Expected a None object in the execute function return list for reschduled request" in text


def test_only_a_model_of_iterative_sequences_may_reschedule_requests(served: Served) -> None:
    status, text = infer(served, "dynamic_thread", 1)
    assert status == 500
    assert "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE" in text
    assert "iterative_sequence: true" in text


def test_a_decoupled_sequence_model_sends_any_number_of_responses(served: Served) -> None:
    """All sent at the same time, over one gRPC stream; each runs when the previous one is complete."""
    told: Queue[Any] = Queue()
    with triton.InferenceServerClient(served.grpc_address) as client:
        client.start_stream(lambda result, error: told.put(error or int(result.as_numpy("OUT")[0, 0])))
        for number, flags in ((2, {"sequence_start": True}), (1, {}), (3, {"sequence_end": True}), (1, {})):
            tensor = triton.InferInput("IN", [1, 1], "INT32")
            tensor.set_data_from_numpy(np.array([[number]], np.int32))
            client.async_stream_infer("repeats_process", [tensor], sequence_id="five", **flags)
        answers = [told.get(timeout=30) for _ in range(7)]
        client.stop_stream()
    assert [answer for answer in answers if isinstance(answer, int)] == [*range(1, 7)]
    (refused,) = [str(answer) for answer in answers if not isinstance(answer, int)]
    assert "inference request for sequence five to model 'repeats_process' must specify the START flag" in refused


def test_the_examples_of_the_page_on_iterative_sequences_work(served: Served, root: Path) -> None:
    page = (root / "docs/iterative.md").read_text()
    for command, printed in zip(blocks(page, ""), blocks(page, "text"), strict=True):
        text = command.replace("localhost:8000", served.address)
        done = subprocess.run(text, shell=True, capture_output=True, text=True, timeout=30, check=True)
        assert done.stdout.strip() == printed.strip()


def test_a_warm_up_runs_once(served: Served) -> None:
    assert stream(served, "warm_thread", 2) == [1, 0]
