"""Which printed lines are one record: whole tracebacks from any source, and nothing else."""

from __future__ import annotations

import io
import logging
import threading
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowserve.backends.worker.forkserver import WorkerLogFormatter
from flowserve.runtime.processes.printed import CONTINUATION_WAIT_S, RECORD_CHARS_MAX, Printed, Record

INFO, ERROR = logging.INFO, logging.ERROR
# Lines of tracebacks, and lines that resemble them.
LINES = (
    "",
    "plain",
    "Traceback (most recent call last):",
    '  File "model.py", line 1, in execute',
    "ValueError: x",
    "During handling of the above exception, another exception occurred:",
    "Exception in thread Thread-1 (work):",
    "  + Exception Group Traceback (most recent call last):",
    "<3+>a record of the log",
    "<3>a record of the log",
    "Note: nothing",
)


def records(printed: str) -> list[Record]:
    reader = Printed()
    return [*reader.take(printed.encode(), 0), *reader.rest()]


def text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def chained() -> Exception:
    with pytest.raises(RuntimeError) as caught:
        try:
            try:
                int("x")
            except ValueError as error:
                raise KeyError("k") from error
        except KeyError:
            raise RuntimeError  # noqa: B904  # the other kind of chain
    return caught.value


def grouped() -> Exception:
    try:
        raise ExceptionGroup("many", [ValueError("a"), chained()])
    except ExceptionGroup as error:
        return error


@pytest.mark.parametrize("error", [chained(), grouped()], ids=["chained", "grouped"])
def test_a_traceback_with_all_its_causes_is_one_error_between_other_lines(error: BaseException) -> None:
    whole = text_of(error)
    assert records(f"before\n{whole}after\n") == [(INFO, "before"), (ERROR, whole.rstrip("\n")), (INFO, "after")]


def test_two_tracebacks_are_two_records_and_a_following_empty_line_is_kept() -> None:
    whole = text_of(chained())
    one = (ERROR, whole.rstrip("\n"))
    assert records(f"{whole}{whole}\nplain\n") == [one, one, (INFO, ""), (INFO, "plain")]


def test_an_exception_in_a_thread_is_one_record_with_the_threads_name(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.StringIO()
    monkeypatch.setattr("sys.stderr", printed)
    # Called as the interpreter does, because pytest replaces the hook.
    arguments = threading.ExceptHookArgs((ValueError, chained(), None, threading.Thread(name="worker")))
    threading.__excepthook__(arguments)
    ((level, text),) = records(printed.getvalue())
    assert (level, text.splitlines()[0]) == (ERROR, "Exception in thread worker:")


def test_a_record_of_the_processs_own_log_keeps_its_level_and_its_lines() -> None:
    error = ValueError("first\nsecond\n\nthird")
    record = logging.LogRecord("m", logging.WARNING, "", 1, "went\nwrong", (), (ValueError, error, None))
    told = WorkerLogFormatter("%(message)s").format(record)
    assert records(f"{told}\nafter\n") == [
        (logging.WARNING, "went\\nwrong\nValueError: first\nsecond\n\nthird"),
        (INFO, "after"),
    ]


@pytest.mark.parametrize(
    "printed",
    [
        "Exception in thread x:\nand then nothing of the kind\n",
        "Traceback\n  indented\nValueError: x\n",
        "  File 'x'\nValueError: x\n",
        "During handling of the above exception, another exception occurred:\n\nplain\n",
    ],
)
def test_text_that_resembles_a_traceback_is_logged_as_plain_lines(printed: str) -> None:
    assert records(printed) == [(INFO, line) for line in printed.splitlines()]


def test_an_endless_traceback_is_logged_in_pieces() -> None:
    reader = Printed()
    reader.take(b"Traceback (most recent call last):\n", 0)
    assert reader.wait_s == CONTINUATION_WAIT_S
    told = reader.take(b"  File\n" * 900 + b"  " + b"x" * 4000 + b"\n", 2_000_000_000)
    for second in range(40):
        told += reader.take((b"  " + b"x" * 4000 + b"\n") * 10, (second + 4) * 1_000_000_000)
        assert sum(map(len, reader._records._held)) <= RECORD_CHARS_MAX
    assert told[0][0] == ERROR
    assert reader.wait_is_over() == reader.rest() == []


@given(st.lists(st.sampled_from(LINES), max_size=30), st.data())
def test_property_no_printed_line_is_lost_doubled_or_moved(lines: list[str], data: st.DataObject) -> None:
    plain = [line for line in lines if not line.startswith("<")]
    assert [line for _, text in records("".join(f"{line}\n" for line in plain)) for line in text.split("\n")] == plain
    whole = "".join(f"{line}\n" for line in lines)
    told = [line for _, text in records(whole) for line in text.split("\n")]
    # A line that another thread prints within a record of the log is logged before it.
    assert sorted(told) == sorted(line.removeprefix("<3>").removeprefix("<3+>") for line in lines)
    cut = data.draw(st.integers(0, len(whole)))
    reader = Printed()
    parts = [*reader.take(whole[:cut].encode(), 0), *reader.take(whole[cut:].encode(), 0), *reader.rest()]
    assert parts == records(whole)
