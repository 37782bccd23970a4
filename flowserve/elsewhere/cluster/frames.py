"""Frames: the wire format of the connection between the server and an actor on another machine.

Decides their form: a header of fixed size with the number of an instance and the lengths of the two parts, a message of
worker processes (backends/worker/messages.py), and a block of bytes; the message states where each tensor is in the
block. A message is sent to that instance of the actor, or by it; 0 is the actor itself. The segment of every tensor
with bytes is `BLOCK`. For a tensor that a stage of a route computed and that is not sent, PASSED has its size in bytes
and no shape. Every length is checked before memory is allocated for it, and every position before a view is made.
Nothing is decoded by `pickle` or `marshal`.

Decides too how the two ends authenticate each other: both know a secret of 32 random bytes, which was sent through the
engine (`base.ActorJob`). Each sends 32 random bytes and proves that it knows the secret by a message authentication
code over both, so that the secret is never sent and a recorded answer cannot be replayed.

Does not know sockets or models. Callers: `link`, `actor`, and the worker in runtime/.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np

from flowserve.backends.base import Work
from flowserve.backends.worker.messages import CALLS, READINESS, ColumnPlace, Form, Garbled
from flowserve.errors import Invalid
from flowserve.memory import raw
from flowserve.memory.arena import aligned
from flowserve.memory.column import Column
from flowserve.memory.tensor import Tensor
from flowserve.values import Array, DType, TensorSpec

HEAD: Final = struct.Struct("<4sIIQ")  # mark, instance, bytes of the message, bytes of the block
MARK: Final = b"fsf2"
MESSAGE_BYTES_MAX: Final = 1 << 24
BLOCK_BYTES_MAX: Final = 1 << 34
BLOCK: Final = 1  # the segment of tensors that have bytes

# Kinds of messages that only connections have, in addition to those of messages.py.
HELLO: Final = 32
PING: Final = 33
PONG: Final = 34
CLOSED: Final = 35
RECALLED: Final = 36
ASK: Final = 37
OBJECTION: Final = 38
CALLS_ENDED: Final = 39
CELLS: Final = 40
CALLS_FROM: Final = 1 << 31

KINDS: Final[Mapping[int, Form]] = {
    HELLO: Form("HELLO", "", "[version of flowserve, of Python, of numpy]"),  # the first message of the server
    PING: Form("PING"),  # a liveness check
    PONG: Form("PONG"),  # ... and its answer
    CLOSED: Form("CLOSED"),  # the instance has ended, as requested by END to it; END to the actor itself ends all
    # The reply to CANCEL if the batch has not returned: it returns after that stage of its route.
    RECALLED: Form("RECALLED", "number stage"),
    # Of an instance: a process of its model calls others under that number. Messages of the numbers from CALLS_FROM on
    # are those of messages.py about calls, with their tensors in the block.
    CALLS: Form("CALLS", "channel is_fork"),
    # Of an instance: its model has code that says whether it is ready. ASK is the question, OBJECTION the answer.
    READINESS: Form("READINESS"),
    ASK: Form("ASK"),
    OBJECTION: Form("OBJECTION", "", "empty if it is ready"),
    CALLS_ENDED: Form("CALLS_ENDED"),  # of a number for calls: its process has ended, or its instance
    # The numbers of the metric that this SERVER_REQUEST has shown are in the block.
    CELLS: Form("CELLS", "number"),
}

SECRET_BYTES: Final = 32
GREETING_BYTES: Final = 32
PROOF_BYTES: Final = 32

Buffer = bytes | memoryview


def encode_head(instance: int, message_bytes: int, block_bytes: int) -> bytes:
    """The head of a frame. Raises Invalid for a batch that is too large for one."""
    if message_bytes > MESSAGE_BYTES_MAX or block_bytes > BLOCK_BYTES_MAX:
        what = f"a message of {message_bytes} bytes with {block_bytes} bytes of tensors"
        most = f"{MESSAGE_BYTES_MAX} and {BLOCK_BYTES_MAX} are the most"
        raise Invalid(f"{what} cannot be sent to another machine: {most}; lower max_batch_size")
    return HEAD.pack(MARK, instance, message_bytes, block_bytes)


def decode_head(head: bytes | bytearray) -> tuple[int, int, int]:
    """The instance, and the lengths of the message and of the block. Raises Garbled."""
    if len(head) != HEAD.size:
        raise Garbled("a head of another length")
    mark, instance, message_bytes, block_bytes = HEAD.unpack(head)
    if mark != MARK:
        raise Garbled("not a frame")
    if not 8 <= message_bytes <= MESSAGE_BYTES_MAX or block_bytes > BLOCK_BYTES_MAX:
        raise Garbled(f"a frame of {message_bytes} and {block_bytes} bytes")
    return instance, message_bytes, block_bytes


def proof(secret: bytes, sender: bytes, first: bytes, second: bytes) -> bytes:
    """The proof that `sender` (b"server" or b"actor") knows the secret, over the random bytes of both."""
    return hmac.digest(secret, b"flowserve " + sender + first + second, "sha256")


def is_proof(found: bytes, secret: bytes, sender: bytes, first: bytes, second: bytes) -> bool:
    """Whether `found` is that proof, compared in constant time."""
    return hmac.compare_digest(found, proof(secret, sender, first, second))


class Outgoing:
    """Tensors to be sent in a frame: `buffers` are the block of `nbytes` bytes, padding included. With `write` it
    serves as the segment of an `OutputWriter`: nothing is copied.
    """

    number: Final = BLOCK

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.nbytes = 0

    def add(self, arrays: Sequence[Array]) -> tuple[int, int]:
        """The bytes of these arrays, one after the other. Returns the offset of the first byte, and the number of
        bytes.
        """
        start = aligned(self.nbytes)
        nbytes = self._append(start, arrays)
        return start, nbytes

    def write(self, start: int, arrays: Sequence[Array]) -> None:
        """As memory/segment.py's; every write begins after the last one."""
        self._append(start, arrays)

    def _append(self, start: int, arrays: Sequence[Array]) -> int:
        pieces = [flat for array in arrays if (flat := raw.flat_bytes(array)).nbytes]
        nbytes = sum([piece.nbytes for piece in pieces])
        if nbytes:
            if start > self.nbytes:
                self.buffers.append(bytes(start - self.nbytes))
            self.buffers += [piece.data for piece in pieces]
            self.nbytes = start + nbytes
        return nbytes

    def finish(self, nbytes: int) -> list[Buffer]:
        """The buffers of a block of `nbytes` bytes, the size that its message states."""
        if nbytes > self.nbytes:  # the last tensors have no bytes
            self.buffers.append(bytes(nbytes - self.nbytes))
            self.nbytes = nbytes
        return self.buffers


class OutgoingArena:
    """Used by an `OutputWriter` as shared memory: `block` is the block of one frame, and `nbytes` its size."""

    def __init__(self) -> None:
        self.block = Outgoing()
        self.nbytes = 0

    def take(self, nbytes: int) -> tuple[Outgoing, int]:
        """Allocate bytes of the block, after those that are already allocated."""
        start = aligned(self.nbytes)
        self.nbytes = start + nbytes
        return self.block, start

    def give_back(self, blocks: object) -> None:
        """No effect: blocks are not reused."""


def add_inputs(work: Work, specs: Sequence[TensorSpec], block: Outgoing) -> tuple[list[ColumnPlace], list[int]]:
    """Put the inputs of a batch into a block, without a copy of what is contiguous. Returns their places, for
    `protocol.encode_run`, and the size of each.
    """
    places: list[ColumnPlace] = []
    taken: list[int] = []
    for i, spec in enumerate(specs):
        column = work.inputs[i]
        if spec.ragged and len(column) > 1:
            apart = [None if one is None else _add(block, [one.array]) for one in column]
            places.append(apart)
            taken.append(sum([one[2] for one in apart if one is not None]))
            continue
        if column.block is None and column.lacks_some:  # no member has it: all have the same inputs
            places.append(None)
            taken.append(0)
            continue
        place = _add(block, column.pieces)
        places.append(place)
        taken.append(place[2])
    return places, taken


def _add(block: Outgoing, arrays: Sequence[Array]) -> tuple[int, int, int, tuple[int, ...]]:
    """Put one tensor into a block. Returns its place."""
    shape: tuple[int, ...] = arrays[0].shape
    if len(arrays) > 1:
        shape = (sum([len(array) for array in arrays]), *shape[1:])
    start, nbytes = block.add(arrays)
    return (BLOCK, start, nbytes, shape) if nbytes else (0, 0, 0, shape)


def inputs_of_block(
    places: Sequence[ColumnPlace],
    specs: Sequence[TensorSpec],
    rows: Sequence[int],
    block: Array,
    model: str,
    batches: bool,
) -> list[Column]:
    """The inputs of a batch: views of its block. Raises Garbled."""
    if len(places) != len(specs):
        raise Garbled(f"a batch of {len(places)} inputs for a model of {len(specs)}")
    inputs: list[Column] = []
    for spec, place in zip(specs, places, strict=True):
        if place is None:
            inputs.append(Column.of([None] * len(rows), rows))
            continue
        if type(place) is list:
            if not (spec.ragged and batches):
                raise Garbled(f"input '{spec.name}' is in pieces")
            inputs.append(
                Column.of([_member(spec, one, n, block, model) for one, n in zip(place, rows, strict=True)], rows)
            )
            continue
        array = _view(spec, place, block, model)
        if not batches:
            if len(rows) != 1:
                raise Garbled(f"input '{spec.name}' has {len(rows)} members without a batch dimension")
            inputs.append(Column.of([Tensor(array)], rows))
        elif array.ndim and len(array) == sum(rows):
            inputs.append(Column(rows, array))
        else:
            raise Garbled(f"input '{spec.name}' has another number of rows than its members")
    return inputs


def _member(spec: TensorSpec, place: Any, rows: int, block: Array, model: str) -> Tensor | None:
    """The input of one member of a batch with a batch dimension."""
    if place is None:
        return None
    array = _view(spec, place, block, model)
    if array.shape[:1] != (rows,):
        raise Garbled(f"input '{spec.name}' has another number of rows than its member")
    return Tensor(array, 0, rows)


def _view(spec: TensorSpec, place: tuple[int, int, int, Sequence[int]], block: Array, model: str) -> Array:
    segment, start, nbytes, dims = place
    shape = tuple(dims)
    if segment not in (0, BLOCK) or start + nbytes > len(block) or start % 8 or (nbytes and not segment):
        raise Garbled(f"input '{spec.name}' is not within its block")
    count = prod(shape)
    try:
        if spec.dtype is DType.BYTES:
            if count * 4 > nbytes:  # checked before memory is allocated for the strings
                raise Garbled(f"input '{spec.name}' of shape {[*shape]} is said to have {nbytes} bytes")
            encoded = block.data[start : start + nbytes]
            return raw.decode_bytes(encoded, count, name=spec.name, model=model).reshape(shape)
        if count * spec.dtype.itemsize != nbytes:
            raise Garbled(f"input '{spec.name}' of shape {[*shape]} is said to have {nbytes} bytes")
        if not nbytes:
            return np.empty(shape, spec.dtype.numpy)
        return np.ndarray(shape, spec.dtype.numpy, block, start)
    except (Invalid, ValueError, OverflowError) as error:  # invalid strings, or a shape that numpy does not support
        raise error if isinstance(error, Garbled) else Garbled(f"input '{spec.name}': {error}") from None


def part_of_block(block: Any, segment: int, offset: int, nbytes: int) -> Any:
    """A part of the block of a frame; None for no bytes. Raises Garbled."""
    if not nbytes:
        return None
    if block is None or segment != BLOCK or offset + nbytes > len(block) or offset % 8:
        raise Garbled("tensors that are not within their block")
    return block if nbytes == len(block) else block[offset : offset + nbytes]
