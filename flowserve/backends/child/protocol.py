"""What the server and a model's process say to each other.

Decided here: the messages, and that they are trusted in one direction only. Both travel as datagrams of at most
`MESSAGE_BYTES_MAX`; tensors never do, they lie in shared memory (memory/arena.py) and messages say where. A message
that is longer lies in shared memory itself, and a `SPILLED` one says where.

* The server's are tuples, by `marshal`: the fastest way to a handful of integers, and unsafe to read from strangers.
* A child runs other people's code, so what it says is unsigned 64-bit numbers, and JSON after them where text is
  needed: nothing in it can do more than be wrong, and whoever reads it checks every number.

Numbers 16 to 31 are for what a decoupled model and the server say to each other while it runs.
"""

from __future__ import annotations

import json
import socket
import struct
from array import array
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

from flowserve.errors import (
    AlreadyExists,
    Cancelled,
    FlowserveError,
    Invalid,
    ModelFailed,
    NotFound,
    TooLarge,
    Unavailable,
    Unsupported,
)
from flowserve.values import Request

# The exit status of a process that lost its GPU, far from those that programs end with.
LOST_GPU: Final = 86
MESSAGE_BYTES_MAX: Final = 32 * 1024
# Of one error's text; at six bytes each still no longer than a message.
ERROR_CHARACTERS_MAX: Final = 4096
# The last that writes down what it is given: later ones first look whether they have seen it, at three times the cost.
MARSHAL_VERSION: Final = 2
# Room for the one descriptor that a message may carry.
ANCILLARY_BYTES: Final = 64

# ---- from the server: (kind, ...)
# (ATTACH, segment number), with a descriptor: memory that inputs will lie in
ATTACH: Final = 1
# (RUN, number, come home, ended segments, columns, rows, requests, wanted, contexts, relay): one batch; the last two
#   may be left out
#   come home: (segment, offset) of the child's own blocks that nobody reads any more
#   ended segments: numbers of attached memory that nothing will lie in any more
#   columns[i]: None, or (segment, offset, nbytes, shape, rows of each member), or a list with None or
#     (segment, offset, nbytes, shape) for each member; segment 0 where there are no bytes
#   requests[m]: what `request_facts` says of a request, or None where that is `PLAIN_FACTS` for all of them
#   wanted[m]: the outputs asked of it; or these once, where all are asked for the same
#   contexts[m]: the `traceparent` of the span that it runs in, or ""; None where nobody is traced
#   relay: None, or (path, passed, places, news): the batch is handed on along a PATH, as a RUN of the same number that
#     comes to the next process as if from the server, and only the last one answers
#       passed: of each process so far kept, gathered_ns, computed_ns, segment, offset, as in its DONE
#       places[i][j]: where the i-th process laid its j-th output, as columns say it
#       news: of each process that follows (come home, ended segments)
RUN: Final = 2
# (END,): finalise and leave
END: Final = 3
# (SPILLED, segment, offset, nbytes): the message lies there
SPILLED: Final = 4
# (PEER, number, gone), with a descriptor: the server's end of another process's socket, to hand batches on to it
#   gone: numbers of such that are no more
PEER: Final = 32
# (PATH, number, names, peer, inputs, wanted, gone): where relays go on from here
#   names: for each segment of the child's own the number that others know it by
#   inputs: of the next process; (i, j) is what the i-th process of the relay made as its j-th output
#   wanted: the outputs that the next process is asked for
#   gone: numbers of paths that no relay takes any more
PATH: Final = 36
# (FENCE, number): say whether that batch of a relay has come by here; if not, it no longer may
FENCE: Final = 34
# (RECALL, number): nobody reads what was made of it
RECALL: Final = 35
# (SHOW, number): send that SEGMENT once more; the server could take no descriptor when it came
SHOW: Final = 37
# ... to a decoupled model, at any time
# (GRANT, number, member, count, come home): so many more answers may be sent to that member of that batch; before the
#   batch itself for those it may send from the beginning
GRANT: Final = 16
# (WITHDRAW, number, member): nobody wants its answers any more
WITHDRAW: Final = 17
# (GOES_ON, number, [(member, earlier number, member there)...]): those members of the batch that comes next were given
#   back, and have the senders that they had; where there is no such sender (any more), nobody wants answers
GOES_ON: Final = 18

# ---- from a child: 64-bit numbers, the first of them kind and count; a `TEXT` after them is JSON to the message's end
# READY, or BROKEN TEXT [kind, text]: the instance is open, or is not
READY: Final = 1
BROKEN: Final = 2
# SEGMENT number, with a descriptor: memory that outputs will lie in
SEGMENT: Final = 3
# DONE number kept gathered_ns computed_ns segment offset nbytes outputs...  TEXT {member: [kind, text] or parameters,
#   or null where it is to be run again}
#   kept: whether the model still holds views of this batch's inputs; GONE follows when it does not
#   outputs: for each output NOTHING, or
#     TOGETHER offset nbytes absent member... dimensions dim...    members side by side, those that are absent left out
#     APART, and for each member 0, or 1 offset nbytes dimensions dim...
#   offsets count from the block
DONE: Final = 4
# FAILED number kept TEXT [kind, text]: the whole batch
FAILED: Final = 5
# GONE number...: of those batches no view is left
GONE: Final = 6
# SPILLED_OUT segment offset nbytes: the message lies there
SPILLED_OUT: Final = 7
# RELAYED number passed...: a relay is over, and after the words comes the DONE or FAILED of the process that says so,
#   unless it was fenced off. What it passed before was answered as usual (usual.py).
RELAYED: Final = 32
# FENCED number seen
FENCED: Final = 33
# ... from a decoupled model, whose DONE has NOTHING of every output, at any time
# ANSWER number member infer_ns output_ns rows segment offset nbytes outputs..., and TEXT parameters where there are
#   some: one answer, in exchange for what one GRANT counted
ANSWER: Final = 16
# OVER number member empty, and TEXT [kind, text] where it failed: no more answers
OVER: Final = 17
# WAITS number member inside: a thread waits until it may send; inside: the one that runs the batch
WAITS: Final = 18

# CALLS, with a descriptor: a socket for the calls that the model makes of others. It sends and gets there:
CALLS: Final = 8
# SEGMENT number, with a descriptor: memory that inputs of calls will lie in
# CALL number is_stream segment offset nbytes count, and for each input: type offset nbytes dimensions dim...  TEXT
#   [model, version, names of inputs, names of outputs or null, id, priority, timeout in us, sequence id, start, end,
#   parameters]. Types are numbers in ModelConfig.
CALL: Final = 9
# READ token: what came with that token was read
READ: Final = 10
# LEAVE number: nobody waits for that call any more
LEAVE: Final = 11
# ASK number 0 segment offset nbytes count, and for each file: type offset nbytes dimensions dim...  TEXT
#   [what, arguments, names of files]: something else that the model asks of the server (backends/base.py). The file of
#   a metric is what it is counted in, from then on.
ASK: Final = 13
# DROP family: its metrics are no more
DROP: Final = 14
# ... and from the server there, by `marshal`: (ATTACH, segment number) with a descriptor, and
# (TOLD, number, come home, [kind, text] or None, answer): what was asked
TOLD: Final = 13
# (RESULT, number, is last, come home, token or 0, [kind, text] or None, columns or None): an answer
#   columns: (name, type, shape, bytes or (segment, offset, nbytes)) of each output
#   come home: (segment, offset) of inputs of calls that nobody reads any more
RESULT: Final = 12

# What of a request travels with it, in this order: `Request`'s fields but its tensors, and but its outputs, since
# `wanted` says what a step is asked for.
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


def are_plain(requests: Sequence[Request]) -> bool:
    """Whether these say nothing of themselves: their `request_facts` are all `PLAIN_FACTS`, or mean the same. Nearly
    all are, and each step of every request is looked at: attributes one by one cost a third of what tuples of them do.
    """
    for one in requests:
        if one.id or one.parameters or one.priority or one.timeout_us:
            return False
        if one.sequence_id or one.sequence_start or one.sequence_end:
            return False
    return True


NOTHING: Final = 0
TOGETHER: Final = 1
APART: Final = 2

# Of each process that a relay has passed.
PASSED_WORDS: Final = 5
# What comes before the outputs of a DONE.
DONE_HEAD: Final = struct.Struct("<8Q")
_FIRST: Final = struct.Struct("<Q")
_STRUCTS: Final = [struct.Struct(f"<{n}Q") for n in range(64)]
_KINDS: Final[Mapping[str, type[FlowserveError]]] = {
    one.kind: one
    for one in (Invalid, AlreadyExists, TooLarge, NotFound, Unavailable, Unsupported, Cancelled, ModelFailed)
}


def pack(kind: int, words: Sequence[int], text: Any = None) -> bytes:
    """A child's message. `text` is anything that JSON can say."""
    count = len(words) + 1
    packed = _struct(count).pack(kind | count << 8, *words)
    return packed if text is None else packed + json.dumps(text).encode()


def unpack(message: bytes) -> tuple[int, tuple[int, ...], bytes]:
    """A child's message: its kind, its words (of which the first is not for the reader), its text. Raises
    `struct.error` where it ends too early.
    """
    head = _FIRST.unpack_from(message)[0]
    count = head >> 8
    if count * 8 > len(message):
        raise struct.error(f"a message of {len(message)} bytes announces {count} words")
    return head & 255, _struct(count).unpack_from(message), message[count * 8 :]


def said(error: FlowserveError) -> list[str]:
    """An error as a `TEXT` of one."""
    return [error.kind, str(error)[:ERROR_CHARACTERS_MAX]]


def heard(text: Any) -> FlowserveError:
    """The error that a child reported. What is no such report is an error all the same."""
    if isinstance(text, list) and len(text) == 2 and isinstance(text[1], str):
        return _KINDS.get(text[0] if isinstance(text[0], str) else "", ModelFailed)(text[1])
    return ModelFailed(f"a model's process reported a failure in a form that is none: {str(text)[:200]}")


def descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came with a message."""
    fds = array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def _struct(count: int) -> struct.Struct:
    return _STRUCTS[count] if count < len(_STRUCTS) else struct.Struct(f"<{count}Q")
