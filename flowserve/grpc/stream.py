"""One ModelStreamInfer: requests come, answers go, each in its time.

Decided here: that answers of deployments that answer once leave in the order of their requests, that others' leave as
they come, but those of one sequence in the order of its requests, what marks a request's last answer, and that a
request that fails says so and ends nothing (unless the client asked for that by the header `triton_grpc_error`).
Everything here runs in grpcio's loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from flowserve.errors import FlowserveError, Unavailable
from flowserve.grpc.calls import STOPPING, STREAMED, Call, Calls, Outcome, broken
from flowserve.grpc.decode import Asked
from flowserve.grpc.encode import in_stream, nothing_more, stream_error
from flowserve.grpc.reader import Incoming

IN_FLIGHT_MAX: Final = 1024  # of one stream; what a client sends beyond waits unread

Whole = Callable[[Incoming], Asked]
Answer = bytes | FlowserveError
SequenceKey = tuple[tuple[str, str], int | str]  # its model and version, and its id


class _Member:
    """One request of a stream. `answer` is its only one, once it is there and where there is one. `sequence` names the
    one it belongs to.
    """

    __slots__ = ("answer", "call", "id", "is_settled", "sequence", "target")

    def __init__(self, message: Incoming) -> None:
        self.id = message.asked.request.id
        self.target = message.target
        self.call: Call | None = None
        self.sequence: SequenceKey | None = None
        self.is_settled = False
        self.answer: Answer | None = None


class Stream:
    """`trace_context`: in which its caller traces all of its requests. `ends_on_error`: the first request that fails
    ends the stream with its status.
    """

    def __init__(self, calls: Calls, whole: Whole, trace_context: str = "", *, ends_on_error: bool = False) -> None:
        self._calls = calls
        self._whole = whole
        self._trace_context = trace_context
        self._ends_on_error = ends_on_error
        self._room = asyncio.Semaphore(IN_FLIGHT_MAX)
        self._order: deque[_Member] = deque()
        self._members: set[_Member] = set()
        self._sequences: dict[SequenceKey, Call] = {}  # of each, the last request that is under way
        # What is to be written, and who is told then.
        self._outbox: asyncio.Queue[tuple[Answer | None, Callable[[], None]]] = asyncio.Queue()
        self._is_read = False
        self._is_cut = False
        self._is_over = False

    async def run(self, context: Any, stopping: asyncio.Event) -> None:
        """Until the client has said everything and was answered, or the server is `stopping` and those who asked
        before were answered. Raises the error that ends it.
        """
        ended: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read_until(context, stopping))
                await self._write(context)
        except* FlowserveError as errors:
            ended = errors.exceptions[0]  # raised in here, Python before 3.11.4 would put it into a group again
        finally:
            self._let_go()
        if ended is not None:
            raise ended from None
        if self._is_cut:
            raise Unavailable(STOPPING)

    def _let_go(self) -> None:
        """Nobody is written to any more. Errors that ended the stream, and what is still on its way to it, may hold the
        stream for long; with its requests they would hold the models that these are for.
        """
        self._is_over = True
        for member in self._members:
            if member.call is not None:
                member.call.leave()
                member.call.close()
                member.call = None
        self._members.clear()
        self._order.clear()
        self._sequences.clear()
        self._outbox = asyncio.Queue()

    # ------------------------------------------------------------------ in

    async def _read_until(self, context: Any, stopping: asyncio.Event) -> None:
        reading = asyncio.create_task(self._read(context))
        stopped = asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait((reading, stopped), return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()  # raises what was wrong
        finally:
            self._is_cut = not reading.done()
            for task in (reading, stopped):
                task.cancel()
        self._is_read = True
        self._end_if_done()

    async def _read(self, context: Any) -> None:
        """A client that breaks off in the middle cancels the whole call, this included."""
        while isinstance(message := await context.read(), Incoming):
            await self._room.acquire()
            self._begin(message)
        if isinstance(message, FlowserveError):
            raise message

    def _begin(self, message: Incoming) -> None:
        member = _Member(message)
        self._members.add(member)
        self._order.append(member)
        try:
            asked = self._whole(message)
        except FlowserveError as error:
            self._settle(member, error)
            return
        call = member.call = Call(self._calls, member.target, asked, self._trace_context)
        before = None
        if asked.request.sequence_id:
            member.sequence = member.target, asked.request.sequence_id
            before = self._sequences.get(member.sequence)
            self._sequences[member.sequence] = call
        call.begin(partial(self._settle, member), partial(self._one, member), before)

    # ------------------------------------------------------------------ out

    def _settle(self, member: _Member, outcome: Outcome) -> None:
        """The only outcome is there, or it is known that there are many. Those before it in the order go first."""
        if self._is_over:
            return
        member.is_settled = True
        if outcome is not STREAMED:
            member.answer = self._answer(member, outcome, is_final=True)
        while self._order and self._order[0].is_settled:
            first = self._order.popleft()
            if first.answer is not None:
                self._outbox.put_nowait((first.answer, partial(self._over, first)))

    def _one(self, member: _Member, outcome: Outcome) -> None:
        """One of many answers, or what ended them: None, or an error."""
        if self._is_over:
            return
        assert member.call is not None  # it told us
        if outcome is None and not member.call.asked.wants_final:
            self._outbox.put_nowait((None, partial(self._over, member)))
        elif outcome is None:
            last = nothing_more(member.target[0], member.call.version, member.id)
            self._outbox.put_nowait((in_stream(last), partial(self._over, member)))
        elif isinstance(outcome, FlowserveError):
            self._outbox.put_nowait((self._answer(member, outcome), partial(self._over, member)))
        else:
            self._outbox.put_nowait((self._answer(member, outcome), partial(self._taken, member)))

    def _answer(self, member: _Member, outcome: Outcome, *, is_final: bool = False) -> Answer:
        if not isinstance(outcome, FlowserveError):
            assert member.call is not None  # it told us
            try:
                return in_stream(member.call.encode(outcome, is_final=is_final))
            except FlowserveError as refusal:
                outcome = refusal
            except Exception as mistake:
                outcome = broken(mistake)
        if self._ends_on_error:
            alone: FlowserveError = outcome.with_traceback(None)  # its frames hold the request
            return alone
        return stream_error(outcome, member.id)

    @staticmethod
    def _taken(member: _Member) -> None:
        assert member.call is not None  # its end comes later
        member.call.taken()

    def _over(self, member: _Member) -> None:
        if member.call is not None:
            member.call.close()
        if member.sequence is not None and self._sequences.get(member.sequence) is member.call:
            del self._sequences[member.sequence]
        member.call = None
        self._members.discard(member)
        self._room.release()
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._is_read and not self._members:
            self._outbox.put_nowait(_END)

    async def _write(self, context: Any) -> None:
        while (item := await self._outbox.get()) is not _END:
            answer, told = item
            if isinstance(answer, FlowserveError):
                raise answer
            if answer is not None:
                await context.write(answer)
            told()


_END: Final[tuple[None, Callable[[], None]]] = (None, lambda: None)
