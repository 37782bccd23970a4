"""The context in which a caller traces its request: the header `traceparent` of the W3C.

Decided here: which texts are one. What is none counts as absent, as the recommendation has it.
"""

from __future__ import annotations

import re
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
