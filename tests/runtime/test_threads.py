"""Work of requests on threads: its memory is freed after a refusal."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from flowserve.errors import TooLarge
from flowserve.runtime.threads import in_one_piece, in_steps, in_thread


class Body:
    """Represents a large body."""


@pytest.mark.fault("W2", "W8")
@pytest.mark.parametrize("run", [in_thread, in_one_piece, in_steps])
async def test_the_body_of_a_refused_request_is_freed_without_the_garbage_collector(
    run: Callable[[Any], Awaitable[Any]],
) -> None:
    alive: list[weakref.ref[Body]] = []

    async def refuse() -> str:
        body = Body()
        alive.append(weakref.ref(body))

        def work(*_: Any) -> None:
            raise TooLarge(f"{body}")

        try:
            await run(work)
        except TooLarge as error:
            return str(error)
        raise AssertionError

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        assert "Body" in await refuse()
        for _ in range(1000):  # the thread may reference it a little longer
            if alive[0]() is None:
                break
            await trio.sleep(0.005)
        assert alive[0]() is None
    finally:
        if was_enabled:
            gc.enable()
