"""The models of the reliability figures, as a repository on disk in Triton's layout.

Every response is a function of its request, so that a lost, wrong or exchanged response is detected: `double` and
`chain` compute 2 x and 2 x + 1, the sequence models partial sums. The others misbehave when a figure asks them to.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

_HEAD: Final = """\
import os
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


def read(request, name="X"):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()


def respond(**outputs):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in outputs.items()])


class TritonPythonModel:
"""
# Also the number of the process that ran, for figures that kill or stop it.
_DOUBLE: Final = """\
    def execute(self, requests):
        return [respond(Y=2 * read(one), PID=np.full((len(read(one)), 1), os.getpid())) for one in requests]
"""
_PLUS: Final = """\
    def execute(self, requests):
        return [respond(Y=read(one) + 1) for one in requests]
"""
# Its capacity is one batch of 8 in 20 ms, whatever the machine: 400 rows per second.
_LIMITED: Final = """\
    def execute(self, requests):
        time.sleep(0.02)
        return [respond(Y=2 * read(one)) for one in requests]
"""
_SPIN: Final = """\
    def execute(self, requests):
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            pass
        return [respond(Y=2 * read(one)) for one in requests]
"""
_HANG: Final = """\
    def execute(self, requests):
        time.sleep(600)
"""
_RAISE: Final = """\
    def execute(self, requests):
        raise ValueError("asked to")
"""
_LEAK: Final = """\
    kept = []

    def execute(self, requests):
        self.kept += [np.ones(16384) for one in requests]  # 128 KiB each
        return [respond(Y=2 * read(one)) for one in requests]
"""
_SUM: Final = """\
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for one in requests:
            sequence = int(read(one, "CORRID").reshape(-1)[0])
            if not read(one, "READY").any():  # the slot of no sequence, in a batch of the direct strategy
                responses.append(respond(Y=np.zeros((1, 1), np.int64)))
                continue
            if read(one, "START").any():
                self.sums[sequence] = 0
            self.sums[sequence] += int(read(one).sum())
            responses.append(respond(Y=np.full((1, 1), self.sums[sequence])))
            if read(one, "END").any():
                del self.sums[sequence]
        return responses
"""
_COUNT: Final = """\
    def execute(self, requests):
        for one in requests:
            threading.Thread(target=self.answer, args=(read(one), one.get_response_sender())).start()

    def answer(self, x, sender):
        for n in range(int(x.reshape(-1)[0])):
            if sender.is_cancelled():
                break
            sender.send(respond(Y=np.full((1, 1), n)))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
# The rows that `produce` has sent and `consume` has finished are counted in files, for the difference between them.
_PRODUCE: Final = """\
    def execute(self, requests):
        for one in requests:
            threading.Thread(target=self.answer, args=(read(one), one.get_response_sender())).start()

    def answer(self, x, sender):
        count, limit = (int(number) for number in x.reshape(-1))
        sent = np.memmap(os.path.join(FOLDER, f"sent-{limit}"), np.int64, "r+", shape=1)
        for n in range(count):
            if sender.is_cancelled():
                break
            sender.send(respond(T=np.array([n, limit])))
            sent[0] += 1
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_CONSUME: Final = """\
    def execute(self, requests):
        responses = []
        for one in requests:
            n, limit = (int(number) for number in read(one, "T").reshape(-1))
            counts = np.memmap(os.path.join(FOLDER, f"sent-{limit}"), np.int64, "r+", shape=3)
            time.sleep(0.0005)
            counts[2] = max(counts[2], counts[0] - counts[1])
            counts[1] += 1
            responses.append(respond(Y=np.array([n])))
        return responses
"""
LIMITS: Final = (1, 4, 16)  # of max_inflight_requests
_BATCHED: Final = """\
backend: "python" max_batch_size: 8 dynamic_batching { %s }
input { name: "X" data_type: TYPE_INT64 dims: [ -1 ] } output { name: "Y" data_type: TYPE_INT64 dims: [ -1 ] }
"""
_CONTROL: Final = """\
  control_input { name: "%s" control { kind: CONTROL_SEQUENCE_%s fp32_false_true: [ 0, 1 ] } }
"""
_SEQUENCES: Final = """\
backend: "python" max_batch_size: 8 instance_group { count: 2 kind: KIND_CPU }
input { name: "X" data_type: TYPE_INT64 dims: [ 1 ] } output { name: "Y" data_type: TYPE_INT64 dims: [ 1 ] }
sequence_batching {
  max_sequence_idle_microseconds: 2000000
  %s
"""
_CORRID: Final = """\
  control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
}
"""
_STREAM: Final = """\
backend: "python" max_batch_size: 8 model_transaction_policy { decoupled: true }
input { name: "X" data_type: TYPE_INT64 dims: [ 1 ] } output { name: "Y" data_type: TYPE_INT64 dims: [ 1 ] }
"""
_PRODUCER: Final = """\
backend: "python" model_transaction_policy { decoupled: true }
input { name: "X" data_type: TYPE_INT64 dims: [ 2 ] } output { name: "T" data_type: TYPE_INT64 dims: [ 2 ] }
"""
_CONSUMER: Final = """\
backend: "python" instance_group { count: 1 kind: KIND_CPU }
input { name: "T" data_type: TYPE_INT64 dims: [ 2 ] } output { name: "Y" data_type: TYPE_INT64 dims: [ 1 ] }
"""
_LIMITED_CHAIN: Final = """\
platform: "ensemble"
input { name: "X" data_type: TYPE_INT64 dims: [ 2 ] } output { name: "Y" data_type: TYPE_INT64 dims: [ 1 ] }
ensemble_scheduling {
  max_inflight_requests: %d
  step { model_name: "produce" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "T" value: "t" } }
  step { model_name: "consume" model_version: -1 input_map { key: "T" value: "t" } output_map { key: "Y" value: "Y" } }
}
"""
_CHAIN: Final = """\
platform: "ensemble" max_batch_size: 8
input { name: "X" data_type: TYPE_INT64 dims: [ -1 ] } output { name: "Y" data_type: TYPE_INT64 dims: [ -1 ] }
ensemble_scheduling {
  step { model_name: "double" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "Y" value: "t" } }
  step { model_name: "plus" model_version: -1 input_map { key: "X" value: "t" } output_map { key: "Y" value: "Y" } }
}
"""
_PID: Final = 'output { name: "PID" data_type: TYPE_INT64 dims: [ 1 ] }\n'
_QUEUE_LIMIT: Final = "default_queue_policy { max_queue_size: 16 }"
_CACHED: Final = "response_cache { enable: true }\n"
_INLINE: Final = 'parameters { key: "execution" value { string_value: "inline" } }\n'

_SEQUENCE_CONTROLS: Final = "".join(_CONTROL % (name, name) for name in ("START", "END", "READY")) + _CORRID
_ORDINARY: Final = _BATCHED % ""
# The configuration and the code of each model; "" for an ensemble.
_MODELS: Final[dict[str, tuple[str, str]]] = {
    "double": (_ORDINARY + _PID, _DOUBLE),
    "victim": (_ORDINARY + _PID, _DOUBLE),  # its process is killed and stopped
    "reloaded": (_ORDINARY + _PID, _DOUBLE),
    "plus": (_ORDINARY, _PLUS),
    "chain": (_CHAIN, ""),
    "cached": (_ORDINARY + _CACHED, _PLUS),
    "limited": (_BATCHED % _QUEUE_LIMIT, _LIMITED),
    "spin": (_ORDINARY, _SPIN),
    "hang": (_ORDINARY, _HANG),
    "raise": (_ORDINARY, _RAISE),
    "leak": (_ORDINARY + _INLINE, _LEAK),
    "sum_direct": (_SEQUENCES % "direct { }" + _SEQUENCE_CONTROLS, _SUM),
    "sum_oldest": (_SEQUENCES % "oldest { max_candidate_sequences: 16 }" + _SEQUENCE_CONTROLS, _SUM),
    "count": (_STREAM, _COUNT),
    "produce": (_PRODUCER, _PRODUCE),
    "consume": (_CONSUMER, _CONSUME),
    **{f"limit_{limit}": (_LIMITED_CHAIN % limit, "") for limit in LIMITS},
}
_STEPS: Final = {"chain": ("double", "plus"), **{f"limit_{limit}": ("produce", "consume") for limit in LIMITS}}
ALL: Final = tuple(_MODELS)


def write_models(folder: Path, names: Iterable[str]) -> None:
    """Write these models and the steps of those that are ensembles below `folder`. `produce` and `consume` count in
    files beside it.
    """
    for name in dict.fromkeys(step for one in names for step in (*_STEPS.get(one, ()), one)):
        config, model = _MODELS[name]
        version = folder / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(config)
        if model:
            (version / "model.py").write_text(f"FOLDER = {str(folder.parent)!r}\n{_HEAD}{model}")
    for limit in LIMITS:
        (folder.parent / f"sent-{limit}").write_bytes(bytes(24))
