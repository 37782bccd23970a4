"""The cost of state: requests of sequences beside requests to the same model without state.

The model is the perceptron of networks.py with an additional state of 64 numbers. Each connection sends requests from
the middle of a sequence of its own. The model without state is behind the dynamic batcher. Both run on one server, in
turns.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import onnx
from onnx import TensorProto, helper

from bench import networks
from bench.load import Measured
from bench.ratios import SEQUENCES
from bench.requests import infer_request
from bench.servers import FLOWSERVE, Server, flowserve_command, run_load, serving
from bench.works import WORKS, Work

STATELESS: Final = "perceptron"
STATEFUL: Final = "perceptron_state"
STATE: Final = 64
WARM_UP_S: Final = 0.5

_CONFIG: Final = "max_batch_size: 64\n%s\n"
_SEQUENCE_BATCHING: Final = """sequence_batching {
  max_sequence_idle_microseconds: 60000000
  oldest { max_candidate_sequences: 256 }
  state { input_name: "S" output_name: "S_NEXT" data_type: TYPE_FP32 dims: [ %d ] }
}"""


@dataclass(frozen=True, slots=True)
class Stateful:
    """Requests per second, and CPU microseconds of the server per request, with and without state, at `concurrency`
    connections; medians."""

    concurrency: int
    with_state: float
    with_state_cpu_us: float
    without: float
    without_cpu_us: float

    def __str__(self) -> str:
        share = self.with_state / self.without
        return (
            f"{self.concurrency} sequences: "
            f"{self.with_state:.0f} requests/s ({self.with_state_cpu_us:.0f} us CPU each), "
            f"{self.without:.0f} ({self.without_cpu_us:.0f} us) without state; "
            f"{share:.2f} of it ({SEQUENCES.verdict(share)}: at least {SEQUENCES.must:g})"
        )


def measure_sequences(concurrency: int, rounds: int, seconds: float, say: Callable[[str], None]) -> Stateful:
    """Raises BenchFailed."""
    found: dict[str, list[Measured]] = {STATELESS: [], STATEFUL: []}
    with tempfile.TemporaryDirectory(prefix="bench-sequences-") as temporary:
        folder = Path(temporary)
        _write_models(folder / "models")
        for name in found:
            _write_requests(folder / name, name, concurrency)
        command = flowserve_command(folder / "models", "process")
        with serving(FLOWSERVE, command, folder / "log", environment={}) as server:
            for i in range(concurrency):
                _ask(server, i, "sequence_start")
            for number in range(rounds):
                say(f"round {number + 1} of {rounds}")
                for name, measured in found.items():
                    measured.append(run_load(folder / name, server, concurrency, WARM_UP_S, seconds))
            for i in range(concurrency):
                _ask(server, i, "sequence_end")  # so that the server does not wait for more requests when it stops
    return Stateful(concurrency, *_medians(found[STATEFUL]), *_medians(found[STATELESS]))


def _medians(found: Sequence[Measured]) -> tuple[float, float]:
    """Requests per second, and CPU microseconds of the server per request."""
    speed = statistics.median(one.requests / one.seconds for one in found)
    return speed, statistics.median(one.server_cpu_s / one.requests * 1e6 for one in found)


def _write_models(folder: Path) -> None:
    for name, scheduling, model in (
        (STATELESS, "dynamic_batching { }", networks.perceptron()),
        (STATEFUL, _SEQUENCE_BATCHING % STATE, _with_state(networks.perceptron())),
    ):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(_CONFIG % scheduling)
        (folder / name / "1" / "model.onnx").write_bytes(model)


def _with_state(model: bytes) -> bytes:
    """The same network with a state that counts its requests."""
    made = onnx.load_from_string(model)
    made.graph.initializer.append(helper.make_tensor("one_more", TensorProto.FLOAT, [1], [1.0]))
    made.graph.node.append(helper.make_node("Add", ["S", "one_more"], ["S_NEXT"]))
    made.graph.input.append(helper.make_tensor_value_info("S", TensorProto.FLOAT, ["N", STATE]))
    made.graph.output.append(helper.make_tensor_value_info("S_NEXT", TensorProto.FLOAT, ["N", STATE]))
    onnx.checker.check_model(made)
    return made.SerializeToString()


def _write_requests(folder: Path, name: str, count: int) -> None:
    """A request for each connection; those with state are from the middle of a sequence."""
    folder.mkdir()
    net = next(step for step in WORKS["mlp"].steps if step.model == "mlp_net")
    work = Work(name, "", (replace(net, inputs={"X": "X"}, output="Y"),))
    rows = work.rows(count)
    answers = work.direct()(rows)
    for i in range(count):
        parameters = {"sequence_id": i + 1} if name == STATEFUL else {}
        (folder / f"{i}.request").write_bytes(infer_request(name, rows[i : i + 1], parameters))
        (folder / f"{i}.answer").write_bytes(answers[i : i + 1].astype("<f4").tobytes())


def _ask(server: Server, i: int, flag: str) -> None:
    tensor = {"name": "X", "shape": [1, networks.FEATURES], "datatype": "FP32", "data": [0.0] * networks.FEATURES}
    body = {"parameters": {"sequence_id": i + 1, flag: True}, "inputs": [tensor]}
    url = f"http://127.0.0.1:{server.port}/v2/models/{STATEFUL}/infer"
    with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=30) as answer:
        answer.read()
