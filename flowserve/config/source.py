"""What a configuration file says before anybody knows what it means: names, values and where each stands.

Decided here: the one tree that both notations (pbtxt.py, jsontext.py) are read into, and how a position becomes a
place. The tree knows nothing of the schema; build.py gives it meaning.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Final, Literal, NoReturn

from flowserve.errors import Place, Problem, Problems

# The schema is seven levels deep. A bound keeps hostile nesting from becoming a RecursionError.
DEPTH_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value as written. A "string" is already unquoted; a "number" keeps its sign; a "word" is anything bare."""

    at: int
    kind: Literal["string", "number", "word"]
    text: str


@dataclass(frozen=True, slots=True)
class Entry:
    """`name: value` at offset `at`, which is where the name begins."""

    at: int
    name: str
    value: Value


@dataclass(frozen=True, slots=True)
class Block:
    at: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Items:
    at: int
    values: tuple[Value, ...]


Value = Scalar | Block | Items


class Text:
    """A file's contents that can tell where an offset is."""

    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.file = file
        self._line_starts = [0]
        start = text.find("\n")
        while start >= 0:
            self._line_starts.append(start + 1)
            start = text.find("\n", start + 1)

    def place(self, at: int) -> Place:
        line = bisect_right(self._line_starts, at)
        return Place(self.file, line, at - self._line_starts[line - 1] + 1)

    def fail(self, at: int, message: str, hint: str = "") -> NoReturn:
        """Give up: what follows `at` can no longer be told apart."""
        raise Problems([Problem(message, self.place(at), hint=hint)])

    def too_deep(self, at: int) -> NoReturn:
        self.fail(at, f"nested deeper than {DEPTH_MAX} levels")
