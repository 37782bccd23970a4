"""The selection of metrics, and log settings that can be changed while the server runs.

Decides the operator's options and defaults for metrics; the settings of Triton's logging extension, their valid values,
and that clients cannot choose a file: only the operator can. Does not write the log: `apply` is called with every
change. Imported by the command line, so it must stay light. Callers: `cli`, `http`, `grpc`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from flowserve.errors import Invalid, Unsupported

JSON: Final = "json"
FORMATS: Final = ("default", "ISO8601", JSON)  # Triton has the first two
_VERBOSE_MAX: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class MetricsChoice:
    """`quantiles`: quantiles of the summaries, () for no summaries. `interval_ms`: the minimum period over which the
    machine's figures are averaged.
    """

    has_latency_counters: bool = True
    has_first_response: bool = True
    quantiles: tuple[float, ...] = ()
    has_machine: bool = True
    has_gpus: bool = True
    interval_ms: int = 2000


EVERYTHING: Final = MetricsChoice()


@dataclass(frozen=True, slots=True)
class LogChoice:
    """One state of the settings, with Triton's names. `log_file` "": standard error."""

    log_file: str = ""
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    log_format: str = "default"


class LogSettings:
    """The current settings. `apply` puts them into effect; `change` calls it with every new choice before returning."""

    def __init__(self, choice: LogChoice | None = None, apply: Callable[[LogChoice], None] | None = None) -> None:
        self._choice = choice or LogChoice()
        self._apply = apply

    def as_json(self) -> dict[str, Any]:
        return asdict(self._choice)

    def change(self, asked: Mapping[str, Any]) -> None:
        """Change the given settings, all or none. Raises `Invalid` naming the setting, `Unsupported` for one that
        clients cannot change.
        """
        for key, value in asked.items():
            _check(key, value)
        if self._apply is None and asked:
            raise Unsupported("log settings cannot be changed: this server's log belongs to the program around it")
        choice = replace(self._choice, **asked)
        if self._apply is not None:
            self._apply(choice)
        self._choice = choice


def _check(key: str, value: Any) -> None:
    if key == "log_file":
        raise Unsupported("log file location can not be updated through network protocol")
    if key == "log_verbose_level":
        if type(value) is not int or not 0 <= value <= _VERBOSE_MAX:
            raise Invalid(f"expect unsigned integer for log setting '{key}'")
    elif key == "log_format":
        if value not in FORMATS:
            raise Invalid(f"invalid argument for log setting '{key}': use {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    elif key in ("log_info", "log_warning", "log_error"):
        if type(value) is not bool:
            raise Invalid(f"expect boolean for log setting '{key}'")
    else:
        raise Invalid(f"unknown log setting '{key[:100]}'")
