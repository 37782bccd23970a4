"""Frames: what one end packs the other reads, and anything else is an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.backends.base import Work
from flowserve.backends.worker.messages import Garbled, decode_run, encode_run, unpack
from flowserve.elsewhere.cluster.frames import (
    BLOCK_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    Outgoing,
    add_inputs,
    decode_head,
    encode_head,
    inputs_of_block,
    is_proof,
    proof,
)
from flowserve.errors import Invalid
from flowserve.memory.column import Column
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, DType, Request, TensorSpec

SPECS = (
    TensorSpec("A", DType.FP32, (-1,)),
    TensorSpec("B", DType.BYTES, (2,)),
    TensorSpec("C", DType.INT64, (1,), optional=True),
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[list[Array] | None]]:
    """Rows of the members, and for each input an array for each member."""
    rows = draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
    width = draw(st.integers(0, 4))
    inputs: list[list[Array] | None] = [[np.arange(n * width, dtype=np.float32).reshape(n, width) for n in rows]]
    strings = st.binary(max_size=9)
    inputs.append(
        [np.array([[draw(strings), draw(strings)] for _ in range(n)], np.object_).reshape(n, 2) for n in rows]
    )
    inputs.append([np.full((n, 1), 7, np.int64) for n in rows] if draw(st.booleans()) else None)
    return rows, inputs


def packed(rows: list[int], inputs: Sequence[list[Array] | None]) -> tuple[bytes, bytes]:
    """The message and the block."""
    columns = [
        Column.of([None] * len(rows) if one is None else [Tensor(array, 0, len(array)) for array in one], rows)
        for one in inputs
    ]
    block = Outgoing()
    places, taken = add_inputs(Work(columns, rows, [Request({})] * len(rows), [("OUT",)] * len(rows)), SPECS, block)
    assert len(taken) == len(SPECS)
    data = b"".join(map(bytes, block.finish(block.nbytes)))
    assert len(data) == block.nbytes
    return encode_run(5, 0, 0, rows, [(0,)], (0, 0), places), data


def read(message: bytes, block: bytes) -> list[Column]:
    _, words, text = unpack(message)
    run = decode_run(words, text)
    return inputs_of_block(run.columns, SPECS, run.rows, np.frombuffer(block, np.uint8), "m", batches=True)


@given(batches())
def test_properties_a_batch_is_read_as_it_was_packed(batch: tuple[list[int], list[list[Array] | None]]) -> None:
    rows, inputs = batch
    columns = read(*packed(rows, inputs))
    for column, arrays in zip(columns, inputs, strict=True):
        if arrays is None:
            assert column.lacks_some
        else:
            for tensor, array in zip(column, arrays, strict=True):
                assert tensor is not None
                assert tensor.array.tolist() == array.tolist()


@given(batches(), st.data())
def test_properties_a_changed_batch_is_an_error_or_a_batch_within_its_block(
    batch: tuple[list[int], list[list[Array] | None]], data: st.DataObject
) -> None:
    message, block = packed(*batch)
    if data.draw(st.booleans()):
        block = block[: data.draw(st.integers(0, len(block)))]
    else:
        at = data.draw(st.integers(0, len(message) - 1))
        message = message[:at] + bytes([message[at] ^ data.draw(st.integers(1, 255))]) + message[at + 1 :]
    try:
        columns = read(message, block)
    except Garbled:
        return
    assert sum(column.nbytes for column in columns[::2]) <= 2 * len(block)


@given(st.binary(max_size=40))
def test_properties_any_bytes_are_a_head_or_an_error(data: bytes) -> None:
    try:
        lengths = decode_head(data)
    except Garbled:
        return
    assert encode_head(*lengths) == data


def test_lengths_are_bounded_on_both_sides() -> None:
    for lengths in ((1, MESSAGE_BYTES_MAX + 1, 0), (1, 8, BLOCK_BYTES_MAX + 1)):
        with pytest.raises(Invalid, match="lower max_batch_size"):
            encode_head(*lengths)
    head = encode_head(1, 8, 0)
    huge = head[:12] + (BLOCK_BYTES_MAX + 1).to_bytes(8, "little")
    for wrong in (b"HTTP" + head[4:], head[:-1], huge, head[:8] + bytes(4) + head[12:]):
        with pytest.raises(Garbled):
            decode_head(wrong)


def test_a_proof_is_of_one_end_one_secret_and_one_greeting() -> None:
    known: tuple[Any, ...] = (b"s" * 32, b"actor", b"a" * 32, b"b" * 32)
    code = proof(*known)
    assert is_proof(code, *known)
    for wrong in (
        (b"t" * 32, *known[1:]),
        (known[0], b"server", *known[2:]),
        (*known[:2], b"c" * 32, known[3]),
        (*known[:3], b"c" * 32),
    ):
        assert not is_proof(code, *wrong)
