"""Where a batch meets a model in a process of its own.

Decided here: how an instance in a process is opened, given batches and closed. A batch is packed and sent on the loop,
its answer is read on the loop, in place where it is taken to be alone (alone.py); there is no thread or task per
child. A process that says what cannot be is ended. When one has ended, what it was running fails; what else that means
is decided in supervisor.py, how things are sent in process_link.py.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import trio

from flowserve.backends.base import Remote, Results, Work
from flowserve.backends.child.main import Job
from flowserve.config.types import ModelConfig
from flowserve.errors import FlowserveError, InstanceDied, Internal, ModelFailed, Unavailable
from flowserve.memory.arena import Arena
from flowserve.runtime.alone import WAIT_NS_MAX, Occupancy, Pace
from flowserve.runtime.carriers import passes_on, receives
from flowserve.runtime.children import Child, Spawn
from flowserve.runtime.clock import ClockNs
from flowserve.runtime.crowds import RequestPace
from flowserve.runtime.instance import Completions, Outcome, gather
from flowserve.runtime.process_calls import ProcessCalls
from flowserve.runtime.process_inputs import InputPacker
from flowserve.runtime.process_link import Link
from flowserve.runtime.process_outputs import Garbled, OutputReader
from flowserve.runtime.readiness import Readiness
from flowserve.runtime.relay_paths import OnItsWay
from flowserve.runtime.relays import Relays
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.router import Ticket

log = logging.getLogger("flowserve.runtime")

ENTRY: Final = "flowserve.backends.child.main:serve"
# A process that closed its socket is about to end; one that goes on living cannot be talked to.
EOF_GRACE_S: Final = 1.0
# A model that is unloaded has this long to finish and to finalize; at the end of the server the exit timeout counts.
CLOSE_S_MAX: Final = 600.0
_WAIT_MS: Final = WAIT_NS_MAX // 1_000_000


class ProcessHost:
    """One instance in a child process. The scheduling room holds it as an opaque handle."""

    _waits = True  # in place, where that is quick

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        remote: Remote,
        packer: InputPacker,
        spawn: Spawn,
        readiness: Readiness,
        occupancy: Occupancy,
        relays: Relays,
        clock: ClockNs,
    ) -> None:
        self.name = name
        self.is_on_gpu = False  # its process has a context of its own
        self.running: Batch | None = None  # what its process is busy with
        self.child: Child | None = None  # its process, once the instance is open there
        self.ended = ""  # how its last process ended, while there is no other
        self.on_end: Callable[[], None] | None = None  # told of that, on the loop; nobody else starts another
        self._model = config.name
        self._inputs = range(len(config.inputs))
        batches = config.max_batch_size > 0
        job = Job(config.name, name, config.inputs, config.outputs, batches, remote, config.decoupled)
        self._job = pickle.dumps(job)
        self._reader = OutputReader(config.name, config.outputs, batches=batches)
        self._packer = packer
        self._spawn = spawn
        self._readiness = readiness
        self._occupancy = occupancy
        self._relays = relays
        self.relay: OnItsWay | None = None  # that its process takes part in
        # It hands on what the next process can find without looking, and is handed what lies in one piece.
        self.passes_on, self.receives = passes_on(config), receives(config)
        self.pace = Pace()
        self.request_pace: RequestPace | None = None  # of all instances of its model, where anybody wants to know
        self._answer = select.poll()  # on which it is waited for in place
        self._clock = clock
        self._completions: Completions | None = None
        self.link: Link | None = None  # the wire to its process, while there is one
        self._calls: ProcessCalls | None = None  # once its model has called another
        self._is_closed = False
        self._opening: Child | None = None  # while it is not open yet; its model may ask for things already
        self._given_up = ""

    @property
    def asks_meanwhile(self) -> bool:
        """Whether its model has been seen to want something of the server before it answers."""
        return self._calls is not None and self._calls.come_in_batches

    @property
    def arena(self) -> Arena:
        """Where inputs that lie there already need not be copied. Shared by the instances of one model version."""
        return self._packer.arena

    def open(self, completions: Completions) -> None:
        """Start the process and open the instance there. Blocks; called on a loader's thread. Raises what the model
        raised, or how its process ended. May be called again after that, and after `on_end`.
        """
        self._completions = completions
        child = self._spawn(self.name, ENTRY, self._job, log_name=self._model)
        link = self._new_link(child)
        link.on_calls = partial(self._post, completions, self._begin_early_calls, child)
        self._opening = child
        if self._given_up:
            child.kill(why=self._given_up)
        try:
            _await_ready(child, link)
        except BaseException:
            self._drop(completions, child, link)
            raise
        finally:
            self._opening = None
        self.child, self.link, self.ended = child, link, ""
        if self._is_closed:  # meanwhile; looked at last, as `close` says so first and then looks for a process
            self.child = self.link = None
            self._drop(completions, child, link)
            return
        completions.token.run_sync_soon(self._carry_out, self._begin, (child,))

    def give_up(self, why: str) -> None:
        """Nobody wants it any more: whoever waits in `open` is told so. On any thread; harmless once it is open."""
        self._given_up = f"its process was killed: {why}"
        child = self._opening
        if child is not None:
            child.kill(why=self._given_up)

    def start(self, batch: Batch) -> Outcome | None:
        """Send a batch; None where its outcome comes later."""
        link = self.link
        if link is None:
            return Unavailable(f"model '{self._model}', instance '{self.name}': its process is not running")
        batch.started_ns = self._clock()
        self.running = batch
        is_alone = self._occupancy.begins(batch)
        try:
            self._send(link, batch)
        except ConnectionError:
            return None  # its process has ended, and in a moment we are told how
        except FlowserveError as error:
            self._is_over()
            return error.with_traceback(None)  # or its frames would hold it, and it the batch
        except OSError as error:
            self._is_over()
            return Internal(f"model '{self._model}', instance '{self.name}': a batch cannot be sent: {error.strerror}")
        except Exception:
            self._is_over()
            raise
        if is_alone and self._waits and self.pace.is_quick and not self.asks_meanwhile:
            return self._wait(link)
        return None

    def close(self) -> None:
        """End the process after what it runs now. Blocks; called on a worker thread."""
        self._is_closed = True
        child, link = self.child, self.link
        if child is None or link is None:
            return
        with suppress(OSError):  # where it is gone already
            link.end()
        if not child.wait(CLOSE_S_MAX):
            child.kill(why=f"its process was killed, because it had not ended {CLOSE_S_MAX:g} s after it was told to")
            log.error("model '%s', instance '%s': %s", self._model, self.name, child.why)
        assert self._completions is not None
        self._post(self._completions, self._let_go)

    def _drop(self, completions: Completions, child: Child, link: Link) -> None:
        link.close()
        child.kill()
        self._post(completions, self._end_calls)

    def _post(self, completions: Completions, what: Callable[..., None], *arguments: Any) -> None:
        """Do it on the loop, where there still is one."""
        with suppress(trio.RunFinishedError):
            completions.token.run_sync_soon(self._carry_out, what, arguments)

    def _new_link(self, child: Child) -> Link:
        return Link(child.socket, self._packer, self._reader)

    # ------------------------------------------------------------------ on the loop

    def _carry_out(self, what: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            what(*arguments)
        except Exception as error:  # raised further it would end the server
            log.exception("instance %s: what was to be done about its process failed", self.name)
            self._broke(error)

    def _send(self, link: Link, batch: Batch) -> None:
        link.send(self._gather(batch.tickets))

    def _gather(self, tickets: Sequence[Ticket]) -> Work:
        return gather(tickets, self._inputs)

    def _begin(self, child: Child) -> None:
        child.on_end = self._over
        if child.ended:
            self._over(child)
        elif self.child is child and self.link is not None:
            self.link.on_calls = self._begin_calls
            self.link.on_relay = partial(self._relays.told, self)
            self._readiness.watch(child.socket.fileno(), self._read, self._broke)
            self._answer = select.poll()
            self._answer.register(child.socket, select.POLLIN)

    def _over(self, child: Child) -> None:
        """Its process has ended: what ran there fails at once, and is never tried again; nobody knows what it did."""
        self._let_go()
        self.ended = child.ended
        try:
            self._relays.died(self, InstanceDied(child.ended))
        finally:  # whatever is wrong with one: each of them is what somebody waits for
            batch = self._is_over()
            try:
                if batch is not None:
                    self._finish(batch, InstanceDied(child.ended))
            finally:
                if self.on_end is not None:
                    self.on_end()

    def _let_go(self) -> None:
        link, child = self.link, self.child
        self.link = self.child = None
        if link is not None and child is not None:
            self._readiness.forget(child.socket.fileno())
            link.close()
        self._end_calls()

    def _end_calls(self) -> None:
        if self._calls is not None:
            self._calls.close()
            self._calls = None

    def _executes(self) -> Batch | None:
        """What its model asks for in the name of: of a relay the batch as this instance has it."""
        if self.relay is not None:
            self.running = self.relay.batch_of(self)
        return self.running

    def _begin_early_calls(self, child: Child, fd: int) -> None:
        try:
            self._begin_calls(fd)
        except Garbled as error:
            child.kill(why=_garbled(str(error)))

    def _begin_calls(self, fd: int) -> None:
        assert self._completions is not None
        if self._calls is not None or self._completions.calls is None:
            os.close(fd)
            raise Garbled("a second socket for calls")
        self._calls = ProcessCalls(
            fd,
            self._model,
            self._packer.arena,
            self._completions.calls,
            self._readiness,
            self._executes,
            lambda: "" if self._opening is None else self._model,
            self.wrong,
        )

    def wrong(self, what: str) -> None:
        """Its process said what cannot be, and is ended."""
        self._kill(_garbled(what))

    def _broke(self, error: Exception) -> None:
        """A mistake of ours about its process, or something that the system did not give. Nobody knows what was done,
        so it is ended: else whoever waits for it might wait for ever.
        """
        self._kill(f"its process was killed: the server could not go on with it ({type(error).__name__}: {error})")

    def _kill(self, why: str) -> None:
        if self.child is not None:
            self._readiness.forget(self.child.socket.fileno())
            self.child.kill(why=why)
        elif self._opening is not None:
            self._opening.kill(why=why)

    def _wait(self, link: Link) -> Outcome | None:
        """The answer where it comes at once; None where it comes later, or the process has ended: `_read` is told."""
        self._answer.poll(_WAIT_MS)
        try:
            while (outcome := link.read()) is True:
                pass
        except EOFError:
            return None
        except Garbled as error:
            self.wrong(str(error))
            return None
        if outcome is False:
            self._occupancy.waited_in_vain()
            return None
        batch = self._is_over()
        assert batch is not None, "it was sent a moment ago"
        self._judge(batch, outcome)
        return outcome

    def _read(self) -> None:
        """Take in what its process says, until an answer or to the end."""
        link, child = self.link, self.child
        if link is None or child is None:
            return
        try:
            while (outcome := link.read()) is True:
                pass
        except EOFError:
            self._readiness.forget(child.socket.fileno())
            trio.lowlevel.spawn_system_task(_end_if_it_lives, child, name=f"end of {self.name}")
            return
        except Garbled as error:
            self.wrong(str(error))
            return
        if outcome is not False:
            batch = self._is_over()
            assert batch is not None, "the link takes no answer that was not asked for"
            self._finish(batch, outcome)

    def _finish(self, batch: Batch, outcome: Outcome) -> None:
        assert self._completions is not None
        try:
            self._judge(batch, outcome)
            self._completions.finished(batch, self._outcome(batch, outcome))
        except Exception as error:
            self._completions.broke(batch, error)

    def _is_over(self) -> Batch | None:
        """What its process was busy with, which it is no more."""
        batch, self.running = self.running, None
        if batch is not None:
            self._occupancy.ends()
        return batch

    def _judge(self, batch: Batch, outcome: Outcome) -> None:
        if isinstance(outcome, Results):
            # Another process's clock is the same clock, and other people's code may have written it.
            now_ns = self._clock()
            if not batch.started_ns <= outcome.gathered_ns <= outcome.computed_ns <= now_ns:
                outcome.gathered_ns = min(max(outcome.gathered_ns, batch.started_ns), now_ns)
                outcome.computed_ns = min(max(outcome.computed_ns, outcome.gathered_ns), now_ns)
            took_ns = outcome.computed_ns - batch.started_ns
            self.pace.took(took_ns)
            if self.request_pace is not None:
                self.request_pace.took(took_ns, len(batch.tickets))

    def _outcome(self, batch: Batch, outcome: Outcome) -> Outcome:
        return outcome


def _garbled(what: str) -> str:
    return f"what its process said cannot be ({what}); it was killed"


def _await_ready(child: Child, link: Link) -> None:
    """Block until the instance is open. Raises why it is not."""
    poll = select.poll()
    poll.register(child.socket, select.POLLIN)
    poll.register(child.pidfd, select.POLLIN)
    while True:
        ready = [number for number, _ in poll.poll()]
        try:
            opened = link.read()
        except EOFError:
            raise ModelFailed(child.how_it_ended()) from None
        except Garbled as error:
            raise ModelFailed(f"instance '{child.name}': what its process said cannot be: {error}") from None
        if isinstance(opened, FlowserveError):
            raise opened
        if link.is_ready:
            return
        if opened is False and child.pidfd in ready:
            raise ModelFailed(child.how_it_ended())


async def _end_if_it_lives(child: Child) -> None:
    await trio.sleep(EOF_GRACE_S)
    if not child.ended:
        child.kill(why="its process closed its connection to the server; it was killed")
