"""Suggestions for unknown names: the most similar known name. Callers: every package that reports an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from typing import Final

KNOWN_MAX: Final = 64
NAME_CHARS_MAX: Final = 128
BEGINNING_MIN: Final = 4  # characters: shorter prefixes match too many names


def nearest(name: str, known: Iterable[str]) -> str:
    """The most similar known name, else the most similar ignoring case, else the first that begins with `name`; "" if
    there is none.
    """
    names = list(known)
    if close := difflib.get_close_matches(name, names, n=1):
        return close[0]
    small = {one.casefold(): one for one in names}
    if close := difflib.get_close_matches(name.casefold(), small, n=1):
        return small[close[0]]
    return next((one for one in names if len(name) >= BEGINNING_MIN and one.startswith(name)), "")


def did_you_mean(name: str, known: Iterable[str], quote: str = '"') -> str:
    """'did you mean "input"?' if a known name is similar, else ""."""
    close = nearest(name, known)
    return f"did you mean {quote}{close}{quote}?" if close else ""


def meant(name: str, known: Iterable[str]) -> str:
    """A suffix for the message of a refused request or a log line: " (did you mean 'input'?)", or "".

    A comparison takes tens of microseconds per known name, and more for long names. So there is none with more than
    `KNOWN_MAX` names or for overlong names, and the results are cached for clients that repeat a wrong name.
    """
    if len(name) > NAME_CHARS_MAX:
        return ""
    names = tuple(islice(known, KNOWN_MAX + 1))
    return _meant(name, names) if len(names) <= KNOWN_MAX else ""


@lru_cache(maxsize=64)
def _meant(name: str, known: tuple[str, ...]) -> str:
    hint = did_you_mean(name, known, "'")
    return f" ({hint})" if hint else ""
