"""The messages between the server and a worker process, and between the worker processes of a route.

Decides the form of each message. Messages are datagrams of at most `MESSAGE_BYTES_MAX` bytes; a longer one is written
to shared memory and announced by SPILLED. Tensors are always in shared memory (memory/arena.py), and messages have
their positions. A message is a sequence of unsigned 64-bit numbers, called words: the first has its kind and the number
of words, the others follow; then a text, mostly JSON, where one is needed. A worker process runs third-party code, so
the server checks every number that it receives.

RUN, which only worker processes read, has a batch's inputs, requests and route (`RunMessage`), written by `marshal` in
its oldest version, which every Python reads. The server writes the message for the first stage of a route, each worker
process the one for the next stage. The outputs of stages are also sent to the server, which trusts no worker process:
as numbers, each of which it checks:

  PASSED    the count of stages, then for each
            kept gathered_ns computed_ns segment offset outputs (offset nbytes dimensions dim...)...

Numbers 16 to 31 are for messages between a decoupled model and the server during a batch.

Does not know memory or models. Callers: the modules of this package, and runtime/.
"""

from __future__ import annotations

import json
import marshal
import socket
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Final, NamedTuple

from flowserve.backends.base import Remote
from flowserve.errors import (
    AlreadyExists,
    Cancelled,
    FlowserveError,
    Internal,
    Invalid,
    ModelFailed,
    NotFound,
    Place,
    TooLarge,
    Unavailable,
    Unsupported,
)
from flowserve.memory.arena import BlockAddress
from flowserve.values import Request, TensorSpec

# What a worker process runs: an instance, with a pickled `Job`; or one function, with a pickled `Remote`.
SERVE: Final = "flowserve.backends.worker.main:serve"
RUN_TASK: Final = "flowserve.backends.worker.main:run_task"
# The exit status of a process that lost its GPU, far from those that programs end with.
LOST_GPU: Final = 86
MESSAGE_BYTES_MAX: Final = 32 * 1024
# Of one error's text; at six bytes each still no longer than a message.
ERROR_CHARACTERS_MAX: Final = 4096
# Room for the one descriptor that a message may carry.
ANCILLARY_BYTES: Final = 64

# ---- server to worker process
# ATTACH segment, with a descriptor: memory that inputs will be in. Segment numbers are unique in a server: those that a
#   worker process creates begin at its own number << 32 (`Job.number`). Also between worker processes.
ATTACH: Final = 1
# RUN, with a text of its own: one batch. Also between worker processes, for a batch with a route.
RUN: Final = 2
# END: finalise the model and exit
END: Final = 3
# SPILLED segment offset nbytes: the position of a message that is too long for a datagram
SPILLED: Final = 4
# SHOW segment: send that SEGMENT again; the server had no free descriptor when it arrived
SHOW: Final = 5
# PEER number gone..., with a descriptor: the server's end of another process's socket, to hand batches on to that
#   process; the peers `gone` have ended
PEER: Final = 6
# ROUTE number peer wanted output... inputs (stage output)... gone...: batches with this route go on to that peer, which
#   computes those outputs; its inputs are those outputs of those stages. `wanted` and `inputs` are counts. The routes
#   `gone` are not used any more.
ROUTE: Final = 7
# CANCEL number: reply whether that batch was run here; if not, it must not be run any more
CANCEL: Final = 8
# GRANT number member count (segment offset)...: permits `count` more responses of that member of that batch; those that
#   are permitted from the beginning are sent before the batch. The blocks are free again.
GRANT: Final = 16
# WITHDRAW number member: its client has cancelled the request
WITHDRAW: Final = 17
# GOES_ON number (member earlier-number earlier-member)...: these members of the next batch were rescheduled earlier and
#   keep their senders; a member whose sender does not exist any more is treated as cancelled
GOES_ON: Final = 18

# ---- worker process to server
# READY, or BROKEN TEXT [kind, text]: the instance is open, or could not be opened
READY: Final = 1
BROKEN: Final = 2
# SEGMENT number, with a descriptor: memory that outputs will be in
SEGMENT: Final = 3
# DONE number PASSED kept gathered_ns computed_ns segment offset nbytes outputs...  TEXT {member: [kind, text] if it
#   failed, its parameters, or null if it is rescheduled}
#   PASSED: what the earlier stages of a route made; their count first
#   kept: whether the model still holds views of this batch's inputs; GONE follows when it has released them
#   outputs: for each output NOTHING, or
#     TOGETHER offset nbytes absent member... dimensions dim...    contiguous, without the absent members
#     APART, and for each member 0, or 1 offset nbytes dimensions dim...
#   offsets are relative to the block
DONE: Final = 4
# FAILED number PASSED kept TEXT [kind, text]: the whole batch failed
FAILED: Final = 5
# GONE number...: the model has released the inputs of these batches
GONE: Final = 6
# SPILLED_OUT segment offset nbytes: as SPILLED
SPILLED_OUT: Final = 7
# RETURNED number PASSED: a batch of a route was not run here: it was cancelled, or its inputs do not fit
RETURNED: Final = 15
# CANCELLED number PASSED: the reply to CANCEL: what the batch made here, if it was run (one stage or none)
CANCELLED: Final = 19
# ... from a decoupled model, at any time; its DONE has NOTHING for every output
# ANSWER number member infer_ns output_ns rows segment offset nbytes outputs..., and TEXT parameters if there are any:
#   one response; uses up one that GRANT permitted
ANSWER: Final = 16
# OVER number member empty, and TEXT [kind, text] if it failed: there are no more responses
OVER: Final = 17
# WAITS number member inside: a thread waits for a GRANT; inside: the thread that runs the batch
WAITS: Final = 18

# CALLS, with a descriptor: a socket for the model's calls of other models. Messages of the worker process on it:
CALLS: Final = 8
# SEGMENT as above, for inputs of calls, and
# CALL number is_stream batch segment offset nbytes count, and for each input: type offset nbytes dimensions dim...
#   TEXT [model, version, names of inputs, names of outputs or null, id, priority, timeout in us, sequence id, start,
#   end, parameters]. Types are numbers in ModelConfig. batch: the batch that is executed and returns to the server
#   after this stage of its route, because its model calls another; else 0
CALL: Final = 9
# READ token: the response with that token was read
READ: Final = 10
# LEAVE number: the call is withdrawn
LEAVE: Final = 11
# SERVER_REQUEST number 0 0 segment offset nbytes count, and for each file: type offset nbytes dimensions dim...  TEXT
#   [what, arguments, names of files]: another request to the server (backends/base.py). The file of a metric is the
#   memory in which it is counted from then on.
SERVER_REQUEST: Final = 13
# DROP family: its metrics are not shown any more
DROP: Final = 14
# ... and messages of the server on it, by `marshal`: (ATTACH, segment number) with a descriptor, and
# (SERVER_REPLY, number, free blocks, [kind, text] or None, answer): the answer to an SERVER_REQUEST
SERVER_REPLY: Final = 13
# (RESULT, number, is last, free blocks, token or 0, [kind, text] or None, columns or None): a response to a CALL
#   columns: (name, type, shape, bytes or (segment, offset, nbytes)) of each output
#   free blocks: (segment, offset) of inputs of calls that the server does not read any more
RESULT: Final = 12

# The fields of a `Request` that are sent with it, in this order: all but its tensors, and its outputs, since a step has
# its own (`wanted`).
FACTS: Final = (
    "id",
    "priority",
    "timeout_us",
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "parameters",
)
request_facts: Final = attrgetter(*FACTS)
PLAIN_FACTS: Final = request_facts(Request({}))


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker process is to be, as it is pickled to the process at its start: `remote` makes the instance, the
    rest is what that takes and gives. `number` is the process's own among all of a server.
    """

    model: str
    instance: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batches: bool
    remote: Remote
    decoupled: bool = False
    number: int = 0


NOTHING: Final = 0
TOGETHER: Final = 1
APART: Final = 2

_FIRST: Final = struct.Struct("<Q")
_STRUCTS: Final = [struct.Struct(f"<{n}Q") for n in range(256)]
_KINDS: Final[Mapping[str, type[FlowserveError]]] = {
    one.kind: one
    for one in (
        Invalid,
        AlreadyExists,
        TooLarge,
        NotFound,
        Unavailable,
        Unsupported,
        Cancelled,
        ModelFailed,
    )
}


def pack(kind: int, words: Sequence[int], text: Any = None) -> bytes:
    """A message. `text` is any value that JSON can represent."""
    count = len(words) + 1
    form = _STRUCTS[count] if count < len(_STRUCTS) else struct.Struct(f"<{count}Q")
    packed = form.pack(kind | count << 8, *words)
    return packed if text is None else packed + json.dumps(text).encode()


def unpack(message: bytes) -> tuple[int, tuple[int, ...], bytes]:
    """A message: its kind, its words with the head first, its text. Raises `struct.error` if it is too short."""
    head = _FIRST.unpack_from(message)[0]
    count = head >> 8
    if count * 8 > len(message):
        raise struct.error(f"a message of {len(message)} bytes announces {count} words")
    form = _STRUCTS[count] if count < len(_STRUCTS) else struct.Struct(f"<{count}Q")
    return head & 255, form.unpack_from(message), message[count * 8 :]


def encode_error(error: FlowserveError) -> list[str]:
    """An error as the TEXT of a message."""
    return [error.kind, str(error)[:ERROR_CHARACTERS_MAX]]


def decode_error(text: Any) -> FlowserveError:
    """The error whose `encode_error` a worker process sent. For any other value, an error that shows the value."""
    if isinstance(text, list) and len(text) == 2 and isinstance(text[1], str):
        return _KINDS.get(text[0] if isinstance(text[0], str) else "", ModelFailed)(text[1])
    return ModelFailed(f"a model's process reported a failure in a form that is none: {str(text)[:200]}")


def parse_result(message: bytes) -> Any:
    """The result that `main.run_task` sent. Raises the error of its function, ValueError for an incomplete message."""
    result = json.loads(message)
    if not isinstance(result, dict) or not result.keys() & {"answer", "error"}:
        raise ValueError("neither an answer nor an error")
    if "error" not in result:
        return result["answer"]
    error = decode_error(result["error"])
    place = result.get("place")
    if isinstance(place, list) and [*map(type, place)] == [str, int]:
        error.place = Place(place[0], place[1], 1)
    raise error


def descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came with a message."""
    fds = array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


# Where a column is: the place (segment, offset, bytes, shape) of one tensor of all members; a list with a place, or
# None, for each member; or None. The segment is 0 where there are no bytes.
ColumnPlace = Any
_MARSHAL_VERSION = 2
RUN_HEAD = pack(RUN, ())


class Stage(NamedTuple):
    """What a stage of a route made, as the later processes and the server receive it: the times, the block, and for
    each output its offset there, its bytes and its shape. `kept`: the model keeps inputs.
    """

    kept: int
    gathered_ns: int
    computed_ns: int
    segment: int
    offset: int
    outputs: Sequence[tuple[int, int, tuple[int, ...]]]


# Sent to a process with its next batch: blocks of its own that are free, and attached memory that has ended.
MemoryUpdate = tuple[Sequence[BlockAddress], Sequence[int]]


class RunMessage(NamedTuple):
    """One batch. `columns[i]` is the place of input i; `wanted` has the indices of the outputs that each member
    requests, or one entry if all request the same. `update` is for the reader, `later_updates` for the stages after it.
    `facts`: the `request_facts` of each member, None if all are plain. `contexts`: the trace contexts of the members,
    by stage.
    """

    number: int
    rows: list[int]
    columns: Sequence[ColumnPlace]
    wanted: Sequence[tuple[int, ...]]
    update: MemoryUpdate
    facts: Sequence[Any] | None
    contexts: Sequence[Sequence[str]]
    route: int
    later_updates: Sequence[MemoryUpdate]
    passed: Sequence[Stage]


# Without the call of Python that a constructor is.
make_stage: Callable[[Sequence[Any]], Stage] = partial(tuple.__new__, Stage)
_make_message: Callable[[Sequence[Any]], RunMessage] = partial(tuple.__new__, RunMessage)


def encode_run(message: Sequence[Any]) -> bytes:
    """The message of the batch that a `RunMessage` with these fields describes. All sequences are lists or tuples.
    Raises Internal if a fact of a request is no text, number or boolean.
    """
    *fields, passed = message
    try:
        return RUN_HEAD + marshal.dumps((*fields, [*map(tuple, passed)]), _MARSHAL_VERSION)
    except ValueError:
        pass  # raised in here, the error would hold these frames, and the batch, by its context
    raise Internal("a request holds a parameter that is no text, number or boolean")


def decode_run(message: bytes) -> RunMessage:
    """Read a RUN message."""
    *fields, stages = marshal.loads(message[len(RUN_HEAD) :])
    return _make_message((*fields, [*map(make_stage, stages)]))


def begin_reply(number: int, passed: Sequence[Stage]) -> list[int]:
    """The first words of a message to the server about a batch: its number, and PASSED."""
    words = [number, len(passed)]
    for stage in passed:
        words += (*stage[:5], len(stage.outputs))
        for start, nbytes, shape in stage.outputs:
            words += (start, nbytes, len(shape), *shape)
    return words


def read_passed(words: Sequence[int], at: int) -> tuple[list[Stage], int]:
    """PASSED, which is at `at`, and where it ends. Raises IndexError."""
    count = words[at]
    at += 1
    passed = []
    for _ in range(count):
        kept, gathered_ns, computed_ns, segment, offset, outputs = words[at : at + 6]
        at += 6
        made = []
        for _ in range(outputs):
            end = at + 3 + words[at + 2]
            made.append((words[at], words[at + 1], tuple(words[at + 3 : end])))
            at = end
        passed.append(make_stage((kept, gathered_ns, computed_ns, segment, offset, made)))
    return passed, at
