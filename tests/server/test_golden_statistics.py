"""One fixed load on a real server; everything it counts equals a golden file, byte for byte, durations left out.

The load has each way in which a request ends (answered, failed, refused, late, cancelled; from a cache) in each place
where it can be then (held, queued, running, in order, between steps), over HTTP and gRPC, alone, in ensembles, from
BLS, decoupled, in sequences and iterative. Python models wait for files that the load creates.

`python -m tests.server.test_golden_statistics` writes the golden file.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import httpx
import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from flowserve.runtime.processes.children import SUPPORTED
from flowserve.testing.serve import Served, serving
from flowserve.values import DType
from tests.support.onnx_files import onnx_model, onnx_node, onnx_value

GOLDEN: Final = Path(__file__).parents[1] / "golden/statistics.txt"
WAIT_S_MAX: Final = 60.0

# What a model does is in its input of four numbers: value, its act, the next step's act, and a number that makes the
# request unlike others. An act is a kind, plus ten times the number of the file that the model waits for before it.
REFUSE, RAISE, DIE = 1, 2, 3
HEAD: Final = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def given(request, name="IN"):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()


def answer(numbers, **more):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", numbers)], **more)


class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_name"]
        self.totals = {}

    def act(self, request):
        numbers = given(request).copy()
        act = int(numbers[0, 1])
        with open(f"FOLDER/ran-{self.name}", "a") as file:
            file.write(".")
        while act // 10 and not os.path.exists(f"FOLDER/go-{act // 10}"):
            time.sleep(0.002)
        if act % 10 == 2:
            raise ValueError("it raises")
        if act % 10 == 3:
            os._exit(3)
        numbers[:, 0] *= 2
        numbers[:, 1], numbers[:, 2] = numbers[:, 2], 0
        return numbers, act % 10 == 1

    def one(self, request):
        numbers, is_refused = self.act(request)
        if is_refused:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("it refuses"))
        return answer(numbers)

"""
ACTS: Final = "    def execute(self, requests):\n        return [self.one(request) for request in requests]\n"
# Sends as many responses as the input's value; the error is the last.
REPEATS: Final = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for n in range(int(given(request)[0, 0])):
                numbers = given(request).copy()
                numbers[0, :3] = n, numbers[0, 2], 0
                sender.send(answer(numbers))
            if self.act(request)[1]:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("it refuses")))
            sender.send(flags=FINAL)
"""
# Calls the models of its parameter one after the other.
CALLS: Final = """
    def execute(self, requests):
        return [self.call(request) for request in requests]

    def call(self, request):
        numbers = given(request)
        self.act(request)
        for model in eval(request.parameters())["models"].split():
            inputs = [pb_utils.Tensor("IN", numbers)]
            wanted = dict(model_name=model, requested_output_names=["OUT"], inputs=inputs)
            made = pb_utils.InferenceRequest(**wanted).exec()
            if made.has_error():
                return pb_utils.InferenceResponse(error=pb_utils.TritonError(made.error().message()))
            numbers = pb_utils.get_output_tensor_by_name(made, "OUT").as_numpy()
        return answer(numbers)
"""
# Is executed as often as the input's value says.
AGAIN: Final = """
    def execute(self, requests):
        return [self.once(request) for request in requests]

    def once(self, request):
        numbers, is_refused = self.act(request)
        old = given(request, "OLD")
        new = pb_utils.Tensor("NEW", old + 1)
        if old[0, 0] + 1 < given(request)[0, 0]:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return pb_utils.InferenceResponse([new])
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", numbers), new])
"""
ITEMS: Final = """
    def execute(self, requests):
        return [self.items(request) for request in requests]

    def items(self, request):
        numbers, _ = self.act(request)
        items = np.repeat(numbers[:, None], int(numbers[0, 0]), axis=1).copy()
        items[:, :, 0] = np.arange(items.shape[1])
        odd = items[:, :, :1] % 2
        return pb_utils.InferenceResponse([pb_utils.Tensor("ITEMS", items), pb_utils.Tensor("ODD", odd)])
"""

NUMBERS: Final = "data_type: TYPE_FP32 dims: [ 4 ]"
IN_OUT: Final = f'input {{ name: "IN" {NUMBERS} }}\noutput {{ name: "OUT" {NUMBERS} }}\n'
BATCHES: Final = "max_batch_size: 8\n" + IN_OUT
CACHE: Final = "response_cache { enable: true }\n"
DYNAMIC: Final = "dynamic_batching { }\n"
DECOUPLED: Final = "model_transaction_policy { decoupled: true }\n"
ORDER: Final = "dynamic_batching { preserve_ordering: true }\n"
TWO: Final = "instance_group { count: 2 kind: KIND_CPU }\n"


def parameters(**values: object) -> str:
    return "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in values.items()
    )


def policy(text: str) -> str:
    return f"dynamic_batching {{ default_queue_policy {{ {text} }} }}\n"


def step(model: str, taken: str, made: str) -> str:
    maps = f'input_map {{ key: "IN" value: "{taken}" }} output_map {{ key: "OUT" value: "{made}" }}'
    return f'step {{ model_name: "{model}" model_version: -1 {maps} }}\n'


def ensemble(*models: str, more: str = "") -> str:
    names = ["IN", *(f"t{n}" for n in range(1, len(models))), "OUT"]
    steps = "".join(step(model, *names[n : n + 2]) for n, model in enumerate(models))
    return f'platform: "ensemble"\n{BATCHES}{more}ensemble_scheduling {{\n{steps}}}\n'


def gathers() -> bytes:
    """An ONNX model that fails if an index in IN is not below 4: a failed batch is retried in halves."""
    table = onnx.helper.make_tensor("table", onnx.TensorProto.FLOAT, [4], [0.0, 1.0, 2.0, 3.0])
    nodes = [onnx_node("Gather", ["table", "IN"], ["OUT"])]
    return onnx_model(
        nodes, [onnx_value("IN", DType.INT64, ["N", 1])], [onnx_value("OUT", DType.FP32, ["N", 1])], [table]
    )


EACH: Final = """
platform: "ensemble"
%s
ensemble_scheduling {
  step { model_name: "items" model_version: -1 input_map { key: "IN" value: "IN" }
         output_map { key: "ITEMS" value: "items" } output_map { key: "ODD" value: "odd" } }
  step { model_name: "item" model_version: -1
         input_map { key: "IN" value: "items" } output_map { key: "OUT" value: "OUT" }
         each { tensor: [ "items", "odd" ] at_most: 100 } when { tensor: "odd" equals: [ 1 ] } }
  fill { tensor: "OUT" value: -1 } }
"""


def write_repository(folder: Path, files: Path) -> None:
    def model(name: str, config: str, program: str = ACTS) -> None:
        home = folder / name / "1"
        home.mkdir(parents=True)
        is_graph = "ensemble_scheduling" in config
        (home.parent / "config.pbtxt").write_text(config if is_graph else f'backend: "python"\n{config}')
        if not is_graph:
            (home / "model.py").write_text((HEAD + program).replace("FOLDER", str(files)))

    model("plain", BATCHES)
    model("batched", BATCHES + "dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 9000000 }")
    model("second", BATCHES + DYNAMIC)
    model("full", BATCHES + policy("max_queue_size: 1"))
    model("timed", BATCHES + policy("default_timeout_microseconds: 60000 allow_timeout_override: true"))
    model("late", BATCHES + DYNAMIC + parameters(answer_at_timeout="true"))
    model("cached", BATCHES + DYNAMIC + CACHE)
    model("ordered", BATCHES + ORDER + TWO)
    model("ordered_cached", BATCHES + ORDER + CACHE)
    model("one_inside", BATCHES + parameters(max_requests=1))
    model("one_waits", BATCHES + parameters(max_requests=1, when_full="wait"))
    model("small", BATCHES + parameters(max_request_bytes=12))
    model("dies", BATCHES)
    model("repeats", "max_batch_size: 8\n" + IN_OUT + DECOUPLED, REPEATS)
    model("calls", BATCHES, CALLS)
    model("sums", BATCHES + "sequence_batching { max_sequence_idle_microseconds: 600000000 direct { } }\n")
    state = '{ input_name: "OLD" output_name: "NEW" data_type: TYPE_FP32 dims: [ 1 ] }'
    model("again", BATCHES + f"sequence_batching {{ iterative_sequence: true oldest {{ }} state {state} }}\n", AGAIN)
    items = f'input {{ name: "IN" {NUMBERS} }} output {{ name: "ITEMS" data_type: TYPE_FP32 dims: [ -1, 4 ] }}'
    model("items", f'max_batch_size: 8 {items} output {{ name: "ODD" data_type: TYPE_FP32 dims: [ -1, 1 ] }}', ITEMS)
    model("item", BATCHES + DYNAMIC)

    model("chain", ensemble("plain", "second"))
    model("chain_full", ensemble("plain", "full"))
    model("chain_timed", ensemble("plain", "timed"))
    model("chain_late", ensemble("plain", "second", more=parameters(deadline_ms=150)))
    model("chain_cached", ensemble("plain", "second", more=CACHE))
    model("around_cached", ensemble("plain", "cached", "second"))
    model("cached_around_cached", ensemble("cached", "second", more=CACHE))
    model("chain_ordered", ensemble("ordered", "second"))
    model("chain_waits", ensemble("plain", "second", more=parameters(max_requests=1, when_full="wait")))
    model("chain_calls", ensemble("second", "calls"))
    model("streams", ensemble("repeats", "plain", more=DECOUPLED))  # one response in each batch
    out = f'input {{ name: "IN" {NUMBERS} }} output {{ name: "OUT" data_type: TYPE_FP32 dims: [ -1, 4 ] }}'
    model("each", EACH % f"max_batch_size: 8 {out}")

    home = folder / "gathers" / "1"
    home.mkdir(parents=True)
    (home / "model.onnx").write_bytes(gathers())
    pairs = "dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 9000000 }"
    (home.parent / "config.pbtxt").write_text(f'backend: "onnxruntime"\nmax_batch_size: 8\n{pairs}\n')


class Sent:
    """A request on a connection of its own, whose response is read later, or never."""

    def __init__(self, load: Load, request: bytes) -> None:
        self._load = load
        self._socket = socket.create_connection(("127.0.0.1", load.served.port), timeout=WAIT_S_MAX)
        self._socket.sendall(request)

    def status(self) -> int:
        received = b""
        while piece := self._socket.recv(1 << 16):
            received += piece
        self._socket.close()
        return int(received.split(b" ", 2)[1])

    def drop(self) -> None:
        """The client disconnects."""
        self._socket.close()

    def leave(self) -> None:
        """The client disconnects; returns when the server has counted that."""
        before = self._load.failed()
        self._socket.close()
        self._load.until(lambda: self._load.failed() > before)


class Load:
    """A client of the server, which sends the requests of this test."""

    def __init__(self, served: Served, grpc: triton.InferenceServerClient, files: Path) -> None:
        self.served = served
        self.grpc = grpc
        self._files = files
        self._salt = 0
        self._gates = 0
        self._ran: dict[str, int] = {}

    def gate(self) -> int:
        """The act of waiting for a new file."""
        self._gates += 1
        return 10 * self._gates

    def open(self, gate: int) -> None:
        (self._files / f"go-{gate // 10}").touch()

    def numbers(self, value: float = 1, act: int = 0, then: int = 0, salt: int | None = None) -> list[float]:
        if salt is None:
            self._salt += 1
            salt = 1000 + self._salt
        return [value, act, then, salt]

    def begin(self, model: str, *numbers: float, tensor: str = "IN", datatype: str = "FP32", **parameters: Any) -> Sent:
        data = [*numbers]
        given = {"name": tensor, "shape": [1, len(data)], "datatype": datatype, "data": data}
        body = json.dumps({"inputs": [given], "parameters": parameters}).encode()
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        return Sent(self, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def http(self, model: str, *numbers: float, expected: int = 200, **parameters: Any) -> None:
        found = self.begin(model, *(numbers or self.numbers()), **parameters).status()
        assert found == expected, (model, numbers, found)

    def by_grpc(self, model: str, *numbers: float, fails: bool = False, **more: Any) -> None:
        try:
            self.grpc.infer(model, [self.tensor(*(numbers or self.numbers()))], client_timeout=WAIT_S_MAX, **more)
        except InferenceServerException:
            assert fails, (model, numbers)
        else:
            assert not fails, (model, numbers)

    def stream(self, model: str, *numbers: float) -> Stream:
        return Stream(self, model, *(numbers or self.numbers()))

    def tensor(self, *numbers: float) -> triton.InferInput:
        given = triton.InferInput("IN", [1, len(numbers)], "FP32")
        given.set_data_from_numpy(np.array([numbers], np.float32))
        return given

    def ran(self, model: str) -> None:
        """Wait until the model was executed once more."""
        self._ran[model] = self._ran.get(model, 0)
        path = self._files / f"ran-{model}"
        self.until(lambda: path.exists() and path.stat().st_size > self._seen(model))
        self._note(model)

    def _seen(self, model: str) -> int:
        return self._ran[model]

    def _note(self, model: str) -> None:
        self._ran[model] = (self._files / f"ran-{model}").stat().st_size

    def runs(self, model: str, *numbers: float, of: str = "", **parameters: Any) -> Sent:
        """Begin a request, and wait until model `of`, by default its own, executes it."""
        of = of or model
        path = self._files / f"ran-{of}"
        self._ran[of] = path.stat().st_size if path.exists() else 0
        sent = self.begin(model, *numbers, **parameters)
        self.ran(of)
        return sent

    def waits(self, model: str, *numbers: float, of: str = "", **parameters: Any) -> Sent:
        """Begin a request, and wait until it waits in the queue of model `of`."""
        before = self.pending(of or model)
        sent = self.begin(model, *numbers, **parameters)
        self.until(lambda: self.pending(of or model) > before)
        return sent

    def pending(self, model: str) -> int:
        pattern = rf'(?m)^nv_inference_pending_request_count{{model="{model}".*}} (\d+)'
        (found,) = re.findall(pattern, self.metrics())
        return int(found)

    def failed(self) -> int:
        """The number of requests that any model or ensemble has counted as failed."""
        return sum(map(int, re.findall(r"(?m)^nv_inference_request_failure{.*} (\d+)", self.metrics())))

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.served.base_url + path, timeout=WAIT_S_MAX, verify=False)

    def metrics(self) -> str:
        return self.get("/metrics").text

    @staticmethod
    def until(is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_S_MAX
        while not is_so():
            assert time.monotonic() < end
            time.sleep(0.01)

    def settle(self) -> None:
        """Wait until the server has no request, and counts nothing more."""
        before = None
        while (now := counted(self)) != before:
            before = now
            time.sleep(0.2)


class Stream:
    """A request on a gRPC stream."""

    def __init__(self, load: Load, model: str, *numbers: float) -> None:
        self._load = load
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._client = triton.InferenceServerClient(load.served.grpc_address)
        self._client.start_stream(callback=lambda result, error: self._answers.put(error or result))
        self._client.async_stream_infer(model, [load.tensor(*numbers)], enable_empty_final_response=True)

    def take(self) -> Any:
        return self._answers.get(timeout=WAIT_S_MAX)

    def end(self) -> int:
        """Read until the last response, or an error. Returns the number of responses."""
        count = 0
        while True:
            answer = self.take()
            if isinstance(answer, Exception):
                break
            count += bool(answer.get_response().outputs)
            if answer.get_response().parameters["triton_final_response"].bool_param:
                break
        self._client.close()
        return count

    def leave(self) -> None:
        before = self._load.failed()
        self._client.stop_stream(cancel_requests=True)
        self._client.close()
        self._load.until(lambda: self._load.failed() > before)


# ------------------------------------------------------------------------------------------------------------- the load


def single_requests(load: Load) -> None:
    for send in (load.http, load.by_grpc):
        send("plain")
        send("chain")
        send("second")
    load.http("plain", 1, 2, 3, expected=400)
    load.by_grpc("plain", 1, 2, 3, fails=True)
    load.http("chain", 1, 2, 3, expected=400)
    load.http("plain", *load.numbers(act=REFUSE), expected=500)
    load.by_grpc("plain", *load.numbers(act=RAISE), fails=True)
    load.http("chain", *load.numbers(act=REFUSE), expected=500)
    load.http("chain", *load.numbers(then=REFUSE), expected=500)
    load.by_grpc("chain", *load.numbers(then=RAISE), fails=True)
    pair = [load.begin("batched", *load.numbers()) for _ in range(2)]
    assert [sent.status() for sent in pair] == [200, 200]
    pair = [load.begin("batched", *load.numbers(act=act)) for act in (0, REFUSE)]
    assert [sent.status() for sent in pair] == [200, 500]
    pair = [load.begin("batched", *load.numbers(act=act)) for act in (0, RAISE)]
    assert [sent.status() for sent in pair] == [500, 500]
    pair = [load.begin("gathers", number, datatype="INT64") for number in (1, 9)]
    assert sorted(sent.status() for sent in pair) == [200, 500]
    load.http("dies", *load.numbers(act=DIE), expected=500)
    load.until(lambda: load.get("/v2/models/dies/ready").status_code == 200)
    load.http("dies")


def limits(load: Load) -> None:
    gate = load.gate()
    first, second = load.runs("full", *load.numbers(act=gate)), load.waits("full", *load.numbers())
    load.http("full", expected=503)
    load.by_grpc("full", fails=True)
    load.http("chain_full", expected=503)
    load.open(gate)
    assert (first.status(), second.status()) == (200, 200)

    gate = load.gate()
    first = load.runs("timed", *load.numbers(act=gate))
    load.http("timed", expected=503)
    load.by_grpc("timed", fails=True, timeout=30_000)
    load.http("chain_timed", expected=503)
    load.open(gate)
    assert first.status() == 200

    gate = load.gate()
    load.http("late", *load.numbers(act=gate), expected=504, timeout=100_000)  # while it runs
    load.http("late", expected=504, timeout=100_000)  # while it waits
    load.open(gate)
    load.http("late", timeout=50_000_000)
    gate = load.gate()
    load.http("chain_late", *load.numbers(act=gate), expected=504)
    load.http("chain_late", expected=504)
    load.open(gate)
    load.settle()
    load.http("chain", *load.numbers())

    gate = load.gate()
    first = load.runs("one_inside", *load.numbers(act=gate))
    load.http("one_inside", expected=503)
    load.open(gate)
    assert first.status() == 200
    gate = load.gate()
    first = load.runs("one_waits", *load.numbers(act=gate))
    held = [load.begin("one_waits", *load.numbers()) for _ in range(2)]
    time.sleep(0.2)
    held.pop().leave()
    load.open(gate)
    assert (first.status(), held[0].status()) == (200, 200)
    load.http("small", expected=413)
    gate = load.gate()
    first = load.runs("chain_waits", *load.numbers(act=gate), of="plain")
    held = [load.begin("chain_waits", *load.numbers()) for _ in range(2)]
    time.sleep(0.2)
    held.pop().leave()
    load.open(gate)
    assert (first.status(), held[0].status()) == (200, 200)


def cancellations(load: Load) -> None:
    for model, of in (("plain", "plain"), ("chain", "plain"), ("chain_ordered", "ordered"), ("ordered", "ordered")):
        gate = load.gate()
        running = load.runs(model, *load.numbers(act=gate), of=of)
        if of == "ordered":  # its two instances are busy
            also = load.runs(model, *load.numbers(act=gate), of=of)
        waiting = load.waits(model, *load.numbers(), of=of)
        waiting.leave()
        running.leave()
        load.open(gate)
        if of == "ordered":
            assert also.status() == 200
        load.http(model)
    gate = load.gate()
    running = load.runs("chain", *load.numbers(then=gate), of="second")  # in its last step
    running.leave()
    load.open(gate)
    load.http("chain")
    gate = load.gate()
    running = load.runs("ordered", *load.numbers(act=gate))
    done = load.runs("ordered", *load.numbers())
    time.sleep(0.2)
    done.drop()
    time.sleep(0.2)
    load.open(gate)
    assert running.status() == 200
    gate = load.gate()
    running = load.runs("sums", *load.numbers(act=gate), sequence_id=3, sequence_start=True)
    waiting = load.begin("sums", *load.numbers(), sequence_id=3)
    time.sleep(0.2)
    running.leave()
    load.open(gate)
    waiting.status()


def caches(load: Load) -> None:
    for model, of in (
        ("cached", "cached"),
        ("chain_cached", "plain"),
        ("around_cached", "cached"),
        ("cached_around_cached", "cached"),
    ):
        is_step = model == "around_cached"

        def numbers(act: int = 0, is_step: bool = is_step, **more: Any) -> list[float]:
            return load.numbers(then=act, **more) if is_step else load.numbers(act=act, **more)

        same = load.numbers()
        load.http(model, *same)
        load.http(model, *same)
        load.by_grpc(model, *same)
        load.http(model, *numbers(REFUSE), expected=500)
        # One runs, two wait for its result.
        gate = load.gate()
        same = numbers(gate)
        first = load.runs(model, *same, of=of)
        others = [load.begin(model, *same) for _ in range(2)]
        time.sleep(0.3)
        load.open(gate)
        assert [sent.status() for sent in (first, *others)] == [200, 200, 200]
        # The one that runs fails: each of the others fails by itself.
        gate = load.gate()
        same = numbers(gate + REFUSE)
        first = load.runs(model, *same, of=of)
        others = [load.begin(model, *same) for _ in range(2)]
        time.sleep(0.3)
        load.open(gate)
        assert [sent.status() for sent in (first, *others)] == [500, 500, 500]
        # The one that runs leaves, and one that waits: another runs.
        gate = load.gate()
        same = numbers(gate)
        first = load.runs(model, *same, of=of)
        others = [load.begin(model, *same) for _ in range(3)]
        time.sleep(0.3)
        others.pop().leave()
        first.leave()
        load.open(gate)
        assert [sent.status() for sent in others] == [200, 200]
        load.settle()
    same = load.numbers()
    load.http("around_cached", *same)
    value, _, _, salt = same
    load.http("cached", 2 * value, 0, 0, salt)  # a step's result answers a request
    gate = load.gate()
    known = load.numbers()
    load.http("ordered_cached", *known)
    first = load.runs("ordered_cached", *load.numbers(act=gate))
    after = [load.begin("ordered_cached", *known) for _ in range(2)]
    time.sleep(0.3)
    after.pop().leave()
    load.open(gate)
    assert (first.status(), after[0].status()) == (200, 200)


def calls(load: Load) -> None:
    load.http("calls", models="plain chain")
    load.by_grpc("calls", parameters={"models": "plain cached around_cached"})
    load.http("chain_calls", expected=500)
    same = load.numbers()
    load.http("calls", *same, models="cached")
    load.http("calls", *same, models="cached")
    load.http("calls", *load.numbers(then=REFUSE), models="chain", expected=500)
    load.http("calls", models="small", expected=500)
    load.http("calls", models="one_waits one_inside each")
    load.http("calls", models="chain_late")


def streams(load: Load) -> None:
    for model in ("repeats", "streams"):
        assert load.stream(model, *load.numbers(3)).end() == 3
        assert load.stream(model, *load.numbers(0)).end() == 0
        for ends in (REFUSE, RAISE):
            gate = load.gate()
            running = load.stream(model, *load.numbers(2, act=gate + ends))
            taken = running.take(), running.take()
            assert not any(isinstance(one, Exception) for one in taken)
            load.settle()
            load.open(gate)
            assert running.end() == 0
        gate = load.gate()
        running = load.stream(model, *load.numbers(1, act=gate))
        running.take()
        load.settle()
        running.leave()
        load.open(gate)
        load.settle()
        load.stream(model, *load.numbers(1)).end()
    gate = load.gate()
    running = load.stream("streams", *load.numbers(1, then=gate + REFUSE))
    load.settle()
    load.open(gate)
    assert running.end() == 0
    one = load.stream("plain")
    assert one.end() == 1
    one = load.stream("chain")
    assert one.end() == 1


def sequences(load: Load) -> None:
    load.http("sums", sequence_id=1, sequence_start=True)
    load.by_grpc("sums", sequence_id=2, sequence_start=True)
    load.http("sums", sequence_id=1)
    load.http("sums", *load.numbers(act=REFUSE), sequence_id=1, expected=500)
    load.by_grpc("sums", sequence_id=2, sequence_end=True)
    load.http("sums", sequence_id=1, sequence_end=True)
    load.http("sums", sequence_id=7, expected=400)
    load.http("again", *load.numbers(3))
    load.http("again", *load.numbers(1))
    gate = load.gate()
    running = load.runs("again", *load.numbers(2, act=gate))
    running.leave()
    load.open(gate)
    load.settle()
    load.http("again", *load.numbers(2))


def spaces(load: Load) -> None:
    load.http("each", *load.numbers(2))
    load.http("each", *load.numbers(0))
    load.by_grpc("each", *load.numbers(1))
    load.http("each", *load.numbers(1, then=REFUSE), expected=500)


LOADS: Final = (single_requests, limits, caches, calls, streams, sequences, spaces, cancellations)


# ---------------------------------------------------------------------------------------------------------- the figures


NOT_COUNTS: Final = re.compile(
    r"_(ns|us|ms|seconds|bytes|ratio)(_sum|_bucket)?$|_bucket$|_(duration|load)\w*(_sum|_bucket)?$"
)
OF_THE_MACHINE: Final = re.compile(r"nv_(cpu|gpu|energy|pinned)|process_|python_")


def counts(found: Any) -> Any:
    """Only what is counted."""
    if isinstance(found, dict):
        return {
            key: counts(each)
            for key, each in found.items()
            if key not in ("ns", "last_inference", "last_error_ms", "nanoseconds") and not NOT_COUNTS.search(key)
        }
    return [*map(counts, found)] if isinstance(found, list) else found


def counted_metrics(text: str) -> Iterator[str]:
    for line in text.splitlines():
        name = re.split("[{ ]", line)[0]
        is_zero = line.endswith((" 0", " 0.0"))
        if not (line.startswith("#") or is_zero or NOT_COUNTS.search(name) or OF_THE_MACHINE.match(name)):
            yield line


def counted(load: Load) -> str:
    """One line for each model of each kind of statistics, and each metric."""
    statistics = load.get("/v2/models/stats").json()["model_stats"]
    graphs = load.get("/flowserve/stats").json()
    lines = [json.dumps(counts(one), separators=(",", ":")) for one in statistics]
    for key, found in graphs.items():
        each = found if isinstance(found, list) else [found]
        lines += [json.dumps({key: counts(one)}, separators=(",", ":")) for one in each]
    return "\n".join([*lines, *counted_metrics(load.metrics()), ""])


@contextmanager
def loaded(folder: Path, *options: str) -> Iterator[Load]:
    repository, files = folder / "models", folder / "files"
    files.mkdir()
    write_repository(repository, files)
    options = ("--allow-grpc", "true", "--grpc-port", "0", "--cache-config", "local,size=10000000", *options)
    with serving(repository, *options) as served, triton.InferenceServerClient(served.grpc_address) as grpc:
        yield Load(served, grpc, files)


def run_load(folder: Path) -> str:
    with loaded(folder) as load:
        for part in LOADS:
            part(load)
            load.settle()
        return counted(load)


@pytest.mark.skipif(not SUPPORTED, reason="needs worker processes")
def test_a_fixed_load_is_counted_as_before(tmp_path: Path) -> None:
    found = run_load(tmp_path)
    assert found.splitlines() == GOLDEN.read_text().splitlines()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        (Path(sys.argv[1]) if sys.argv[1:] else GOLDEN).write_text(run_load(Path(folder)))
