"""The context in which somebody traces something: the header `traceparent` of the W3C.

Decided here: which texts are one, and which one a model that joins a trace is told. What is none counts as absent, as
the recommendation has it.
"""

from __future__ import annotations

import re
from random import getrandbits
from typing import Final

_FORM: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)


def is_sampled(traceparent: str) -> bool | None:
    """Whether the caller records its trace; None where the text is no context."""
    found = _FORM.fullmatch(traceparent)
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace, 16) or not int(span, 16):
        return None
    return bool(int(flags, 16) & 1)


def trace_id_for(parent: str) -> int:
    """The number of a trace that begins below `parent`, a context or ""."""
    return int(parent[3:35], 16) if parent else getrandbits(128) or 1


def new_span_id() -> int:
    return getrandbits(64) or 1


def context_of(trace_id: int, span_id: int) -> str:
    """The context of a span that is recorded."""
    return f"00-{trace_id:032x}-{span_id:016x}-01"
