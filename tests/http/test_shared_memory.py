"""The shared memory extension over HTTP, with the shared memory tools of Triton's own client."""

from __future__ import annotations

import inspect
import json
import re
import secrets
import threading
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException, shared_memory

from flowserve.http.api.infer import AppOptions
from flowserve.memory.client_memory import ClientMemory
from flowserve.memory.devices import Devices, using
from flowserve.runtime.engine.engine import Engine
from tests.support.engine import add_function
from tests.support.fake_device import FakeMachine


@pytest.fixture
def region() -> Iterator[Any]:
    """A region of 64 bytes that the client made, and its key."""
    key = f"/flowserve_test_{secrets.token_hex(8)}"
    handle = shared_memory.create_shared_memory_region("r", key, 64)
    yield handle, key
    shared_memory.destroy_shared_memory_region(handle)


@pytest.fixture
async def allowed(engine: Engine, start: Any) -> Any:
    return await start(engine, AppOptions(client_memory=ClientMemory(is_allowed=True)))


def tensors(offset_in: int, offset_out: int, nbytes_out: int = 16) -> tuple[list[Any], list[Any]]:
    one = triton.InferInput("IN", [1, 4], "FP32")
    one.set_shared_memory("r", 16, offset_in)
    out = triton.InferRequestedOutput("OUT")
    out.set_shared_memory("r", nbytes_out, offset_out)
    return [one], [out]


async def test_inputs_are_read_from_shared_memory_and_outputs_written_to_it(allowed: Any, region: Any) -> None:
    handle, key = region

    def talk() -> None:
        with triton.InferenceServerClient(f"127.0.0.1:{allowed.port}") as client:
            assert client.get_system_shared_memory_status() == []
            client.register_system_shared_memory("r", key, 64)
            row = {"name": "r", "key": key, "offset": 0, "byte_size": 64}
            assert client.get_system_shared_memory_status() == client.get_system_shared_memory_status("r") == [row]
            inputs, outputs = tensors(8, 32)
            for number in (1, 2):
                shared_memory.set_shared_memory_region(handle, [np.full((1, 4), number, np.float32)], 8)
                answer = client.infer("double", inputs, outputs=outputs)
                assert answer.get_output("OUT") == {"name": "OUT", "datatype": "FP32", "shape": [1, 4]}
                told = shared_memory.get_contents_as_numpy(handle, np.float32, [1, 4], 32)
                assert told.tolist() == [[2.0 * number] * 4]
            assert shared_memory.mapped_shared_memory_regions() == [key]
            client.unregister_system_shared_memory("r")
            assert client.get_system_shared_memory_status() == []
            with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'r'"):
                client.infer("double", inputs)

    await trio.to_thread.run_sync(talk)


@pytest.mark.fault("M11")
async def test_a_region_destroyed_by_its_owner_remains_until_it_is_unregistered(allowed: Any) -> None:
    key = f"/flowserve_test_{secrets.token_hex(8)}"
    handle = shared_memory.create_shared_memory_region("r", key, 64)
    shared_memory.set_shared_memory_region(handle, [np.full((1, 4), 5, np.float32)])

    def talk() -> None:
        with triton.InferenceServerClient(f"127.0.0.1:{allowed.port}") as client:
            client.register_system_shared_memory("r", key, 64)
            shared_memory.destroy_shared_memory_region(handle)
            inputs, _ = tensors(0, 16)
            assert client.infer("double", inputs).as_numpy("OUT").tolist() == [[10.0] * 4]
            client.unregister_system_shared_memory("r")
            with pytest.raises(InferenceServerException, match="Unable to open shared memory region"):
                client.register_system_shared_memory("r", key, 64)

    await trio.to_thread.run_sync(talk)


def test_the_table_of_the_clients_functions_is_complete(root: Path) -> None:
    page = (root / "docs/compatibility.md").read_text().partition("# Shared memory of clients")[2]
    listed = dict(re.findall(r"^\| `(\w+)` \|.*\| `(test_\w+)` \|$", page, re.MULTILINE))
    functions = {name for name, one in vars(shared_memory).items() if inspect.isfunction(one) and name[0] != "_"}
    assert {*listed} == functions
    here = Path(__file__).read_text()
    for function, test in listed.items():
        assert f"shared_memory.{function}(" in here.partition(f"def {test}(")[2].partition("\n\n\n")[0]


@pytest.mark.fault("M9")
async def test_an_output_that_exceeds_its_region_is_refused_and_not_written(allowed: Any, region: Any) -> None:
    handle, key = region

    def talk() -> None:
        with triton.InferenceServerClient(f"127.0.0.1:{allowed.port}") as client:
            client.register_system_shared_memory("r", key, 64)
            shared_memory.set_shared_memory_region(handle, [np.ones(16, np.float32)])
            inputs, outputs = tensors(0, 32, nbytes_out=12)
            text = r"output 'OUT' \(12 bytes\) should be at least 16 bytes to hold the results"
            with pytest.raises(InferenceServerException, match=text) as refused:
                client.infer("double", inputs, outputs=outputs)
            assert refused.value.status() == "400"
            assert shared_memory.get_contents_as_numpy(handle, np.float32, [16]).tolist() == [1.0] * 16

    await trio.to_thread.run_sync(talk)


@pytest.mark.fault("M10")
async def test_unregistering_a_region_does_not_affect_a_running_request(
    engine: Engine, allowed: Any, region: Any
) -> None:
    handle, key = region
    begun, gate = threading.Event(), threading.Event()

    def wait(array: Any) -> Any:
        begun.set()
        gate.wait(30)
        return array

    add_function(engine, "slow", [wait], inline=False)

    def talk() -> None:
        with triton.InferenceServerClient(f"127.0.0.1:{allowed.port}", concurrency=2) as client:
            client.register_system_shared_memory("r", key, 64)
            shared_memory.set_shared_memory_region(handle, [np.full((1, 4), 7, np.float32)])
            inputs, outputs = tensors(0, 16)
            waiting = client.async_infer("slow", inputs, outputs=outputs)
            with triton.InferenceServerClient(f"127.0.0.1:{allowed.port}") as other:
                while not begun.is_set():
                    assert other.is_server_live()  # lets the greenlet of the first client run
                other.unregister_system_shared_memory()
                assert other.get_system_shared_memory_status() == []
            gate.set()
            waiting.get_result()
            assert shared_memory.get_contents_as_numpy(handle, np.float32, [1, 4], 16).tolist() == [[7.0] * 4]

    await trio.to_thread.run_sync(talk)


async def test_inputs_are_read_from_cuda_memory_and_outputs_written_to_it(allowed: Any) -> None:
    machine = FakeMachine(1)
    handle = machine.export(0, np.full((1, 4), 3, np.float32).tobytes() + bytes(16))

    def talk() -> None:
        with triton.InferenceServerClient(f"127.0.0.1:{allowed.port}") as client:
            client.register_cuda_shared_memory("r", b64encode(handle), 0, 32)
            assert client.get_cuda_shared_memory_status("r") == [{"name": "r", "device_id": 0, "byte_size": 32}]
            inputs, outputs = tensors(0, 16)
            client.infer("double", inputs, outputs=outputs)
            client.unregister_cuda_shared_memory("r")
            assert client.get_cuda_shared_memory_status() == []

    with using(Devices(machine.devices)):
        await trio.to_thread.run_sync(talk)
    assert np.frombuffer(machine.exported[handle].bytes[16:], np.float32).tolist() == [6.0] * 4


async def test_cuda_memory_without_a_gpu_is_refused_with_the_reason(allowed: Any) -> None:
    def talk() -> None:
        with triton.InferenceServerClient(f"127.0.0.1:{allowed.port}") as client:
            assert client.get_cuda_shared_memory_status() == []
            client.unregister_cuda_shared_memory()
            with pytest.raises(InferenceServerException, match="'r', GPUs not supported: no driver") as refused:
                client.register_cuda_shared_memory("r", b"aGFuZGxl", 0, 64)
            assert refused.value.status() == "400"
            with pytest.raises(InferenceServerException, match="Unable to parse 'raw_handle': 'b64' is no base64"):
                client.register_cuda_shared_memory("r", b"?", 0, 64)
            with pytest.raises(InferenceServerException, match="Unable to find cuda shared memory region: 'r'"):
                client.get_cuda_shared_memory_status("r")

    with using(Devices((), "no driver")):
        await trio.to_thread.run_sync(talk)


@pytest.mark.parametrize(
    ("asked", "status", "text"),
    [
        ({"key": "/x"}, 400, "non-existing object member 'byte_size'"),
        ({"byte_size": 8}, 400, "non-existing object member 'key'"),
        ({"key": 7, "byte_size": 8}, 400, "Unable to parse 'key'"),
        ({"key": "/x", "byte_size": "8"}, 400, "Unable to parse 'byte_size'"),
        ({"key": "/x", "byte_size": 8, "offset": -1}, 400, "Unable to parse 'offset'"),
        ({"key": "/flowserve_nothing", "byte_size": 8}, 400, "Unable to open shared memory region"),
        ([], 400, "the body is a JSON object"),
    ],
)
async def test_an_invalid_registration_is_400(allowed: Any, asked: Any, status: int, text: str) -> None:
    body = json.dumps(asked).encode()
    client = await allowed.connect()
    head = f"POST /v2/systemsharedmemory/region/r/register HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
    answer = await client.ask(head.encode() + body)
    assert (answer.status, text in json.loads(answer.body)["error"]) == (status, True)
