"""A log record is one line, whatever its text contains."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowserve.cli.logs import JsonFormatter, LineFormatter, configure, escape, log_thread_exception, messages
from flowserve.cli.options import run_arguments
from flowserve.cli.run import run
from flowserve.observe.settings import LogChoice


def _record(message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("flowserve.http", logging.WARNING, __file__, 1, message, arguments, None)


@pytest.mark.fault("Z4")
def test_client_text_cannot_forge_a_log_line() -> None:
    line = LineFormatter("default").format(_record("request %s", "a\nI0101 forged\r\x1b[31m\u2028b\x00"))
    assert line.endswith("request a\\nI0101 forged\\r\\x1b[31m\\u2028b\\x00")
    assert len(line.splitlines()) == 1


@pytest.mark.fault("Z4")
def test_lines_of_a_traceback_cannot_be_mistaken_for_records() -> None:
    record = _record("a model failed\nI0101 forged")
    try:
        raise ValueError("first\nE1121 14:03:05.250000 flowserve.http] forged\r\x1b[2K\u2028I0101 forged")
    except ValueError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    for style in ("default", "ISO8601"):
        first, *below = LineFormatter(style).format(record).splitlines()
        assert first.endswith("flowserve.http] a model failed\\nI0101 forged")
        assert below[0] == "    Traceback (most recent call last):"
        assert below[-2] == "    ValueError: first"
        assert below[-1] == "    E1121 14:03:05.250000 flowserve.http] forged\\r\\x1b[2K\\u2028I0101 forged"
        assert all(line.startswith("    ") for line in below)


def test_lines_that_a_models_process_printed_as_one_record_are_one() -> None:
    record = _record("%s", "Traceback (most recent call last):\n  File\nValueError: \x1b[2Kx")
    record.of_lines = True
    first, *below = LineFormatter("default").format(record).splitlines()
    assert first.endswith("] Traceback (most recent call last):")
    assert below == ["      File", "    ValueError: \\x1b[2Kx"]


def test_an_uncaught_exception_in_a_thread_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def raised(error: BaseException) -> threading.ExceptHookArgs:
        try:
            raise error
        except BaseException as caught:
            return threading.ExceptHookArgs(
                (type(caught), caught, caught.__traceback__, threading.Thread(name="worker"))
            )

    log_thread_exception(raised(SystemExit(1)))  # a normal end of a thread
    log_thread_exception(raised(ValueError("not now")))
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("ERROR", "exception in thread worker")
    assert LineFormatter("default").format(record).splitlines()[-1] == "    ValueError: not now"


def test_both_formats_show_time_level_and_logger() -> None:
    record = _record("text")
    record.created = 1_763_733_785.25
    assert LineFormatter("default").format(record) == "W1121 14:03:05.250000 flowserve.http] text"
    assert LineFormatter("ISO8601").format(record) == "2025-11-21T14:03:05.250000Z WARNING flowserve.http] text"


@pytest.mark.fault("Z4")
def test_as_json_a_record_is_one_object_with_its_fields_and_its_traceback() -> None:
    record = _record("request %s", 'a\n{"level": "INFO"}\r\x1b[31m\u2028\x85\udc80"')
    record.created = 1_763_733_785.25
    record.fields = {"model": "m", "trace_id": "4b"}
    try:
        raise ValueError("first\nsecond\u2028third")
    except ValueError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    line = JsonFormatter().format(record)
    assert len(line.splitlines()) == 1
    assert line.isascii()
    said = json.loads(line)
    assert said.pop("exception").splitlines()[0] == "Traceback (most recent call last):"
    assert said == {
        "time": "2025-11-21T14:03:05.250000Z",
        "level": "WARNING",
        "logger": "flowserve.http",
        "message": 'request a\n{"level": "INFO"}\r\x1b[31m\u2028\x85\udc80"',
        "model": "m",
        "trace_id": "4b",
    }


def test_letters_of_every_script_pass_unchanged() -> None:
    assert escape("größe 猫 ok") == "größe 猫 ok"


@pytest.fixture
def loggers() -> Iterator[logging.Logger]:
    """The program's loggers, restored afterwards."""
    root, own = logging.getLogger(), logging.getLogger("flowserve")
    before = root.handlers[:], root.level, own.level
    yield own
    messages.use("default")
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    own.setLevel(before[2])


def test_log_settings_can_change_while_the_server_runs(
    loggers: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> list[str]:
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            loggers.log(level, logging.getLevelName(level))
        return [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()]

    configure(LogChoice(log_warning=False))
    assert said() == ["INFO", "ERROR"]
    settings = configure(LogChoice())
    assert said() == ["INFO", "WARNING", "ERROR"]
    settings.change({"log_verbose_level": 1})
    assert said() == ["DEBUG", "INFO", "WARNING", "ERROR"]
    settings.change({"log_info": False, "log_error": False})
    assert said() == ["DEBUG", "WARNING"]
    settings.change({"log_verbose_level": 0})
    assert said() == ["WARNING"]
    settings.change({"log_info": True, "log_error": True, "log_verbose_level": 0, "log_format": "ISO8601"})
    loggers.warning("text")
    assert capsys.readouterr().err.split(" ", 1)[1] == "WARNING flowserve] text\n"
    settings.change({"log_format": "json"})
    loggers.warning("text")
    assert json.loads(capsys.readouterr().err)["message"] == "text"


def test_the_log_goes_to_the_operators_file_and_reopens_it_after_rotation(
    loggers: logging.Logger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "server.log"
    path.write_text("before\n")
    settings = configure(LogChoice(log_file=str(path)))
    try:
        assert settings.as_json()["log_file"] == str(path)
        loggers.warning("one")
        path.rename(tmp_path / "server.log.1")
        loggers.warning("two")
    finally:
        logging.getLogger().handlers[0].close()
    assert capsys.readouterr().err == ""
    kept = (tmp_path / "server.log.1").read_text().splitlines()
    assert kept[0] == "before"
    assert kept[1].endswith("flowserve] one")
    assert path.read_text().endswith("flowserve] two\n")


@pytest.mark.parametrize("style", ["default", "json"])
def test_why_a_server_ends_has_the_form_of_its_log(
    style: str, loggers: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(LogChoice(log_format=style))
    line = messages.line("not served\n", model="m")
    if style == "default":
        assert line == "flowserve: not served\\n\n"
    else:
        said = json.loads(line)
        assert (said["level"], said["message"], said["model"]) == ("ERROR", "not served\n", "m")


@pytest.mark.fault("W10")
def test_records_without_a_file_are_lost_with_one_line_and_counted_when_it_is_there_again(
    loggers: logging.Logger, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    configure(LogChoice(log_file=str(folder / "server.log")))
    try:
        folder.rename(tmp_path / "moved")
        for _ in range(3):
            loggers.warning("lost")
        folder.mkdir()
        loggers.warning("kept")
        loggers.warning("kept too")
    finally:
        logging.getLogger().handlers[0].close()
    what = f"log file '{folder}/server.log' cannot be written: No such file or directory"
    assert capfd.readouterr().err == f"flowserve: {what}; log records are lost until it can be\n"
    assert [line.partition("] ")[2] for line in (folder / "server.log").read_text().splitlines()] == [
        "kept",
        f"3 log records were lost: log file '{folder}/server.log' could not be written",
        "kept too",
    ]


def test_a_mistake_in_a_call_that_logs_is_still_shown(
    loggers: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(LogChoice())
    loggers.warning("%d", "no number")
    assert "--- Logging error ---" in capsys.readouterr().err


def test_a_log_file_that_cannot_be_opened_ends_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nowhere/server.log"
    assert run(run_arguments(str(tmp_path), f"--log-file={path}")) == 1
    assert capsys.readouterr().err == f"flowserve: --log-file: '{path}' cannot be written: No such file or directory\n"
