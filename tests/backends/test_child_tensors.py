"""Tensors on their way into a model's process and out of it: the same values, nobody's pages but one's own, and
nothing believed that a child says.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.backends.base import Results, Work
from flowserve.backends.child.inputs import Inputs, Run
from flowserve.backends.child.outputs import Outputs
from flowserve.backends.child.protocol import DONE, SEGMENT, TOGETHER, heard, pack, said, unpack
from flowserve.errors import Invalid, ModelFailed, NotFound
from flowserve.memory.arena import Arena
from flowserve.memory.segment import PAGE, Lease, Segment
from flowserve.memory.tensor import Tensor
from flowserve.runtime.process_inputs import InputPacker
from flowserve.runtime.process_link import Link
from flowserve.runtime.process_outputs import Garbled, OutputReader
from flowserve.testing.backends import sample, spec
from flowserve.values import Array, DType, Request

# ------------------------------------------------------------------------------------------------------------- inputs


class Server:
    """The server's side of one child's inputs: an arena, and columns that say where arrays lie in it."""

    def __init__(self) -> None:
        self.arena = Arena()
        self.said: list[int] = []
        self.inputs = Inputs("m", [spec("IN", (4,), DType.FP32)], batches=True, let_go=self._let_go)
        self._runs = 0
        self._attached: set[int] = set()

    def _let_go(self) -> None:
        while self.inputs.gone:
            self.said.append(self.inputs.gone.popleft())

    def lay(self, array: Array) -> tuple[Lease, tuple[Any, ...]]:
        lease = self.arena.lease(array.nbytes)
        np.ndarray(array.shape, array.dtype, lease.segment.memory, lease.offset)[...] = array
        if lease.segment.number not in self._attached:
            self.inputs.attach(lease.segment.number, lease.segment.open_for_reading())
            self._attached.add(lease.segment.number)
        return lease, (lease.segment.number, lease.offset, array.nbytes, array.shape, [1] * len(array))

    def give(self, column: Any, members: int) -> tuple[Run, list[Tensor | None]]:
        self._runs += 1
        run = Run(self._runs)
        return run, self.inputs.take(run, [column], members)[0]


def rows(count: int, first: float = 0.0) -> Array:
    return (np.arange(count * 4, dtype=np.float32) + first).reshape(count, 4)


def test_members_get_their_rows_and_may_write_into_them() -> None:
    server = Server()
    lease, column = server.lay(rows(3))
    run, tensors = server.give(column, 3)
    arrays = [tensor.array for tensor in tensors if tensor is not None]
    assert np.concatenate(arrays).tolist() == rows(3).tolist()
    arrays[1][:] = -1
    assert (lease.view() == rows(3).view(np.uint8).ravel()).all(), "the server's bytes are as they were"
    del arrays, tensors
    assert not server.inputs.finish(run)


def test_what_one_batch_wrote_is_not_what_the_next_reads() -> None:
    """The same block, used again at once: the classic stale page."""
    server = Server()
    for number in range(20):
        lease, column = server.lay(rows(16, number))
        run, tensors = server.give(column, 16)
        for m, tensor in enumerate(tensors):
            assert tensor is not None
            assert tensor.array.tolist() == [rows(16, number)[m].tolist()]
            tensor.array[:] = 1e9
        del tensor, tensors
        assert not server.inputs.finish(run)
        assert lease.offset == 0
        del lease


def test_a_kept_input_stays_what_it_was_and_is_given_back_when_it_is_dropped() -> None:
    server = Server()
    _lease, column = server.lay(rows(2))
    run, tensors = server.give(column, 2)
    assert tensors[0] is not None
    kept = tensors[0].array
    kept[:] = 42
    del tensors
    assert server.inputs.finish(run), "the model holds it"
    assert server.said == []
    assert kept.tolist() == [[42] * 4]
    # Another batch over the same rows, while they are held: it sees the writer's bytes, and disturbs nobody.
    again, tensors = server.give(column, 2)
    assert tensors[0] is not None
    assert tensors[0].array.tolist() == [rows(2)[0].tolist()]
    tensors[0].array[:] = -5
    del tensors
    assert not server.inputs.finish(again)
    assert kept.tolist() == [[42] * 4]
    del kept
    assert server.said == [run.number]
    last, tensors = server.give(column, 2)
    assert tensors[0] is not None
    assert tensors[0].array.tolist() == [rows(2)[0].tolist()], "what was written went with it"
    del tensors
    server.inputs.finish(last)


def test_rows_beside_a_kept_one_share_its_page_and_are_thrown_away_with_it() -> None:
    server = Server()
    _, column = server.lay(rows(4))
    segment, offset, nbytes, _, _ = column
    left = (segment, offset, nbytes // 2, (2, 4), [1, 1])
    right = (segment, offset + nbytes // 2, nbytes // 2, (2, 4), [1, 1])
    first, tensors = server.give(left, 2)
    assert tensors[0] is not None
    kept = tensors[0].array
    kept[:] = 7
    del tensors
    server.inputs.finish(first)
    second, tensors = server.give(right, 2)
    assert tensors[0] is not None
    assert tensors[0].array.tolist() == [rows(4)[2].tolist()]
    tensors[0].array[:] = 8
    del tensors
    assert not server.inputs.finish(second)
    assert kept.tolist() == [[7] * 4], "the page is not thrown away under it"
    del kept
    third, tensors = server.give(column, 4)
    assert [tensor.array.tolist()[0] for tensor in tensors if tensor is not None] == rows(4).tolist()
    del tensors
    server.inputs.finish(third)


def test_rows_beside_one_that_is_dropped_in_that_very_moment_are_thrown_away_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server()
    _, column = server.lay(rows(1000))
    segment, offset, nbytes, _, _ = column
    part = nbytes // 500
    first, tensors = server.give((segment, offset, part, (2, 4), [1, 1]), 2)
    assert tensors[0] is not None
    kept = [tensors[0].array]
    del tensors
    server.inputs.finish(first)
    second, tensors = server.give((segment, offset + part, nbytes - part, (998, 4), [998]), 1)
    assert tensors[0] is not None
    tensors[0].array[:] = 8  # on the page of the first, and on others
    del tensors
    find = server.inputs._holder

    def find_and_drop(piece: Any) -> Any:
        found = find(piece)
        kept.clear()  # as another thread of the model may
        return found

    monkeypatch.setattr(server.inputs, "_holder", find_and_drop)
    assert not server.inputs.finish(second)
    _, tensors = server.give(column, 1000)
    assert [tensor.array.tolist()[0] for tensor in tensors if tensor is not None] == rows(1000).tolist()


def test_members_of_many_shapes_and_members_without_the_input() -> None:
    server = Server()
    _, (segment, offset, nbytes, shape, _) = server.lay(rows(2))
    _, tensors = server.give([(segment, offset, nbytes, shape), None], 2)
    assert tensors[0] is not None
    assert tensors[0].array.tolist() == rows(2).tolist()
    assert tensors[1] is None
    _, none = server.give(None, 3)
    assert none == [None] * 3
    _, empty = server.give((0, 0, 0, (2, 0), [1, 1]), 2)
    assert [tensor.shape for tensor in empty if tensor is not None] == [(1, 0), (1, 0)]


def test_memory_that_is_no_more_is_unmapped() -> None:
    server = Server()
    _, column = server.lay(rows(1))
    server.inputs.detach([column[0], 999])
    with pytest.raises(KeyError):
        server.give(column, 1)


# ------------------------------------------------------------------------------------------------------------ outputs


class Both:
    """A child's outputs and the server's reading of them, joined by hand."""

    def __init__(self, *specs: Any, batches: bool = True) -> None:
        self.outputs = Outputs(specs)
        self.reader = OutputReader("m", specs, batches=batches)
        self.segments: dict[int, Segment] = {}
        self.gone: list[Any] = []

    def place(self, columns: Sequence[Sequence[Tensor | None]]) -> list[int]:
        words = self.outputs.place(columns)
        for segment in self.outputs.new_segments():
            self.segments[segment.number] = Segment.read_shared(os.dup(segment.fd))
        return words

    def read(self, words: Sequence[int], members: Sequence[int]) -> list[list[Tensor | None]]:
        number, offset, nbytes = words[:3]
        block = Lease(self.segments[number], offset, nbytes, self.gone.append, (number, offset)) if nbytes else None
        columns, _ = self.reader.read(words, 3, block, members)
        return columns


@st.composite
def answers(draw: st.DrawFn) -> tuple[DType, list[int], list[Array | None], bool]:
    """A column as a model may answer it: of any type, some members missing, maybe each of its own width."""
    dtype = draw(st.sampled_from(list(DType)))
    members = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    is_ragged = draw(st.booleans())
    column: list[Array | None] = []
    for count in members:
        width = draw(st.integers(0, 5)) if is_ragged else 4
        is_there = draw(st.sampled_from([True, True, False]))
        column.append(np.resize(sample(dtype, count), (count, width)) if is_there else None)
    return dtype, members, column, draw(st.booleans())


@given(answers())
def test_what_a_model_answered_is_what_the_server_reads(
    answered: tuple[DType, list[int], list[Array | None], bool],
) -> None:
    dtype, members, arrays, in_one_block = answered
    both = Both(spec("OUT", (-1,), dtype))
    present = [array for array in arrays if array is not None]
    if in_one_block and present and len({array.shape[1] for array in present}) == 1:
        block = np.concatenate(present)
        stops = np.cumsum([len(array) for array in present]).tolist()
        cuts = iter(zip([0, *stops], stops, strict=False))
        column = [None if array is None else Tensor(block, *next(cuts)) for array in arrays]
    else:
        column = [None if array is None else Tensor(array, 0, len(array)) for array in arrays]
    (read,) = both.read(both.place([column]), members)
    for tensor, array in zip(read, arrays, strict=True):
        assert (tensor is None) == (array is None)
        if tensor is not None and array is not None:
            assert tensor.array.dtype == dtype.numpy
            assert tensor.array.tolist() == array.tolist()
    blocks = {id(tensor.block) for tensor in read if tensor is not None}
    if len({array.shape[1] for array in present}) == 1:
        assert len(blocks) == 1, "members side by side are one block, whoever is missing"


def test_an_output_is_a_read_only_view_of_the_childs_memory_and_comes_home_after_its_last_reader() -> None:
    both = Both(spec("A"), spec("B"))
    words = both.place([[Tensor(rows(2), 0, 2)], [Tensor(rows(2, 100), 0, 2)]])
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
    both.outputs.come_home(both.gone)
    assert both.place([[Tensor(rows(2), 0, 2)], [None]])[:2] == words[:2], "the block is used again"


def test_a_model_without_batches_answers_whole_tensors() -> None:
    both = Both(spec("A", (2, 4)), spec("S", (1,), DType.BYTES), batches=False)
    words = both.place([[Tensor(rows(2))], [Tensor(np.array([b"x\0y"], np.object_))]])
    (whole,), (text,) = both.read(words, [1])
    assert whole is not None
    assert text is not None
    assert whole.array.tolist() == rows(2).tolist()
    assert text.array.tolist() == [b"x\0y"]


WORDS = st.one_of(st.integers(0, 200), st.integers(2**64 - 10, 2**64 - 1), st.sampled_from([2**31, 2**40, 2**63]))


@given(st.lists(st.tuples(st.integers(0, 30), WORDS), min_size=1, max_size=3), st.integers(0, 3), st.booleans())
def test_nothing_that_a_child_says_makes_a_view_of_what_is_not_its_block(
    changes: list[tuple[int, int]], cut: int, is_apart: bool
) -> None:
    """A right message, changed at random: it is refused, or every view of it lies in the block."""
    both = Both(spec("OUT", (-1,)), spec("TEXT", (-1,), DType.BYTES))
    second = rows(2)[:, : 3 if is_apart else 4].copy()
    texts = np.array([[b"a", b"bc"]], np.object_)
    numbers: list[Tensor | None] = [Tensor(rows(1), 0, 1), Tensor(second, 0, 2)]
    words = both.place([numbers, [Tensor(texts, 0, 1), Tensor(np.repeat(texts, 2, 0), 0, 2)]])
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


@given(st.lists(st.tuples(st.integers(0, 30), WORDS), max_size=2), st.integers(0, 2), st.sampled_from(["", "{}", "[]"]))
def test_nothing_in_the_usual_answer_of_a_batch_is_believed(
    changes: list[tuple[int, int]], cut: int, text: str
) -> None:
    """A right DONE of fixed shapes, changed at random: it is refused, or is right and every view lies in its block."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    segment = Segment.create(2 * PAGE)
    with ours, theirs:
        ours.setblocking(False)
        link = Link(ours, InputPacker([spec("IN", (4,))]), OutputReader("m", [spec("OUT", (4,))], batches=True))
        link.send(Work([[Tensor(rows(1), 0, 1), Tensor(rows(2), 0, 2)]], [1, 2], [Request({})] * 2, [("OUT",)] * 2))
        socket.send_fds(theirs, [pack(SEGMENT, (segment.number,))], [segment.fd])
        words = [1, 0, 5, 6, segment.number, PAGE, 48, TOGETHER, 0, 48, 0, 2, 3, 4]
        for index, value in changes:
            words[index % len(words)] = value
        theirs.send(pack(DONE, words[: len(words) - cut]) + text.encode())
        try:
            while (outcome := link.read()) is True:
                pass
        except Garbled:
            assert changes or cut or text == "[]"
            return
        assert isinstance(outcome, Results)
        low = link._segments[segment.number].address
        for tensor in outcome.outputs[0]:
            assert tensor is not None
            address = tensor.array.ctypes.data
            assert low <= address <= address + tensor.array.nbytes <= low + 2 * PAGE
        with pytest.raises(Garbled, match="which does not run"):
            theirs.send(pack(DONE, [1, 0, 5, 6, segment.number, PAGE, 48, TOGETHER, 0, 48, 0, 2, 3, 4]))
            link.read()
        link.close()


# ----------------------------------------------------------------------------------------------------------- messages


@given(st.integers(1, 255), st.lists(st.integers(0, 2**64 - 1), max_size=100), st.none() | st.text())
def test_a_childs_message_comes_back_as_it_was(kind: int, words: list[int], text: str | None) -> None:
    found, numbers, tail = unpack(pack(kind, words, text))
    assert (found, [*numbers[1:]]) == (kind, words)
    assert (tail == b"") == (text is None)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error_of_their_own(message: bytes) -> None:
    try:
        _, words, text = unpack(message)
    except struct.error:
        return
    assert len(words) * 8 + len(text) == len(message)


@pytest.mark.parametrize("error", [Invalid("a"), NotFound("b"), ModelFailed("c")])
def test_an_error_keeps_its_class_and_its_text(error: Invalid) -> None:
    again = heard(said(error))
    assert (type(again), str(again)) == (type(error), str(error))


@pytest.mark.parametrize("text", [None, 3, [], ["invalid"], [["invalid"], "x"], ["nonsense", "x"], {"a": 1}])
def test_what_is_no_error_is_an_error_of_the_models(text: Any) -> None:
    assert isinstance(heard(text), ModelFailed)


def test_a_text_that_is_too_long_for_a_message_is_cut() -> None:
    assert len(str(heard(said(ModelFailed("é" * 100_000))))) == 4096
