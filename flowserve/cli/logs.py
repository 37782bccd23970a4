"""Format and destination of the log: one line per record, on standard error or in the operator's file; and of the
messages that a server writes to standard error besides.

Decides the format of a line, and escapes control characters in every record, so that text from a client or a file
cannot forge a line. Only a traceback adds lines below its record; each begins with spaces, unlike a record. In the
format `json` every line is an object, messages included, and a traceback is one of its fields. Decides that records
that cannot be written are lost. Does not know what is logged. Callers: `run`; `escape` is used by all commands that
print names from files.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime
from io import FileIO, TextIOWrapper
from logging.handlers import WatchedFileHandler
from typing import Any, Final, TextIO

from flowserve.observe.log_fields import FIELDS, of
from flowserve.observe.settings import JSON, LogChoice, LogSettings
from flowserve.runtime.processes.log_level import tell_log_level
from flowserve.runtime.processes.printed import OF_LINES

_log = logging.getLogger("flowserve.cli")

# C0 and C1 control characters, DEL, and the two Unicode separators at which some viewers break lines.
_ESCAPES: Final = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
} | {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"}
_BELOW: Final = "    "


def escape(text: str) -> str:
    """`text` as one printable line."""
    return text.translate(_ESCAPES)


class LineFormatter(logging.Formatter):
    """`default`: `I1121 14:03:05.123456 flowserve.http] text`. `ISO8601`: `2025-11-21T14:03:05.123456Z INFO ...`. The
    name of the logger is followed by the number of the worker, if there are several: `flowserve.http/1]`.
    """

    def __init__(self, style: str, worker: int | None = None) -> None:
        super().__init__("%(message)s")
        self._time = style
        self._worker = "" if worker is None else f"/{worker}"

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, tz=UTC)
        first, *below = super().format(record).split("\n")  # includes the traceback, if any
        text = "".join((first, *(f"\n{_BELOW}{escape(line)}" for line in below)))
        if self._time == "ISO8601":
            return f"{when:%Y-%m-%dT%H:%M:%S.%f}Z {record.levelname} {record.name}{self._worker}] {text}"
        return f"{record.levelname[0]}{when:%m%d %H:%M:%S.%f} {record.name}{self._worker}] {text}"

    def formatMessage(self, record: logging.LogRecord) -> str:
        message = super().formatMessage(record)
        return "\n".join(map(escape, message.split("\n"))) if getattr(record, OF_LINES, False) else escape(message)


class JsonFormatter(logging.Formatter):
    """`{"time": ..., "level": ..., "logger": ..., "message": ...}`, with the record's fields and its traceback. ASCII
    only, so that no text can end a line or fail to be encoded. `worker`: its number, if there are several.
    """

    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._worker = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, tz=UTC)
        line = {
            "time": f"{when:%Y-%m-%dT%H:%M:%S.%f}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._worker,
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        elif record.exc_text:  # of an exception in another process
            line["exception"] = record.exc_text
        return json.dumps(line, default=str)


class Messages:
    """The lines that a server writes to standard error besides its log: why it does not start, or ends at once."""

    def __init__(self) -> None:
        self._formatter: logging.Formatter | None = None

    def use(self, style: str) -> None:
        """`style`: the log's format."""
        self._formatter = JsonFormatter() if style == JSON else None

    @property
    def are_json(self) -> bool:
        return self._formatter is not None

    def line(self, text: str, **fields: str) -> str:
        """`text`, which is one problem, as one line: with the program's name, or as an object with these fields."""
        if self._formatter is None:
            return f"flowserve: {escape(text)}\n"
        record = logging.LogRecord(_log.name, logging.ERROR, "", 0, "%s", (text,), None)
        record.__dict__.update(of(**fields))
        return f"{self._formatter.format(record)}\n"


messages: Final = Messages()


class LossyHandler(logging.Handler):
    """A handler whose records are lost while they cannot be written, because a disk is full or a folder is gone. The
    first loss is a line on standard error; how many were lost is a record after the next one that is written.
    `destination`: its name in that line.
    """

    destination = "standard error"
    _lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        before = self._lost
        try:
            super().emit(record)
        except OSError:  # a file that is opened again
            self.handleError(record)
        if before and self._lost == before:
            self._lost = 0
            _log.warning("%d log records were lost: %s could not be written", before, self.destination)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # a mistake in the call that logs
            super().handleError(record)
            return
        if not self._lost:
            what = f"{self.destination} cannot be written: {error.strerror}"
            with suppress(OSError):
                os.write(
                    2, messages.line(f"{what}; log records are lost until it can be").encode(errors="backslashreplace")
                )
        self._lost += 1


class LossyStreamHandler(LossyHandler, logging.StreamHandler[TextIO]):
    """Writes to standard error."""


class LossyFileHandler(LossyHandler, WatchedFileHandler):
    """Appends to a file, and creates it again if it was moved away. Without a buffer: a full one could not be flushed,
    and would keep a file open that an operator has removed to make room.
    """

    def __init__(self, file: str) -> None:
        self.destination = f"log file '{file}'"
        super().__init__(file, encoding="utf-8")

    def _open(self) -> TextIOWrapper:
        return TextIOWrapper(_Unbuffered(self.baseFilename, "a"), encoding="utf-8", write_through=True)


class _Unbuffered(FileIO):
    """A file whose `write` writes everything, or raises."""

    def write(self, data: Any, /) -> int:
        rest = memoryview(data)
        while rest:
            rest = rest[super().write(rest) :]
        return len(data)


def log_thread_exception(arguments: threading.ExceptHookArgs) -> None:
    """`threading.excepthook` that logs an uncaught exception of a thread, usually of a model's own thread."""
    kind, error = arguments.exc_type, arguments.exc_value
    if error is not None and kind is not SystemExit:
        name = arguments.thread.name if arguments.thread is not None else "?"
        _log.error("exception in thread %s", name, exc_info=(kind, error, arguments.exc_traceback))


def configure(choice: LogChoice, worker: int | None = None) -> LogSettings:
    """Send the log to standard error, or append it to its file; a file that was moved away is created again. Verbosity
    0: INFO and above; 1: flowserve's DEBUG records too; 2: all libraries' DEBUG records. As on Triton, each kind is
    independent of the others: verbose records are written without `log_info` too. The returned settings can be
    changed while the server runs. `worker`: the number of this server, if there are several. Raises OSError if the file
    cannot be opened.
    """
    file = choice.log_file
    handler = LossyFileHandler(file) if file else LossyStreamHandler(sys.stderr)
    logging.basicConfig(handlers=[handler], force=True)

    def is_wanted(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            return choice.log_error
        if record.levelno >= logging.WARNING:
            return choice.log_warning
        # The levels of the loggers decide about verbose records, whether or not others are wanted.
        return choice.log_info or record.levelno < logging.INFO

    def apply(changed: LogChoice) -> None:
        nonlocal choice
        choice = changed
        style = choice.log_format
        handler.setFormatter(JsonFormatter(worker) if style == JSON else LineFormatter(style, worker))
        messages.use(style)
        level = choice.log_verbose_level
        logging.getLogger().setLevel(logging.DEBUG if level > 1 else logging.INFO)
        logging.getLogger("flowserve").setLevel(logging.DEBUG if level else logging.INFO)
        tell_log_level()

    handler.addFilter(is_wanted)
    apply(choice)
    return LogSettings(choice, apply)


def failed(message: str) -> int:
    """Write a message to standard error; returns the exit status."""
    sys.stderr.write("".join(map(messages.line, message.splitlines())))
    sys.stderr.flush()
    return 1
