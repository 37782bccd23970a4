"""Format and destination of the log: one line per record, on standard error or in the operator's file.

Decides the format of a line, and escapes control characters in every record, so that text from a client or a file
cannot forge a line. Only a traceback adds lines below its record; each begins with spaces, unlike a record. Does not
know what is logged. Callers: `run`; `escape` is used by all commands that print names from files.
"""

from __future__ import annotations

import logging
import sys
import threading
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from typing import Final

from flowserve.observe.settings import LogChoice, LogSettings
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
    """`default`: `I1121 14:03:05.123456 flowserve.http] text`. `ISO8601`: `2025-11-21T14:03:05.123456Z INFO ...`."""

    def __init__(self, style: str) -> None:
        super().__init__("%(message)s")
        self._time = style

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, tz=UTC)
        first, *below = super().format(record).split("\n")  # includes the traceback, if any
        text = "".join((first, *(f"\n{_BELOW}{escape(line)}" for line in below)))
        if self._time == "ISO8601":
            return f"{when:%Y-%m-%dT%H:%M:%S.%f}Z {record.levelname} {record.name}] {text}"
        return f"{record.levelname[0]}{when:%m%d %H:%M:%S.%f} {record.name}] {text}"

    def formatMessage(self, record: logging.LogRecord) -> str:
        message = super().formatMessage(record)
        return "\n".join(map(escape, message.split("\n"))) if getattr(record, OF_LINES, False) else escape(message)


def log_thread_exception(arguments: threading.ExceptHookArgs) -> None:
    """`threading.excepthook` that logs an uncaught exception of a thread, usually of a model's own thread."""
    kind, error = arguments.exc_type, arguments.exc_value
    if error is not None and kind is not SystemExit:
        name = arguments.thread.name if arguments.thread is not None else "?"
        _log.error("exception in thread %s", name, exc_info=(kind, error, arguments.exc_traceback))


def configure(choice: LogChoice) -> LogSettings:
    """Send the log to standard error, or append it to its file; a file that was moved away is created again. Verbosity
    0: INFO and above; 1: flowserve's DEBUG records too; 2: all libraries' DEBUG records. The returned settings can be
    changed while the server runs. Raises OSError if the file cannot be opened.
    """
    file = choice.log_file
    handler = WatchedFileHandler(file, encoding="utf-8") if file else logging.StreamHandler(sys.stderr)
    logging.basicConfig(handlers=[handler], force=True)

    def is_wanted(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            return choice.log_error
        return choice.log_warning if record.levelno >= logging.WARNING else choice.log_info

    def apply(changed: LogChoice) -> None:
        nonlocal choice
        choice = changed
        handler.setFormatter(LineFormatter(choice.log_format))
        level = choice.log_verbose_level
        logging.getLogger().setLevel(logging.DEBUG if level > 1 else logging.INFO)
        logging.getLogger("flowserve").setLevel(logging.DEBUG if level else logging.INFO)

    handler.addFilter(is_wanted)
    apply(choice)
    return LogSettings(choice, apply)
