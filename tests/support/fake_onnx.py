"""The real onnxruntime on a fake GPU: it computes on the CPU, in the fake's memory, in the order of the fake's streams.

Decides the layer between an instance and a session, in which a run counts as work on a stream that reads and writes its
bound memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from flowserve.backends.onnx.session import CPU_ONLY, CUDA, Provider, open_session
from flowserve.memory.devices import Devices, using
from tests.support.fake_device import FakeMachine


class OnFake:
    """A session on the CPU whose runs are work on a fake device's stream, on the memory that they are bound to."""

    def __init__(self, session: Any, machine: FakeMachine, stream: int) -> None:
        self._session = session
        self._machine = machine
        self._stream = next(one for one in machine.streams if one.address == stream)
        self.bindings = 0
        self.addresses: list[tuple[int, ...]] = []  # for each run, the addresses that it reads and writes
        self.runs: list[str] = []  # for each run, the number of its graph, "" for none

    def io_binding(self) -> Binding:
        self.bindings += 1
        return Binding(self._session.io_binding())

    def run_with_iobinding(self, binding: Binding, options: Any) -> None:
        reads, writes = ([self._machine.find(one, 1) for one in side] for side in (binding.reads, binding.writes))
        self._machine.enqueue(self._stream, reads, writes)
        self.addresses.append((*binding.reads, *binding.writes))
        self.runs.append(_entry(options, "gpu_graph_id"))
        self._session.run_with_iobinding(binding.raw, options)


class Binding:
    """Passes "cpu" to onnxruntime in place of "cuda", because a fake device's memory is host memory."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.reads: list[int] = []
        self.writes: list[int] = []

    def bind_input(self, name: str, device: str, number: int, dtype: Any, shape: Sequence[int], address: int) -> None:
        self.reads.append(address)
        self.raw.bind_input(name, "cpu", 0, dtype, shape, address)

    def bind_output(self, name: str, device: str, number: int, *buffer: Any) -> None:
        if buffer:
            self.writes.append(buffer[-1])
        self.raw.bind_output(name, "cpu", 0, *buffer)

    def get_outputs(self) -> Any:
        return self.raw.get_outputs()


def _entry(options: Any, key: str) -> str:
    """A run's configuration entry, "" for none."""
    try:
        return str(options.get_run_config_entry(key))
    except RuntimeError:
        return ""


@contextmanager
def onnx_on(machine: FakeMachine) -> Iterator[Devices]:
    """Within the block the machine's GPUs are the process's, and onnxruntime's CUDA provider is a fake on them."""

    def on_fake(config: Any, path: Any, files: Any, settings: Any, providers: Sequence[Provider] = CPU_ONLY) -> Any:
        options: Mapping[str, str] = dict(providers).get(CUDA, {})
        session = open_session(config, path, files, settings)
        stream = options.get("user_compute_stream")
        return session if stream is None else OnFake(session, machine, int(stream))

    with (
        mock.patch("flowserve.backends.onnx.session.open_session", on_fake),
        using(Devices(machine.devices)) as devices,
    ):
        yield devices
