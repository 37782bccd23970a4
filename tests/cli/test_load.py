"""The closed-loop load generator, on a mock clock."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from flowserve.cli.load import ANSWER_TIMEOUT_S, SequenceClient, measure, measure_sequences
from flowserve.errors import Invalid, Unavailable


async def test_a_server_that_never_answers_does_not_block_the_measurement(
    autojump_clock: trio.testing.MockClock,
) -> None:
    with pytest.raises(Unavailable, match="were not answered within 10 s"):
        await measure([trio.sleep_forever], 1)
    assert trio.current_time() < 2 + ANSWER_TIMEOUT_S


async def test_responses_count_even_if_one_never_arrives(autojump_clock: trio.testing.MockClock) -> None:
    async def quick() -> None:
        await trio.sleep(0.01)

    measured = await measure([quick, trio.sleep_forever], 1)
    assert 95 <= measured.requests_per_s <= 101
    assert measured.p50_ms == pytest.approx(10, abs=0.1)
    assert (measured.failed, "were not answered" in measured.why) == (1, True)


async def test_a_sequence_starts_once_ends_once_and_is_abandoned_if_a_request_fails() -> None:
    sent: list[tuple[int | str, bool, bool]] = []

    async def send(sequence_id: int | str, start: bool, end: bool) -> None:
        sent.append((sequence_id, start, end))
        if len(sent) == 4:
            raise Invalid("no")

    ids = iter("abcd")
    sequences = SequenceClient(send, 3, lambda: next(ids))
    for _ in range(3):
        await sequences.send_next()
    with pytest.raises(Invalid):
        await sequences.send_next()
    await sequences.send_next()
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
