"""Python models in processes of their own, which get each input of a batch as one array.

Decided here: how such a batch is run where nothing is unusual about it, in as little code as may be: a process that is
woken for one small batch finds its caches cold, and then what a batch costs goes by how much code it comes through, not
by how long that takes when it is run again and again (docs/decisions/0012-processes.md). What is unusual about an
answer is everybody else's matter as ever. Nobody else is in the process, so nothing need be said of whom the thread
works for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

from flowserve.backends.base import Alike, ClockNs, Results, Work
from flowserve.backends.python import PythonInstance
from flowserve.backends.python_requests import give
from flowserve.backends.python_sender import Remains, collect, lacks_some
from flowserve.backends.python_source import RAISED
from flowserve.values import Array


class WholeInstance(PythonInstance):
    """One object of the model's class, which answers each request once."""

    def run_whole(self, work: Work, inputs: Sequence[Array], clock: ClockNs) -> Results | Alike:
        """As `base.RunsWhole` says."""
        about = self._about
        count = len(work.rows)
        given = self._given
        requests: list[Any] = []
        if count == 1:
            requests.append(given(about, work, 0))
        else:
            requests += map(given, repeat(about), repeat(work), range(count))
        for spec, whole in zip(about.inputs, inputs, strict=True):
            give(requests, spec, whole, work.rows)
        gathered_ns = clock()
        try:
            answered = self._execute(requests)
            # A list of our own, as `run` makes one; of what is none that is told.
            responses: list[Any] = [*answered] if type(answered) is list else self._listed(answered, count)
            del answered
        except RAISED as error:
            self._raise(error, ())
        computed_ns = clock()
        if len(responses) == count == len(requests):  # which was the model's to change
            taken = self._answers.at_first_glance(responses, work)
            if taken is not None and self._answers.are_fixed and None not in taken:
                return Alike(taken, gathered_ns, computed_ns)  # type: ignore[arg-type]  # none of them is None
        if lacks_some(responses):
            requests = [*map(Remains, requests)]  # as in `run`
            collect(requests, responses, about.name, self._loop)
            computed_ns = clock()
        return self._results(requests, responses, work, gathered_ns, computed_ns)
