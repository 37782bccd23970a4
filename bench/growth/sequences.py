"""Growth with the number of live sequences: requests to them in turn, one at a time and 32 at a time.

The model is an ONNX file with a state of 64 numbers that counts the requests of its sequence. Every sequence is started
before the load and ended after it; the counts that the ends return must add up to the executed requests. The client is
the own load generator: `wrk` leaves in the middle of requests, and the server ends the sequence of a request whose
client has left.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper

from bench import networks
from bench.growth.loads import CPU_US, MEBIBYTE, MEMORY_MIB, Client, Load, figures_of, get
from bench.growth.readings import Reading, Slope
from bench.load import Measured
from bench.processes import memory_bytes
from bench.requests import infer_request, post
from bench.servers import FLOWSERVE, BenchFailed, Server, flowserve_command, run_load, serving
from bench.works import WORKS

PER_SEQUENCE: Final = "memory KiB per sequence"
SLOPES: Final = (
    Slope(CPU_US, "CPU ns/request per extra", 1e3),
    Slope(MEMORY_MIB, "memory KiB per extra", 1024.0),
)
_CONCURRENCY: Final = (1, 32)
_MODEL: Final = "counting"
_WIDTH: Final = 64
_CONFIG: Final = """\
max_batch_size: 64
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ {width} ] }} ]
output [ {{ name: "COUNT" data_type: TYPE_FP32 dims: [ 1 ] }}, {{ name: "Y" data_type: TYPE_FP32 dims: [ {width} ] }} ]
sequence_batching {{
  max_sequence_idle_microseconds: 600000000
  oldest {{ max_candidate_sequences: {most} }}
  state {{ input_name: "S" output_name: "S_NEXT" data_type: TYPE_FP32 dims: [ {width} ] }}
}}
"""


def measure_sequences(sizes: Sequence[int], load: Load) -> list[Reading]:
    """One round. Raises BenchFailed."""
    return [reading for size in sizes for reading in _measure(size, load)]


def _measure(size: int, load: Load) -> list[Reading]:
    with tempfile.TemporaryDirectory(prefix="bench-growth-") as name:
        folder = Path(name)
        (folder / "models" / _MODEL / "1").mkdir(parents=True)
        (folder / "models" / _MODEL / "config.pbtxt").write_text(_CONFIG.format(width=_WIDTH, most=size))
        (folder / "models" / _MODEL / "1" / "model.onnx").write_bytes(_counting())
        _write_requests(folder / "requests", size)
        with serving(FLOWSERVE, flowserve_command(folder / "models", "inline"), folder / "log", environment={}) as one:
            with contextlib.closing(Client(one)) as client:
                # One sequence more, started and ended: the first request also loads code.
                ended = [json.loads(client.ask(_flagged(size, flag))) for flag in ("sequence_start", "sequence_end")]
                before = memory_bytes(one.pid)
                counts = [json.loads(client.ask(_flagged(i, "sequence_start"))) for i in range(size)]
                if any(_count(answer) != 1 for answer in counts):
                    raise BenchFailed(f"{one.name}: a sequence of {size} did not start with an empty state")
                memory = memory_bytes(one.pid)
                readings = [
                    Reading(f"c = {concurrency}", size, figures_of(_run(load, folder / "requests", one, concurrency)))
                    for concurrency in _CONCURRENCY
                    if concurrency <= size
                ]
                ended = ended[1:] + [json.loads(client.ask(_flagged(i, "sequence_end"))) for i in range(size)]
                counted = sum(map(_count, ended))
                executed = json.loads(client.ask(get(f"/v2/models/{_MODEL}/stats")))["model_stats"][0]
                if counted != executed["inference_count"]:
                    raise BenchFailed(
                        f"{one.name}: the states of {size} sequences count {counted} requests where "
                        f"{executed['inference_count']} were executed"
                    )
    for reading in readings:
        reading.figures[MEMORY_MIB] = memory / MEBIBYTE
        reading.figures[PER_SEQUENCE] = (memory - before) / size / 1024
    return readings


def _run(load: Load, folder: Path, server: Server, concurrency: int) -> Measured:
    return run_load(folder, server, concurrency, load.warmup_s, load.seconds, cycle=True)


def _counting() -> bytes:
    """Y = X + 1; the state S has one added by every request, and COUNT is its mean."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("Add", ["X", "one"], ["Y"]),
            helper.make_node("Add", ["S", "one"], ["S_NEXT"]),
            helper.make_node("ReduceMean", ["S_NEXT"], ["COUNT"], axes=[1], keepdims=1),
        ],
        _MODEL,
        [value(name, TensorProto.FLOAT, ["N", _WIDTH]) for name in ("X", "S")],
        [
            value("COUNT", TensorProto.FLOAT, ["N", 1]),
            *(value(name, TensorProto.FLOAT, ["N", _WIDTH]) for name in ("Y", "S_NEXT")),
        ],
        [helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])],
    )
    opsets = [helper.make_opsetid("", networks.OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=networks.IR_VERSION)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def _write_requests(folder: Path, size: int) -> None:
    """A request from the middle of each sequence."""
    folder.mkdir()
    rows = WORKS["identity"].rows(size)
    for i in range(size):
        (folder / f"{i}.request").write_bytes(infer_request(_MODEL, rows[i : i + 1], {"sequence_id": i + 1}))
        (folder / f"{i}.answer").write_bytes((rows[i : i + 1] + np.float32(1)).tobytes())


def _flagged(i: int, flag: str) -> bytes:
    """The first or the last request of a sequence, whose response has the count as JSON."""
    tensor = {"name": "X", "shape": [1, _WIDTH], "datatype": "FP32", "data": [0.0] * _WIDTH}
    body = {"parameters": {"sequence_id": i + 1, flag: True}, "inputs": [tensor], "outputs": [{"name": "COUNT"}]}
    return post(f"/v2/models/{_MODEL}/infer", ["Content-Type: application/json"], json.dumps(body).encode())


def _count(answer: dict[str, Any]) -> int:
    return int(answer["outputs"][0]["data"][0])
