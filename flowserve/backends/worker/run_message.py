"""A batch as it is sent to a worker process: the RUN message.

Decides how a batch's inputs, requests and route are written, and how they are read again: by `marshal`, in its oldest
version, which every Python reads. The server writes the message for the first stage of a route, each worker process the
one for the next stage. The outputs of stages are also sent to the server, which trusts no worker process: as numbers
(PASSED in protocol.py), each of which it checks:

  PASSED    the count of stages, then for each
            kept gathered_ns computed_ns segment offset outputs (offset nbytes dimensions dim...)...

Does not know memory or models. Called by ipc/encoder.py and driver.py.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from flowserve.backends.worker.protocol import RUN, pack
from flowserve.memory.arena import BlockAddress

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


class News(NamedTuple):
    """Sent to a process with its next batch: blocks of its own that are free, and attached memory that has ended."""

    homes: Sequence[BlockAddress] = ()
    ended: Sequence[int] = ()


# Without the call of Python that a constructor is.
_stage: Callable[[Sequence[Any]], Stage] = partial(tuple.__new__, Stage)
_news: Callable[[Sequence[Any]], News] = partial(tuple.__new__, News)


class RunMessage:
    """One batch. `columns[i]` is the place of input i; `wanted` has the indices of the outputs that each member
    requests, or one entry if all request the same. `news` is for the reader, `later_news` for the stages after it.
    `facts`: the `request_facts` of each member, None if all are plain. `contexts`: the trace contexts of the members,
    by stage.
    """

    __slots__ = ("columns", "contexts", "facts", "later_news", "news", "number", "passed", "route", "rows", "wanted")

    def __init__(
        self,
        number: int,
        rows: list[int],
        columns: Sequence[ColumnPlace],
        wanted: Sequence[Sequence[int]],
        news: News,
        facts: Sequence[Any] | None = None,
        contexts: Sequence[Sequence[str]] = (),
        route: int = 0,
        later_news: Sequence[News] = (),
        passed: Sequence[Stage] = (),
    ) -> None:
        self.number = number
        self.rows = rows
        self.columns = columns
        self.wanted = wanted
        self.news = news
        self.facts = facts
        self.contexts = contexts
        self.route = route
        self.later_news = later_news
        self.passed = passed

    def encode(self) -> bytes:
        """The message. Raises ValueError if a fact of a request is no text, number or boolean."""
        later_news = [*map(tuple, self.later_news)] if self.later_news else ()
        passed = [*map(tuple, self.passed)] if self.passed else ()
        columns, news = self.columns, (self.news.homes, self.news.ended)
        batch: Any = (
            self.number,
            self.rows,
            columns,
            self.wanted,
            news,
            self.facts,
            [*self.contexts],
            self.route,
            later_news,
            passed,
        )
        return RUN_HEAD + marshal.dumps(batch, _MARSHAL_VERSION)

    @classmethod
    def decode(cls, text: bytes) -> RunMessage:
        """Read the text of a RUN message."""
        number, rows, columns, wanted, news, facts, contexts, route, later_news, passed = marshal.loads(text)
        later = [*map(_news, later_news)]
        return cls(number, rows, columns, wanted, _news(news), facts, contexts, route, later, [*map(_stage, passed)])


def write_passed(words: list[int], passed: Sequence[Stage]) -> None:
    """Append PASSED to the words of a message to the server."""
    words.append(len(passed))
    for stage in passed:
        words += (*stage[:5], len(stage.outputs))
        for start, nbytes, shape in stage.outputs:
            words += (start, nbytes, len(shape), *shape)


def read_passed(words: Sequence[int], at: int) -> tuple[list[Stage], int]:
    """What `write_passed` wrote, and where it ends. Raises IndexError."""
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
        passed.append(_stage((kept, gathered_ns, computed_ns, segment, offset, made)))
    return passed, at
