"""An output of many strings from a worker process: as a response to a program, and to a calling model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import trio

from flowserve import Engine

COUNT = 70_000
STRINGS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            rows = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            strings = np.resize(np.array([b"", b"abc"], np.object_), (len(rows), int(rows[0, 0])))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", strings)]))
        return responses
"""
CALLER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        x = pb_utils.get_input_tensor_by_name(request, "X")
        answer = pb_utils.InferenceRequest(model_name="strings", requested_output_names=["Y"], inputs=[x]).exec()
        y = pb_utils.get_output_tensor_by_name(answer, "Y").as_numpy()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", y[:, ::-1].copy())])]
"""
CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_STRING dims: [ -1 ] }
"""


def test_many_strings_in_a_program_and_a_call(tmp_path: Path) -> None:
    for name, code, more in (
        ("strings", STRINGS, "dynamic_batching { max_queue_delay_microseconds: 20000 }"),
        ("caller", CALLER, ""),
        ("caller_thread", CALLER, 'parameters { key: "execution" value: { string_value: "thread" } }'),
    ):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.py").write_text(code)
        (tmp_path / name / "config.pbtxt").write_text(CONFIG + more)
    one = {"X": np.array([[COUNT]], np.int32)}
    wanted = np.resize(np.array([b"", b"abc"], np.object_), COUNT)

    async def main() -> None:
        async with Engine(tmp_path) as engine:

            async def ask(rows: int) -> None:
                answer = (await engine.infer("strings", {"X": np.full((rows, 1), COUNT, np.int32)}))["Y"]
                assert type(answer) is np.ndarray
                assert answer.shape == (rows, COUNT)
                assert (answer == wanted).all()

            async with trio.open_nursery() as nursery:  # a batch, which is divided among its members
                for rows in (1, 2, 3):
                    nursery.start_soon(ask, rows)
            for name in ("caller", "caller_thread"):
                assert ((await engine.infer(name, one))["Y"] == wanted[::-1]).all()

    trio.run(main)
