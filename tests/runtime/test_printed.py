"""Output that models print becomes whole, bounded lines, for output in any chunks."""

from __future__ import annotations

import logging
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.runtime.processes.printed import LINE_BYTES_MAX, LINE_PATIENCE_S, LINES_A_SECOND_MAX, Printed

SECOND_NS = 1_000_000_000


def texts(printed: Printed, *pieces: bytes, now_ns: int = 5 * SECOND_NS) -> list[str]:
    lines = [text for piece in pieces for _, text in printed.take(piece, now_ns)]
    return [*lines, *(text for _, text in printed.rest())]


@given(st.lists(st.binary(max_size=20).filter(lambda piece: not {*b"<\r"} & {*piece}), max_size=30))
def test_lines_do_not_depend_on_the_chunks_of_the_output(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    assert texts(Printed(), *pieces) == texts(Printed(), whole)
    lines = whole.split(b"\n")
    expected = lines if lines[-1] else lines[:-1]
    assert texts(Printed(), whole) == [line.decode(errors="backslashreplace") for line in expected]


@given(st.lists(st.sampled_from([b"a", b"b", b" ", b"\r", b"\n", b"cc"]), max_size=30))
def test_property_the_last_state_of_an_overwritten_line_is_logged_for_any_chunks(pieces: list[bytes]) -> None:
    whole = b"".join(pieces).rstrip(b"\n") + b"\n"
    last = [line.rstrip(b"\r").rpartition(b"\r")[2].decode() for line in whole[:-1].split(b"\n")]
    assert texts(Printed(), whole) == last
    one_by_one = iter(texts(Printed(), *pieces, b"\n"))
    assert all(text in one_by_one for text in last if text.strip()), "in order, with states before them"


def test_windows_line_ends_are_line_ends() -> None:
    assert texts(Printed(), b"one\r\ntwo\r", b"\nthree\r\n") == ["one", "two", "three"]
    (cut,) = texts(Printed(), b"x" * (LINE_BYTES_MAX + 1), b"\r\n")
    assert cut.endswith(f" ... (cut: longer than {LINE_BYTES_MAX} bytes)")


def test_a_progress_bar_shows_a_state_every_five_seconds_and_its_last() -> None:
    printed = Printed()
    seen = []
    for tenth in range(120):
        piece = f"\rloading {tenth:3d}".encode()
        seen += [(tenth // 10, text) for _, text in printed.take(piece, tenth * SECOND_NS // 10)]
    seen += [(12, text) for _, text in printed.take(b"\n", 12 * SECOND_NS)]
    assert seen == [(0, "loading   0"), (5, "loading  50"), (10, "loading 100"), (12, "loading 119")]


def test_an_unterminated_line_is_logged_after_a_pause() -> None:
    printed = Printed()
    assert printed.wait_s == inf
    assert printed.take(b"loading ...", 0) == []
    assert printed.wait_s == LINE_PATIENCE_S
    assert printed.wait_is_over() == [(logging.INFO, "loading ...")]
    assert printed.wait_s == inf
    assert printed.take(b"\nnext\n\n", 0) == [(logging.INFO, "next"), (logging.INFO, "")]


@pytest.mark.parametrize(
    ("line", "level"),
    [
        (b"<2>x", logging.CRITICAL),
        (b"<3>x", logging.ERROR),
        (b"<4>x", logging.WARNING),
        (b"<6>x", logging.INFO),
        (b"<7>x", logging.DEBUG),
        (b"x", logging.INFO),
    ],
)
def test_a_severity_at_the_front_is_the_level_of_the_line(line: bytes, level: int) -> None:
    assert Printed().take(line + b"\n", 0) == [(level, "x")]


def test_a_long_line_is_cut_with_a_note_and_the_next_one_is_whole() -> None:
    long, after = texts(Printed(), b"a" * 10_000, b"a" * 90_000 + b"\nnext\n")
    assert long == "a" * LINE_BYTES_MAX + f" ... (cut: longer than {LINE_BYTES_MAX} bytes)"
    assert after == "next"


def test_lines_beyond_the_limit_are_counted_and_reported_after_the_second() -> None:
    printed = Printed()
    second = 7 * SECOND_NS
    assert len(printed.take(b"x\n" * 1500, second)) == LINES_A_SECOND_MAX
    assert printed.take(b"x\n" * 700 + b"half a", second + 1) == []
    lines = printed.take(b" line\n", second + SECOND_NS)
    assert [text for _, text in lines] == [
        "1200 lines are missing here: more than 1000 a second were printed",
        "half a line",
    ]


@pytest.mark.fault("R6")
def test_a_hundred_megabytes_without_a_line_end_are_not_kept() -> None:
    printed = Printed()
    shown = 0
    for number in range(1600):
        shown += sum(len(text) for _, text in printed.take(b"y" * 65536, number))
    shown += sum(len(text) for _, text in printed.rest())
    assert shown < 2 * LINE_BYTES_MAX
