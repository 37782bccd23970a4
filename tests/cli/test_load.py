"""The load generator's closed loop, on a clock that jumps."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from flowserve.cli.load import PATIENCE_S, measure
from flowserve.errors import Unavailable


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
