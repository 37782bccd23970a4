"""A log line is one line, whoever wrote the words in it."""

from __future__ import annotations

import logging

from flowserve.cli.logs import LineFormatter, escape


def _record(message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("flowserve.http", logging.WARNING, __file__, 1, message, arguments, None)


def test_what_a_client_sent_cannot_forge_a_line() -> None:
    line = LineFormatter("default").format(_record("request %s", "a\nI0101 forged\r\x1b[31m\u2028b\x00"))
    assert line.endswith("request a\\nI0101 forged\\r\\x1b[31m\\u2028b\\x00")
    assert len(line.splitlines()) == 1


def test_a_traceback_stays_on_the_line_of_its_record() -> None:
    record = _record("a model failed")
    try:
        raise ValueError("first\nsecond")
    except ValueError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    line = LineFormatter("default").format(record)
    assert len(line.splitlines()) == 1
    assert "ValueError: first\\nsecond" in line


def test_both_formats_tell_time_level_and_room() -> None:
    record = _record("text")
    record.created = 1_763_733_785.25
    assert LineFormatter("default").format(record) == "W1121 14:03:05.250000 flowserve.http] text"
    assert LineFormatter("ISO8601").format(record) == "2025-11-21T14:03:05.250000Z WARNING flowserve.http] text"


def test_letters_of_every_script_pass_unchanged() -> None:
    assert escape("größe 猫 ok") == "größe 猫 ok"
