"""One repository and one server of it for this folder, and Triton's gRPC client.

Models run on threads, so that the server starts quickly; the tests do not depend on it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from flowserve.testing.serve import Served
from flowserve.values import DType
from tests.support.forked import serving

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about the age of its generated code
    import tritonclient.grpc as triton

OPTIONS = ("--allow-grpc", "true", "--grpc-port", "0", "--python-execution", "thread")

HEAD = """
import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils

def given(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()

def answer(**outputs):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])

class TritonPythonModel:
"""

ECHO = """
    def execute(self, requests):
        return [answer(OUT=given(request, "IN")) for request in requests]
"""

TYPES = """
    def execute(self, requests):
        return [pb_utils.InferenceResponse([
            pb_utils.Tensor("OUT_" + one.name().removeprefix("IN_"), one.as_numpy()) for one in request.inputs()
        ]) for request in requests]
"""

SLEEPS = """
    def execute(self, requests):
        for request in requests:
            time.sleep(float(given(request, "IN").max()))
        return [answer(OUT=given(request, "IN")) for request in requests]
"""

FAILS = """
    def execute(self, requests):
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("no, thank you")) for request in requests]
"""

TELLS = """
    def execute(self, requests):
        return [answer(OUT=np.array([json.dumps(json.loads(one.parameters()), sort_keys=True)], object))
                for one in requests]
"""

# Sends as many responses as the first number, each with its position; then an error if there is a second number.
REPEATS = """
    def execute(self, requests):
        for request in requests:
            count, *more = given(request, "IN").ravel()
            sender = request.get_response_sender()
            for place in range(int(count)):
                if sender.is_cancelled():
                    break
                sender.send(answer(OUT=np.array([place], np.float32)))
            if more:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("enough")))  # the final response
                continue
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

VECTOR = "data_type: TYPE_FP32 dims: [ -1 ]"


def write(repository: Path, name: str, body: str, config: str, files: Mapping[str, str] | None = None) -> None:
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "1/model.py").write_text(HEAD + body)
    (folder / "config.pbtxt").write_text(f'backend: "python"\n{config}')
    for path, text in (files or {}).items():
        (folder / path).write_text(text)


def one_in_one_out(more: str = "", spec: str = VECTOR, out: str = "") -> str:
    return f'input [ {{ name: "IN" {spec} }} ]\noutput [ {{ name: "OUT" {out or spec} }} ]\n{more}\n'


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grpc_models")
    write(folder, "echo", ECHO, one_in_one_out("max_batch_size: 8"))
    labelled = VECTOR + ' label_filename: "labels.txt"'
    write(folder, "score", ECHO, one_in_one_out(out=labelled), {"labels.txt": "cat\ndog\nbird\n"})
    inputs = "".join(
        f'input {{ name: "IN_{one}" data_type: {one.config_name} dims: [ -1 ] optional: true }}\n'
        f'output {{ name: "OUT_{one}" data_type: {one.config_name} dims: [ -1 ] }}\n'
        for one in DType
    )
    write(folder, "types", TYPES, inputs)
    single = 'max_batch_size: 8\nparameters { key: "execution" value { string_value: "process" } }'
    write(folder, "single", ECHO, one_in_one_out(single, "data_type: TYPE_FP32 dims: [ 1 ]"))
    write(folder, "sleeps", SLEEPS, one_in_one_out())
    write(folder, "fails", FAILS, one_in_one_out())
    write(folder, "tells", TELLS, one_in_one_out(out="data_type: TYPE_STRING dims: [ 1 ]"))
    write(folder, "repeats", REPEATS, one_in_one_out("model_transaction_policy { decoupled: true }"))
    return folder


@pytest.fixture(scope="session")
def served(repository: Path) -> Iterator[Served]:
    control = ("--model-control-mode", "explicit", "--load-model", "*", "--allow-client-shm", "true")
    with serving(repository, *OPTIONS, *control) as running:
        yield running
        assert running.process.poll() is None, f"the server died with status {running.process.poll()}:\n{running.log}"
        assert "Traceback" not in running.log


@pytest.fixture
def client(served: Served) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(served.grpc_address) as made:
        yield made


@pytest.fixture(scope="session")
def options() -> tuple[str, ...]:
    """Options for a further server with gRPC on a free port."""
    return OPTIONS
