"""Tensors and messages between server and worker: equal values, no memory of other batches, checked messages."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from flowserve.backends.base import Remote, Results
from flowserve.backends.worker.messages import (
    APART,
    DONE,
    READY,
    SEGMENT,
    TOGETHER,
    Garbled,
    decode_error,
    encode_error,
    pack,
    unpack,
)
from flowserve.backends.worker.tensors import InputReader, OutputWriter, Run
from flowserve.errors import Invalid, ModelFailed, NotFound
from flowserve.graph.plan import make_plan
from flowserve.graph.types import ModelKey, compile_model
from flowserve.memory import raw
from flowserve.memory.arena import Arena
from flowserve.memory.column import Column
from flowserve.memory.segment import PAGE, Lease, Segment
from flowserve.memory.tensor import Tensor, with_rows
from flowserve.runtime.ipc.tensors import InputPacker, Members, OutputReader
from flowserve.runtime.loop import StepLoop
from flowserve.runtime.processes.children import Child
from flowserve.runtime.remote.shm import ProcessPool, ProcessPort
from flowserve.runtime.remote.worker import RemoteWorker
from flowserve.runtime.workers.base import Completions, WorkerContext
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.flow import Flow
from flowserve.scheduling.model_queue import ModelQueue
from flowserve.scheduling.queue import BatchPolicy, Queue
from flowserve.values import Array, DType, Request
from tests.support.backends import config_of, sample, spec

# ------------------------------------------------------------------------------------------------------------- inputs


Place = tuple[int, int, int, tuple[int, ...]]


class Server:
    """The server's side of one worker's inputs: an arena, and columns with the positions of arrays in it."""

    def __init__(self, **options: Any) -> None:
        self.arena = Arena()
        self.said: list[int] = []
        specs = [spec("IN", (4,), DType.FP32)]
        self.inputs = InputReader("m", specs, batches=True, let_go=self._let_go, **options)
        self._runs = 0
        self._attached: set[int] = set()

    def _let_go(self) -> None:
        while self.inputs.gone:
            self.said.append(self.inputs.gone.popleft())

    def lay(self, array: Array) -> tuple[Lease, Place]:
        lease = self.arena.lease(array.nbytes)
        np.ndarray(array.shape, array.dtype, lease.segment.memory, lease.offset)[...] = array
        if lease.segment.number not in self._attached:
            self.inputs.attach(lease.segment.number, lease.segment.open_for_reading())
            self._attached.add(lease.segment.number)
        return lease, (lease.segment.number, lease.offset, array.nbytes, array.shape)

    def give(self, column: Any, rows: Sequence[int]) -> tuple[Run, Column]:
        self._runs += 1
        run = Run(self._runs)
        return run, self.inputs.take(run, [column], rows)[0]


def finished(inputs: InputReader, run: Run) -> bool:
    """End a run as the driver does. Returns whether the model keeps its inputs."""
    is_kept = inputs.finish(run)
    if not is_kept:
        inputs.forget_writes(run)
    return is_kept


def rows(count: int, first: float = 0.0) -> Array:
    return (np.arange(count * 4, dtype=np.float32) + first).reshape(count, 4)


def test_members_get_their_rows_and_may_write_to_them() -> None:
    server = Server(copied_max=0)
    lease, column = server.lay(rows(3))
    run, tensors = server.give(column, [1] * 3)
    arrays = [tensor.array for tensor in tensors if tensor is not None]
    assert np.concatenate(arrays).tolist() == rows(3).tolist()
    arrays[1][:] = -1
    assert (lease.view() == rows(3).view(np.uint8).ravel()).all(), "the server's bytes are as they were"
    del arrays, tensors
    assert not finished(server.inputs, run)


def test_writes_of_one_batch_are_not_visible_to_the_next() -> None:
    """The same block is reused at once: a stale page would show."""
    server = Server(copied_max=0)
    for number in range(20):
        lease, column = server.lay(rows(16, number))
        run, tensors = server.give(column, [1] * 16)
        for m, tensor in enumerate(tensors):
            assert tensor is not None
            assert tensor.array.tolist() == [rows(16, number)[m].tolist()]
            tensor.array[:] = 1e9
        del tensor, tensors
        assert not finished(server.inputs, run)
        assert lease.offset == 0
        del lease


def test_a_kept_input_is_unchanged_and_released_when_it_is_freed() -> None:
    server = Server(copied_max=0)
    _lease, column = server.lay(rows(2))
    run, tensors = server.give(column, [1] * 2)
    assert tensors[0] is not None
    kept = tensors[0].array
    kept[:] = 42
    del tensors
    assert finished(server.inputs, run), "the model holds it"
    assert server.said == []
    assert kept.tolist() == [[42] * 4]
    # Another batch over the same rows, while they are held: it sees the writer's bytes, and changes nothing.
    again, tensors = server.give(column, [1] * 2)
    assert tensors[0] is not None
    assert tensors[0].array.tolist() == [rows(2)[0].tolist()]
    tensors[0].array[:] = -5
    del tensors
    assert not finished(server.inputs, again)
    assert kept.tolist() == [[42] * 4]
    del kept
    assert server.said == [run.number]
    last, tensors = server.give(column, [1] * 2)
    assert tensors[0] is not None
    assert tensors[0].array.tolist() == [rows(2)[0].tolist()], "what was written went with it"
    del tensors
    finished(server.inputs, last)


def test_a_small_input_is_a_copy_that_belongs_to_the_model() -> None:
    server = Server()
    lease, column = server.lay(rows(2))
    run, tensors = server.give(column, [1] * 2)
    assert tensors[0] is not None
    kept = tensors[0].array
    kept[:] = 42
    assert not finished(server.inputs, run)
    lease.segment.memory[lease.offset : lease.offset + 32] = 0  # the next batch
    assert kept.tolist() == [[42] * 4]
    assert tensors[1] is not None
    assert tensors[1].array.tolist() == [rows(2)[1].tolist()]


def test_rows_on_the_page_of_a_kept_row_are_discarded_with_it() -> None:
    server = Server(copied_max=0)
    _, column = server.lay(rows(4))
    segment, offset, nbytes, _ = column
    left = (segment, offset, nbytes // 2, (2, 4))
    right = (segment, offset + nbytes // 2, nbytes // 2, (2, 4))
    first, tensors = server.give(left, [1, 1])
    assert tensors[0] is not None
    kept = tensors[0].array
    kept[:] = 7
    del tensors
    finished(server.inputs, first)
    second, tensors = server.give(right, [1, 1])
    assert tensors[0] is not None
    assert tensors[0].array.tolist() == [rows(4)[2].tolist()]
    tensors[0].array[:] = 8
    del tensors
    assert not finished(server.inputs, second)
    assert kept.tolist() == [[7] * 4], "the page is not thrown away under it"
    del kept
    third, tensors = server.give(column, [1] * 4)
    assert [tensor.array.tolist()[0] for tensor in tensors if tensor is not None] == rows(4).tolist()
    del tensors
    finished(server.inputs, third)


def test_rows_on_the_page_of_a_row_freed_meanwhile_are_discarded_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(copied_max=0)
    _, column = server.lay(rows(1000))
    segment, offset, nbytes, _ = column
    part = nbytes // 500
    first, tensors = server.give((segment, offset, part, (2, 4)), [1, 1])
    assert tensors[0] is not None
    kept = [tensors[0].array]
    del tensors
    finished(server.inputs, first)
    second, tensors = server.give((segment, offset + part, nbytes - part, (998, 4)), [998])
    assert tensors[0] is not None
    tensors[0].array[:] = 8  # on the page of the first, and on others
    del tensors
    find = server.inputs._holder

    def find_and_drop(piece: Any) -> Any:
        found = find(piece)
        kept.clear()  # as another thread of the model could
        return found

    monkeypatch.setattr(server.inputs, "_holder", find_and_drop)
    assert not finished(server.inputs, second)
    _, tensors = server.give(column, [1] * 1000)
    assert [tensor.array.tolist()[0] for tensor in tensors if tensor is not None] == rows(1000).tolist()


def test_members_of_different_shapes_and_without_an_input() -> None:
    server = Server()
    _, column = server.lay(rows(2))
    _, tensors = server.give([column, None], [2, 1])
    assert tensors[0] is not None
    assert tensors[0].array.tolist() == rows(2).tolist()
    assert tensors[1] is None
    _, none = server.give(None, [1] * 3)
    assert [*none] == [None] * 3
    _, empty = server.give((0, 0, 0, (2, 0)), [1, 1])
    assert [tensor.shape for tensor in empty if tensor is not None] == [(1, 0), (1, 0)]


def test_an_ended_segment_is_unmapped() -> None:
    server = Server()
    _, column = server.lay(rows(1))
    server.inputs.detach([column[0], 999])
    with pytest.raises(KeyError):
        server.give(column, [1])


# ------------------------------------------------------------------------------------------------------------ outputs


class Both:
    """A worker's outputs, and the server's reader of them, connected directly."""

    def __init__(self, *specs: Any, batches: bool = True) -> None:
        self.outputs = OutputWriter(specs, self._see)
        self.reader = OutputReader("m", specs, batches=batches)
        self.segments: dict[int, Segment] = {}
        self.gone: list[Any] = []

    def place(self, columns: Sequence[Sequence[Tensor | None]], rows: Sequence[int]) -> list[int]:
        return self.outputs.place(columns, rows).words()

    def _see(self, segment: Segment) -> None:
        self.segments[segment.number] = Segment.read_shared(os.dup(segment.fd), segment.number)

    def read(self, words: Sequence[int], rows: Sequence[int], unlike: Sequence[str] = ()) -> list[Members]:
        number, offset, nbytes = words[:3]
        block = Lease(self.segments[number], offset, nbytes, self.gone.append, (number, offset)) if nbytes else None
        columns, _ = self.reader.read(words, 3, block, rows, unlike)
        return columns


@st.composite
def answers(draw: st.DrawFn) -> tuple[DType, list[int], list[Array | None], bool]:
    """A column of any data type; some members are missing, and widths may differ. A member may have other rows than its
    request, or be a number without dimensions.
    """
    dtype = draw(st.sampled_from(list(DType)))
    members = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    is_ragged = draw(st.booleans())
    column: list[Array | None] = []
    for count in members:
        width = draw(st.integers(0, 5)) if is_ragged else 4
        is_there = draw(st.sampled_from([True, True, False]))
        found = draw(st.sampled_from([count] * 6 + [0, count + 1, -1]))
        shape = () if found < 0 else (found, width)
        column.append(np.resize(sample(dtype, count), shape) if is_there else None)
    return dtype, members, column, draw(st.booleans())


@pytest.mark.parametrize("encoded_min", [raw.ENCODED_BYTES_MIN, 0], ids=["small", "large strings"])
@given(answered=answers())
def test_the_server_reads_the_outputs_of_the_model(
    encoded_min: int, answered: tuple[DType, list[int], list[Array | None], bool]
) -> None:
    dtype, members, arrays, in_one_block = answered
    both = Both(spec("OUT", (-1,), dtype))
    present = [array for array in arrays if array is not None]
    has_rows = all(array is None or array.shape[:1] == (n,) for array, n in zip(arrays, members, strict=True))
    is_even = has_rows and len({array.shape[1:] for array in present}) == 1
    if in_one_block and is_even:
        block = np.concatenate(present)
        stops = np.cumsum([len(array) for array in present]).tolist()
        cuts = iter(zip([0, *stops], stops, strict=False))
        column = [None if array is None else Tensor(block, *next(cuts)) for array in arrays]
    else:
        column = [None if array is None else with_rows(array) for array in arrays]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raw, "ENCODED_BYTES_MIN", encoded_min)
        (read,) = both.read(both.place([column], members), members, () if has_rows else ("OUT",))
    for tensor, array in zip(read, arrays, strict=True):
        assert (tensor is None) == (array is None)
        if tensor is not None and array is not None:
            assert (tensor.array.dtype, tensor.shape) == (dtype.numpy, array.shape)
            assert tensor.array.tolist() == array.tolist()
    blocks = {id(tensor.block) for tensor in read if tensor is not None}
    if is_even:
        assert len(blocks) == 1, "contiguous members are one block, also if some are missing"


def test_an_output_is_a_read_only_view_and_returns_to_the_worker_after_its_last_reader() -> None:
    both = Both(spec("A"), spec("B"))
    words = both.place([[Tensor(rows(2), 0, 2)], [Tensor(rows(2, 100), 0, 2)]], [2])
    (first,), (second,) = both.read(words, [2])
    assert first is not None
    assert second is not None
    assert not first.block.flags.writeable
    part = second.block[1:]
    del first, second
    assert both.gone == []
    assert part.tolist() == [rows(2, 100)[1].tolist()]
    del part
    assert both.gone == [(words[0], words[1])]
    both.outputs.give_back(both.gone)
    assert both.place([[Tensor(rows(2), 0, 2)], [None]], [2])[:2] == words[:2], "the block is used again"


def test_a_model_without_batching_returns_whole_tensors() -> None:
    both = Both(spec("A", (2, 4)), spec("S", (1,), DType.BYTES), batches=False)
    words = both.place([[Tensor(rows(2))], [Tensor(np.array([b"x\0y"], np.object_))]], [2])
    (whole,), (text,) = both.read(words, [1])
    assert whole is not None
    assert text is not None
    assert whole.array.tolist() == rows(2).tolist()
    assert text.array.tolist() == [b"x\0y"]


WORDS = st.one_of(st.integers(0, 200), st.integers(2**64 - 10, 2**64 - 1), st.sampled_from([2**31, 2**40, 2**63]))


@given(st.lists(st.tuples(st.integers(0, 30), WORDS), min_size=1, max_size=3), st.integers(0, 3), st.booleans())
def test_no_message_of_a_worker_makes_a_view_outside_its_block(
    changes: list[tuple[int, int]], cut: int, is_apart: bool
) -> None:
    """A valid message, changed at random: it is refused, or all its views are in the block."""
    both = Both(spec("OUT", (-1,)), spec("TEXT", (-1,), DType.BYTES))
    second = rows(2)[:, : 3 if is_apart else 4].copy()
    texts = np.array([[b"a", b"bc"]], np.object_)
    numbers: list[Tensor | None] = [Tensor(rows(1), 0, 1), Tensor(second, 0, 2)]
    words = both.place([numbers, [Tensor(texts, 0, 1), Tensor(np.repeat(texts, 2, 0), 0, 2)]], [1, 2])
    segment, offset, nbytes = words[:3]
    changed = [*words]
    for index, value in changes:
        changed[3 + index % (len(changed) - 3)] = value
    if cut:
        changed = changed[:-cut]
    lease = Lease(both.segments[segment], offset, nbytes, lambda _: None, None)
    try:
        columns, _ = both.reader.read(changed, 3, lease, [1, 2])
    except Garbled:
        return
    low = both.segments[segment].address + offset
    for tensor in columns[0]:
        if tensor is not None and tensor.array.size:
            address = tensor.array.ctypes.data
            assert low <= address
            assert address + tensor.array.nbytes <= low + nbytes


CONFIG = config_of(inputs=[spec("IN", (4,))], outputs=[spec("OUT", (4,))], max_batch_size=4)
PLAN = make_plan(compile_model(CONFIG, 1))


@pytest.fixture(scope="module")
def ended_process() -> Iterator[int]:
    """A process descriptor. The process has ended, so that killing it has no effect but the recorded reason."""
    process = subprocess.Popen(["true"])
    descriptor = os.pidfd_open(process.pid)
    process.wait()
    yield descriptor
    os.close(descriptor)


class BatchInProcess:
    """A worker whose process has batch 1, of members with 1 and 2 rows. Made by `batch_in_process`.

    `theirs` is the process's end of the socket. `waiting` are the completed batches.
    """

    def __init__(self, ours: socket.socket, theirs: socket.socket, process: int) -> None:
        ours.setblocking(False)
        self.theirs = theirs
        self.child = Child("m_0", "m", 0, os.dup(process), ours, -1, theirs)
        token = trio.lowlevel.current_trio_token()
        completions = Completions(token, lambda: None)
        self.waiting = completions.waiting
        self.context = WorkerContext(token, lambda: 100, completions, lambda: None, lambda batch, stages: None)
        pool = ProcessPool(self.context.clock, StepLoop(lambda: None, self.context.clock))
        pool.spawn = lambda *_, **__: self.child
        packer = InputPacker(CONFIG.inputs, ["OUT"])
        self.port = ProcessPort("m_0", CONFIG, Remote("no_module:no_function", ()), packer, pool, is_plain=True)
        self.worker = RemoteWorker("m_0", CONFIG, self.port, self.context.clock)

    async def start(self) -> None:
        self.theirs.send(pack(READY, ()))
        self.worker.open(self.context)
        await wait_all_tasks_blocked()
        inputs = [Tensor(rows(1), 0, 1), Tensor(rows(2), 0, 2)]
        tickets = [ticket for tensor in inputs for ticket in Flow(PLAN, (), [tensor], 0, 0, Request({})).begin()]
        queue = ModelQueue(ModelKey("m", 1), Queue(BatchPolicy.simple(4)), [self.worker])
        assert self.worker.run(Batch(queue, self.worker, tickets, 0)) is None

    def send(self, words: Sequence[int], text: str = "") -> None:
        """The process sends DONE, and the worker reads it."""
        self.theirs.send(pack(DONE, words) + text.encode())
        self.port.read()


@asynccontextmanager
async def batch_in_process(process: int) -> AsyncIterator[BatchInProcess]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        made = BatchInProcess(ours, theirs, process)
        await made.start()
        yield made


OWN_SEGMENT = (1 << 32) + 1  # the first segment of process 1
# The words of DONE for batch 1, whose block is at the second page of the segment: three rows of four numbers.
VALID = [1, 0, 0, 5, 6, OWN_SEGMENT, PAGE, 48, TOGETHER, 0, 48, 0, 2, 3, 4]


@given(st.lists(st.tuples(st.integers(0, 30), WORDS), max_size=2), st.integers(0, 2), st.sampled_from(["", "{}", "[]"]))
async def test_every_field_of_a_batch_result_is_checked(
    ended_process: int, changes: list[tuple[int, int]], cut: int, text: str
) -> None:
    """A valid DONE, changed at random: its process is killed, or all views of the results are in its block."""
    segment = Segment.create(2 * PAGE)
    async with batch_in_process(ended_process) as process:
        socket.send_fds(process.theirs, [pack(SEGMENT, (OWN_SEGMENT,))], [segment.fd])
        words = [*VALID]
        for index, value in changes:
            words[index % len(words)] = value
        process.send(words[: len(words) - cut], text)
        if process.child.why:
            assert changes or cut or text == "[]"
            assert process.child.why.startswith("its process sent an invalid message (")
            assert not process.waiting
            return
        ((_, outcome),) = process.waiting
        assert isinstance(outcome, Results)
        channel = process.port.channel
        assert channel is not None
        known = channel.block(OWN_SEGMENT, 0, 2 * PAGE)
        assert known is not None
        start = known.view().ctypes.data
        for tensor in outcome.outputs[0]:
            assert tensor is not None
            address = tensor.array.ctypes.data
            assert start <= address <= address + tensor.array.nbytes <= start + 2 * PAGE
        process.send(VALID)
        assert "a reply to batch 1, which it does not have" in process.child.why
        channel.close()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({0: 2}, "a reply to batch 2, which it does not have"),
        ({1: 1}, "passed stages"),
        ({5: 999}, "KeyError: 999"),
        ({6: PAGE + 8}, "a block at"),
        ({6: 2 * PAGE}, "a block at"),
        ({7: PAGE + 1}, "a block at"),
        ({8: 7}, "has an unknown form: 7"),
        ({9: 8}, "is not within its block"),
        ({7: PAGE, 9: 4}, "is not within its block"),
        ({10: 40}, "is said to have 40 bytes"),
        ({11: 1}, ""),
        ({12: 1}, "is not what the configuration promises"),
        ({14: 5}, "is not what the configuration promises"),
        ({13: 2, 10: 32}, "has 2 rows, its members have 3"),
        ({15: 0}, "the message has 1 words too many"),
    ],
)
async def test_a_result_with_an_invalid_field_kills_its_process(
    ended_process: int, changes: dict[int, int], why: str
) -> None:
    segment = Segment.create(2 * PAGE)
    async with batch_in_process(ended_process) as process:
        socket.send_fds(process.theirs, [pack(SEGMENT, (OWN_SEGMENT,))], [segment.fd])
        words = [*VALID]
        words += [0] * (max(changes) + 1 - len(words))
        for index, value in changes.items():
            words[index] = value
        process.send(words)
        assert process.child.why.startswith("its process sent an invalid message (")
        assert why in process.child.why
        assert not process.waiting


# The same outputs as INT64, in the form of an output whose members are not one tensor.
INTEGERS = [*VALID[:7], 96, APART, 10, 0, 32, 2, 1, 4, 10, 32, 64, 2, 2, 4]


@pytest.mark.parametrize(
    ("words", "text", "why"),
    [
        (INTEGERS, '{"": [{"OUT": "other"}, {}, {}]}', ""),
        (INTEGERS, "", "has an unknown form: 10"),
        ([*INTEGERS[:9], 100, *INTEGERS[10:]], '{"": [{"OUT": "other"}, {}, {}]}', "has an unknown form: 100"),
        (VALID, '{"": [{"z": "other"}, {}, {}]}', "notes about an output that does not exist"),
        (VALID, '{"": [{}, {"OUT": "many"}, {}]}', "notes about outputs that are none"),
        (VALID, '{"": 5}', "notes about outputs that are none"),
    ],
)
async def test_an_output_differs_from_the_configuration_only_if_that_is_reported(
    ended_process: int, words: list[int], text: str, why: str
) -> None:
    segment = Segment.create(2 * PAGE)
    async with batch_in_process(ended_process) as process:
        socket.send_fds(process.theirs, [pack(SEGMENT, (OWN_SEGMENT,))], [segment.fd])
        process.send(words, text)
        if why:
            assert why in process.child.why
            return
        ((_, outcome),) = process.waiting
        assert isinstance(outcome, Results)
        assert [(one.array.dtype.name, one.shape) for one in outcome.outputs[0] if one] == [
            ("int64", (1, 4)),
            ("int64", (2, 4)),
        ]
        assert process.port.channel is not None
        process.port.channel.close()


# ----------------------------------------------------------------------------------------------------------- messages


@given(st.integers(1, 255), st.lists(st.integers(0, 2**64 - 1), max_size=100), st.none() | st.text())
def test_a_packed_message_is_unpacked_unchanged(kind: int, words: list[int], text: str | None) -> None:
    found, numbers, tail = unpack(pack(kind, words, text))
    assert (found, [*numbers[1:]]) == (kind, words)
    assert (tail == b"") == (text is None)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_error(message: bytes) -> None:
    try:
        _, words, text = unpack(message)
    except Garbled:
        return
    assert len(words) * 8 + len(text) == len(message)


@pytest.mark.parametrize("error", [Invalid("a"), NotFound("b"), ModelFailed("c")])
def test_an_error_keeps_its_class_and_its_text(error: Invalid) -> None:
    again = decode_error(encode_error(error))
    assert (type(again), str(again)) == (type(error), str(error))


@pytest.mark.parametrize("text", [None, 3, [], ["invalid"], [["invalid"], "x"], ["nonsense", "x"], {"a": 1}])
def test_an_invalid_error_is_reported_as_a_failure_of_the_model(text: Any) -> None:
    assert isinstance(decode_error(text), ModelFailed)


def test_a_text_that_is_too_long_for_a_message_is_cut() -> None:
    assert len(str(decode_error(encode_error(ModelFailed("é" * 100_000))))) == 4096
