"""Python models as public repositories write them: without declared tensors, with the compiled module, and how their
calls of other models, their requests' timeouts and their log messages behave, over HTTP and gRPC.

All expectations hold for Triton too.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import tritonclient.grpc

from tests.support.triton_like import free_port
from tests.support.triton_models import python_config, spec, write_model, write_source

PLACES = ("process", "thread", "inline")  # Triton ignores the parameter
X, Y = spec("X", "FP32", "-1"), spec("Y", "FP32", "-1")
CPU = "instance_group [ { kind: KIND_CPU } ]"
DECOUPLED = "model_transaction_policy { decoupled: true }"
TEXT = python_config([spec("CODE", "STRING", "1")], [spec("TEXT", "STRING", "1")], CPU)
ENSEMBLE = """
platform: "ensemble"
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
ensemble_scheduling { step [ {
  model_name: "MODEL" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } } ] }
"""

# What models do.
DOUBLES = """
def execute(self, requests):
    return [respond(Y=request.inputs()[0].as_numpy() * 2) for request in requests]
"""
RETURNS_MORE = """
def execute(self, requests):
    responses = []
    for request in requests:
        x = given(request, "X")
        x = np.ones(1, np.float32) if x is None else x
        responses.append(respond(Y=x * 2, MORE=np.array([3], np.int32)))
    return responses
"""
RETURNS_NOTHING = """
def execute(self, requests):
    return [pb_utils.InferenceResponse([]) for request in requests]
"""
STREAMS_NOTHING = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        for number in range(2):
            sender.send(respond(MORE=np.array([number], np.int32)))
        sender.send(flags=FINAL)
"""
SLEEPS = """
def execute(self, requests):
    time.sleep(0.25)
    return [respond(Y=given(request, "X")) for request in requests]
"""
FAILS = """
def execute(self, requests):
    error = pb_utils.TritonError("not today", pb_utils.TritonError.UNAVAILABLE)
    return [pb_utils.InferenceResponse(error=error) for request in requests]
"""
RAISES = """
def execute(self, requests):
    raise ValueError("no luck")
"""
DOES_NOT_LOAD = """
def initialize(self, args):
    raise ValueError("does not load")

def execute(self, requests):
    return None
"""
STREAMS = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        for number in range(int(given(request, "X")[0])):
            sender.send(respond(Y=np.array([number], np.float32)))
        sender.send(flags=FINAL)
"""
# Sends 50 responses without looking whether they are wanted. A negative number asks how often it has sent all.
IGNORES_CANCEL = """
def initialize(self, args):
    self.ended = 0

def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        if given(request, "X")[0] < 0:
            sender.send(respond(Y=np.array([self.ended], np.float32)))
        else:
            for number in range(50):
                sender.send(respond(Y=np.full(SIZE, number, np.float32)))
                time.sleep(0.002)
            self.ended += 1
        sender.send(flags=FINAL)
"""
LOGS = """
def execute(self, requests):
    for request in requests:
        name = given(request, "CODE")[0].decode()
        for kind in ("verbose", "info", "warn", "error"):
            getattr(pb_utils.Logger, f"log_{kind}")(f"{name}-{kind}.")
    return [respond(TEXT=np.array([b""], np.object_)) for request in requests]
"""
# The value of an expression, in which calls of other models can be awaited.
EVALUATES = """
import asyncio
import importlib
import inspect
import json

import numpy as np
import triton_python_backend_utils as pb_utils

try:
    import c_python_backend_utils
except ImportError:
    c_python_backend_utils = None


def shown(response):
    if response.has_error():
        return response.error().message()
    return [tensor.as_numpy().tolist() for tensor in response.output_tensors()]


def made(model, number=1.0, outputs=("Y",), name="X", dtype="float32", **more):
    tensor = pb_utils.Tensor(name, np.array([number], dtype))
    return pb_utils.InferenceRequest(model_name=model, requested_output_names=list(outputs), inputs=[tensor], **more)


async def called(how, model, number=1.0, **more):
    request = made(model, number, **more)
    if how == "exec":
        return [shown(request.exec())]
    if how == "async_exec":
        return [shown(await request.async_exec())]
    if how == "decoupled":
        return [shown(response) for response in request.exec(decoupled=True)]
    return [shown(response) for response in await request.async_exec(decoupled=True)]


kept = []


async def left(way, how, model):
    "Begin a stream and stop reading it in some way."
    request = made(model)
    responses = request.exec(decoupled=True) if how == "exec" else await request.async_exec(decoupled=True)
    if way == "unread":
        return "left"
    first = [shown(response)[0][0] for response, _ in zip(responses, range(1 if way != "half" else 25))]
    if way == "kept":
        kept.append(responses)
    if way in ("cancelled", "cancelled and read"):
        responses.cancel()
    if way == "cancelled and read":
        assert len([*responses]) < 50
    if way == "raises":
        raise RuntimeError("stops")
    return first[0]


class TritonPythonModel:
    async def execute(self, requests):
        return [await self.answer(request) for request in requests]

    async def answer(self, request):
        code = pb_utils.get_input_tensor_by_name(request, "CODE").as_numpy()[0].decode()
        found = eval(code)
        if inspect.isawaitable(found):
            found = await found
        text = json.dumps(found).encode()
        return pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", np.array([text], np.object_))])
"""


class Policy(NamedTuple):
    """`batching`: the contents of dynamic_batching, None for none. `counts`: whether a request's own timeout does."""

    batching: str | None
    counts: bool
    priority: int = 0


ALLOWED = "allow_timeout_override: true"
LONG = "default_timeout_microseconds: 60000000"
LEVELS = "priority_levels: 2 default_priority_level: 2"
POLICIES: Mapping[str, Policy] = {
    "no_batcher": Policy(None, counts=False),
    "no_policy": Policy("", counts=False),
    "allowed_without_default": Policy(f"default_queue_policy {{ {ALLOWED} }}", counts=False),
    "not_allowed": Policy(f"default_queue_policy {{ {LONG} }}", counts=False),
    "allowed": Policy(f"default_queue_policy {{ {ALLOWED} {LONG} }}", counts=True),
    "delays": Policy(f"default_queue_policy {{ {ALLOWED} {LONG} timeout_action: DELAY }}", counts=False),
    "of_the_default_level": Policy(f"{LEVELS} default_queue_policy {{ {ALLOWED} {LONG} }}", counts=True),
    "of_a_level": Policy(
        f"{LEVELS} priority_queue_policy {{ key: 1 value {{ {ALLOWED} {LONG} }} }}", counts=True, priority=1
    ),
    "of_another_level": Policy(
        f"{LEVELS} priority_queue_policy {{ key: 1 value {{ {ALLOWED} {LONG} }} }}", counts=False, priority=2
    ),
}
OF_CALLS = ("no_batcher", "no_policy", "allowed_without_default", "not_allowed", "allowed")
SEQUENCES = """sequence_batching { max_sequence_idle_microseconds: 60000000 control_input [ {
  name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] } ] }"""


def execution(place: str) -> str:
    return f'parameters {{ key: "execution" value {{ string_value: "{place}" }} }}'


def write_models(repository: Path) -> None:
    for place in PLACES:
        where = CPU, execution(place)
        write_model(repository, f"no_outputs_{place}", python_config([X], [], *where), RETURNS_MORE)
        write_model(repository, f"no_outputs_empty_{place}", python_config([X], [], *where), RETURNS_NOTHING)
        rows = python_config([X], [], *where, "max_batch_size: 8", "dynamic_batching { }")
        write_model(repository, f"no_outputs_rows_{place}", rows, RETURNS_MORE)
        write_model(repository, f"no_inputs_{place}", python_config([], [Y], *where), RETURNS_MORE)
        write_model(repository, f"no_tensors_{place}", python_config([], [], *where), RETURNS_MORE)
        write_model(repository, f"more_outputs_{place}", python_config([X], [Y], *where), RETURNS_MORE)
        if place != "inline":
            streams = python_config([X], [], *where, DECOUPLED)
            write_model(repository, f"no_outputs_streams_{place}", streams, STREAMS_NOTHING)
    write_model(repository, "logs", TEXT, LOGS)


def write_callers(repository: Path) -> None:
    for place in PLACES:
        write_source(repository, f"evaluates_{place}", TEXT + execution(place), EVALUATES)
    one = python_config([X], [Y], CPU)
    for name, body in (("doubles", DOUBLES), ("fails", FAILS), ("raises", RAISES), ("does_not_load", DOES_NOT_LOAD)):
        write_model(repository, name, one, body)
    write_model(repository, "streams", one + DECOUPLED, STREAMS)
    for size in (1, 20_000):
        write_model(repository, f"sends_{size}", one + DECOUPLED, IGNORES_CANCEL.replace("SIZE", str(size)))
    write_model(repository, "in_sequences", one + "max_batch_size: 1\n" + SEQUENCES, SLEEPS)
    full = "dynamic_batching { default_queue_policy { max_queue_size: 1 } }"
    write_model(repository, "has_room_for_one", one + full + "\nmax_batch_size: 1", SLEEPS)
    write_source(repository, "around_fails", ENSEMBLE.replace("MODEL", "fails"))
    for name in OF_CALLS:
        write_queue(repository, name)


def write_queues(repository: Path) -> None:
    write_model(repository, "in_sequences", python_config([X], [Y], CPU, "max_batch_size: 1", SEQUENCES), SLEEPS)
    for name in POLICIES:
        write_queue(repository, name)
        around = "max_batch_size: 1\n" + ENSEMBLE.replace("MODEL", name)
        write_source(repository, f"around_{name}", around)


def write_queue(repository: Path, name: str) -> None:
    batching = POLICIES[name].batching
    text = "" if batching is None else f"dynamic_batching {{ {batching} }}"
    write_model(repository, name, python_config([X], [Y], CPU, "max_batch_size: 1", text), SLEEPS)


class Server(NamedTuple):
    url: str
    grpc: Any
    log: Path

    def infer(self, protocol: str, model: str, inputs: Mapping[str, Any], **more: Any) -> tuple[Any, ...]:
        """The status, and the outputs or the error."""
        wanted = more.pop("outputs", None)
        if protocol == "http":
            tensors = [
                {"name": name, "shape": list(array.shape), "datatype": "FP32", "data": array.ravel().tolist()}
                for name, array in inputs.items()
            ]
            body: dict[str, Any] = {"inputs": tensors, "parameters": more}
            if wanted is not None:
                body["outputs"] = [{"name": name} for name in wanted]
            reply = httpx.post(f"{self.url}/v2/models/{model}/infer", json=body, timeout=60, verify=False)
            if reply.status_code != 200:
                return reply.status_code, reply.json()["error"]
            return 200, {output["name"]: output["data"] for output in reply.json()["outputs"]}
        given = []
        for name, array in inputs.items():
            given.append(tritonclient.grpc.InferInput(name, array.shape, "FP32").set_data_from_numpy(array))
        outputs = None if wanted is None else [tritonclient.grpc.InferRequestedOutput(name) for name in wanted]
        try:
            found = self.grpc.infer(model, given, outputs=outputs, **more)
        except tritonclient.grpc.InferenceServerException as error:
            codes = {"StatusCode.INVALID_ARGUMENT": 400, "StatusCode.UNAVAILABLE": 503}
            return codes.get(error.status(), error.status()), error.message()
        return 200, {one.name: found.as_numpy(one.name).tolist() for one in found.get_response().outputs}

    def executed(self, model: str) -> int:
        """How often the model was executed. A response may be read before its execution is counted."""
        before, count = -1, 0
        while before != count:
            before = count
            time.sleep(0.02)
            reply = httpx.get(f"{self.url}/v2/models/{model}/stats", verify=False)
            count = int(reply.json()["model_stats"][0]["execution_count"])
        return count

    def evaluated(self, place: str, code: str) -> Any:
        """The value of an expression in a model that runs in this place."""
        tensor = {"name": "CODE", "shape": [1], "datatype": "BYTES", "data": [code]}
        url = f"{self.url}/v2/models/evaluates_{place}/infer"
        reply = httpx.post(url, json={"inputs": [tensor]}, timeout=60, verify=False)
        assert reply.status_code == 200, reply.text
        return json.loads(reply.json()["outputs"][0]["data"][0])


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, triton_like: Callable[..., str]) -> Iterator[Callable[..., Server]]:
    """Starts a server of the models that a function writes."""
    with ExitStack() as stack:

        def start(write: Callable[[Path], None]) -> Server:
            folder = tmp_path_factory.mktemp(write.__name__)
            write(folder / "models")
            port = free_port()
            url = triton_like(
                folder / "models",
                "--exit-on-error=false",
                "--log-info=true",
                f"--log-file={folder / 'log'}",
                "--allow-grpc=true",
                "--grpc-address=127.0.0.1",
                f"--grpc-port={port}",
            )
            client = stack.enter_context(tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}"))
            return Server(url, client, folder / "log")

        yield start


@pytest.fixture(scope="module")
def models(start: Callable[..., Server]) -> Server:
    return start(write_models)


@pytest.fixture(scope="module")
def callers(start: Callable[..., Server]) -> Server:
    return start(write_callers)


@pytest.fixture(scope="module")
def queues(start: Callable[..., Server]) -> Server:
    return start(write_queues)


# ------------------------------------------------------------------------------------------------- undeclared tensors

ONE = np.ones(1, np.float32)
PROTOCOLS = pytest.mark.parametrize("protocol", ["http", "grpc"])
IN_EACH_PLACE = pytest.mark.parametrize("place", PLACES)


@PROTOCOLS
@IN_EACH_PLACE
@pytest.mark.parametrize("kind", ["no_outputs", "no_outputs_empty", "no_outputs_rows"])
def test_a_model_without_declared_outputs_runs_and_answers_without_outputs(
    models: Server, protocol: str, place: str, kind: str
) -> None:
    model = f"{kind}_{place}"
    before = models.executed(model)
    given = {"X": ONE[None] if kind == "no_outputs_rows" else ONE}
    assert models.infer(protocol, model, given) == (200, {})
    assert models.executed(model) == before + 1
    status, error = models.infer(protocol, model, given, outputs=["MORE"])
    assert (status, f"unexpected inference output 'MORE' for model '{model}'" in error) == (400, True)
    assert models.infer(protocol, model, {})[0] == 400
    metadata = httpx.get(f"{models.url}/v2/models/{model}", verify=False).json()
    assert (metadata["outputs"], [one["name"] for one in metadata["inputs"]]) == ([], ["X"])


@PROTOCOLS
@IN_EACH_PLACE
def test_a_model_without_declared_inputs_runs(models: Server, protocol: str, place: str) -> None:
    model = f"no_inputs_{place}"
    assert models.infer(protocol, model, {}) == (200, {"Y": [2.0]})
    assert models.infer(protocol, model, {}, outputs=["Y"]) == (200, {"Y": [2.0]})
    status, error = models.infer(protocol, model, {"X": ONE})
    assert (status, f"expected 0 inputs but got 1 inputs for model '{model}'" in error) == (400, True)


@PROTOCOLS
@IN_EACH_PLACE
def test_a_model_without_any_tensors_runs(models: Server, protocol: str, place: str) -> None:
    model = f"no_tensors_{place}"
    before = models.executed(model)
    assert models.infer(protocol, model, {}) == (200, {})
    assert models.executed(model) == before + 1


@PROTOCOLS
@IN_EACH_PLACE
def test_an_output_that_is_not_declared_is_left_out(models: Server, protocol: str, place: str) -> None:
    model = f"more_outputs_{place}"
    assert models.infer(protocol, model, {"X": ONE}) == (200, {"Y": [2.0]})
    status, error = models.infer(protocol, model, {"X": ONE}, outputs=["MORE"])
    assert (status, f"unexpected inference output 'MORE' for model '{model}'" in error) == (400, True)


@pytest.mark.parametrize("place", ["process", "thread"])
def test_a_decoupled_model_without_declared_outputs_streams_empty_responses(models: Server, place: str) -> None:
    model = f"no_outputs_streams_{place}"
    body = {"X": 1.0}
    reply = httpx.post(f"{models.url}/v2/models/{model}/generate_stream", json=body, timeout=60, verify=False)
    events = [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line]
    assert (reply.status_code, events) == (200, [{"model_name": model, "model_version": "1"}] * 2)


# ------------------------------------------------------------------------------------------------- the compiled module

NAMES = [
    "COUNTER",
    "GAUGE",
    "HISTOGRAM",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "MemoryType",
    "Metric",
    "MetricFamily",
    "MetricKind",
    "PreferredMemory",
    "ResponseIterator",
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "is_model_ready",
    "load_model",
    "unload_model",
]


@IN_EACH_PLACE
def test_the_compiled_module_has_its_names(callers: Server, place: str) -> None:
    assert callers.evaluated(place, f"[name for name in {NAMES} if not hasattr(c_python_backend_utils, name)]") == []
    for name in ("InferenceRequest", "InferenceResponse", "Tensor", "TritonError"):
        assert callers.evaluated(place, f"pb_utils.{name} is c_python_backend_utils.{name}")
    assert callers.evaluated(place, "importlib.import_module('c_python_backend_utils') is c_python_backend_utils")


@IN_EACH_PLACE
def test_names_of_the_compiled_module_work(callers: Server, place: str) -> None:
    module = "c_python_backend_utils"
    ready = f"[{module}.is_model_ready(name) for name in ('doubles', 'nothing')]"
    assert callers.evaluated(place, ready) == [True, False]
    assert callers.evaluated(place, f"{module}.Tensor('A', np.ones(2)).as_numpy().tolist()") == [1.0, 1.0]
    levels = f"[int(getattr({module}.Logger.LogLevel, name)) for name in ('INFO', 'WARNING', 'ERROR', 'VERBOSE')]"
    assert callers.evaluated(place, levels) == [0, 1, 2, 3]
    error = f"{module}.TritonError('no', {module}.TritonError.NOT_FOUND)"
    assert callers.evaluated(place, f"shown({module}.InferenceResponse(error={error}))") == "no"


# ------------------------------------------------------------------------------------------------- errors of calls

WAYS = ("exec", "async_exec", "decoupled", "async_decoupled")
REFUSED = "Model {0} - Error when running inference: "
NOT_READY = REFUSED + "Failed for execute the inference request. Model '{0}' is not ready."
# The arguments of a call, and the beginning of its error.
REFUSALS: Mapping[str, tuple[str, str]] = {
    "unknown": ("'nothing'", NOT_READY.format("nothing")),
    "no name": ("''", NOT_READY.format("")),
    "version": ("'doubles', model_version=7", NOT_READY.format("doubles")),
    "not loaded": ("'does_not_load'", NOT_READY.format("does_not_load")),
    "input": ("'doubles', name='W'", REFUSED.format("doubles") + "unexpected inference input 'W' for model 'doubles'"),
    "output": (
        "'doubles', outputs=['W']",
        REFUSED.format("doubles") + "unexpected inference output 'W' for model 'doubles'",
    ),
    "ensemble": (
        "'around_fails', outputs=['W']",
        REFUSED.format("around_fails") + "unexpected inference output 'W' for model 'around_fails'",
    ),
    "no sequence": (
        "'in_sequences', [1.0]",
        REFUSED.format("in_sequences")
        + "inference request to model 'in_sequences' must specify a non-zero or non-empty correlation ID",
    ),
    "no start": (
        "'in_sequences', [1.0], correlation_id=7",
        REFUSED.format("in_sequences")
        + "inference request for sequence 7 to model 'in_sequences' must specify the START flag on the first request",
    ),
    "fails": ("'fails'", "not today"),
    "fails in an ensemble": ("'around_fails'", "in ensemble 'around_fails', not today"),
    "raises": ("'raises'", "Failed to process the request(s) for model "),
}
CALLERS = pytest.mark.parametrize("place", ["process", "thread"])


@CALLERS
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("case", REFUSALS)
def test_the_error_of_a_call_begins_as_on_triton(callers: Server, place: str, how: str, case: str) -> None:
    """A call that no model has run has the name of the model, the error of a model that has run has not."""
    arguments, begins = REFUSALS[case]
    (error,) = callers.evaluated(place, f"called('{how}', {arguments})")
    assert error.startswith(begins), error


@CALLERS
@pytest.mark.parametrize("how", WAYS)
def test_the_error_of_a_call_with_another_data_type_names_the_model(callers: Server, place: str, how: str) -> None:
    """Triton tells an id before the text, also for a request that has none."""
    (error,) = callers.evaluated(place, f"called('{how}', 'doubles', dtype='int32')")
    assert error.startswith(REFUSED.format("doubles"))
    assert error.partition("] ")[2] or error.partition(": ")[2]
    assert "inference input 'X' data-type is 'INT32', but model 'doubles' expects 'FP32'" in error


@CALLERS
@pytest.mark.parametrize("how", ["exec", "async_exec"])
def test_a_plain_call_of_a_decoupled_model_is_refused(callers: Server, place: str, how: str) -> None:
    (error,) = callers.evaluated(place, f"called('{how}', 'streams', 2.0)")
    assert error.startswith(REFUSED.format("streams") + "Model streams is using the decoupled. The current BLS request")


@CALLERS
def test_the_error_of_a_call_to_a_full_queue_names_the_model(callers: Server, place: str) -> None:
    calls = "[called('async_exec', 'has_room_for_one', [1.0]) for _ in range(6)]"
    answers = [answer for (answer,) in callers.evaluated(place, f"asyncio.gather(*{calls})")]
    errors = [answer for answer in answers if isinstance(answer, str)]
    assert 0 < len(errors) < 6
    for error in errors:
        assert error.startswith(REFUSED.format("has_room_for_one"))
        assert "Exceeds maximum queue size" in error


# ------------------------------------------------------------------------------------------------ streams that are left

LEFT = ("unread", "one", "half", "kept", "raises", "cancelled", "cancelled and read")


@CALLERS
@pytest.mark.parametrize("how", ["exec", "async_exec"])
@pytest.mark.parametrize("size", [1, 20_000])
@pytest.mark.parametrize("way", LEFT)
def test_a_stream_that_its_caller_leaves_runs_to_its_end_and_frees_its_instance(
    callers: Server, place: str, how: str, size: int, way: str, on_triton: bool
) -> None:
    if on_triton and way.startswith("cancelled"):
        pytest.skip("2.51 has no cancel()")
    model = f"sends_{size}"

    def ended() -> float:
        """Asked through the model's only instance, which must have become free."""
        ((count,), *_) = callers.evaluated(place, f"called('decoupled', '{model}', -1.0)")[0]
        return float(count)

    before = ended()
    for _ in range(2):
        if way == "raises":
            with pytest.raises(AssertionError, match="stops"):
                callers.evaluated(place, f"left('{way}', '{how}', '{model}')")
        else:
            assert callers.evaluated(place, f"left('{way}', '{how}', '{model}')") in (0.0, "left")
    deadline = time.monotonic() + 30
    while (count := ended()) < before + 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert count == before + 2


# ------------------------------------------------------------------------------------------------- timeouts of requests


def expires(server: Server, protocol: str, model: str, *, priority: int = 0, timeout: int = 20_000) -> bool:
    """Whether the timeout of a request counts that waits behind two others."""
    given = {"X": ONE[None]}
    with ThreadPoolExecutor() as threads:
        busy = [threads.submit(server.infer, "http", model, given, priority=priority) for _ in range(2)]
        time.sleep(0.1)
        status, found = server.infer(protocol, model, given, timeout=timeout, priority=priority)
        assert [one.result()[0] for one in busy] == [200, 200]
    if status == 200:
        return False
    assert (status, "Request timeout expired" in found) == (503, True), found
    return True


@PROTOCOLS
@pytest.mark.parametrize("name", POLICIES)
def test_a_timeout_of_a_request_counts_if_the_queue_permits_it_and_has_a_longer_one(
    queues: Server, protocol: str, name: str
) -> None:
    assert expires(queues, protocol, name, priority=POLICIES[name].priority) is POLICIES[name].counts


@pytest.mark.parametrize("name", POLICIES)
def test_a_timeout_of_a_request_of_an_ensemble_counts_in_its_steps(queues: Server, name: str) -> None:
    assert expires(queues, "http", f"around_{name}", priority=POLICIES[name].priority) is POLICIES[name].counts


@CALLERS
@pytest.mark.parametrize("name", OF_CALLS)
def test_a_timeout_of_a_call_counts_as_that_of_a_request(callers: Server, place: str, name: str) -> None:
    before = f"called('async_exec', '{name}', [1.0])"
    last = f"called('async_exec', '{name}', [1.0], timeout=20000)"
    *_, (answer,) = callers.evaluated(place, f"asyncio.gather({before}, {before}, {before}, {last})")
    assert (isinstance(answer, str) and answer.startswith("Request timeout expired")) is POLICIES[name].counts


@PROTOCOLS
def test_a_sequence_without_a_slot_ends_at_the_timeout_of_its_first_request(queues: Server, protocol: str) -> None:
    given = {"X": ONE[None]}
    numbers = (1, 2) if protocol == "http" else (3, 4)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(queues.infer, "http", "in_sequences", given, sequence_id=numbers[0], sequence_start=True)
        assert first.result()[0] == 200
        began = time.monotonic()
        status, error = queues.infer(
            protocol, "in_sequences", given, sequence_id=numbers[1], sequence_start=True, timeout=100_000
        )
        assert (status, "timeout of the corresponding sequence has been expired" in error) == (503, True)
        assert 0.05 < time.monotonic() - began < 5
        end = queues.infer(protocol, "in_sequences", given, sequence_id=numbers[0], sequence_end=True)
        assert end[0] == 200


# ------------------------------------------------------------------------------------------------- log messages

# The settings, and the kinds of messages that are written.
SETTINGS: Mapping[str, tuple[Mapping[str, Any], set[str]]] = {
    "default": ({}, {"info", "warn", "error"}),
    "verbose without info": ({"log_info": False, "log_verbose_level": 1}, {"verbose", "warn", "error"}),
    "neither": ({"log_info": False}, {"warn", "error"}),
    "verbose only": (
        {"log_info": False, "log_warning": False, "log_error": False, "log_verbose_level": 1},
        {"verbose"},
    ),
    "verbose and info": ({"log_warning": False, "log_error": False, "log_verbose_level": 2}, {"verbose", "info"}),
    "errors only": ({"log_info": False, "log_warning": False}, {"error"}),
}
USUAL = {"log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 0}


@PROTOCOLS
@pytest.mark.parametrize("case", SETTINGS)
def test_each_kind_of_message_of_a_model_has_its_own_setting(models: Server, protocol: str, case: str) -> None:
    asked, kinds = SETTINGS[case]
    name = f"{protocol}-{case.replace(' ', '-')}"

    def change(settings: Mapping[str, Any]) -> None:
        if protocol == "http":
            httpx.post(f"{models.url}/v2/logging", json=dict(settings), verify=False).raise_for_status()
        else:
            models.grpc.update_log_settings(dict(settings))

    def say(what: str) -> None:
        tensor = {"name": "CODE", "shape": [1], "datatype": "BYTES", "data": [what]}
        url = f"{models.url}/v2/models/logs/infer"
        httpx.post(url, json={"inputs": [tensor]}, timeout=60, verify=False).raise_for_status()

    change({**USUAL, **asked})
    say(name)
    change(USUAL)
    say(f"after-{name}")  # later than all messages before it
    deadline = time.monotonic() + 30
    while f"after-{name}-error." not in (log := models.log.read_text()):
        assert time.monotonic() < deadline, "the messages are not written"
        time.sleep(0.05)
    assert {kind for kind in ("verbose", "info", "warn", "error") if re.search(rf'[ "]{name}-{kind}\.', log)} == kinds
