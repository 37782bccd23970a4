"""Backends of libraries: the cost of a request beside a direct call of the library, and OpenVINO beside onnxruntime.

Each library that is installed has a small model. A direct call runs in a program of its own, the same call that the
backend makes, with arrays of 16 rows in and out; the engine under trio runs it where the backend runs by default. They
take turns, one at a time, and the best round of each counts, since disturbances only ever add time. A `model.py` that
returns its input shows how much of a difference is the transfer to another process and back.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import trio

from bench import networks
from flowserve import Engine

ROWS: Final = 16
CNN_ROWS: Final = 8
WARM_UP_S: Final = 1.0
THREAD_US, PROCESS_US = 60.0, 150.0  # targets of the overhead
# What both programs of a library begin with: `folder` is the version's folder, X the input.
_HEAD: Final = """
import os, sys, time
os.environ.update(OMP_WAIT_POLICY="PASSIVE", TF_CPP_MIN_LOG_LEVEL="3")
import numpy as np
folder, seconds = sys.argv[1], float(sys.argv[2])
cores = len(os.sched_getaffinity(0))
X = np.random.default_rng(0).random(({rows}, 256), np.float32)
"""
_LOOP: Final = """
call()
best = 1e9
end = time.perf_counter() + seconds
while time.perf_counter() < end:
    began = time.perf_counter()
    for _ in range(20):
        call()
    best = min(best, (time.perf_counter() - began) / 20)
print(best * 1e6)
"""


@dataclass(frozen=True, slots=True)
class Library:
    """`write` is a program that writes the model, `call` one that defines `call()`; both follow `_HEAD`."""

    title: str
    module: str
    target_us: float
    input: str
    config: str
    write: str
    call: str


_ECHO: Final = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", one)]) for one in given]
"""


def _tensor(side: str, name: str) -> str:
    return f'{side} {{ name: "{name}" data_type: TYPE_FP32 dims: [ 256 ] }}\n'


LIBRARIES: Final = (
    Library(
        "fil (XGBoost, 100 trees)",
        "xgboost",
        THREAD_US,
        "input__0",
        f'backend: "fil" max_batch_size: {ROWS}',
        """
import xgboost
rows = np.random.default_rng(1).random((500, 256), np.float32)
model = xgboost.XGBClassifier(n_estimators=100, max_depth=6).fit(rows, rows[:, 0] > 0.5)
model.save_model(f"{folder}/xgboost.json")
""",
        """
import xgboost
model = xgboost.Booster(model_file=f"{folder}/xgboost.json")
model.set_param({"nthread": cores})
call = lambda: model.inplace_predict(X, validate_features=False)
""",
    ),
    Library(
        "openvino",
        "openvino",
        THREAD_US,
        "X",
        f'backend: "openvino" max_batch_size: {ROWS}',
        """
from bench import networks
open(f"{folder}/model.onnx", "wb").write(networks.perceptron())
""",
        """
import openvino
core = openvino.Core()
compiled = core.compile_model(f"{folder}/model.onnx", "CPU", {"NUM_STREAMS": 1, "INFERENCE_NUM_THREADS": cores})
request = compiled.create_infer_request()
call = lambda: request.infer([X], share_inputs=True)[0]
""",
    ),
    Library(
        "pytorch (TorchScript)",
        "torch",
        PROCESS_US,
        "X__0",
        f'backend: "pytorch" max_batch_size: {ROWS}\n{_tensor("input", "X__0")}{_tensor("output", "Y__0")}',
        """
import torch
layers = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
torch.jit.trace(layers, torch.zeros(2, 256)).save(f"{folder}/model.pt")
""",
        """
import torch
torch.set_num_threads(cores)
module = torch.jit.load(f"{folder}/model.pt").eval()
def call():
    with torch.inference_mode():
        return module(torch.from_numpy(X)).numpy()
""",
    ),
    Library(
        "tensorflow (SavedModel)",
        "tensorflow",
        PROCESS_US,
        "x",
        f'backend: "tensorflow" max_batch_size: {ROWS}',
        """
import tensorflow as tf
class Layers(tf.Module):
    def __init__(self):
        self.weights = [tf.Variable(tf.random.normal((256, 256)) / 16) for _ in range(2)]
layers = Layers()
def run(x):
    return {"y": tf.nn.relu(x @ layers.weights[0]) @ layers.weights[1]}
layers.run = tf.function(run, input_signature=[tf.TensorSpec([None, 256], tf.float32, name="x")])
tf.saved_model.save(layers, f"{folder}/model.savedmodel", signatures=layers.run)
""",
        """
import tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(cores)
tf.config.threading.set_inter_op_parallelism_threads(1)
loaded = tf.saved_model.load(f"{folder}/model.savedmodel")
function = loaded.signatures["serving_default"]
call = lambda: function(x=tf.constant(X))["y"].numpy()
""",
    ),
)


@dataclass(frozen=True, slots=True)
class Overhead:
    """Microseconds of a batch of 16 rows: a direct call, and a request to the engine."""

    library: Library
    direct_us: float
    engine_us: float

    def __str__(self) -> str:
        over, target = self.engine_us - self.direct_us, self.library.target_us
        return (
            f"| {self.library.title} | {self.direct_us:.0f} | {self.engine_us:.0f} | {over:.0f} | {target:.0f}: "
            f"{'reached' if over <= target else 'missed'} |"
        )


def measure_libraries(rounds: int, seconds: float, say: Callable[[str], None]) -> Iterator[str]:
    """Lines of two tables."""
    yield "| library | direct, us | engine, us | difference, us | target, us |"
    yield "|---|---|---|---|---|"
    for library in LIBRARIES:
        if find_spec(library.module) is None:
            say(f"{library.title}: {library.module} is not installed")
            continue
        say(library.title)
        with tempfile.TemporaryDirectory(prefix="bench-libraries-") as folder:
            version = Path(folder) / "m" / "1"
            version.mkdir(parents=True)
            (version.parent / "config.pbtxt").write_text(library.config)
            _program(library.write, version, 0)
            x = np.random.default_rng(0).random((ROWS, 256), np.float32)
            costs = [
                (_program(library.call + _LOOP, version, seconds), _engine_us(folder, library.input, x, seconds))
                for _ in range(rounds)
            ]
        direct, engine = (min(column) for column in zip(*costs, strict=True))
        yield str(Overhead(library, direct, engine))
    yield _echo(rounds, seconds, say)
    if find_spec("openvino") is not None:
        yield from _cnn(rounds, seconds, say)


def _echo(rounds: int, seconds: float, say: Callable[[str], None]) -> str:
    say("a model.py that returns its input")
    with tempfile.TemporaryDirectory(prefix="bench-libraries-") as folder:
        version = Path(folder) / "m" / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(_ECHO)
        config = f'backend: "python" max_batch_size: {ROWS}\n{_tensor("input", "X")}{_tensor("output", "Y")}'
        (version.parent / "config.pbtxt").write_text(config)
        x = np.ones((ROWS, 256), np.float32)
        engine = min(_engine_us(folder, "X", x, seconds) for _ in range(rounds))
    return f"| `model.py` that returns its input | 0 | {engine:.0f} | {engine:.0f} | |"


def _cnn(rounds: int, seconds: float, say: Callable[[str], None]) -> Iterator[str]:
    """The network of the work `cnn` by two backends."""
    yield "\n| backend | cnn, 1 row, ms | cnn, 8 rows, ms |"
    yield "|---|---|---|"
    say("cnn by onnxruntime and openvino")
    times: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-libraries-") as folder:
        for backend in ("onnxruntime", "openvino"):
            version = Path(folder) / backend / "m" / "1"
            version.mkdir(parents=True)
            (version / "model.onnx").write_bytes(networks.convolutions())
            (version.parent / "config.pbtxt").write_text(
                f'backend: "{backend}" max_batch_size: {CNN_ROWS} instance_group {{ count: 1 }}'
            )
        for _ in range(rounds):
            for backend in ("onnxruntime", "openvino"):
                for rows in (1, CNN_ROWS):
                    x = np.random.default_rng(0).random((rows, *networks.IMAGE), np.float32)
                    spent = _engine_us(str(Path(folder) / backend), "X", x, seconds) / 1000
                    times.setdefault((backend, rows), []).append(spent)
    for backend in ("onnxruntime", "openvino"):
        yield f"| {backend} | {min(times[backend, 1]):.1f} | {min(times[backend, CNN_ROWS]):.1f} |"


def _program(text: str, version: Path, seconds: float) -> float:
    """Runs a program; the number on its last line, 0 for none."""
    command = [sys.executable, "-c", _HEAD.format(rows=ROWS) + text, str(version), str(seconds)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    lines = done.stdout.split()
    return float(lines[-1]) if lines and seconds else 0.0


def _engine_us(folder: str, name: str, x: Any, seconds: float) -> float:
    """Microseconds of the best twenty requests in a row, one at a time."""

    async def ask() -> float:
        async with Engine(folder) as engine:
            best = float("inf")
            end = time.perf_counter() + WARM_UP_S + seconds
            while time.perf_counter() < end:
                began = time.perf_counter()
                for _ in range(20):
                    await engine.infer("m", {name: x})
                best = min(best, (time.perf_counter() - began) / 20)
        return best * 1e6

    return trio.run(ask)
