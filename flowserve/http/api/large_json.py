"""The JSON of a large inference request, decoded in pieces.

Parsing tens of megabytes at once keeps the interpreter for seconds, on any thread. So a large text is read in two
passes of short steps: `outline` finds the arrays of the inputs' `data`, and cuts them out of the text; the rest is
small and is parsed as every request's JSON. Then each array is parsed in pieces, when its type and shape are known.

Decides where a text may be cut (at a comma outside of strings, with the depth of the arrays around it), and the limits
that bound the work of one step: the bytes of the text without the arrays, and those of one value. No object is made
before the number of elements was compared with the shape and with the limit. `pause` is called between two steps. Does
not know which fields a request has. Caller: `decode`.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from secrets import token_hex
from typing import Any, Final

import numpy as np

from flowserve.errors import Invalid, TooLarge
from flowserve.http.api.json_bodies import DEPTH_MAX, parse_json, too_deep
from flowserve.runtime.protocol import ITEMS_MAX
from flowserve.runtime.threads import Pause
from flowserve.values import Array

OUTLINE_BYTES_MAX: Final = 1 << 20  # parsing so much takes up to 50 ms
VALUE_BYTES_MAX: Final = 1 << 24  # parsing so long a string takes up to 70 ms
_STEP_BYTES: Final = 1 << 16
_FIRST_LOOK: Final = 1 << 12
# The backslash excludes a key that ends in "data: in a string, this quote is escaped.
_DATA: Final = re.compile(rb'(?<!\\)"data"[ \t\r\n]*:[ \t\r\n]*\[')
_COMMA, _QUOTE, _BACKSLASH = b',"\\'
_IS_MARK: Final = np.zeros(256, np.bool_)
_IS_MARK[list(b'[]{},"')] = True
_IS_BRACE: Final = np.zeros(256, np.bool_)
_IS_BRACE[list(b"{}")] = True
_DEPTH_STEP: Final = np.zeros(256, np.int8)
_DEPTH_STEP[ord("[")], _DEPTH_STEP[ord("]")] = 1, -1
_BINARY_HINT: Final = "send it as binary data (docs/http.md)"


class LargeArray:
    """One array in `text`, from `start` to `end`. `count`: its elements, where no array in it is empty. `cuts`: the
    offsets of the commas at which it is cut, each with the number of arrays that are open there.
    """

    __slots__ = ("_pause", "count", "cuts", "end", "start", "text")

    def __init__(self, text: memoryview, start: int, pause: Pause) -> None:
        self.text = text
        self.start = self.end = start
        self.count = 0
        self.cuts: list[tuple[int, int]] = []
        self._pause = pause

    def read(self, take: Callable[[Any], None]) -> None:
        """Call `take` with the array's values, as several arrays in order, each nested as deeply. Raises `Invalid`."""
        first, depth = self.start, 0
        for at, next_depth in [*self.cuts, (self.end, 0)]:
            piece = bytes(self.text[first:at]).strip(b" \t\r\n")
            # With the brackets around it such a piece would be valid, though the comma beside it is not.
            if not piece or (depth and piece.startswith(b"]")) or (next_depth and piece.endswith(b"[")):
                raise Invalid(f"failed to parse the request JSON buffer: a value is missing before byte {at}")
            with collector_paused():
                take(_parsed(b"[" * depth + piece + b"]" * next_depth, first - depth))
            self._pause()
            first, depth = at + 1, next_depth


def _parsed(piece: bytes, start: int) -> Any:
    """The value of text that begins at byte `start` of the body. Raises `Invalid`."""
    try:
        return parse_json(piece)
    except Invalid as error:
        raise Invalid(f"{error}, counted from byte {start}") from None


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector, which thousands of new lists would start: it examines all of the server's objects,
    which takes longer than everything else in a step, and JSON has no reference cycles.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def outline(text: memoryview, elements_max: int, pause: Pause) -> tuple[bytes, list[LargeArray], str]:
    """The text with each `data` array replaced by a short one: a mark, and the array's place in the list. The mark, the
    last result, is random, so that no text of a client can stand for an array. Raises `Invalid`, and
    `TooLarge` for more than `elements_max` elements, one value that is too long, or too much else.
    """
    rest = bytearray()
    arrays: list[LargeArray] = []
    mark = token_hex(16)
    position, elements = 0, 0
    while (start := _next_array(text, position, OUTLINE_BYTES_MAX - len(rest))) is not None:
        if len(arrays) == ITEMS_MAX:
            raise Invalid(f"Unable to parse 'inputs': at most {ITEMS_MAX} entries are accepted")
        rest += text[position:start]
        array = LargeArray(text, start, pause)
        _scan(array, elements_max - elements)
        elements += array.count
        if elements > elements_max:
            raise TooLarge(
                f"the request's JSON holds more than {elements_max} elements (--http-max-json-elements); {_BINARY_HINT}"
            )
        rest += b'["%b",%d]' % (mark.encode(), len(arrays))
        arrays.append(array)
        position = array.end
    rest += text[position:]
    return bytes(rest), arrays, mark


def _next_array(text: memoryview, position: int, room: int) -> int | None:
    """The offset of the bracket that opens the next `data`; None if no more follows. Raises `TooLarge` if it is not
    within the next `room` bytes.
    """
    look = _FIRST_LOOK
    while True:
        near = bytes(text[position : position + min(look, room)])
        found = _DATA.search(near)
        if found:
            return position + found.end() - 1
        if position + len(near) == len(text):
            return None
        if look >= room:
            raise TooLarge(
                f"the request's JSON without the 'data' of its inputs has more than {OUTLINE_BYTES_MAX} bytes, which "
                f"is the most that is accepted in a body of {len(text)} bytes"
            )
        look *= 8


def _scan(array: LargeArray, elements_max: int) -> None:
    """Find the array's end, its cuts and the number of its elements; not its end if they are more than `elements_max`.
    Raises as `outline` does.
    """
    text = array.text
    position = last_cut = array.start
    depth, commas = 0, 0
    is_in_string = is_escaped = False  # at `position`
    while True:
        block = np.frombuffer(text, np.uint8, min(_STEP_BYTES, len(text) - position), position)
        if not block.size:
            raise Invalid("failed to parse the request JSON buffer: unexpected end of data")
        at = np.flatnonzero(_IS_MARK[block])
        marks = block[at]
        is_quote = marks == _QUOTE
        if is_in_string or is_quote.any():
            escaped, is_escaped = _escaped(block, is_escaped)
            if escaped is not None:
                is_quote &= ~escaped[at]
            is_inside = ((np.cumsum(is_quote) + is_in_string) & 1).astype(np.bool_)
            if is_inside.size:
                is_in_string = bool(is_inside[-1])
            outside = ~is_inside & ~is_quote
            at, marks = at[outside], marks[outside]
        depths = np.cumsum(_DEPTH_STEP[marks], dtype=np.int64) + depth
        ends = np.flatnonzero(depths == 0)
        if ends.size:
            end = int(ends[0])
            at, marks, depths = at[: end + 1], marks[: end + 1], depths[: end + 1]
        if _IS_BRACE[marks].any():
            raise Invalid("Unable to parse 'data': the data of an input holds objects")
        if depths.size and int(depths.max()) > DEPTH_MAX:
            raise too_deep()
        is_comma = marks == _COMMA
        commas += int(np.count_nonzero(is_comma))
        array.count = commas + 1
        if array.count > elements_max:
            return
        if ends.size:
            array.end = position + int(at[-1]) + 1
            return
        if is_comma.any():
            last = int(np.flatnonzero(is_comma)[-1])
            last_cut = position + int(at[last])
            array.cuts.append((last_cut, int(depths[last])))
        position += block.size
        if position - last_cut > VALUE_BYTES_MAX:
            raise _too_long()
        if depths.size:
            depth = int(depths[-1])
        array._pause()


def _escaped(block: Array, is_first_escaped: bool) -> tuple[Array | None, bool]:
    """Which bytes of a block follow a backslash that is not escaped itself, None for none; and whether the byte after
    the block does.
    """
    slashes = np.flatnonzero(block == _BACKSLASH)
    if not slashes.size:
        if not is_first_escaped:
            return None, False
        escaped = np.zeros(block.size, np.bool_)
        escaped[0] = True
        return escaped, False
    is_start = np.ones(slashes.size, np.bool_)
    is_start[1:] = np.diff(slashes) != 1
    starts = np.maximum.accumulate(np.where(is_start, slashes, 0))  # of the run of backslashes that each belongs to
    odd = (slashes - starts) & 1
    if is_first_escaped:
        odd[starts == 0] ^= 1
    escaped = np.zeros(block.size + 1, np.bool_)
    escaped[slashes[odd == 0] + 1] = True
    escaped[0] = is_first_escaped
    return escaped[:-1], bool(escaped[-1])


def _too_long() -> TooLarge:
    return TooLarge(f"one value in the request's JSON has more than {VALUE_BYTES_MAX} bytes; {_BINARY_HINT}")
