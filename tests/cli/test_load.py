"""The load generator's closed loop, on a clock that jumps."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from flowserve.cli.load import PATIENCE_S, measure
from flowserve.cli.sequence_load import Sequences, measure_sequences
from flowserve.errors import Invalid, Unavailable


async def test_a_server_that_never_answers_does_not_hold_up_the_measurement(
    autojump_clock: trio.testing.MockClock,
) -> None:
    with pytest.raises(Unavailable, match="were not answered within 10 s"):
        await measure([trio.sleep_forever], 1)
    assert trio.current_time() < 2 + PATIENCE_S


async def test_answers_count_although_one_never_comes(autojump_clock: trio.testing.MockClock) -> None:
    async def quick() -> None:
        await trio.sleep(0.01)

    measured = await measure([quick, trio.sleep_forever], 1)
    assert 95 <= measured.requests_per_s <= 101
    assert measured.p50_ms == pytest.approx(10, abs=0.1)
    assert (measured.failed, "were not answered" in measured.why) == (1, True)


async def test_a_sequence_begins_once_ends_once_and_is_given_up_where_a_request_fails() -> None:
    sent: list[tuple[int | str, bool, bool]] = []

    async def send(sequence_id: int | str, start: bool, end: bool) -> None:
        sent.append((sequence_id, start, end))
        if len(sent) == 4:
            raise Invalid("no")

    ids = iter("abcd")
    sequences = Sequences(send, 3, lambda: next(ids))
    for _ in range(3):
        await sequences.ask()
    with pytest.raises(Invalid):
        await sequences.ask()
    await sequences.ask()
    await sequences.end()
    await sequences.end()
    first = [("a", True, False), ("a", False, False), ("a", False, True)]
    assert sent == [*first, ("b", True, False), ("c", True, False), ("c", False, True)]


async def test_sequences_that_wait_for_a_slot_at_the_end_get_it(autojump_clock: trio.testing.MockClock) -> None:
    slot = trio.Semaphore(1)

    async def send(sequence_id: int | str, start: bool, end: bool) -> None:
        if start:
            await slot.acquire()
        await trio.sleep(0.01)
        if end:
            slot.release()

    measured = await measure_sequences([send, send, send], int, 1000, 1)
    assert (measured.failed, slot.value) == (0, 1)
    assert trio.current_time() < 2
