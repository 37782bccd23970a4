"""The messages between the server and a worker process, and between the worker processes of a route.

Decides the form of each message. Messages are datagrams of at most `MESSAGE_BYTES_MAX` bytes; a longer one is written
to shared memory and announced by SPILLED. Tensors are always in shared memory (memory/arena.py), and messages have
their positions. A message is a sequence of unsigned 64-bit numbers, called words: the first has its kind and the number
of words, the others follow; then a text in UTF-8, if the message has one. Every list is preceded by its length or is
the rest of its message, and each decoder checks that it has read the whole message: any bytes are either decoded, or
raise `Garbled`. Nothing is decoded by `pickle` or `marshal`, except the arguments with which the server starts a
process (`Job`), which that process trusts as it trusts its own command line. A worker process runs third-party code, so
the server checks every number that it receives, and a worker process that receives an invalid message ends.

RUN has a batch's inputs, requests and route (`RunMessage`). The server writes the message for the first stage of a
route, each worker process the one for the next stage. The parts that a stage does not read (the updates for later
stages, PASSED, the facts of the requests) are handed on unchanged. The results of the stages are also sent to the
server, which trusts no worker process:

  PASSED    for each stage: kept gathered_ns computed_ns segment offset outputs (offset nbytes dimensions dim...)...

The kinds are in four tables at the end of this module, with their fields and their functions. Numbers 16 to 18 are for
messages between a decoupled model and the server during a batch.

Does not know memory or models. Callers: the modules of this package, and runtime/.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from operator import attrgetter
from typing import Any, Final, NamedTuple

from flowserve.backends.base import OutputNotes, Remote, Results
from flowserve.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    FlowserveError,
    Internal,
    Invalid,
    ModelFailed,
    ModelUnknown,
    NotFound,
    Place,
    Raised,
    TooLarge,
    Unavailable,
    Unsupported,
)
from flowserve.memory.arena import BlockAddress
from flowserve.values import Request, TensorSpec

# What a worker process runs: an instance, with a pickled `Job`; or one function, with a pickled `Remote`.
SERVE: Final = "flowserve.backends.worker.main:serve"
RUN_TASK: Final = "flowserve.backends.worker.main:run_task"
# The exit status of a process that lost its GPU, unlike usual statuses of programs.
LOST_GPU: Final = 86
MESSAGE_BYTES_MAX: Final = 32 * 1024
# Characters of one error's text; at six bytes each, they still fit into a message.
ERROR_CHARACTERS_MAX: Final = 4096
# Outputs of a called model up to this size are sent in the message.
INLINE_BYTES_MAX: Final = 8 * 1024
# Blocks of inputs of calls that one message gives back: each call takes one, so that their number does not grow.
HOME_BLOCKS_MAX: Final = 64
# Room for the one descriptor that a message may carry.
ANCILLARY_BYTES: Final = 64
# A descriptor that is received is closed on exec. A number: an operation on the enumeration's member costs 0.5 us.
CLOSE_ON_EXEC: Final = int(socket.MSG_CMSG_CLOEXEC)

# The kinds of messages; what their words are is in the tables at the end of this module. To an instance:
ATTACH: Final = 1
RUN: Final = 2
END: Final = 3
SPILLED: Final = 4
SHOW: Final = 5
PEER: Final = 6
ROUTE: Final = 7
CANCEL: Final = 8
RELEASE: Final = 9
GRANT: Final = 16
WITHDRAW: Final = 17
GOES_ON: Final = 18
OF_STREAMS: Final = frozenset((GRANT, WITHDRAW, GOES_ON))

# From an instance:
READY: Final = 1
BROKEN: Final = 2
SEGMENT: Final = 3
DONE: Final = 4
FAILED: Final = 5
GONE: Final = 6
SPILLED_OUT: Final = 7
CALLS: Final = 8
NOT_RUN: Final = 15
ANSWER: Final = 16
OVER: Final = 17
WAITS: Final = 18
CANCELLED: Final = 19
READINESS: Final = 20
PASSED_AT: Final = 3  # where PASSED is in the replies to a batch; the number of its stages is the word before
STAGE_WORDS: Final = 6  # before the outputs, of a stage in PASSED and of DONE behind PASSED
ANSWER_OUTPUTS_AT: Final = 9
RAISED: Final = "raised"

# From a process that calls models, and to it:
CALL: Final = 9
READ: Final = 10
LEAVE: Final = 11
RESULT: Final = 12
SERVER_REQUEST: Final = 13
SERVER_REPLY: Final = 13
DROP: Final = 14

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


_NO_REMOTE: Final = Remote("", ())


@dataclass(frozen=True, slots=True)
class Job:
    """The job of an instance: its names and its tensors. For a worker process, to which it is pickled at its start,
    `remote` makes the instance, and `number` is unique among the processes of a server.
    """

    model: str
    instance: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batches: bool
    decoupled: bool = False
    remote: Remote = _NO_REMOTE
    number: int = 0


class Garbled(ValueError):
    """An invalid message."""


NOTHING: Final = 0
TOGETHER: Final = 1
APART: Final = 2

_WORD_END: Final = 1 << 64


class _Forms(dict[int, struct.Struct]):
    """The struct of a message by its number of words; cached for the lengths of nearly all messages."""

    def __missing__(self, count: int) -> struct.Struct:
        form = struct.Struct(f"<{count}Q")
        if count < 256:
            self[count] = form
        return form


_FORMS: Final = _Forms()
_KINDS: Final[Mapping[str, type[FlowserveError]]] = {
    one.kind: one
    for one in (
        Invalid,
        AlreadyExists,
        TooLarge,
        NotFound,
        Unavailable,
        DeadlineExceeded,
        Unsupported,
        Cancelled,
        ModelFailed,
        ModelUnknown,
    )
}


def pack(kind: int, words: Sequence[int], text: Any = None) -> bytes:
    """A message. `text` is any value that JSON can represent."""
    count = len(words) + 1
    packed = _FORMS[count].pack(kind | count << 8, *words)
    return packed if text is None else packed + json.dumps(text).encode()


def repack(kind: int, words: Sequence[int], text: bytes) -> bytes:
    """A message whose text is encoded already."""
    return pack(kind, words) + text


def unpack(message: bytes) -> tuple[int, tuple[int, ...], bytes]:
    """A message: its kind, its words with the head first, its text. Raises Garbled if it is too short."""
    count = int.from_bytes(message[1:8], "little")
    if not 8 <= count * 8 <= len(message):
        raise Garbled(f"a message of {len(message)} bytes announces {count} words")
    return message[0], _FORMS[count].unpack_from(message), message[count * 8 :]


def encode_error(error: FlowserveError) -> list[str]:
    """An error as the TEXT of a message, with the traceback of the model's exception unless it was sent before, and the
    place if it is known.
    """
    text = [error.kind, str(error)[:ERROR_CHARACTERS_MAX]]
    traceback = None if error.raised is None else error.raised.take()
    if (place := error.place) is not None:
        return [*text, traceback or "", place.file, str(place.line), str(place.column)]
    return text if traceback is None else [*text, traceback]


def decode_error(text: Any) -> FlowserveError:
    """The error whose `encode_error` a worker process sent. For any other value, an error that shows the value."""
    if isinstance(text, list) and len(text) in (2, 3, 6) and all(isinstance(one, str) for one in text[1:]):
        error = _KINDS.get(text[0] if isinstance(text[0], str) else "", ModelFailed)(text[1])
        if len(text) == 3 or (len(text) == 6 and text[2]):
            error.raised = Raised(text[2])
        if len(text) == 6 and text[4].isdecimal() and text[5].isdecimal():
            error.place = Place(text[3], int(text[4][:9]), int(text[5][:9]))
        return error
    return ModelFailed(f"a model's process reported a failure in a form that is none: {str(text)[:200]}")


def decode_done_text(text: bytes, outputs: Collection[str], members: int) -> tuple[dict[str, Any], OutputNotes | None]:
    """The TEXT of a DONE that has one, for a batch with this number of `members`: the parts that `decode_members`
    reads, and the notes about `outputs`. Raises ValueError, TypeError or AttributeError for a text of another form.
    """
    told: dict[str, Any] = json.loads(text)
    return told, decode_notes(told.pop("", None), outputs, members)


def decode_members(told: dict[str, Any], results: Results, members: int) -> None:
    """Set the parameters, errors and rescheduled members of a batch from the TEXT of DONE, without its notes. Raises
    Garbled.
    """
    if (raised := told.pop(RAISED, None)) is not None:
        results.raised = decode_error(raised)
    by_member = {int(m): one for m, one in told.items()}
    if not by_member.keys() <= set(range(members)):
        raise Garbled("a reply about a member that does not exist")
    results.parameters = {m: one for m, one in by_member.items() if isinstance(one, dict)}
    results.rescheduled = [m for m, one in by_member.items() if one is None]
    results.errors = {
        m: results.raised if one == RAISED and results.raised is not None else decode_error(one)
        for m, one in by_member.items()
        if not (one is None or isinstance(one, dict))
    }


def encode_notes(notes: OutputNotes) -> list[Any]:
    """Notes as a part of the TEXT of a message."""
    return [notes.unlike, notes.left_out, notes.orders]


def decode_notes(text: Any, outputs: Collection[str], members: int) -> OutputNotes | None:
    """The notes whose `encode_notes` a worker process sent about `outputs`, for a batch with this number of `members`;
    None for none. Raises Garbled.
    """
    if text is None:
        return None
    try:
        unlike, left_out, orders = text
        notes = OutputNotes(
            {name: str(why)[:ERROR_CHARACTERS_MAX] for name, why in unlike.items()},
            {name: min(max(int(count), 0), members) for name, count in left_out.items()},
            {int(m): tuple(map(str, names)) for m, names in orders.items()},
        )
    except (AttributeError, TypeError, ValueError):
        raise Garbled("notes about outputs that are none") from None
    if not {*notes.unlike, *notes.left_out} <= {*outputs}:
        raise Garbled("notes about an output that does not exist")
    return notes


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


def receive(sock: socket.socket, flags: int = 0) -> tuple[int, tuple[int, ...], bytes, list[int]] | None:
    """The next message of a socket about calls: its kind, words and text, and the descriptors that came with it, which
    the caller owns; none if they were lost for lack of room. None at the end. Raises BlockingIOError, and Garbled. The
    sockets of batches are read by loops of their own, because a call for each message costs them a microsecond.
    """
    try:
        packed, ancillary, _, _ = sock.recvmsg(MESSAGE_BYTES_MAX, ANCILLARY_BYTES, CLOSE_ON_EXEC | flags)
    except BlockingIOError:
        raise
    except OSError:
        return None
    fds = descriptors(ancillary) if ancillary else []
    try:
        return (*unpack(packed), fds) if packed else None
    except Garbled:
        for fd in fds:
            os.close(fd)
        raise


# The place of a column: (segment, offset, bytes, shape) of one tensor of all members; a list with such a place, or
# None, for each member; or None. The segment is 0 where there are no bytes.
ColumnPlace = Any


class Stage(NamedTuple):
    """The results of a stage of a route, as the server receives them: the times, the block, and for each output its
    offset there, its bytes and its shape. `kept`: the model keeps inputs.
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
    """One batch, as the process of one stage receives it. `stage`: the stages that it has passed. `columns[i]` is the
    place of input i; `wanted` has the indices of the outputs that each member requests, or one entry if all request the
    same. `update` is for this process. `later`, `passed`, `about` and `text` are the parts for later stages, the server
    and `decode_about`, as they are in the message.
    """

    number: int
    route: int
    stage: int
    rows: list[int]
    wanted: Sequence[tuple[int, ...]]
    update: MemoryUpdate
    columns: Sequence[ColumnPlace]
    later: Sequence[int]
    passed: Sequence[int]
    about: Sequence[int]
    text: bytes


# Faster than the constructor, which is a Python function.
make_stage: Callable[[Sequence[Any]], Stage] = partial(tuple.__new__, Stage)
_make_message: Callable[[Sequence[Any]], RunMessage] = partial(tuple.__new__, RunMessage)


def encode_run(
    number: int,
    route: int,
    stage: int,
    rows: Sequence[int],
    wanted: Sequence[Sequence[int]],
    updates: Sequence[int],
    columns: Sequence[ColumnPlace],
    passed: Sequence[int] = (),
    about: Sequence[int] = (),
    text: bytes = b"",
) -> bytes:
    """The RUN message of a batch. `updates` has the words of the updates of this stage and all later ones."""
    words = [
        RUN,
        number,
        route,
        stage,
        len(rows),
        len(wanted),
        len(updates),
        len(passed),
        len(about),
        len(columns),
        *rows,
    ]
    for outputs in wanted:
        words += (len(outputs), *outputs)
    words += updates
    words += passed
    words += about
    for column in columns:
        if column is None:
            words.append(NOTHING)
        elif type(column) is tuple:
            segment, offset, nbytes, shape = column
            words += (TOGETHER, segment, offset, nbytes, len(shape), *shape)
        else:
            words.append(APART)
            for one in column:
                if one is None:
                    words.append(0)
                else:
                    words += (1, *one[:3], len(one[3]), *one[3])
    count = len(words)
    words[0] |= count << 8
    return _FORMS[count].pack(*words) + text


def decode_run(words: Sequence[int], text: bytes) -> RunMessage:
    """Read the words and the text of a RUN message. Raises Garbled. `about` is not examined (`decode_about`)."""
    try:
        number, route, stage, members, sets, updates, passed, about, inputs = words[1:10]
        at = 10 + members
        rows = words[10:at]
        wanted = []
        for _ in range(sets):
            stop = at + 1 + words[at]
            wanted.append(words[at + 1 : stop])
            at = stop
        passed_at = at + updates
        blocks_at = at + 2
        ended_at = blocks_at + 2 * words[at]
        later_at = ended_at + words[at + 1]
        blocks: list[BlockAddress] = []
        if words[at]:
            blocks = [*zip(words[blocks_at:ended_at:2], words[blocks_at + 1 : ended_at : 2], strict=True)]
        about_at = passed_at + passed
        at = about_at + about
        columns: list[ColumnPlace] = []
        if later_at > passed_at:
            raise Garbled("an update that is cut off")
        for _ in range(inputs):
            form = words[at]
            at += 1
            if form == TOGETHER:
                stop = at + 4 + words[at + 3]
                columns.append((words[at], words[at + 1], words[at + 2], words[at + 4 : stop]))
                at = stop
            elif form == APART:
                places: list[Any] = []
                for _ in range(members):
                    if not words[at]:
                        places.append(None)
                        at += 1
                        continue
                    stop = at + 5 + words[at + 4]
                    places.append((words[at + 1], words[at + 2], words[at + 3], words[at + 5 : stop]))
                    at = stop
                columns.append(places)
            elif form == NOTHING:
                columns.append(None)
            else:
                raise Garbled(f"an input of an unknown form: {form}")
    except (IndexError, ValueError, OverflowError) as error:
        raise Garbled(f"a batch that is none: {error}") from None
    if at != len(words):
        raise Garbled("a batch that is cut off")
    update = blocks, words[ended_at:later_at]
    parts = words[later_at:passed_at], words[passed_at:about_at], words[about_at : about_at + about]
    return _make_message((number, route, stage, [*rows], wanted, update, columns, *parts, text))


_STARTS: Final = 1
_ENDS: Final = 2
_IS_TEXT: Final = 4  # the sequence id
_IS_LARGE: Final = 8  # the sequence id is a number that does not fit into a word


def encode_about(facts: Sequence[Sequence[Any]] | None, contexts: Sequence[Sequence[str]]) -> tuple[list[int], bytes]:
    """The facts of the members of a batch (`request_facts`; None if all are plain) and their trace contexts by stage,
    as words and a text:

      members has_facts stages  (priority timeout_us sequence flags)...  characters...

    The strings in the text, whose lengths are the last words: of all members their ids, their sequence ids where these
    are no words, and their parameters as JSON where they have any; then the contexts of each stage. Raises Internal for
    a value that is no text, number or boolean.
    """
    texts: list[str] = []
    words: list[int] = []
    members = len(facts or contexts[0])
    try:
        for _, priority, timeout_us, sequence, starts, ends, _ in facts or ():
            flags = (_STARTS if starts else 0) | (_ENDS if ends else 0)
            if type(sequence) is str:
                flags |= _IS_TEXT
            elif not 0 <= sequence < _WORD_END:
                flags |= _IS_LARGE
            if (priority | timeout_us) >> 64:
                raise ValueError("negative, or too large")
            words += (priority, timeout_us, 0 if flags & (_IS_TEXT | _IS_LARGE) else sequence, flags)
        if facts is not None:
            texts += [one[0] for one in facts]
            texts += [str(one[3]) if words[4 * m + 3] & (_IS_TEXT | _IS_LARGE) else "" for m, one in enumerate(facts)]
            texts += [json.dumps(dict(one[6])) if one[6] else "" for one in facts]
        for stage in contexts:
            texts += stage
        words = [members, facts is not None, len(contexts), *words, *map(len, texts)]
        return words, "".join(texts).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError):
        pass  # not raised here: its context would reference these frames, and the batch
    raise Internal("a request holds a parameter that is no text, number or boolean")


def decode_about(
    words: Sequence[int], text: bytes, members: int
) -> tuple[Sequence[Sequence[Any]] | None, Sequence[Sequence[str]]]:
    """The facts and contexts that `encode_about` wrote for a batch with this number of `members`. Raises Garbled."""
    try:
        count, has_facts, stages = words[:3]
        if count != members or has_facts > 1:
            raise Garbled("facts of other requests")
        at = 3 + 4 * members * has_facts
        lengths = words[at:]
        if len(lengths) != (3 * has_facts + stages) * members:
            raise Garbled("facts of other requests")
        string = text.decode("utf-8", "surrogatepass")
        texts = []
        start = 0
        for length in lengths:
            texts.append(string[start : start + length])
            start += length
        if start != len(string):
            raise Garbled("texts that are cut off")
        facts = None
        if has_facts:
            facts = [_facts(words[3 + 4 * m : 7 + 4 * m], texts[m : 3 * members : members]) for m in range(members)]
    except (ValueError, RecursionError) as error:
        raise Garbled(f"facts of requests that are none: {error}") from None
    first = 3 * members * has_facts
    return facts, [texts[at : at + members] for at in range(first, len(texts), members)] if members else []


def _facts(words: Sequence[int], texts: Sequence[str]) -> tuple[Any, ...]:
    priority, timeout_us, sequence, flags = words
    request_id, sequence_text, parameters_text = texts
    sequence_id: int | str = sequence
    if flags & _IS_TEXT:
        sequence_id = sequence_text
    elif flags & _IS_LARGE:
        sequence_id = int(sequence_text)
    parameters = json.loads(parameters_text) if parameters_text else {}
    if type(parameters) is not dict:
        raise Garbled("parameters that are no object")
    return request_id, priority, timeout_us, sequence_id, bool(flags & _STARTS), bool(flags & _ENDS), parameters


def encode_release(*, is_quiet: bool, blocks: Sequence[BlockAddress], ended: Sequence[int]) -> bytes:
    """A RELEASE message: `blocks` of the process's own are free, and the attached segments `ended` have ended."""
    return pack(RELEASE, [is_quiet, len(blocks), *chain.from_iterable(blocks), *ended])


def decode_release(words: Sequence[int]) -> tuple[bool, Sequence[BlockAddress], Sequence[int]]:
    """Read a RELEASE message: the arguments of `encode_release`. Raises Garbled."""
    if len(words) < 3 or len(words) < 3 + 2 * words[2]:
        raise Garbled("free memory that is cut off")
    ended_at = 3 + 2 * words[2]
    blocks = [*zip(words[3:ended_at:2], words[4:ended_at:2], strict=True)]
    return bool(words[1]), blocks, words[ended_at:]


class RouteHop(NamedTuple):
    """The next stage of a route: in `peer`, a process or an instance of the same one, which computes `outputs`; its
    inputs are outputs of earlier stages, each as (stage, output).
    """

    peer: int
    outputs: tuple[int, ...]
    inputs: Sequence[tuple[int, int]]


def decode_route(words: Sequence[int]) -> tuple[int, RouteHop, Sequence[int]]:
    """The number of the route in a ROUTE message, its next stage, and the routes that are no longer used. Raises
    IndexError.
    """
    number, peer, wanted = words[1:4]
    at = 4 + wanted
    outputs = tuple(words[4:at])
    count = words[at]
    at += 1
    inputs = [(words[k], words[k + 1]) for k in range(at, at + 2 * count, 2)]
    return number, RouteHop(peer, outputs, inputs), words[at + 2 * count :]


def encode_route(number: int, hop: RouteHop, gone: Sequence[int] = ()) -> bytes:
    """A ROUTE message."""
    read = chain.from_iterable(hop.inputs)
    return pack(ROUTE, [number, hop.peer, len(hop.outputs), *hop.outputs, len(hop.inputs), *read, *gone])


def read_passed(words: Sequence[int], at: int, count: int) -> tuple[list[Stage], int]:
    """The `count` stages of PASSED, which is at `at`, and where it ends. Raises Garbled."""
    passed = []
    try:
        for _ in range(count):
            kept, gathered_ns, computed_ns, segment, offset, outputs = words[at : at + STAGE_WORDS]
            at += STAGE_WORDS
            made = []
            for _ in range(outputs):
                end = at + 3 + words[at + 2]
                made.append((words[at], words[at + 1], words[at + 3 : end]))
                at = end
            passed.append(make_stage((kept, gathered_ns, computed_ns, segment, offset, made)))
    except (IndexError, ValueError, OverflowError) as error:
        raise Garbled(f"a stage that is none: {error}") from None
    if at > len(words):
        raise Garbled("a stage that is cut off")
    return passed, at


NO_PARAMETERS: Final[Mapping[str, Any]] = {}
# An output of a called model: its name, type, shape, and its bytes or their place (segment, offset, bytes).
ResultColumn = tuple[str, int, Sequence[int], "bytes | tuple[int, int, int]"]


def encode_result(
    number: int,
    is_last: bool,
    token: int,
    blocks: Sequence[BlockAddress],
    error: Sequence[str] | None,
    columns: Sequence[ResultColumn],
    parameters: Mapping[str, Any] = NO_PARAMETERS,
) -> bytes:
    """A RESULT message."""
    words = [number, is_last, token, len(blocks), *chain.from_iterable(blocks), len(columns)]
    inline: list[bytes] = []
    size = 0
    for _, dtype, shape, where in columns:
        if isinstance(where, bytes):
            words += (dtype, 0, size, len(where), len(shape), *shape)
            inline.append(where)
            size += len(where)
        else:
            words += (dtype, *where, len(shape), *shape)
    names = [column[0] for column in columns]
    return b"\n".join((pack(RESULT, words, [error, names, dict(parameters)]), b"".join(inline)))


def decode_result(
    words: Sequence[int], text: bytes
) -> tuple[int, bool, int, list[BlockAddress], Any, list[ResultColumn], dict[str, Any]]:
    """Read a RESULT message: the arguments of `encode_result`. Raises Garbled."""
    try:
        number, is_last, token, count = words[1:5]
        at = 5 + 2 * count
        blocks = [*zip(words[5:at:2], words[6:at:2], strict=True)]
        outputs = words[at]
        at += 1
        head, _, inline = text.partition(b"\n")  # JSON escapes line feeds
        error, names, parameters = json.loads(head)
        if not isinstance(parameters, dict):
            raise Garbled("parameters that are no object")
        if len(names) != outputs or {*map(type, names)} - {str}:
            raise Garbled("a result whose outputs have no names")
        columns: list[ResultColumn] = []
        for name in names:
            dtype, segment, offset, nbytes, dimensions = words[at : at + 5]
            stop = at + 5 + dimensions
            where = (segment, offset, nbytes) if segment else inline[offset : offset + nbytes]
            if len(where) != (3 if segment else nbytes):
                raise Garbled("an output that is cut off")
            columns.append((name, dtype, words[at + 5 : stop], where))
            at = stop
    except (IndexError, TypeError, ValueError, OverflowError, RecursionError) as fault:
        raise Garbled(f"a result that is none: {fault}") from None
    if at != len(words):
        raise Garbled("a result that is cut off")
    return number, bool(is_last), token, blocks, error, columns, parameters


def encode_server_reply(number: int, blocks: Sequence[BlockAddress], error: Sequence[str] | None, answer: Any) -> bytes:
    """A SERVER_REPLY message."""
    return pack(SERVER_REPLY, (number, *chain.from_iterable(blocks)), [error, answer])


def decode_server_reply(words: Sequence[int], text: bytes) -> tuple[int, list[BlockAddress], Any, Any]:
    """Read a SERVER_REPLY message: the arguments of `encode_server_reply`. Raises Garbled."""
    try:
        blocks = [*zip(words[2::2], words[3::2], strict=True)]
        error, answer = json.loads(text)
        return words[1], blocks, error, answer
    except (IndexError, TypeError, ValueError, RecursionError) as fault:
        raise Garbled(f"a reply that is none: {fault}") from None


class Form(NamedTuple):
    """The form of one kind of message. `fields`: the names of its words, in order; those in brackets repeat until its
    end, and "..." stands for lists that only its functions know. `text`: what its text is, "" for none. `encode` and
    `decode`: its functions, if it has lists within lists; every other kind is written by `pack` and read by
    `read_fields`.
    """

    name: str
    fields: str = ""
    text: str = ""
    encode: Callable[..., bytes] | None = None
    decode: Callable[..., Any] | None = None


# OUTPUTS: for each output NOTHING, or TOGETHER offset nbytes absent member... dimensions dim..., contiguous without the
# absent members; or APART, and for each member 0, or form offset nbytes dimensions dim..., where form is 1 for the
# configuration's data type, else 1 + the number of another one in ModelConfig. Offsets are relative to the block.
# COLUMNS: for each input NOTHING, or TOGETHER segment offset nbytes dimensions dim..., the place of one tensor of all
# members; or APART, and for each member 0, or 1 segment offset nbytes dimensions dim...  The segment is 0 where there
# are no bytes.

TO_INSTANCE: Final[Mapping[int, Form]] = {
    # With a descriptor: memory that inputs will be in. Segment numbers are unique in a server: those that a worker
    # process creates begin at its own number << 32 (`Job.number`). Also between worker processes.
    ATTACH: Form("ATTACH", "segment"),
    # One batch; also between worker processes, for a batch with a route. `stage` is the number of stages that it has
    # passed, `members` counts the rows, `sets` the lists of requested outputs (one if all members request the same),
    # the next three the words of these parts, and `inputs` the COLUMNS. For this stage and each later one, the updates
    # have the blocks of its process that are free again, and the attached memory that has ended.
    RUN: Form(
        "RUN",
        "number route stage members sets updates passed about inputs ... rows wanted updates PASSED about COLUMNS",
        "the strings of `about`",
        encode_run,
        decode_run,
    ),
    END: Form("END"),  # finalise the model, and exit
    SPILLED: Form("SPILLED", "segment offset nbytes"),  # the place of a message that is too long for a datagram
    # Send that SEGMENT again: the server had no free descriptor when it arrived.
    SHOW: Form("SHOW", "segment"),
    # With a descriptor: the server's end of another process's socket, to hand batches on to that process.
    PEER: Form("PEER", "number [gone]"),
    # Batches with this route go on to that peer, which computes those outputs of those inputs: (stage, output).
    ROUTE: Form("ROUTE", "number peer ... wanted inputs gone", "", encode_route, decode_route),
    CANCEL: Form("CANCEL", "number"),  # reply whether that batch was run here; if not, it must not be run any more
    # Release memory that was not used for a while. quiet: no batch came since the last RELEASE.
    RELEASE: Form("RELEASE", "quiet count ... blocks ended", "", encode_release, decode_release),
    # Permits `count` more responses of that member; those that are permitted from the beginning come before the batch.
    # The blocks are free again.
    GRANT: Form("GRANT", "number member count [segment offset]"),
    WITHDRAW: Form("WITHDRAW", "number member"),  # its client has cancelled the request
    # These members of the next batch were rescheduled earlier and keep their senders; a member whose sender does not
    # exist any more is treated as cancelled.
    GOES_ON: Form("GOES_ON", "number [member earlier-number earlier-member]"),
}
FROM_INSTANCE: Final[Mapping[int, Form]] = {
    READY: Form("READY", "[pure]"),  # the instance is open; an actor also says whether its model is pure
    BROKEN: Form("BROKEN", "", "the error"),
    SEGMENT: Form("SEGMENT", "number"),  # with a descriptor: memory that outputs will be in
    # kept: whether the model still holds views of this batch's inputs; GONE follows when it has released them.
    DONE: Form(
        "DONE",
        "number stages ... PASSED kept gathered_ns computed_ns segment offset nbytes OUTPUTS",
        "{member: its error if it failed, its parameters, or null if it is rescheduled; under '' the notes about the "
        "outputs, under RAISED what the model raised after it had responded to some members}",
        None,
        decode_done_text,
    ),
    FAILED: Form("FAILED", "number stages ... PASSED kept", "the error of the whole batch"),
    # A batch of a route was not run here: it was cancelled, or its inputs do not fit.
    NOT_RUN: Form("NOT_RUN", "number stages ... PASSED", "", None, read_passed),
    # The reply to CANCEL: the results of the batch here, if it was run (one stage or none).
    CANCELLED: Form("CANCELLED", "number stages ... PASSED", "", None, read_passed),
    GONE: Form("GONE", "[number]"),  # the model has released the inputs of these batches
    SPILLED_OUT: Form("SPILLED_OUT", "segment offset nbytes"),
    # One response of a decoupled model; uses up one that GRANT permitted. last: it carries the final flag.
    ANSWER: Form(
        "ANSWER",
        "number member last infer_ns output_ns segment offset nbytes ... OUTPUTS",
        "parameters, or [parameters, notes about the outputs], if there are any",
    ),
    # There are no more responses: an error, or the final flag came without a response.
    OVER: Form("OVER", "number member", "the error"),
    # A thread waits for a GRANT; inside: the thread that runs the batch.
    WAITS: Form("WAITS", "number member inside"),
    # With a descriptor: a socket for questions whether the model is ready (readiness.py), before READY.
    READINESS: Form("READINESS"),
    # With a descriptor: a socket for the model's calls of other models, in its process or in one that it has forked.
    CALLS: Form("CALLS", "is_fork"),
}
FROM_CALLER: Final[Mapping[int, Form]] = {
    SEGMENT: Form("SEGMENT", "number"),
    # batch: the batch that is executed and returns to the server after this stage of its route, because its model calls
    # another; else 0. Types are numbers in ModelConfig.
    CALL: Form(
        "CALL",
        "number is_stream batch segment offset nbytes count ... type offset nbytes dimensions dim",
        "[model, version, names of inputs, names of outputs or null, FACTS...]",
    ),
    READ: Form("READ", "token"),  # the response with that token was read
    # The call is withdrawn. is_answered: a last RESULT follows, if none was sent.
    LEAVE: Form("LEAVE", "number is_answered"),
    # Another request to the server (backends/base.py). The file of a metric is the memory in which it is counted.
    SERVER_REQUEST: Form(
        "SERVER_REQUEST",
        "number 0 0 segment offset nbytes count ... type offset nbytes dimensions dim",
        "[what, arguments, names of files]",
    ),
    DROP: Form("DROP", "family"),  # its metrics are not shown any more
}
TO_CALLER: Final[Mapping[int, Form]] = {
    ATTACH: Form("ATTACH", "segment"),
    # The blocks, of inputs of calls, are free again: the server does not read them any more.
    SERVER_REPLY: Form(
        "SERVER_REPLY",
        "number [segment offset]",
        "[the error or null, the answer]",
        encode_server_reply,
        decode_server_reply,
    ),
    # A response to a CALL. The bytes of outputs whose segment is 0 are behind a line feed in the text. `token` is 0
    # where no output is in a segment.
    RESULT: Form(
        "RESULT",
        "number is_last token blocks ... segment offset outputs type segment offset nbytes dimensions dim",
        "[the error or null, names, parameters]",
        encode_result,
        decode_result,
    ),
}


@lru_cache(None)
def _counts(fields: str) -> tuple[int, int]:
    """The words of a message before a group that repeats, and the words of that group; 0 for none."""
    fixed, _, group = fields.partition("[")
    return len(fixed.split()), len(group.rstrip("]").split())


def read_fields(table: Mapping[int, Form], kind: int, words: Sequence[int]) -> Sequence[int]:
    """The fields of a message without functions of its own. Raises Garbled for an unknown kind, and if it has other
    fields.
    """
    form = table.get(kind)
    if form is None or "..." in form.fields:
        raise Garbled(f"a message of kind {kind}")
    fixed, group = _counts(form.fields)
    more = len(words) - 1 - fixed
    if more < 0 or (more % group if group else more):
        raise Garbled(f"a message {form.name} of {len(words) - 1} words")
    return words[1:]
