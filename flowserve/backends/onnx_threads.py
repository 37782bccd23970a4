"""How many threads a model's runs on the CPU get, where nobody says.

Decided here: a model whose runs are short has one. Waking another thread costs tens of microseconds on each side, most
of all where its core has gone to sleep, and a run that takes a hundred has nothing to give away. Which models these are
is measured once, when the file is opened, with zeros: a batch of one, and one of a few rows. What cannot be measured
so (shapes that vary, text, a large file) gets its share of the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Final

import numpy as np

from flowserve.backends.onnx_session import Feed
from flowserve.config.types import ModelConfig
from flowserve.values import DType

THREADS: Final = "intra_op_thread_count"
# A run of a row this short, and one of several rows, is not worth a second thread: with 256 to 10 numbers a row and two
# threads it took 1.1 to 1.2 of the time with one, up to 64 rows.
_ROW_NS: Final = 150_000
_ROWS_NS: Final = 300_000
_ROWS: Final = 8
_RUNS: Final = 5
# Bytes: opening a file twice should cost nobody his patience.
_WEIGHT_MAX: Final = 8 << 20


def session_on_cpu(
    config: ModelConfig,
    path: Path,
    options: Mapping[str, str],
    settings: Callable[[ModelConfig, Mapping[str, str]], Any],
    opening: Callable[[Callable[[], Any]], Any],
) -> Any:
    """A session, opened by `opening` with the settings that `settings` gives. Raises what `opening` raises."""
    usual = settings(config, options)
    is_said = config.parameters.get(THREADS, options.get(THREADS, "0")) != "0"
    feeds = [] if is_said or usual.intra_op_num_threads < 2 else _feeds(config)
    if feeds and _weight(path) <= _WEIGHT_MAX:
        alone = settings(config, options)
        alone.intra_op_num_threads = 1
        session = opening(lambda: alone)
        if _is_short(session, feeds):
            return session
    return opening(lambda: usual)


def _weight(path: Path) -> int:
    """The bytes of a model's file and of all that lies beside it, such as weights of its own."""
    return sum(file.stat().st_size for file in path.parent.iterdir() if file.is_file())


def _feeds(config: ModelConfig) -> list[tuple[Feed, int]]:
    """What to try it with, and how long that may take; nothing where that cannot be known."""
    if any(spec.is_variable or spec.optional or spec.dtype in (DType.BYTES, DType.BF16) for spec in config.inputs):
        return []
    rows = [1, min(_ROWS, config.max_batch_size)] if config.max_batch_size else [0]
    return [
        ({spec.name: np.zeros((n, *spec.dims) if n else spec.dims, spec.dtype.numpy) for spec in config.inputs}, limit)
        for n, limit in zip(rows, (_ROW_NS, _ROWS_NS), strict=False)
    ]


def _is_short(session: Any, feeds: list[tuple[Feed, int]]) -> bool:
    try:
        return all(_best_ns(session, feed) <= limit_ns for feed, limit_ns in feeds)
    except Exception:  # whatever is wrong with it, or with zeros, is not for here to say
        return False


def _best_ns(session: Any, feed: Feed) -> int:
    """The shortest of a few runs. One that is far too long is the last."""
    best_ns = 1 << 62
    for _ in range(_RUNS):
        began_ns = perf_counter_ns()
        session.run(None, feed)
        best_ns = min(best_ns, perf_counter_ns() - began_ns)
        if best_ns > 100 * _ROW_NS:
            break
    return best_ns
