"""Start-up time and memory of a server with many Python models that compute nothing.

The time is measured from the command to the first 200 of /v2/health/ready. The memory is the proportional set size of
the whole process tree then: pages that processes share are counted once.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.processes import memory_bytes, tree
from bench.servers import FLOWSERVE, flowserve_command, serving

_MEBIBYTE: Final = 1 << 20

_CONFIG: Final = """\
backend: "python"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 64 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 64 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""

_MODEL: Final = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "X").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.copy(array))]) for array in arrays]
"""


@dataclass(frozen=True, slots=True)
class Started:
    """`seconds` until ready, and the memory of all `processes` then."""

    seconds: float
    processes: int
    memory_bytes: int

    def __str__(self) -> str:
        memory = self.memory_bytes / _MEBIBYTE
        return f"ready in {self.seconds:.1f} s; {self.processes} processes hold {memory:.0f} MiB (PSS)"


def measure_start(counts: Sequence[int], say: Callable[[str], None]) -> None:
    """Print the start-up time and memory of a server of that many models, for each count. Raises BenchFailed."""
    for count in counts:
        say(f"starting a server of {count} models")
        with tempfile.TemporaryDirectory(prefix="bench-start-") as folder:
            print(f"{count} Python models, each in a process of its own: {_start(Path(folder), count)}")


def _start(folder: Path, count: int) -> Started:
    repository = folder / "models"
    for number in range(count):
        version = repository / f"model_{number:04}" / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(_CONFIG)
        (version / "model.py").write_text(_MODEL)
    begun = time.monotonic()
    command = flowserve_command(repository, "process")
    with serving(FLOWSERVE, command, folder / "log", environment={}) as server:
        seconds = time.monotonic() - begun
        return Started(seconds, len(tree(server.pid)), memory_bytes(server.pid))
