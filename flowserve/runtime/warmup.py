"""Warm-up: what an instance runs before its model is ready, as its configuration's `model_warmup` says.

Decided here: what a sample's tensors hold, and that its requests come to the instance as a client's would, through a
queue of its own, so that one batch of the size that was asked for runs there and nothing of it is counted. How the
samples are written down is config/'s; when an instance is warmed up, and what a failure means, is the loader's.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import trio

from flowserve.config.types import ModelConfig, SequenceBatching, WarmupInput, WarmupSample
from flowserve.errors import FlowserveError, Invalid
from flowserve.graph.plain import compile_model
from flowserve.graph.types import Graph, ModelKey
from flowserve.memory import bytes_codec
from flowserve.memory.blank import zeros
from flowserve.memory.tensor import Tensor
from flowserve.observe.statistics import Statistics
from flowserve.runtime.answers import Answers
from flowserve.runtime.clock import SECOND_NS
from flowserve.runtime.deployment import Deployment
from flowserve.runtime.engine import Engine
from flowserve.runtime.instance import Host
from flowserve.runtime.process_host import ProcessHost
from flowserve.runtime.supervisor import end_overdue
from flowserve.scheduling.batch import ModelQueue
from flowserve.scheduling.batcher import BatchPolicy, DynamicBatcher
from flowserve.scheduling.lines import Line
from flowserve.scheduling.router import Ticket
from flowserve.values import Array, DType, Request

FOLDER: Final = "warmup"
_INTEGERS_BELOW: Final = 128  # fits every integer type
# Longer than any turn of the loop: a sample's requests wait for each other, and come together.
_ALL_COME_WITHIN_NS: Final = 3600 * SECOND_NS

Tensors = Mapping[str, Array]
Samples = Sequence[tuple[WarmupSample, Tensors]]


def read_samples(config: ModelConfig, folder: Path) -> Samples:
    """What each sample that runs feeds to a model, one request of it. Blocks: files are read from `folder`/warmup.

    Raises Invalid where a file cannot be read or holds too little.
    """
    return [
        (sample, {name: _array(sample, name, given, config, folder) for name, given in sample.inputs.items()})
        for sample in config.warmup
        if sample.batch_size
    ]


async def warm_up(
    engine: Engine, host: Host, config: ModelConfig, version: int, samples: Samples, execution_timeout_ns: int = 0
) -> None:
    """Run every sample on an open instance. Raises the kind of error that a sample failed with.

    `execution_timeout_ns`: an instance in a process that takes longer for one batch is killed; 0: none is.
    """
    graph = compile_model(config, version)
    for sample, tensors in samples:
        for _ in range(sample.count):
            error = await _run_once(engine, host, graph, config, sample, tensors, execution_timeout_ns)
            if error is not None:
                raise type(error)(f"failed to run warmup sample '{sample.name}': {error}")


async def _run_once(
    engine: Engine,
    host: Host,
    graph: Graph,
    config: ModelConfig,
    sample: WarmupSample,
    tensors: Tensors,
    execution_timeout_ns: int,
) -> FlowserveError | None:
    """One batch of as many requests as the sample says. Returns what the first that failed did."""
    key = ModelKey(graph.name, graph.version)
    uncounted = Statistics(key.name, key.version)
    size = sample.batch_size
    batcher = _AllTogether(BatchPolicy.simple(size, _ALL_COME_WITHIN_NS), _memory(config, tensors))
    queue = ModelQueue(key, batcher, [host], observer=uncounted)
    deployment = Deployment(config, graph, uncounted, [graph.version], (queue,))
    beside = _beside(config)
    errors: list[FlowserveError] = []

    async def ask() -> None:
        # Copies: a model may write into what nobody else will read.
        inputs = {name: array.copy() for name, array in tensors.items() if name not in beside}
        request = Request(inputs, stamp=engine.next_stamp())
        if config.sequence is not None:
            _place(request, config.sequence, tensors)
        try:
            # Also while the server drains: who was accepted may wait for an instance that is started again.
            flow = engine.submit(deployment, request, deployment.make_stream, engine.dispatcher.submit)
            async with Answers(engine, flow) as answers:  # who leaves is withdrawn
                async for _ in answers:
                    pass
        except FlowserveError as error:
            errors.append(error)
            nursery.cancel_scope.cancel()

    engine.dispatcher.add(queue)
    try:
        async with trio.open_nursery() as watch:
            if execution_timeout_ns and isinstance(host, ProcessHost):
                watch.start_soon(end_overdue, host, execution_timeout_ns, engine.clock)
            async with trio.open_nursery() as nursery:
                for _ in range(size):
                    nursery.start_soon(ask)
            watch.cancel_scope.cancel()
    finally:
        if queue.running:  # cancelled: its batch comes back some day, and must find its queue
            trio.lowlevel.spawn_system_task(_remove_when_idle, engine, queue, name="end of a warm-up")
        else:
            engine.dispatcher.remove(queue)
    return errors[0] if errors else None


async def _remove_when_idle(engine: Engine, queue: ModelQueue) -> None:
    while queue.running:  # noqa: ASYNC110 - it happens at the end of a model's life, and nobody is told
        await trio.sleep(0.05)
    engine.dispatcher.remove(queue)


class _AllTogether(DynamicBatcher):
    """Each request is of a sequence of its own, where the model has any. `memory`: what that remembers, if anything."""

    __slots__ = ("_memory",)

    def __init__(self, policy: BatchPolicy, memory: Sequence[Tensor] | None) -> None:
        super().__init__(policy)
        self._memory = memory

    def put(self, ticket: Ticket) -> None:
        ticket.line = Line(1)
        ticket.line.memory = self._memory
        super().put(ticket)


def _beside(config: ModelConfig) -> Collection[str]:
    """The inputs that a model of sequences has besides those that clients send."""
    if config.sequence is None:
        return ()
    return {one.name for one in config.sequence.controls} | {one.input for one in config.sequence.states}


def _place(request: Request, sequence: SequenceBatching, tensors: Tensors) -> None:
    """A request is of the sequence that a sample's controls say. What they leave open: all of one, or, where a state
    says what came before, the end of it. READY is always true: without it there is no request.
    """
    said = {one.kind: (one, tensors[one.name].item()) for one in sequence.controls if one.name in tensors}
    is_first = not any(state.input in tensors for state in sequence.states)
    request.sequence_id = 1
    if "CORRID" in said:
        _, name = said["CORRID"]
        request.sequence_id = name.decode(errors="replace") if isinstance(name, bytes) else name
    flags = {kind: value == control.true for kind, (control, value) in said.items()}
    request.sequence_start, request.sequence_end = flags.get("START", is_first), flags.get("END", True)


def _memory(config: ModelConfig, tensors: Tensors) -> Sequence[Tensor] | None:
    """What came before a sample's requests, where it says so; states that it leaves out beside others are zeros."""
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
    if given.dtype is DType.BYTES:  # no strings are more random than others
        array = np.empty(shape, np.object_)
        array.fill(b"")
        return array
    if given.is_random:
        return _random(given.dtype, shape)
    return np.zeros(shape, given.dtype.numpy)


def _random(dtype: DType, shape: tuple[int, ...]) -> Array:
    """The same at every start: floats from 0 to 1, whole numbers from 0 to 127."""
    random = np.random.default_rng(0)
    if dtype.numpy.kind in "iu":
        return random.integers(_INTEGERS_BELOW, size=shape).astype(dtype.numpy)
    if dtype is DType.BOOL:
        return random.integers(2, size=shape).astype(dtype.numpy)
    return random.random(shape).astype(dtype.numpy)


def _from_file(sample: WarmupSample, name: str, given: WarmupInput, config: ModelConfig, folder: Path) -> Array:
    shown = f"{folder.name}/{FOLDER}/{given.file}"
    where = f"warmup sample '{sample.name}' of model '{config.name}'"
    try:
        content = (folder / FOLDER / given.file).read_bytes()
    except OSError as error:
        raise Invalid(f"{where}: file '{shown}' of input '{name}' cannot be read: {error.strerror}") from error
    count = math.prod(given.dims)
    if given.dtype is DType.BYTES:
        try:
            return bytes_codec.decode(content, count, name=name, model=config.name)
        except Invalid as error:
            raise Invalid(f"{where}: file '{shown}': {error}") from error
    wanted = count * given.dtype.itemsize
    if len(content) < wanted:
        raise Invalid(f"{where}: input '{name}' needs {wanted} bytes, and file '{shown}' has {len(content)}")
    return np.frombuffer(content, given.dtype.numpy, count)
