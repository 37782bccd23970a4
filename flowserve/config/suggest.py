"""Turns a name that is not there into the one that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from typing import Final

KNOWN_MAX: Final = 64
NAME_CHARS_MAX: Final = 128
BEGINNING_MIN: Final = 4  # characters: most names begin with one or two of some other's


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is closest, or closest but for capitals, or the first that begins with it; "" where none is
    so.
    """
    names = list(known)
    if close := difflib.get_close_matches(name, names, n=1):
        return close[0]
    small = {one.casefold(): one for one in names}
    if close := difflib.get_close_matches(name.casefold(), small, n=1):
        return small[close[0]]
    longer = (one for one in names if len(name) >= BEGINNING_MIN and one.startswith(name))
    return next(longer, "")


def did_you_mean(name: str, known: Iterable[str], quote: str = '"') -> str:
    """'did you mean "input"?' where one of the known names is close, else ""."""
    close = nearest(name, known)
    return f"did you mean {quote}{close}{quote}?" if close else ""


def meant(name: str, known: Iterable[str]) -> str:
    """What a refused request is told besides, or whoever reads the log: " (did you mean 'input'?)", or "".

    Comparing takes tens of microseconds for each known name, and more for a longer one: so there is none among more
    than `KNOWN_MAX` or for what is too long for a name, and a client that goes on asking for the same wrong name is
    compared once.
    """
    if len(name) > NAME_CHARS_MAX:
        return ""
    names = tuple(islice(known, KNOWN_MAX + 1))
    return _meant(name, names) if len(names) <= KNOWN_MAX else ""


@lru_cache(maxsize=64)
def _meant(name: str, known: tuple[str, ...]) -> str:
    hint = did_you_mean(name, known, "'")
    return f" ({hint})" if hint else ""
