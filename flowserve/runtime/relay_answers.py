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
from flowserve.runtime.process_link import keeps_inputs
from flowserve.runtime.process_outputs import Garbled
from flowserve.runtime.relay_paths import OnItsWay

# Of one that has run through: its stops, and what the last one made.
RanThrough = tuple[list[Stop], Results]


def reached(sent: OnItsWay, passed: Sequence[int], answer: bytes) -> int:
    """How many it has reached that passed it, in those words, or gave this answer. Raises Garbled."""
    count = len(passed) // PASSED_WORDS + bool(answer)
    if len(passed) % PASSED_WORDS or not 0 < count <= len(sent.path.links):
        raise Garbled(f"a relay of {len(sent.path.links)} that has passed {len(passed)} words")
    return count


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


def ran_through(sent: OnItsWay, passed: Sequence[int], answer: bytes, now_ns: int) -> RanThrough | None:
    """The stops of one that has run through with nothing to say of it, as nearly all do, and what the last one made:
    nobody reads what was made before that, and it goes home. None where it is not so, with nothing done; so it is where
    Garbled is raised.
    """
    path = sent.path
    links = path.links
    rows = sent.expected.rows
    before = len(links) - 1
    if len(passed) != before * PASSED_WORDS or not answer or keeps_inputs(answer):
        return None
    stops: list[Stop] = []
    since_ns = sent.started_ns
    for i in range(before):
        kept, gathered_ns, computed_ns, segment, offset = passed[i * PASSED_WORDS : (i + 1) * PASSED_WORDS]
        if kept:
            return None
        placed = links[i].placed_at(segment, offset, rows)
        if not since_ns <= gathered_ns <= computed_ns <= now_ns:
            gathered_ns = min(max(gathered_ns, since_ns), now_ns)
            computed_ns = min(max(computed_ns, gathered_ns), now_ns)
        stops.append((gathered_ns, computed_ns, placed))
        since_ns = computed_ns
    last = sent.outcome
    if last is None:
        link = links[before]
        expected = link.expected(sent.number, rows, None) if before else sent.expected
        last = sent.outcome = link.outcome(expected, answer)
    if not isinstance(last, Results) or last.errors or last.parameters:
        return None
    gathered_ns = min(max(last.gathered_ns, since_ns), now_ns)
    stops.append((gathered_ns, min(max(last.computed_ns, gathered_ns), now_ns), last.placed))
    for i in range(before):  # now that everything is seen to be as it should
        links[i].homes.append((passed[i * PASSED_WORDS + 3], passed[i * PASSED_WORDS + 4]))
    since_ns = sent.started_ns
    for runner, (_, computed_ns, _) in zip(path.runners, stops, strict=True):
        runner.pace.took(computed_ns - since_ns)
        since_ns = computed_ns
    return stops, last
