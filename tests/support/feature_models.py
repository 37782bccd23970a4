"""Models that need the server during a batch, for tests of instances on other machines."""

from __future__ import annotations

import trio

from flowserve.runtime.engine.engine import Engine
from flowserve.values import Array, Request
from tests.support.clusters import ask, row

HEAD = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def given(request, name="IN"):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()


def made(**values):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in values.items()])
"""
DECOUPLED = """
backend: "python" max_batch_size: 4 model_transaction_policy { decoupled: true }
input { name: "IN" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""
# IN is [number of responses, what happens after them].
REPEAT = (
    HEAD
    + """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            count, what = given(request)[0].astype(int)
            sender = request.get_response_sender()
            for number in range(count):
                sender.send(made(OUT=np.full((1, 50_000 if what == 3 else 1), number, np.float32)))
            if what == 1:
                os._exit(4)
            if what == 2:
                raise ValueError("no more")
            sender.send(flags=FINAL)
"""
)
SUMS = """
backend: "python" max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] } output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
sequence_batching {
  control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] } ]
  state { input_name: "OLD" output_name: "NEW" data_type: TYPE_FP32 dims: [ 1 ] initial_state {
    name: "zero" data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } }
}
"""
SUM = (
    HEAD
    + """
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            total = given(request, "OLD") + given(request) + 100 * given(request, "START")
            answers.append(made(OUT=total, NEW=total))
        return answers
"""
)
COUNTDOWN = (
    HEAD
    + """
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            done = given(request, "OLD") + 1
            if done[0, 0] < given(request)[0, 0]:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                answers.append(made(NEW=done))
            else:
                answers.append(made(OUT=done * 10, NEW=done))
        return answers
"""
)
COUNTS = (
    HEAD
    + """
class TritonPythonModel:
    def initialize(self, args):
        kinds = pb_utils.MetricFamily.COUNTER, pb_utils.MetricFamily.GAUGE, pb_utils.MetricFamily.HISTOGRAM
        self.families = [pb_utils.MetricFamily(f"elsewhere_{kind.name.lower()}", "for a test", kind) for kind in kinds]
        counter, gauge, histogram = self.families
        self.counter, self.gauge = counter.Metric(labels={"a": "b"}), gauge.Metric()
        self.sizes = histogram.Metric(buckets=[1, 2.5])

    def execute(self, requests):
        for request in requests:
            value = float(given(request)[0, 0])
            self.counter.increment(value)
            self.gauge.set(value)
            self.gauge.increment(-0.5)
            self.sizes.observe(value)
        total = self.counter.value() + self.gauge.value()
        return [made(OUT=np.full((1, 1), total, np.float32)) for _ in requests]
"""
)
FORKS = """
import multiprocessing


def call(value):
    answer = value_of("twice", np.full((1, 1), value, np.float32))
    return float(answer[0, 0]), os.getpid()


def value_of(model, array):
    tensor = pb_utils.Tensor("IN", array)
    response = pb_utils.InferenceRequest(model_name=model, requested_output_names=["OUT"], inputs=[tensor]).exec()
    if response.has_error():
        raise RuntimeError(response.error().message())
    return pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy()


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            with multiprocessing.get_context("fork").Pool(2) as pool:
                values, processes = zip(*pool.map(call, given(request)[0].tolist(), chunksize=1))
            own = value_of("twice", given(request))
            assert os.getpid() not in processes
            answers.append(made(OUT=np.array([values], np.float32) + own))
        return answers
"""


async def streamed(engine: Engine, name: str, *numbers: float) -> list[float]:
    request = Request({"IN": row(*numbers)}, stamp=engine.next_stamp())
    with trio.fail_after(30):
        found = engine.stream(engine.deployments.find(name), request)
        return [float(one.outputs["OUT"].flat[0]) async for one in found if one.outputs]


async def sent(engine: Engine, name: str, array: Array, **facts: object) -> list[float]:
    with trio.fail_after(30):
        return (await ask(engine, name, array, **facts))["OUT"].ravel().tolist()
