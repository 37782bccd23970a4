"""The final flag: which response of a stream carries it, and when an empty response ends the stream instead."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.support.triton_like import free_port
from tests.support.triton_models import python_config, spec, write_model

pytestmark = pytest.mark.server

FINAL = "triton_final_response"
PLACES = ("process", "thread")
COUNT = [spec("COUNT", "INT32", "1"), spec("HOW", "STRING", "1")]
OUT = [spec("OUT", "INT32", "1")]
DECOUPLED = "model_transaction_policy { decoupled: true }"
BATCHES = "max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 3 ] max_queue_delay_microseconds: 2000000 }"

# COUNT responses. HOW tells how the model ends: the flag is sent `with` the last response, `alone` after it, `later`,
# with an `error` or with a response that has no outputs (`bare`).
SENDS = """
def send_all(self, request):
    sender = request.get_response_sender()
    count, how = int(given(request, "COUNT").ravel()[0]), given(request, "HOW").ravel()[0].decode()
    for number in range(count):
        flags = FINAL if number == count - 1 and how in ("with", "error", "bare") else 0
        if flags and how == "error":
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("no more")), flags)
        elif flags and how == "bare":
            sender.send(pb_utils.InferenceResponse([]), flags)
        else:
            sender.send(respond(OUT=np.full(given(request, "COUNT").shape, number, np.int32)), flags)
    if how == "later":
        time.sleep(0.4)
    if not count or how in ("alone", "later"):
        sender.send(flags=FINAL)

"""
SENDERS = {
    "inside": "def execute(self, requests):\n    for request in requests:\n        self.send_all(request)\n",
    "elsewhere": """
def execute(self, requests):
    import threading

    for request in requests:
        threading.Thread(target=self.send_all, args=(request,)).start()
""",
    "coroutine": """
async def execute(self, requests):
    import asyncio

    for request in requests:
        await asyncio.sleep(0.01)
        self.send_all(request)
""",
}
# Two responses, the flag with the second one or after it.
SPLITS = """
def execute(self, requests):
    for request in requests:
        sender, number = request.get_response_sender(), given(request, "IN")
        sender.send(respond(OUT=10 * number))
        sender.send(respond(OUT=10 * number + 1), FLAGS)
        if not FLAGS:
            sender.send(flags=FINAL)
"""
ADDS = """
def execute(self, requests):
    time.sleep(SECONDS)
    return [respond(OUT=given(request, "IN") + 100) for request in requests]
"""
# The outputs of each item of a call, or the text of its error.
CALLS = """
def call(self, request):
    names = ("IN",) if given(request, "MODEL")[0].decode().startswith("adds") else ("COUNT", "HOW")
    tensors = [pb_utils.Tensor(one, given(request, "COUNT" if one == "IN" else one)) for one in names]
    model = given(request, "MODEL")[0].decode()
    return pb_utils.InferenceRequest(model_name=model, requested_output_names=["OUT"], inputs=tensors)

def shown(self, items):
    found = [
        item.error().message() if item.has_error() else [tensor.as_numpy().tolist() for tensor in item.output_tensors()]
        for item in items
    ]
    return respond(FOUND=np.array([json.dumps(found).encode()], object))

"""
CALLERS = {
    "exec": """
def execute(self, requests):
    return [self.shown(self.call(one).exec(decoupled=True)) for one in requests]
""",
    "async_exec": """
async def execute(self, requests):
    return [self.shown(await self.call(one).async_exec(decoupled=True)) for one in requests]
""",
}


def ensemble(*steps: tuple[str, dict[str, str], str], inputs: list[str] = COUNT) -> str:
    def maps(kind: str, names: dict[str, str]) -> str:
        return " ".join(f'{kind} {{ key: "{key}" value: "{value}" }}' for key, value in names.items())

    written = ",\n".join(
        f'{{ model_name: "{model}" model_version: -1 {maps("input_map", read)} {maps("output_map", {"OUT": made})} }}'
        for model, read, made in steps
    )
    config = python_config(inputs, OUT).replace('backend: "python"', 'platform: "ensemble"')
    return f"{config}ensemble_scheduling {{ step [ {written} ] }}\n"


@dataclass
class Server:
    address: str
    grpc_address: str
    client: tritonclient.grpc.InferenceServerClient


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, triton_like: Callable[..., str]) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("final")
    both = {"COUNT": "COUNT", "HOW": "HOW"}
    for place in PLACES:
        where = f'parameters {{ key: "execution" value {{ string_value: "{place}" }} }}'
        number = [spec("IN", "INT32", "1")]
        for name, execute in SENDERS.items():
            write_model(folder, f"{name}_{place}", python_config(COUNT, OUT, DECOUPLED, where), SENDS + execute)
        config = python_config(COUNT, [*OUT, spec("SIZE", "INT32", "1")], DECOUPLED, BATCHES, where)
        sized = SENDS.replace("respond(OUT=", "respond(SIZE=self.size, OUT=") + SENDERS["inside"].replace(
            "    for", "    self.size = np.array([[len(requests)]], np.int32)\n    for"
        )
        write_model(folder, f"batches_{place}", config, sized)
        for name, flags in (("splits_with", "FINAL"), ("splits_alone", "0")):
            config = python_config(number, OUT, DECOUPLED, where)
            write_model(folder, f"{name}_{place}", config, SPLITS.replace("FLAGS", flags))
        for name, seconds in (("adds", "0"), ("adds_slowly", "0.2")):
            write_model(folder, f"{name}_{place}", python_config(number, OUT, where), ADDS.replace("SECONDS", seconds))
        found = [spec("FOUND", "STRING", "1")]
        for name, execute in CALLERS.items():
            config = python_config([*COUNT, spec("MODEL", "STRING", "1")], found, where)
            write_model(folder, f"{name}_{place}", config, CALLS + execute)
        first = (f"inside_{place}", both, "first")
        ensembles = {
            "e_only": [(f"inside_{place}", both, "OUT")],
            "e_adds": [first, (f"adds_{place}", {"IN": "first"}, "OUT")],
            "e_slow": [first, (f"adds_slowly_{place}", {"IN": "first"}, "OUT")],
            "e_long": [first, (f"adds_{place}", {"IN": "first"}, "next"), (f"adds_{place}", {"IN": "next"}, "OUT")],
            "e_nested": [(f"e_only_{place}", both, "first"), (f"adds_{place}", {"IN": "first"}, "OUT")],
            "e_splits_with": [first, (f"splits_with_{place}", {"IN": "first"}, "OUT")],
            "e_splits_alone": [first, (f"splits_alone_{place}", {"IN": "first"}, "OUT")],
        }
        for name, steps in ensembles.items():
            write_model(folder, f"{name}_{place}", ensemble(*steps))
        write_model(folder, f"e_plain_{place}", ensemble((f"adds_{place}", {"IN": "IN"}, "OUT"), inputs=number))
    port = free_port()
    address = triton_like(folder, "--allow-grpc=true", f"--grpc-port={port}")
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
        yield Server(address, f"127.0.0.1:{port}", client)


Item = tuple[list[int], bool] | str  # the values of a response and whether it is marked final, or an error's text


def tensors(count: int, how: str | None, *, is_batched: bool = False) -> list[Any]:
    """The inputs of a model that sends `count` responses; without `how`, of one that adds to a number."""
    shape = [1, 1] if is_batched else [1]
    name = "IN" if how is None else "COUNT"
    made = [tritonclient.grpc.InferInput(name, shape, "INT32").set_data_from_numpy(np.full(shape, count, np.int32))]
    if how is not None:
        text = np.full(shape, how.encode(), object)
        made.append(tritonclient.grpc.InferInput("HOW", shape, "BYTES").set_data_from_numpy(text))
    return made


def item_of(result: Any, error: InferenceServerException | None) -> Item:
    if error is not None:
        return str(error.message())
    message = result.get_response()
    values = [] if not message.outputs else result.as_numpy("OUT").ravel().tolist()
    return values, message.parameters[FINAL].bool_param


def streamed(server: Server, model: str, count: int, how: str | None, *, wants_empty: bool) -> list[Item]:
    """All that one request of a stream is answered; closing the stream waits for the rest of it."""
    items: list[Item] = []
    server.client.start_stream(lambda result, error: items.append(item_of(result, error)))
    server.client.async_stream_infer(model, tensors(count, how), enable_empty_final_response=wants_empty)
    server.client.stop_stream()
    return items


def streamed_by_aio(server: Server, model: str, count: int, how: str | None, *, wants_empty: bool) -> list[Item]:
    assert not wants_empty, "this client has no option for it"

    async def ask() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": model, "inputs": tensors(count, how)}

    async def items() -> list[Item]:
        async with tritonclient.grpc.aio.InferenceServerClient(server.grpc_address) as client:
            return [item_of(*one) async for one in client.stream_infer(ask())]

    return asyncio.run(items())


CLIENTS = {"grpc": streamed, "aio": streamed_by_aio}
BY_CLIENTS = pytest.mark.parametrize(("client", "wants_empty"), [("grpc", False), ("grpc", True), ("aio", False)])


def marked(values: list[int], *, ends_with_last: bool, wants_empty: bool) -> list[Item]:
    """A response for each value, the last one marked, or followed by an empty one if the client wants that."""
    last = len(values) - 1
    items: list[Item] = [([value], ends_with_last and n == last) for n, value in enumerate(values)]
    return items if (values and ends_with_last) or not wants_empty else [*items, ([], True)]


@pytest.mark.parametrize(("how", "count"), [("with", 1), ("with", 3), ("with", 0), ("alone", 3), ("alone", 0)])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("sender", SENDERS)
@BY_CLIENTS
def test_the_response_that_carries_the_flag_is_the_final_one(
    server: Server, client: str, sender: str, place: str, how: str, count: int, wants_empty: bool
) -> None:
    found = CLIENTS[client](server, f"{sender}_{place}", count, how, wants_empty=wants_empty)
    assert found == marked([*range(count)], ends_with_last=how == "with", wants_empty=wants_empty)


@pytest.mark.parametrize("wants_empty", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_nothing_follows_an_error_that_carries_the_flag(server: Server, place: str, wants_empty: bool) -> None:
    assert streamed(server, f"inside_{place}", 2, "error", wants_empty=wants_empty) == [([0], False), "no more"]


@pytest.mark.parametrize("wants_empty", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_a_response_without_outputs_is_a_response(server: Server, place: str, wants_empty: bool) -> None:
    assert streamed(server, f"inside_{place}", 2, "bare", wants_empty=wants_empty) == [([0], False), ([], True)]


@pytest.mark.parametrize("place", PLACES)
def test_the_empty_final_response_names_the_model_and_the_request(server: Server, place: str) -> None:
    asked = service_pb2.ModelInferRequest(model_name=f"inside_{place}", id="7")
    asked.inputs.add(name="COUNT", datatype="INT32", shape=[1]).contents.int_contents.append(0)
    asked.inputs.add(name="HOW", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"alone")
    asked.parameters["triton_enable_empty_final_response"].bool_param = True
    with tritonclient.grpc.grpc.insecure_channel(server.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        (message,) = stub.ModelStreamInfer(iter([asked]))
    last = message.infer_response
    assert (message.error_message, last.model_name, last.model_version, last.id) == ("", f"inside_{place}", "", "7")
    assert {name: value.bool_param for name, value in last.parameters.items()} == {FINAL: True}


@pytest.mark.parametrize("place", PLACES)
def test_requests_of_one_batch_end_each_in_its_own_way(server: Server, place: str) -> None:
    items: dict[str, list[Item]] = {}
    sizes = set()

    def take(result: Any, error: Any) -> None:
        assert error is None
        if result.get_response().outputs:
            sizes.add(int(result.as_numpy("SIZE").item()))
        items.setdefault(result.get_response().id, []).append(item_of(result, error))

    server.client.start_stream(take)
    for name, count, how in (("a", 2, "with"), ("b", 2, "alone"), ("c", 0, "alone")):
        server.client.async_stream_infer(
            f"batches_{place}",
            tensors(count, how, is_batched=True),
            request_id=name,
            enable_empty_final_response=True,
        )
    server.client.stop_stream()
    assert sizes == {3}
    assert items == {
        "a": [([0], False), ([1], True)],
        "b": [([0], False), ([1], False), ([], True)],
        "c": [([], True)],
    }


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("model", ["adds", "e_plain"])
@BY_CLIENTS
def test_the_one_response_of_a_model_is_final(
    server: Server, client: str, model: str, place: str, wants_empty: bool
) -> None:
    assert CLIENTS[client](server, f"{model}_{place}", 5, None, wants_empty=wants_empty) == [([105], True)]


# The flag is on the last response of an ensemble if no step was left when that was complete: also if the flag came
# alone, while a later step was running. Otherwise it comes alone.
IN_ENSEMBLES = [
    ("e_only", "with", [0, 1], True),
    ("e_only", "alone", [0, 1], False),
    ("e_adds", "with", [100, 101], True),
    ("e_adds", "later", [100, 101], False),
    ("e_slow", "with", [100, 101], True),
    ("e_slow", "alone", [100, 101], True),
    ("e_long", "with", [200, 201], True),
    ("e_long", "later", [200, 201], False),
    ("e_nested", "with", [100, 101], True),
    ("e_nested", "later", [100, 101], False),
    ("e_splits_with", "with", [0, 1, 10, 11], True),
    ("e_splits_with", "later", [0, 1, 10, 11], False),
    ("e_splits_alone", "with", [0, 1, 10, 11], False),
    ("e_splits_alone", "later", [0, 1, 10, 11], False),
]


@pytest.mark.parametrize("wants_empty", [False, True])
@pytest.mark.parametrize(("model", "how", "values", "ends_with_last"), IN_ENSEMBLES)
@pytest.mark.parametrize("place", PLACES)
def test_the_last_response_of_an_ensemble_is_final_if_nothing_is_left(
    server: Server, place: str, model: str, how: str, values: list[int], ends_with_last: bool, wants_empty: bool
) -> None:
    found = streamed(server, f"{model}_{place}", 2, how, wants_empty=wants_empty)
    assert found == marked(values, ends_with_last=ends_with_last, wants_empty=wants_empty)


@pytest.mark.parametrize("wants_empty", [False, True])
@pytest.mark.parametrize("model", ["e_only", "e_adds", "e_nested", "e_splits_with"])
@pytest.mark.parametrize("place", PLACES)
def test_an_ensemble_without_a_response_ends_empty(server: Server, place: str, model: str, wants_empty: bool) -> None:
    assert streamed(server, f"{model}_{place}", 0, "alone", wants_empty=wants_empty) == ([([], True)] * wants_empty)


def called(server: Server, caller: str, model: str, count: int, how: str) -> Any:
    given = [
        {"name": "COUNT", "datatype": "INT32", "shape": [1], "data": [count]},
        {"name": "HOW", "datatype": "BYTES", "shape": [1], "data": [how]},
        {"name": "MODEL", "datatype": "BYTES", "shape": [1], "data": [model]},
    ]
    response = httpx.post(
        f"{server.address}/v2/models/{caller}/infer", json={"inputs": given}, timeout=60, verify=False
    )
    assert response.status_code == 200, response.text
    return json.loads(response.json()["outputs"][0]["data"][0])


@pytest.mark.parametrize(
    ("model", "count", "how", "found"),
    [
        ("inside", 2, "with", [[[0]], [[1]]]),
        ("inside", 2, "alone", [[[0]], [[1]], []]),
        ("inside", 0, "alone", [[]]),
        ("inside", 1, "error", ["no more"]),
        ("inside", 1, "bare", [[]]),
        ("elsewhere", 2, "with", [[[0]], [[1]]]),
        ("coroutine", 2, "alone", [[[0]], [[1]], []]),
        ("adds", 5, "", [[[105]]]),
        ("e_only", 2, "with", [[[0]], [[1]]]),
        ("e_only", 2, "alone", [[[0]], [[1]], []]),
        ("e_adds", 0, "alone", [[]]),
        ("e_adds", 2, "with", [[[100]], [[101]]]),
        ("e_adds", 2, "later", [[[100]], [[101]], []]),
        ("e_slow", 2, "alone", [[[100]], [[101]]]),
        ("e_nested", 2, "with", [[[100]], [[101]]]),
        ("e_nested", 2, "later", [[[100]], [[101]], []]),
        ("e_splits_with", 2, "with", [[[0]], [[1]], [[10]], [[11]]]),
        ("e_splits_alone", 2, "with", [[[0]], [[1]], [[10]], [[11]], []]),
    ],
)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("caller", CALLERS)
def test_a_call_has_an_empty_item_for_a_flag_that_came_alone(
    server: Server, caller: str, place: str, model: str, count: int, how: str, found: list[Any]
) -> None:
    assert called(server, f"{caller}_{place}", f"{model}_{place}", count, how) == found


@pytest.mark.parametrize("wants_empty", [False, True])
@pytest.mark.parametrize("how", ["with", "alone"])
@pytest.mark.parametrize("model", ["inside", "e_adds"])
@pytest.mark.parametrize("place", PLACES)
def test_events_are_sent_for_responses_only(
    server: Server, place: str, model: str, how: str, wants_empty: bool
) -> None:
    """The parameter of streams over gRPC is one without effect here."""
    asked: dict[str, Any] = {"COUNT": 2, "HOW": how}
    if wants_empty:
        asked["triton_enable_empty_final_response"] = True
    where = f"{server.address}/v2/models/{model}_{place}"
    events = httpx.post(f"{where}/generate_stream", json=asked, timeout=60, verify=False)
    assert events.status_code == 200
    data = [json.loads(line.removeprefix("data:")) for line in events.text.splitlines() if line]
    assert [one["OUT"] for one in data] == ([0, 1] if model == "inside" else [100, 101])
    one = httpx.post(f"{where}/generate", json={**asked, "COUNT": 1}, timeout=60, verify=False)
    assert (one.status_code, one.json()["OUT"]) == (200, 0 if model == "inside" else 100)
