"""The gain of tensors that stay on the device: a chain of three steps, beside the same steps as three requests.

Each step is a convolution over 3x224x224. In the ensemble the tensors stay on the device between the steps; with three
requests they return to the program each time. On a GPU the ratio shows the cost of the transfers; on the CPU it shows
the cost of three requests instead of one.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bench.networks import IMAGE, convolution
from bench.servers import BenchFailed
from bench.works import Array
from flowserve import Engine
from flowserve.memory.devices import devices

STEPS: Final = ("first", "second", "third")
CHAIN: Final = "chain"
WARM_UP: Final = 20
ROWS: Final = (1, 32)


@dataclass(frozen=True, slots=True)
class Chain:
    """Milliseconds for a batch of `rows` images, both ways, best round."""

    device: str
    rows: int
    chain_ms: float
    one_by_one_ms: float

    def __str__(self) -> str:
        ratio = self.one_by_one_ms / self.chain_ms
        return (
            f"{self.rows} images through three convolutions on the {self.device}, best round: as one chain "
            f"{self.chain_ms:.2f} ms, one by one {self.one_by_one_ms:.2f} ms, {ratio:.2f} times"
        )


def measure_device(
    device: str, rounds: int, seconds: float, say: Callable[[str], None], rows: Sequence[int] = ROWS
) -> list[Chain]:
    """Both ways in turns, on "cpu" or "gpu", for batches of that many `rows`. Raises BenchFailed without a device."""
    if device == "gpu" and not devices().count:
        raise BenchFailed(f"nothing to measure with --device gpu: {devices().why_none}")
    with tempfile.TemporaryDirectory(prefix="bench-device-") as folder:
        write_chain(Path(folder), f"KIND_{device.upper()}")
        with Engine(folder, gpu=device == "gpu") as engine:

            def one_by_one(image: Array) -> Array:
                for step in STEPS:
                    image = engine.infer(step, {"X": image})["Y"]
                return image

            def chained(image: Array) -> Array:
                return engine.infer(CHAIN, {"X": image})["Y"]

            return [_compared(device, count, chained, one_by_one, rounds, seconds, say) for count in rows]


def write_chain(folder: Path, kind: str) -> None:
    """The three steps, and the ensemble of them."""
    for step in STEPS:
        (folder / step / "1").mkdir(parents=True)
        (folder / step / "1" / "model.onnx").write_bytes(convolution())
        (folder / step / "config.pbtxt").write_text(f"max_batch_size: 32\ninstance_group {{ kind: {kind} count: 1 }}\n")
    (folder / CHAIN / "1").mkdir(parents=True)
    names = ["X", "t0", "t1", "Y"]
    steps = "\n".join(
        f'step {{ model_name: "{step}" model_version: -1 input_map {{ key: "X" value: "{names[i]}" }}'
        f' output_map {{ key: "Y" value: "{names[i + 1]}" }} }}'
        for i, step in enumerate(STEPS)
    )
    dims = ", ".join(map(str, IMAGE))
    (folder / CHAIN / "config.pbtxt").write_text(
        f'platform: "ensemble"\nmax_batch_size: 32\n'
        f'input {{ name: "X" data_type: TYPE_FP32 dims: [ {dims} ] }}\n'
        f'output {{ name: "Y" data_type: TYPE_FP32 dims: [ {dims} ] }}\n'
        f"ensemble_scheduling {{\n{steps}\n}}\n"
    )


def _compared(
    device: str,
    rows: int,
    chained: Callable[[Array], Array],
    one_by_one: Callable[[Array], Array],
    rounds: int,
    seconds: float,
    say: Callable[[str], None],
) -> Chain:
    image = np.random.default_rng(3).standard_normal((rows, *IMAGE)).astype(np.float32)
    np.testing.assert_allclose(chained(image), one_by_one(image), rtol=1e-3, atol=1e-4)
    for _ in range(WARM_UP if device == "gpu" else 1):
        chained(image)
    times = []
    for number in range(rounds):
        say(f"{rows} images, round {number + 1} of {rounds}")
        times.append((_ms(chained, image, seconds), _ms(one_by_one, image, seconds)))
    return Chain(device, rows, *(min(column) for column in zip(*times, strict=True)))


def _ms(call: Callable[[Array], Array], image: Array, seconds: float) -> float:
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        call(image)
        calls += 1
    return (time.perf_counter() - began) / calls * 1e3
