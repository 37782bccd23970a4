"""A model's process: one instance, driven by messages.

Decided here: the order of a child's life (make the instance, open it, run batches one after another until told to
end), what of a failure the server is told, and which relays it lets by no more. Its one thread waits on the socket; a
thread of the model's own may at any time let go of an input, and then says so itself while the first one waits. What
messages look like is decided in protocol.py, where tensors lie in inputs.py and outputs.py, what is handed on to other
processes in peers.py. This file knows no loop, queue or graph, nor which backend it runs.
"""

from __future__ import annotations

import importlib
import logging
import marshal
import os
import pickle
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Final, overload

from flowserve.backends.base import Alike, CallsModels, Instance, Remote, Results, RunsWhole, Work
from flowserve.backends.child.calls import ChildCaller
from flowserve.backends.child.inputs import Inputs, Run
from flowserve.backends.child.outputs import Outputs
from flowserve.backends.child.peers import Peers
from flowserve.backends.child.protocol import (
    ANCILLARY_BYTES,
    ATTACH,
    BROKEN,
    DONE,
    END,
    FAILED,
    FENCE,
    FENCED,
    GONE,
    LOST_GPU,
    MESSAGE_BYTES_MAX,
    PATH,
    PEER,
    PLAIN_FACTS,
    READY,
    RECALL,
    RELAYED,
    RUN,
    SEGMENT,
    SHOW,
    SPILLED,
    SPILLED_OUT,
    descriptors,
    pack,
    said,
)
from flowserve.backends.child.usual import Usual, Usuals
from flowserve.errors import FlowserveError, ModelFailed
from flowserve.memory.arena import Place
from flowserve.memory.cuda_context import why_lost
from flowserve.memory.pool import tune_malloc
from flowserve.memory.segment import Segment
from flowserve.values import Request, TensorSpec

log = logging.getLogger("flowserve.child")

# Relays that are remembered. One that is forgotten would be taken in; each of them was a tenth of a second on its way.
_FENCED_MAX: Final = 1 << 14
# What became of the GPU is not asked more often: it takes 50 us where nobody brought a driver, and a model may refuse
# every other request. Where the GPU is lost, all that follows fails, and is looked into.
_LOOK_EVERY_NS: Final = 100_000_000


@dataclass(frozen=True, slots=True)
class Job:
    """What a child is to be: `remote` makes the instance, the rest is what that takes and gives."""

    model: str
    instance: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batches: bool
    remote: Remote
    decoupled: bool = False


def call(remote: Remote) -> Any:
    """Do what a `Remote` says, in this process."""
    module, _, function = remote.entry.partition(":")
    return getattr(importlib.import_module(module), function)(*remote.arguments)


def serve(socket_fd: int, arguments: bytes) -> None:
    """Be one instance until the server says END or is gone. `arguments` are a pickled `Job`."""
    job: Job = pickle.loads(arguments)
    tune_malloc()  # as in the server, and for the same large arrays
    with socket.socket(fileno=socket_fd) as sock:
        sock.setblocking(True)
        try:
            instance: Instance = call(job.remote)
            if isinstance(instance, CallsModels):
                instance.call_through(ChildCaller(job.model, sock, perf_counter_ns))
            instance.open()
        except FlowserveError as error:
            sock.send(pack(BROKEN, (), said(error)))
            return
        except Exception as error:
            log.exception("instance %s: opening failed", job.instance)
            what = f"model '{job.model}', instance '{job.instance}': {type(error).__name__}: {error}"
            sock.send(pack(BROKEN, (), said(ModelFailed(what))))
            return
        try:
            _server(job)(sock, job, instance).run()
        except ConnectionError:
            log.debug("instance %s: the server is gone", job.instance)
        instance.close()


def _server(job: Job) -> type[Server]:
    if not job.decoupled:
        return Server
    from flowserve.backends.child.streaming import StreamServer

    return StreamServer


class Told(Sequence[Request]):
    """The requests of a batch, from what the server said of them; each is made when somebody asks for it. Which outputs
    they are asked for is said besides.
    """

    __slots__ = ("_facts",)

    def __init__(self, facts: Sequence[tuple[Any, ...]] | None, count: int) -> None:
        self._facts = (PLAIN_FACTS,) * count if facts is None else facts

    def __len__(self) -> int:
        return len(self._facts)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> Told: ...
    def __getitem__(self, index: int | slice) -> Request | Told:
        if isinstance(index, slice):
            return Told(self._facts[index], 0)
        return Request({}, None, *self._facts[index])


_LONE: Final = Told(None, 1)  # of nearly every request that comes alone


class Server:
    """Drives an open instance."""

    def __init__(self, sock: socket.socket, job: Job, instance: Instance) -> None:
        self._socket = sock
        self._job = job
        self._instance = instance
        self._inputs = Inputs(job.model, job.inputs, batches=job.batches, let_go=self._let_go)
        self._outputs = Outputs(job.outputs)
        self._usuals = Usuals(job.outputs, batches=job.batches)
        self._peers = Peers()
        self._runs_whole = instance.run_whole if isinstance(instance, RunsWhole) else None
        self._relayed: tuple[int, Sequence[Place]] = (0, ())  # the last that came by and was done, and where it lies
        # Relays that are fenced off: where lies what was made of them here, None where they had not come by.
        self._fenced: dict[int, Sequence[Place] | None] = {}
        self._is_idle = False
        self._has_failed = False  # a batch, or some of its members
        self._look_ns = 0  # when it may next be asked what became of the GPU
        self._pid = os.getpid()
        self._clock = perf_counter_ns

    def run(self) -> None:
        """Until END, or until nobody is there any more."""
        self._socket.send(pack(READY, ()))
        while True:
            self._is_idle = True
            if self._inputs.gone:
                self._let_go()
            message = self._next_message()
            self._is_idle = False
            if message is None:
                return
            kind = message[0]
            if kind == RUN:
                self._run(*message[1:])
            elif kind == END:
                return
            elif kind == FENCE:
                self._fence_off(message[1])
            elif kind == RECALL:
                self._outputs.come_home(self._fenced.pop(message[1], None) or ())

    def _next_message(self) -> tuple[Any, ...] | None:
        """The next message that is not about memory or peers. None when the server is gone."""
        while True:
            packed, ancillary, _, _ = self._socket.recvmsg(MESSAGE_BYTES_MAX, ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
            if not packed:
                return None
            message: tuple[Any, ...] = marshal.loads(packed)
            kind = message[0]
            if kind == RUN:
                return message
            if kind == ATTACH:
                self._inputs.attach(message[1], *descriptors(ancillary))
            elif kind == SPILLED:
                spilled: tuple[Any, ...] = marshal.loads(self._inputs.message(*message[1:]))
                return spilled
            elif kind == PEER:
                self._peers.know(*message[1:], *descriptors(ancillary))
            elif kind == PATH:
                self._peers.lead(*message[1:])
            elif kind == SHOW:
                self._show(self._outputs.segment(message[1]))
            else:
                return message

    def _run(
        self,
        number: int,
        come_home: Sequence[Place],
        ended_segments: Sequence[int],
        columns: Sequence[Any],
        rows: list[int],
        requests: Sequence[tuple[Any, ...]] | None,
        wanted: list[tuple[str, ...]] | tuple[str, ...],
        contexts: list[str] | None = None,
        relay: tuple[Any, ...] | None = None,
    ) -> None:
        if relay is not None and number in self._fenced:
            self._send(pack(RELAYED, (number, *relay[1])))
            return
        if come_home:
            self._outputs.come_home(come_home)
        if ended_segments:
            self._inputs.detach(ended_segments)
        run = Run(number)
        words = [number, 0]
        kind, text, usual = DONE, None, None
        if isinstance(wanted, tuple):
            wanted = [wanted] * len(rows)
        try:
            usual, text = self._answer(run, words, columns, rows, requests, wanted, contexts)
        except FlowserveError as error:
            kind, text, self._has_failed = FAILED, said(error), True
        except Exception as error:
            # A backend's own mistake: its trace belongs in the log, never in an answer.
            log.exception("instance %s failed", self._job.instance)
            what = f"model '{self._job.model}', instance '{self._job.instance}' failed: {error}"
            kind, text, self._has_failed = FAILED, said(ModelFailed(what)), True
        words[1] = self._inputs.finish(run)
        if self._has_failed:
            self._look_for_loss()
        if relay is None:
            self._send(pack(kind, words, text))
            return
        if kind == DONE:
            self._relayed = number, [(words[4], words[5])] if words[6] else ()
        if usual is None or not relay[3] or not self._peers.hand_on(usual, words, rows, requests, *relay):
            self._send(pack(RELAYED, (number, *relay[1])) + pack(kind, words, text))

    def _look_for_loss(self) -> None:
        """Something failed. Where it was the GPU, nothing can be computed there any more but by another process. The
        batch is not answered: whoever hears of an answer sends the next one.
        """
        self._has_failed = False
        now_ns = self._clock()
        if now_ns < self._look_ns:
            return
        self._look_ns = now_ns + _LOOK_EVERY_NS
        why = why_lost()
        if why:
            log.error("instance %s: its process cannot use the GPU any more (%s), and ends", self._job.instance, why)
            raise SystemExit(LOST_GPU)

    def _fence_off(self, number: int) -> None:
        """Say whether a batch of a relay has come by here. If not, it no longer may."""
        made = self._fenced.setdefault(number, self._relayed[1] if self._relayed[0] == number else None)
        if len(self._fenced) > _FENCED_MAX:
            del self._fenced[next(iter(self._fenced))]
        self._send(pack(FENCED, (number, made is not None)))

    def _answer(
        self,
        run: Run,
        words: list[int],
        columns: Sequence[Any],
        rows: list[int],
        requests: Sequence[tuple[Any, ...]] | None,
        wanted: list[tuple[str, ...]],
        contexts: list[str] | None,
    ) -> tuple[Usual | None, Any]:
        """Run the batch and put what it answered into `words`. Returns how, where that is as usual, and the text about
        members that failed. When it returns, nothing of the batch is held but what the model holds.
        """
        count = len(rows)
        told = _LONE if requests is None and count == 1 else Told(requests, count)
        runs_whole = self._runs_whole
        whole = None if runs_whole is None else self._inputs.take_whole(run, columns)
        results: Results | Alike
        if runs_whole is not None and whole is not None:
            results = runs_whole(Work([], rows, told, wanted, contexts=contexts), whole, self._clock)
        else:
            # Everything may be written to: it is mapped privately.
            may_write = [[True] * count] * len(columns)
            given = self._inputs.take(run, columns, count)
            results = self._instance.run(Work(given, rows, told, wanted, may_write, contexts=contexts), self._clock)
        if os.getpid() != self._pid:
            os._exit(0)  # the model forked and both went on: only one answers, and the memory for answers is shared
        if isinstance(results, Alike):
            usual = self._usuals.of(rows)
            assert usual is not None  # that is when outputs are said to be alike
            place = self._outputs.place_usual(usual, results.outputs)
            words += (results.gathered_ns, results.computed_ns, *place, usual.nbytes, *usual.words)
            return usual if usual.nbytes else None, None
        placed = self._outputs.place(results.outputs)  # which may fail: then nothing of it is said
        words += (results.gathered_ns, results.computed_ns, *placed)
        if not (results.errors or results.parameters or results.rescheduled):
            return self._usuals.of_answer(rows, words), None
        failed = {m: said(error) for m, error in results.errors.items()}
        self._has_failed = bool(failed)
        return None, {**results.parameters, **dict.fromkeys(results.rescheduled), **failed}

    def _send(self, message: bytes) -> None:
        if len(message) > MESSAGE_BYTES_MAX:
            message = pack(SPILLED_OUT, self._outputs.message(message))
        for segment in self._outputs.new_segments():
            self._show(segment)
        self._socket.send(message)

    def _show(self, segment: Segment) -> None:
        socket.send_fds(self._socket, [pack(SEGMENT, (segment.number,))], [segment.fd])

    def _let_go(self) -> None:
        """Say which batches the model holds no inputs of any more. On any thread, and never waiting."""
        if not self._is_idle:
            return  # said when the run is over
        gone = self._inputs.gone
        while gone:
            number = gone.popleft()
            try:
                self._socket.send(pack(GONE, (number,)), socket.MSG_DONTWAIT)
            except OSError:
                gone.append(number)  # the server does not read just now, or never again
                return
