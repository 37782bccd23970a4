"""An engine whose models run on machines that are processes of this one.

Decides the models of these tests, a chain of them, and how an engine with a local cluster is opened. Engine, actors,
sockets and machines are not faked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
import trio

from flowserve.elsewhere.actors import ClusterOptions
from flowserve.elsewhere.cluster.agents import LocalCluster
from flowserve.elsewhere.cluster.link import Tls
from flowserve.elsewhere.cluster.traffic import MachineTraffic
from flowserve.elsewhere.placement import ModelPlace
from flowserve.elsewhere.wing import other_machines
from flowserve.runtime.engine.engine import Engine, open_engine
from flowserve.runtime.engine.options import EngineOptions
from flowserve.runtime.loading.control import Control, ControlOptions, open_control
from flowserve.values import Array, Request

DOUBLE = """
backend: "python" max_batch_size: 8 dynamic_batching {}
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } output { name: "PID" data_type: TYPE_INT32 dims: [ 1 ] }
"""
PURE = f'{DOUBLE} parameters {{ key: "pure" value {{ string_value: "true" }} }}'
DOUBLE_CODE = """
import os
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            first = float(value.flat[0]) if value.size else 0.0
            if first == -1:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("minus one")))
                continue
            if first == -2:
                raise ValueError("minus two")
            if first == -3:
                os._exit(7)
            if first < -3:
                time.sleep(-first / 1000)
            pid = np.full((len(value), 1), os.getpid(), np.int32)
            out = [pb_utils.Tensor("OUT", value * 2), pb_utils.Tensor("PID", pid)]
            responses.append(pb_utils.InferenceResponse(out))
        return responses
"""


STEP_CONFIG = """
backend: "python" max_batch_size: 8 dynamic_batching {}
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } output { name: "PID" data_type: TYPE_INT32 dims: [ 1 ] }
"""
PURE_STEP = f'{STEP_CONFIG} parameters {{ key: "pure" value {{ string_value: "true" }} }}'
# IN is [value, number of a model, action of that model]. The value is doubled.
STEP_CODE = """
import os
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            made = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().copy()
            made[:, 0] *= 2
            what = made[0, 2] if made[0, 1] == NUMBER else 0
            if what == 1:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("one fails")))
                continue
            if what == 2:
                raise ValueError("all fail")
            if what == 3:
                os._exit(7)
            if what == 5:
                made = np.pad(made, ((0, 0), (0, 1)))
            if what > 5:
                time.sleep(float(what) / 1000)
            pid = np.full((len(made), 1), os.getpid(), np.int32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", made), pb_utils.Tensor("PID", pid)]))
        return responses
"""
STEP = """
  step {{ model_name: "{0}" model_version: -1 input_map {{ key: "IN" value: "{1}" }}
    output_map {{ key: "OUT" value: "{2}" }} {3} }}
"""


def write_python(repository: Path, name: str, config: str = DOUBLE, code: str = DOUBLE_CODE) -> Path:
    """A model that doubles its input; its first number selects a further action."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    (folder / "1" / "model.py").write_text(code)
    return folder


def write_chain(
    repository: Path, config: str = STEP_CONFIG, names: Iterable[str] = ("first", "second", "third"), pid: bool = True
) -> None:
    """Three models, and an ensemble of them; PID is the process of the last."""
    names = [*names]
    for number, name in enumerate(names):
        write_python(repository, name, config, STEP_CODE.replace("NUMBER", str(number)))
    tensors = ["IN", *names[:-1], "OUT"]
    last = 'output_map { key: "PID" value: "PID" }' if pid else ""
    steps = [STEP.format(name, *tensors[i : i + 2], last * (i == len(names) - 1)) for i, name in enumerate(names)]
    write_ensemble(repository, steps, pid=pid)


def write_ensemble(repository: Path, steps: Iterable[str], *, pid: bool = True) -> None:
    (repository / "chain" / "1").mkdir(parents=True)
    (repository / "chain" / "config.pbtxt").write_text(
        'platform: "ensemble" max_batch_size: 8 input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }\n'
        'output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }'
        + 'output { name: "PID" data_type: TYPE_INT32 dims: [ 1 ] }' * pid
        + f"ensemble_scheduling {{ {''.join(steps)} }}"
    )


@contextmanager
def local_cluster(count: int) -> Iterator[LocalCluster]:
    """Machines that are processes; none remains afterwards."""
    cluster = LocalCluster(count)
    try:
        yield cluster
    finally:
        cluster.close()


@asynccontextmanager
async def serving(
    repository: Path,
    cluster: LocalCluster,
    places: Mapping[str, ModelPlace],
    *,
    tls: Tls | None = None,
    traffic: dict[str, MachineTraffic] | None = None,
) -> AsyncIterator[tuple[Engine, Control]]:
    """An engine with all models of the repository, some of them on the machines of a cluster. `traffic`: as
    `ClusterOptions.traffic`.
    """
    machines = ClusterOptions(cluster, 20.0, tls, {} if traffic is None else traffic)
    options = EngineOptions(wings=(other_machines(machines, places),))
    async with (
        open_engine(options) as engine,
        open_control(engine, [repository], ControlOptions("explicit", ("*",))) as control,
    ):
        with trio.fail_after(60):
            assert await control.start(lambda _: None) == {}
        yield engine, control


async def ask(engine: Engine, name: str, value: Array, **facts: object) -> Mapping[str, Array]:
    """The outputs for one request."""
    request = Request({"IN": value}, stamp=engine.next_stamp(), **facts)  # type: ignore[arg-type]  # of a Request
    return (await engine.infer(engine.deployments.find(name), request)).outputs


def row(*numbers: float) -> Array:
    """One row of numbers."""
    return np.array([numbers], np.float32)


async def until(is_so: Callable[[], object], seconds: float = 20) -> None:
    """Wait until the condition is true. Raises TooSlowError."""
    with trio.fail_after(seconds):
        while not is_so():  # noqa: ASYNC110 - no event to wait for
            await trio.sleep(0.005)


def is_running(process: int) -> bool:
    """Whether this process exists."""
    return Path(f"/proc/{process}").exists()
