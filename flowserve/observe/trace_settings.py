"""Settings of Triton's trace extension, and the selection of requests to trace.

Decides the valid values, the precedence of a model's settings over the server's over the command line's, and which
request is traced next: one of every `trace_rate`, until `trace_count` were traced. Clients cannot choose a file,
cannot enable tracing without a destination, and cannot cause more bytes in files than the operator allows. Does not
write traces (`trace_file`, `otel`). Callers: `runtime/tracing`, `cli`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from flowserve.errors import Invalid, Unsupported

TRITON: Final = "triton"
OPENTELEMETRY: Final = "opentelemetry"
MODES: Final = (TRITON, OPENTELEMETRY)
OFF: Final = "OFF"
TIMESTAMPS: Final = "TIMESTAMPS"
TENSORS: Final = "TENSORS"
LEVELS: Final = (OFF, TIMESTAMPS, TENSORS)
API_MAX_BYTES: Final = 256 << 20
USED_UP: Final = (
    "settings that were changed or reset over the network write no more traces: the limit for all of them is reached"
    " (--trace-config triton,api-max-bytes=N)"
)
_LEAST: Final[Mapping[str, int]] = {"trace_rate": 0, "trace_count": -1, "log_frequency": 0}
_MOST: Final[Mapping[str, int]] = {"trace_rate": 2**32 - 1, "trace_count": 2**31 - 1, "log_frequency": 2**32 - 1}


@dataclass(frozen=True, slots=True)
class TraceChoice:
    """One state of the settings, with Triton's names. `trace_count` -1: unlimited."""

    trace_file: str = ""
    trace_level: tuple[str, ...] = (OFF,)
    trace_rate: int = 1000
    trace_count: int = -1
    log_frequency: int = 0
    trace_mode: str = TRITON

    @property
    def is_on(self) -> bool:
        return self.trace_level != (OFF,)

    @property
    def has_tensors(self) -> bool:
        return TENSORS in self.trace_level

    @property
    def flaw(self) -> str:
        """The reason why tracing is impossible with these settings, "" if it is possible or off."""
        if not self.is_on:
            return ""
        if self.trace_mode == TRITON and not self.trace_file:
            return "trace file name is not given: the server has none (--trace-config triton,file=PATH)"
        if self.trace_mode == TRITON and self.trace_rate == 0:
            return "sample rate must be non-zero"
        if self.trace_mode == OPENTELEMETRY and self.has_tensors:
            return "tensors are not traced in mode opentelemetry"
        return ""


@dataclass(slots=True)
class TraceBudget:
    """How many bytes the traces of settings that clients changed may still take in files."""

    left: int


class TraceSampler:
    """Selects requests by one state of the settings, of one model or of all models without their own. `left`: the
    number of requests still to be traced, -1 for unlimited; `begun` traces were started, and `written` have finished.
    `budget`: of a state that a client caused; None for the operator's own.
    """

    __slots__ = ("_seen", "begun", "budget", "choice", "left", "written")

    def __init__(self, choice: TraceChoice, budget: TraceBudget | None = None) -> None:
        self.choice = choice
        self.budget = budget
        self.left = choice.trace_count
        self.begun = 0
        self.written = 0
        self._seen = 0

    @property
    def is_tracing(self) -> bool:
        """Whether it may select further requests."""
        may_write = self.budget is None or self.budget.left > 0
        return self.choice.is_on and may_write and (self.left != 0 or self.choice.trace_mode == OPENTELEMETRY)

    def sample(self, *, has_context: bool = False) -> bool:
        """Whether the next request is traced. `has_context`: its caller traces it, which decides in that mode."""
        if not self.choice.is_on or (self.budget is not None and self.budget.left <= 0):
            return False
        if not (has_context and self.choice.trace_mode == OPENTELEMETRY):
            if self.left == 0 or not self.choice.trace_rate:
                return False
            self._seen += 1
            if self._seen % self.choice.trace_rate:
                return False
            if self.left > 0:
                self.left -= 1
        self.begun += 1
        return True

    def as_json(self) -> dict[str, Any]:
        choice = self.choice
        return {
            "trace_file": choice.trace_file,
            "trace_level": [*choice.trace_level],
            "trace_rate": str(choice.trace_rate),
            "trace_count": str(self.left),
            "log_frequency": str(choice.log_frequency),
            "trace_mode": choice.trace_mode,
        }


class TraceSettings:
    """The current settings. `retired` is called with each replaced sampler, `check` with each new choice; it raises if
    the choice is impossible. `api_max_bytes`: what all traces may take in files that settings changed by clients
    select.
    """

    def __init__(
        self,
        default: TraceChoice | None = None,
        *,
        api_max_bytes: int = API_MAX_BYTES,
        retired: Callable[[TraceSampler], None] = lambda _: None,
        check: Callable[[TraceChoice], None] = lambda _: None,
    ) -> None:
        self._default = default or TraceChoice()
        self._budget = TraceBudget(api_max_bytes) if self._default.trace_mode == TRITON else None
        self._retired = retired
        self._check = check
        self._own: dict[str, dict[str, Any]] = {"": {}}  # explicit settings of each model and ("") of the server
        self._settings: dict[str, TraceSampler] = {"": TraceSampler(self._default)}

    def of(self, model: str = "") -> TraceSampler:
        """The sampler of a model; "": the one for models without their own."""
        return self._settings.get(model) or self._settings[""]

    @property
    def is_tracing(self) -> bool:
        """Whether any request may be traced."""
        return any(setting.is_tracing for setting in self._settings.values())

    def change(self, asked: Mapping[str, Any], model: str = "") -> None:
        """Change the given settings, all or none; null restores the server's setting, or for the server the command
        line's. Raises `Invalid` naming the setting, `Unsupported` for one that clients cannot change.
        """
        wanted = {key: _checked(key, value) for key, value in asked.items()}
        mode = wanted.pop("trace_mode", None)
        if mode not in (None, self._default.trace_mode):
            raise Unsupported("trace mode can not be updated through network protocol: it is chosen at start")
        if not wanted:
            return
        own = {name: self._kept(name) for name in self._own}
        own[model] = {**own.get(model, {}), **wanted}
        own[model] = {key: value for key, value in own[model].items() if value is not None}
        if model and not own[model]:
            del own[model]
        choices = self._choices(own)
        for name in choices.keys() if not model else choices.keys() & {model}:
            flaw = choices[name].flaw
            if choices[name].is_on and self._budget is not None and self._budget.left <= 0:
                flaw = flaw or USED_UP
            if flaw:
                raise Invalid(f"Attempting to set invalid trace setting: {flaw}")
            self._check(choices[name])
        former, self._own = self._settings, own
        replaced = {model} if model else {*former, *choices}
        self._settings = {name: former[name] for name in former if name not in replaced}
        # Also of a setting that is reset: otherwise clients could restart the operator's `trace_count` for ever.
        self._settings |= {name: TraceSampler(choices[name], self._budget) for name in choices if name in replaced}
        for name in replaced & former.keys():
            self._retired(former[name])

    def _kept(self, name: str) -> dict[str, Any]:
        """The explicit settings that stay, with `trace_count` reduced to the remaining number."""
        own = self._own[name]
        return {**own, "trace_count": self._settings[name].left} if "trace_count" in own else own

    def _choices(self, own: Mapping[str, Mapping[str, Any]]) -> dict[str, TraceChoice]:
        server = replace(self._default, **own[""])
        return {name: replace(server, **changed) if name else server for name, changed in own.items()}


_KEYS: Final = frozenset(field.name for field in fields(TraceChoice))


def _checked(key: str, value: Any) -> Any:
    """The setting's value, None for null. Raises Invalid or Unsupported."""
    if key not in _KEYS:
        raise Invalid(f"unknown trace setting '{key[:100]}'")
    if value is None:
        return None
    if key == "trace_file":
        raise Unsupported("trace file location can not be updated through network protocol")
    if key == "trace_level":
        return _levels(value)
    if key == "trace_mode":
        if value not in MODES:
            raise Invalid(f"trace setting '{key}' is one of {', '.join(MODES)}")
        return value
    if not isinstance(value, str) or not _is_number(value) or not _LEAST[key] <= int(value) <= _MOST[key]:
        raise Invalid(f"trace setting '{key}' is a whole number in a string, from {_LEAST[key]} to {_MOST[key]}")
    return int(value)


def _levels(value: Any) -> tuple[str, ...]:
    """The levels in the order of LEVELS, each once."""
    if not isinstance(value, list) or not value or any(not isinstance(one, str) or one not in LEVELS for one in value):
        raise Invalid(f"trace setting 'trace_level' is a list of {', '.join(LEVELS)}")
    if OFF in value and len(set(value)) > 1:
        raise Invalid("Expect only one trace level 'OFF' is specified")
    return tuple(level for level in LEVELS if level in value)


def _is_number(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdecimal() and len(digits) < 20
