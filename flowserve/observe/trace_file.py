"""Triton's trace file: where traces are kept until they are written, and into which file.

Decided here: everything is turned into text and written on a thread of its own, so that neither the event loop nor a
request waits for a disk; what cannot be written is said once in the log and given up. With `log_frequency` N, every N
traces go into a file with a number at its end (`trace.json.0`, `trace.json.1`), and so do those of a `trace_count` that
is used up; all others into the file itself, which is whole JSON after each trace. What was there before is replaced.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Final

import orjson

from flowserve.errors import Invalid
from flowserve.observe.trace import Trace
from flowserve.observe.trace_json import as_objects
from flowserve.observe.trace_settings import Setting
from flowserve.observe.writer import Writer

KEPT_BYTES_MAX: Final = 64 << 20  # of text that waits for its file; what is more goes into the file without a number

_TOGETHER: Final = 256  # traces at most are written in one go

log = logging.getLogger("flowserve.observe")


class _Kept:
    """Texts that wait for their file."""

    __slots__ = ("nbytes", "texts")

    def __init__(self) -> None:
        self.texts: list[bytes] = []
        self.nbytes = 0

    def add(self, text: bytes) -> None:
        self.texts.append(text)
        self.nbytes += len(text)


class TraceFile:
    """The files of one path. Its methods return at once, but for `close`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._numbers = count(1)
        self._indices = count()
        self._kept: dict[Setting, _Kept] = {}
        self._end: int | None = None  # where the file's last bracket is, once it is begun
        self._due: list[bytes] = []  # for the file itself, while more comes
        self._complaint = ""
        self._writer = Writer("flowserve trace file", self._complain)

    def check(self) -> None:
        """Raises `Invalid` where nothing could be written."""
        folder = self._path.parent
        if self._path.is_dir():
            raise Invalid(f"trace file '{self._path}' cannot be written: it is a folder")
        if not folder.is_dir():
            raise Invalid(f"trace file '{self._path}' cannot be written: there is no folder '{folder}'")
        if not os.access(self._path if self._path.exists() else folder, os.W_OK):
            raise Invalid(f"trace file '{self._path}' cannot be written: permission denied")

    def put(self, setting: Setting, trace: Trace) -> None:
        """A request that this setting chose is over."""
        self._writer.offer(lambda: self._add(setting, trace))

    def retire(self, setting: Setting) -> None:
        """The setting is in force no more: what was kept for it is written."""
        if self._writer.is_begun:
            self._writer.do(lambda: self._flush(setting))

    def close(self) -> None:
        """Write everything. Blocks."""
        if self._writer.is_begun:
            self._writer.do(self._flush_all)
            self._writer.close()

    # ------------------------------------------------------------------ on its thread

    def _complain(self, error: OSError) -> None:
        text = f"trace file '{self._path}' cannot be written: {error.strerror}"
        if text != self._complaint:
            self._complaint = text
            log.error("%s; traces are lost until it can be", text)

    def _add(self, setting: Setting, trace: Trace) -> None:
        text = b",".join(orjson.dumps(one) for one in self._objects(trace))
        choice = setting.choice
        setting.written += 1
        if not choice.log_frequency and choice.trace_count < 0:
            self._due.append(text)
            if self._writer.is_idle or len(self._due) >= _TOGETHER:
                due, self._due = self._due, []
                self._append(due)
            return
        kept = self._kept.setdefault(setting, _Kept())
        kept.add(text)
        is_complete = setting.left == 0 and setting.written >= setting.begun
        if is_complete or (choice.log_frequency and len(kept.texts) >= choice.log_frequency):
            del self._kept[setting]
            self._save(kept.texts)
        elif kept.nbytes > KEPT_BYTES_MAX:
            del self._kept[setting]
            self._append(kept.texts)

    def _objects(self, trace: Trace) -> Iterator[object]:
        return as_objects(trace, self._numbers)

    def _flush_all(self) -> None:
        due, self._due = self._due, []
        if due:
            self._append(due)
        for setting in [*self._kept]:
            self._flush(setting)

    def _flush(self, setting: Setting) -> None:
        kept = self._kept.pop(setting, None)
        if kept is None:
            return
        if setting.choice.log_frequency:
            self._save(kept.texts)
        else:
            self._append(kept.texts)

    def _save(self, texts: list[bytes]) -> None:
        path = self._path.with_name(f"{self._path.name}.{next(self._indices)}")
        path.write_bytes(b"[%b]" % b",".join(texts))

    def _append(self, texts: list[bytes]) -> None:
        is_new = self._end is None or not self._path.exists()
        with self._path.open("wb" if is_new else "rb+") as file:
            if not is_new:
                assert self._end is not None
                file.truncate(self._end)  # what a disk that was full took of something does not stay
                file.seek(self._end)
            file.write(b"[" if is_new else b",")
            file.write(b",".join(texts))
            end = file.tell()
            file.write(b"]")
        self._end = end
