"""Warm-up: the requests of `model_warmup` that an instance runs before its model is ready.

Decides the contents of a sample's tensors, and that its requests reach the instance as a client's do, through a
separate queue: the instance runs one batch of the configured size, and nothing is counted. `config/` decides how
samples are written; `loader.py` decides when an instance is warmed up, and what a failure means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import trio

from flowserve.config.types import ModelConfig, SequenceBatching, WarmupInput, WarmupSample
from flowserve.errors import FlowserveError, Invalid
from flowserve.graph.types import ModelKey, compile_model
from flowserve.memory import raw
from flowserve.memory.assemble import zeros
from flowserve.memory.tensor import Tensor
from flowserve.observe.statistics import Statistics
from flowserve.runtime.clock import SECOND_NS
from flowserve.runtime.engine.deployments import Deployment
from flowserve.runtime.engine.engine import Engine, ResponseIterator
from flowserve.runtime.workers.base import RunsElsewhere, Worker
from flowserve.runtime.workers.supervisor import end_overdue
from flowserve.scheduling.frames.frame import Ticket
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.queue import BatchPolicy, Queue
from flowserve.scheduling.sequence.sequence import RequestSequence
from flowserve.values import Array, DType, Request

WARMUP_FOLDER: Final = "warmup"
_INTEGERS_BELOW: Final = 128  # fits every integer type
# Longer than any loop iteration, so that all requests of a sample form one batch.
_ALL_WITHIN_NS: Final = 3600 * SECOND_NS

Tensors = Mapping[str, Array]
Sample = tuple[WarmupSample, Tensors]


def read_samples(config: ModelConfig, folder: Path) -> Sequence[Sample]:
    """The tensors of one request of each sample. Blocks: files are read from `folder`/warmup.

    Raises Invalid if a file cannot be read or is too short.
    """
    return [
        (sample, {name: _array(sample, name, given, config, folder) for name, given in sample.inputs.items()})
        for sample in config.warmup
        if sample.batch_size
    ]


async def warm_up(
    engine: Engine,
    worker: Worker,
    config: ModelConfig,
    version: int,
    samples: Sequence[Sample],
    execution_timeout_ns: int = 0,
) -> None:
    """Run every sample on an open instance. Raises an error of the type with which a sample failed.

    `execution_timeout_ns`: a process that takes longer for one batch is killed; 0: no limit.
    """
    for sample in samples:
        for _ in range(sample[0].count):
            await _run_once(engine, worker, config, version, sample, execution_timeout_ns)


async def _run_once(
    engine: Engine, worker: Worker, config: ModelConfig, version: int, sample: Sample, execution_timeout_ns: int
) -> None:
    """Run one batch of a sample's requests. Raises an error of the type of the first that failed."""
    settings, tensors = sample
    uncounted = Statistics(config.name, version)
    batcher = _WarmupQueue(BatchPolicy.simple(settings.batch_size, _ALL_WITHIN_NS), _states(config, tensors))
    queue = ModelQueue(ModelKey(config.name, version), batcher, [worker], statistics=uncounted)
    deployment = Deployment(config, compile_model(config, version), uncounted, [version], (queue,))
    sequence = config.sequence  # its controls and states are inputs that clients do not send
    internal = {one.name for one in sequence.controls} | {one.input for one in sequence.states} if sequence else ()
    errors: list[FlowserveError] = []

    async def run_request() -> None:
        # Copies, since a model may write to its inputs.
        inputs = {name: array.copy() for name, array in tensors.items() if name not in internal}
        request = Request(inputs, stamp=engine.next_stamp())
        if sequence is not None:
            _set_sequence(request, sequence, tensors)
        try:
            # Also while the server drains: accepted requests may wait for a restarted instance.
            frame = engine.submit(deployment, request, deployment.make_stream, engine.scheduler.submit)
            async with ResponseIterator(engine, frame) as responses:  # a request that is cancelled is withdrawn
                async for _ in responses:
                    pass
        except FlowserveError as error:
            errors.append(error)
            nursery.cancel_scope.cancel()

    engine.scheduler.models.add(queue)
    try:
        async with trio.open_nursery() as watch:
            if execution_timeout_ns and isinstance(worker, RunsElsewhere):
                watch.start_soon(end_overdue, worker, execution_timeout_ns, engine.clock)
            async with trio.open_nursery() as nursery:
                for _ in range(settings.batch_size):
                    nursery.start_soon(run_request)
            watch.cancel_scope.cancel()
    finally:
        engine.scheduler.models.remove_when_idle(queue)
    if errors:
        raise type(errors[0])(f"failed to run warmup sample '{settings.name}': {errors[0]}")


class _WarmupQueue(Queue):
    """Assigns each request to a new sequence. `memory`: the states of that sequence, None for initial states."""

    __slots__ = ("_memory",)

    def __init__(self, policy: BatchPolicy, memory: Sequence[Tensor] | None) -> None:
        super().__init__(policy)
        self._memory = memory

    def put(self, ticket: Ticket) -> None:
        ticket.sequence = RequestSequence(1)
        ticket.sequence.memory = self._memory
        super().put(ticket)


def _set_sequence(request: Request, sequence: SequenceBatching, tensors: Tensors) -> None:
    """Set a request's sequence fields from the sample's control tensors. Without them, the request is a whole sequence,
    or, if the sample has states, the end of one. READY is always true.
    """
    given = {one.kind: (one, tensors[one.name].item()) for one in sequence.controls if one.name in tensors}
    is_first = not any(state.input in tensors for state in sequence.states)
    request.sequence_id = 1
    if "CORRID" in given:
        _, name = given["CORRID"]
        request.sequence_id = name.decode(errors="replace") if isinstance(name, bytes) else name
    flags = {kind: value == control.true for kind, (control, value) in given.items()}
    request.sequence_start, request.sequence_end = flags.get("START", is_first), flags.get("END", True)


def _states(config: ModelConfig, tensors: Tensors) -> Sequence[Tensor] | None:
    """The states before a sample's requests, None if it has none; missing ones among them are zeros."""
    states = config.sequence.states if config.sequence is not None else ()
    if not any(state.input in tensors for state in states):
        return None
    batches = config.max_batch_size > 0
    memory = []
    for state in states:
        dims = tuple(max(dim, 1) for dim in state.dims)
        array = tensors.get(state.input)
        array = zeros((1, *dims) if batches else dims, state.dtype.numpy) if array is None else array
        memory.append(Tensor(array, 0, 1) if batches else Tensor(array))
    return memory


def _array(sample: WarmupSample, name: str, given: WarmupInput, config: ModelConfig, folder: Path) -> Array:
    """One request's tensor, with a batch dimension of 1 where the model batches."""
    shape = (1, *given.dims) if config.max_batch_size else given.dims
    if given.file:
        return _from_file(sample, name, given, config, folder).reshape(shape)
    if given.dtype is DType.BYTES:  # random data is empty strings, too
        array = np.empty(shape, np.object_)
        array.fill(b"")
        return array
    if given.is_random:
        return _random(given.dtype, shape)
    return np.zeros(shape, given.dtype.numpy)


def _random(dtype: DType, shape: tuple[int, ...]) -> Array:
    """Deterministic: floats from 0 to 1, integers from 0 to 127."""
    random = np.random.default_rng(0)
    if dtype.numpy.kind in "iub":
        return random.integers(2 if dtype is DType.BOOL else _INTEGERS_BELOW, size=shape).astype(dtype.numpy)
    return random.random(shape).astype(dtype.numpy)


def _from_file(sample: WarmupSample, name: str, given: WarmupInput, config: ModelConfig, folder: Path) -> Array:
    shown = f"{folder.name}/{WARMUP_FOLDER}/{given.file}"
    where = f"warmup sample '{sample.name}' of model '{config.name}'"
    try:
        content = (folder / WARMUP_FOLDER / given.file).read_bytes()
    except OSError as error:
        raise Invalid(f"{where}: file '{shown}' of input '{name}' cannot be read: {error.strerror}") from error
    count = math.prod(given.dims)
    if given.dtype is DType.BYTES:
        try:
            return raw.decode_bytes(content, count, name=name, model=config.name)
        except Invalid as error:
            raise Invalid(f"{where}: file '{shown}': {error}") from error
    wanted = count * given.dtype.itemsize
    if len(content) < wanted:
        raise Invalid(f"{where}: input '{name}' needs {wanted} bytes, and file '{shown}' has {len(content)}")
    return np.frombuffer(content, given.dtype.numpy, count)
