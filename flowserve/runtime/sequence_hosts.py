"""Hosts of models of sequences: any other host, around whose batches controls and state are put and taken off.

Decided here: nothing but when `SequencePorts` is asked. A batch is prepared on the loop right before it starts, and
its outcome is taken apart on the loop before anybody else sees it, wherever it ran.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flowserve.backends.base import Work
from flowserve.runtime.instance import Completions, LocalHost, Outcome
from flowserve.runtime.process_host import ProcessHost
from flowserve.runtime.sequence_ports import SequencePorts
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.router import Ticket


class SequenceLocalHost(LocalHost):
    """On a thread, or on the loop."""

    def __init__(self, ports: SequencePorts, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ports = ports

    def open(self, completions: Completions) -> None:
        super().open(finishing(completions, self._ports.finish))

    def start(self, batch: Batch) -> Outcome | None:
        outcome = super().start(batch)
        return None if outcome is None else self._ports.finish(batch, outcome)

    def _gather(self, tickets: Sequence[Ticket]) -> Work:
        return self._ports.gather(tickets, may_write=self.may_write)


class SequenceProcessHost(ProcessHost):
    """In a process of its own."""

    def __init__(self, ports: SequencePorts, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.passes_on = self.receives = False
        self._ports = ports

    def open(self, completions: Completions) -> None:
        super().open(finishing(completions, self._ports.finish))

    def start(self, batch: Batch) -> Outcome | None:
        outcome = super().start(batch)
        return None if outcome is None else self._ports.finish(batch, outcome)

    def _gather(self, tickets: Sequence[Ticket]) -> Work:
        return self._ports.gather(tickets)


def finishing(completions: Completions, finish: Callable[[Batch, Outcome], Outcome]) -> Completions:
    """The same completions, for outcomes that are looked at first."""

    def finished(batch: Batch, outcome: Outcome) -> None:
        completions.finished(batch, finish(batch, outcome))

    first = Completions(completions.token, finished, completions.broke, completions.pump)
    first.calls = completions.calls
    return first
