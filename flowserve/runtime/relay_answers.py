"""What the processes of a relay say of it, judged.

Decided here: which blocks of which process that means, at which times it was there, and whose pace that tells. What one
says of the others is believed as far as what it says of itself: numbers, checked against the memory and the
configuration of whom they are about; what is wrong raises `Garbled`. What becomes of the relay is decided in relays.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowserve.backends.base import Results
from flowserve.backends.child.protocol import PASSED_WORDS
from flowserve.runtime.accounts import Stop
from flowserve.runtime.process_link import Link, keeps_inputs
from flowserve.runtime.process_outputs import Garbled
from flowserve.runtime.relay_paths import OnItsWay


def reached(sent: OnItsWay, passed: Sequence[int], answer: bytes) -> int:
    """How many it has reached that passed it, in those words, or gave this answer. Raises Garbled."""
    count = len(passed) // PASSED_WORDS + bool(answer)
    if len(passed) % PASSED_WORDS or not 0 < count <= len(sent.path.links):
        raise Garbled(f"a relay of {len(sent.path.links)} that has passed {len(passed)} words")
    return count


def keeps_any(passed: Sequence[int], answer: bytes) -> bool:
    """Whether a model on the way holds on to inputs."""
    return any(passed[::PASSED_WORDS]) or keeps_inputs(answer)


def made(sent: OnItsWay, passed: Sequence[int]) -> list[Results]:
    """What those made that it has passed, up to the first that has ended since. Raises Garbled."""
    found: list[Results] = []
    is_whole = True
    for i in range(len(passed) // PASSED_WORDS):
        link = sent.path.links[i]
        is_whole = is_whole and link.is_open
        if link.is_open:  # the blocks of all others come home, or belong to a model that keeps them
            expected = link.expected(sent.number, sent.expected.rows, [*found]) if i else sent.expected
            results = link.passed(expected, passed[i * PASSED_WORDS : (i + 1) * PASSED_WORDS])
            if is_whole:
                found.append(results)
    return found


def ran_through(sent: OnItsWay, passed: Sequence[int], last: Results, now_ns: int) -> list[Stop]:
    """The stops of one that has run through, as nearly all do: nobody reads what was made before the last, and it goes
    home. Raises Garbled, with nothing done.
    """
    path = sent.path
    rows = sent.expected.rows
    stops: list[Stop] = []
    home: list[tuple[Link, int, int]] = []
    before_ns = sent.started_ns
    for i, link in enumerate(path.links):
        if i * PASSED_WORDS < len(passed):
            _, gathered_ns, computed_ns, segment, offset = passed[i * PASSED_WORDS : (i + 1) * PASSED_WORDS]
            placed = link.placed_at(segment, offset, rows)
            home.append((link, segment, offset))
        else:
            gathered_ns, computed_ns, placed = last.gathered_ns, last.computed_ns, last.placed
        if not before_ns <= gathered_ns <= computed_ns <= now_ns:
            gathered_ns = min(max(gathered_ns, before_ns), now_ns)
            computed_ns = min(max(computed_ns, gathered_ns), now_ns)
        stops.append((gathered_ns, computed_ns, placed))
        before_ns = computed_ns
    for link, *place in home:  # now that everything is seen to be as it should
        link.comes_home(*place)
    before_ns = sent.started_ns
    for runner, (_, computed_ns, _) in zip(path.runners, stops, strict=True):
        runner.pace.took(computed_ns - before_ns)
        before_ns = computed_ns
    return stops
