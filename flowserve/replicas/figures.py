"""What a replica reports to the others, and which changes it takes from them.

Decides the names of the changes and the objects that they change. What the figures are is decided in observe/ and in
the live page's sampler. Caller: `cli`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from flowserve.http.api.app import Exposition
from flowserve.http.api.infer import AppOptions
from flowserve.http.page.sampler import figures
from flowserve.observe.combined import FIGURES, GRAPHS, METRICS, STATISTICS
from flowserve.runtime.engine.engine import Engine
from flowserve.runtime.protocol import by_version, statistics_of


def reports_of(engine: Engine, exposition: Exposition) -> Mapping[str, Callable[[], Awaitable[Any]]]:
    """The functions that make this server's reports, by the kinds of `observe.combined`."""

    async def metrics() -> bytes:
        return b"".join(await exposition.parts())

    async def statistics(kind: str) -> dict[str, Any]:
        return by_version(statistics_of(engine, kind))

    async def live() -> dict[str, Any]:
        return figures(engine)

    rows = {kind: partial(statistics, kind) for kind in (STATISTICS, GRAPHS)}
    return {METRICS: metrics, **rows, FIGURES: live}


def changes_of(engine: Engine, options: AppOptions) -> Mapping[str, Callable[..., object]]:
    """The functions that make changes, by the names that the front ends use (runtime/group.py: `change`)."""
    memory = options.client_memory
    return {
        "log": options.log.change,
        "trace": engine.traces.change,
        "register": memory.register,
        "unregister": memory.unregister,
        "register_cuda": memory.register_encoded,
        "unregister_cuda": memory.unregister_cuda,
    }
