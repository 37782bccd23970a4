"""Suggestions for unknown names and misnamed files: the most similar known name. Callers: every package that reports
one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from typing import Final

KNOWN_MAX: Final = 64
NAME_CHARS_MAX: Final = 128
ENDING_LIKENESS_MIN: Final = 0.6  # onx and onnx, pyc and py; not json and onnx
NAME_LIKENESS_MIN: Final = 0.8  # where the endings differ: not labels.txt and config.pbtxt
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


def misnamed(names: Iterable[str], known: Iterable[str]) -> tuple[str, str] | None:
    """The file of `names` that was probably meant as one of `known`, and which one: its ending is the same, or it is
    similar and so is the whole name. None if there is none, or more than KNOWN_MAX files.
    """
    there, wanted = sorted(names), [*known]
    alike = [(_likeness(name, file), name, file) for name in there for file in wanted if len(there) <= KNOWN_MAX]
    likeness, name, file = max(alike, key=lambda one: one[0], default=(0.0, "", ""))
    return (name, file) if likeness else None


def _likeness(name: str, known: str) -> float:
    """How similar `name` is to the file name `known`; 0 if it was probably not meant as that."""
    name = name.casefold()
    ending, wanted = (one.rpartition(".")[2] if "." in one else "" for one in (name, known))
    whole = _ratio(name, known)
    is_close = whole >= NAME_LIKENESS_MIN and _ratio(ending, wanted) >= ENDING_LIKENESS_MIN
    return whole if is_close or ending == wanted or name.startswith(f"{known}.") else 0.0


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def did_you_mean(name: str, known: Iterable[str], quote: str = '"') -> str:
    """'did you mean "input"?' if a known name is similar, else ""."""
    close = nearest(name, known)
    return f"did you mean {quote}{close}{quote}?" if close else ""


def meant(name: str, known: Iterable[str]) -> str:
    """A suffix for the message of a refused request or a log line: " (did you mean 'input'?)", or "".

    A comparison takes tens of microseconds per known name, and more for long names. So nothing is compared if there are
    more than `KNOWN_MAX` names, or with overlong names, and the results are cached for clients that repeat a wrong
    name.
    """
    if len(name) > NAME_CHARS_MAX:
        return ""
    names = tuple(islice(known, KNOWN_MAX + 1))
    return _meant(name, names) if len(names) <= KNOWN_MAX else ""


@lru_cache(maxsize=64)
def _meant(name: str, known: tuple[str, ...]) -> str:
    hint = did_you_mean(name, known, "'")
    return f" ({hint})" if hint else ""
