"""Kinds of options for argparse, and the parsers of their values: booleans, numbers, resources, settings and others.

Decides the syntax of each kind of value and the message for an invalid one. Does not know which option uses which kind
(`options` and `main`, its callers).
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from flowserve.errors import Invalid
from flowserve.observe.trace_settings import LEVELS, MODES, OPENTELEMETRY, TRITON

if TYPE_CHECKING:
    from flowserve.runtime.protocol import Restriction
    from flowserve.values import Parameter

# Settings of the onnxruntime backend for all its models, each with its minimum. Other backends check their own.
ONNXRUNTIME_SETTINGS: Final[Mapping[str, int]] = {
    "default-max-batch-size": 1,
    "intra_op_thread_count": 0,
    "inter_op_thread_count": 0,
    "execution_mode": 0,
    "enable_mem_arena": 0,
    "enable_mem_pattern": 0,
}

# Settings of Triton's onnxruntime backend that only tune it.
ONNXRUNTIME_UNUSED: Final = frozenset({"enable-global-threadpool"})

# Of a regular expression: an escaped character, a set, flags, any other character.
_TOKENS: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[a-zA-Z]*-?[a-zA-Z]*\)|.", re.DOTALL)
_FLAGS: Final = re.compile(r"\(\?[a-zA-Z]*-?[a-zA-Z]*\)")

_METRICS_SWITCHES: Final = ("counter_latencies", "histogram_latencies", "summary_latencies")
METRICS_QUANTILES: Final = "summary_quantiles"
_SHARE: Final = re.compile(r"0(?:\.[0-9]{1,9})?|1(?:\.0{1,9})?", re.ASCII)

TRACE_SETTINGS: Final = {  # by mode, "" for the global ones
    "": ("level", "rate", "count", "mode"),
    TRITON: ("file", "log-frequency", "api-max-bytes"),
    OPENTELEMETRY: ("url", "resource", "bsp_max_queue_size", "bsp_schedule_delay", "bsp_max_export_batch_size"),
}
_TRACE_NUMBERS: Final = {
    "rate": (0, 2**32 - 1),
    "count": (-1, 2**31 - 1),
    "log-frequency": (0, 2**32 - 1),
    "api-max-bytes": (0, 2**63 - 1),
}
_BSP_MOST: Final = 2**31 - 1

CONCURRENCY_MAX: Final = 1024
WORKERS_MAX: Final = 256

Shape = tuple[int, ...]
TraceSetting = tuple[str, str, str]  # mode ("" for global), name, value
MetricsSetting = tuple[str, bool | tuple[float, ...]]


def add_option(
    group: argparse._ActionsContainer,
    option: str,
    text: str,
    parse: Callable[[str], Any] = str,
    default: Any = None,
    *,
    repeatable: bool = False,
) -> None:
    """Add an option written as in the help, "--name VALUE". The values of a `repeatable` one are a list."""
    name, metavar = option.split(" ")
    if repeatable:
        group.add_argument(name, metavar=metavar, type=parse, action="append", default=[], help=text)
    else:
        group.add_argument(name, metavar=metavar, type=parse, default=default, help=text)


def add_switch(group: argparse._ActionsContainer, name: str, default: bool, text: str) -> None:
    """Add an option with the values true and false."""
    add_option(group, f"{name} BOOL", f"{text}; default {str(default).lower()}", boolean, default)


def boolean(text: str) -> bool:
    """true, false, 1 or 0, in any case, as tritonserver takes them."""
    known = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"expected true, false, 1 or 0, got {text!r}")
    return known[text.lower()]


def workers(text: str) -> int:
    """A number of processes; auto: one for each processor that this process may use."""
    if text == "auto":
        from flowserve.backends.cores import cores_allowed

        return cores_allowed()
    try:
        return whole_number(1, WORKERS_MAX)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or auto") from None


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """A parser of decimal integers from `least` to `most`, both included."""
    wanted = f"a whole number from {least} to {most}" if most is not None else f"a whole number, {least} or more"

    def parse(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]+", text, re.ASCII) or len(text) > 19:
            raise argparse.ArgumentTypeError(f"expected {wanted}, got {text!r}")
        number = int(text)
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"expected {wanted}, got {number}")
        return number

    return parse


def verbosity(text: str) -> int:
    """A level, or a boolean, as tritonserver takes them."""
    words = {"true": 1, "false": 0}
    return words[text.lower()] if text.lower() in words else whole_number(0)(text)


def one_of(*words: str) -> Callable[[str], str]:
    """A parser that takes one of `words`."""

    def parse(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"expected {' or '.join(words)}, got {text!r}")
        return text

    return parse


def resource(text: str) -> tuple[str, int, int | None]:
    """NAME:COUNT or NAME:COUNT:DEVICE."""
    found = re.fullmatch(r"([^:]+):([0-9]{1,9})(?::([0-9]{1,9}))?", text, re.ASCII)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected NAME:COUNT or NAME:COUNT:DEVICE, got {text!r}")
    return found[1], int(found[2]), None if found[3] is None else int(found[3])


def local_cache(text: str) -> int:
    """local,size=BYTES."""
    found = re.fullmatch(r"local,size=([0-9]{1,15})", text, re.ASCII)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected local,size=BYTES, got {text!r}")
    return int(found[1])


def restriction(text: str) -> Restriction:
    """GROUP[,GROUP...]:HEADER=VALUE."""
    from flowserve.runtime.protocol import parse_restriction  # imported late, so that help is fast

    try:
        return parse_restriction(text)
    except Invalid as error:
        raise argparse.ArgumentTypeError(f"{error}, got {text!r}") from None


def hosts(text: str) -> tuple[str, ...]:
    """HOST[,HOST...]."""
    from flowserve.http.api.access import parse_hosts  # imported late, so that help is fast

    try:
        return parse_hosts(text)
    except Invalid as error:
        raise argparse.ArgumentTypeError(f"{error}, got {text!r}") from None


def origins(text: str) -> tuple[str, ...]:
    """ORIGIN[,ORIGIN...]."""
    from flowserve.http.api.access import parse_origins  # imported late, so that help is fast

    try:
        return parse_origins(text)
    except Invalid as error:
        raise argparse.ArgumentTypeError(f"{error}, got {text!r}") from None


def backend_setting(text: str) -> tuple[str, str, str]:
    """BACKEND,KEY=VALUE; without a backend, a setting of onnxruntime."""
    found = re.fullmatch(r"(?:([a-z0-9_]*),)?([A-Za-z0-9_-]+)=(.+)", text, re.ASCII)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected BACKEND,KEY=VALUE, got {text!r}")
    backend, key, value = found[1] or "onnxruntime", found[2], found[3]
    if backend == "onnxruntime" and key not in ONNXRUNTIME_UNUSED:
        if key not in ONNXRUNTIME_SETTINGS:
            known = ", ".join(ONNXRUNTIME_SETTINGS)
            raise argparse.ArgumentTypeError(f"onnxruntime has no setting {key!r}; it has {known}")
        whole_number(ONNXRUNTIME_SETTINGS[key], 2**31 - 1)(value)
    return backend, key, value


def file_stem(text: str) -> str:
    """The name of a file, without folder and suffix."""
    if not re.fullmatch(r"[^\s/\\\x00]+", text) or text in (".", ".."):
        raise argparse.ArgumentTypeError(f"expected a name without slashes and spaces, got {text!r}")
    return text


def pattern(text: str) -> re.Pattern[str]:
    """A regular expression for the names of headers, in RE2's syntax as on Triton: it ignores case, except after
    (?-i).
    """
    try:
        return re.compile(_flags_as_groups(text), re.IGNORECASE | re.ASCII)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, got {text!r}: {error}") from None


def _flags_as_groups(text: str) -> str:
    """RE2's flags, which hold until the end of the group around them, as groups: `a(?-i)b|c` -> `a(?-i:b)|(?-i:c)`."""
    written: list[str] = []
    flags: list[list[str]] = [[]]  # of each open group, the outermost first
    for token in _TOKENS.findall(text):
        if _FLAGS.fullmatch(token):
            flags[-1].append(f"{token[:-1]}:")
            token = flags[-1][-1]
        elif token == "|":
            token = f"{')' * len(flags[-1])}|{''.join(flags[-1])}"
        elif token == "(":
            flags.append([])
        elif token == ")" and len(flags) > 1:
            token += ")" * len(flags.pop())
        written.append(token)
    return "".join([*written, *(")" * len(ends) for ends in flags)])


def gpu_pool(text: str) -> tuple[int, int]:
    """GPU:BYTES."""
    number, colon, nbytes = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"expected GPU:BYTES, got {text!r}")
    parse = whole_number(0)
    return parse(number), parse(nbytes)


def metrics_setting(text: str) -> MetricsSetting:
    """KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not equals or key not in (*_METRICS_SWITCHES, METRICS_QUANTILES):
        known = ", ".join((*_METRICS_SWITCHES, METRICS_QUANTILES))
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE with one of {known}, got {text!r}")
    return key, boolean(value) if key in _METRICS_SWITCHES else _quantiles(value)


def _quantiles(text: str) -> tuple[float, ...]:
    found = []
    for one in text.split(","):
        share, colon, error = one.partition(":")
        if not _SHARE.fullmatch(share) or (colon and not _SHARE.fullmatch(error)):
            raise argparse.ArgumentTypeError(f"expected quantiles such as 0.5:0.05,0.99:0.001, got {text!r}")
        found.append(float(share))
    return tuple(found)


def trace_setting(text: str) -> TraceSetting:
    """SETTING=VALUE or MODE,SETTING=VALUE, as for tritonserver."""
    found = re.fullmatch(r"(?:([a-z]+),)?([a-z_-]+)=(.+)", text, re.ASCII | re.DOTALL)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected SETTING=VALUE or MODE,SETTING=VALUE, got {text!r}")
    mode, name, value = found[1] or "", found[2], found[3]
    if mode not in TRACE_SETTINGS:
        raise argparse.ArgumentTypeError(f"expected the mode triton or opentelemetry, got {mode!r}")
    if name not in TRACE_SETTINGS[mode]:
        where = f"mode {mode} has" if mode else "without a mode there is"
        raise argparse.ArgumentTypeError(f"{where} no setting {name!r}; there are {', '.join(TRACE_SETTINGS[mode])}")
    if name in _TRACE_NUMBERS:
        whole_number(*_TRACE_NUMBERS[name])(value)
    elif name.startswith("bsp_"):
        whole_number(1, _BSP_MOST)(value)
    elif name == "level" and value not in LEVELS:
        raise argparse.ArgumentTypeError(f"expected the level {', '.join(LEVELS)}, got {value!r}")
    elif name == "mode" and value not in MODES:
        raise argparse.ArgumentTypeError(f"expected the mode {' or '.join(MODES)}, got {value!r}")
    elif name == "resource" and not re.fullmatch(r"[^=]+=.*", value, re.DOTALL):
        raise argparse.ArgumentTypeError(f"expected resource=KEY=VALUE, got {value!r}")
    return mode, name, value


def request_parameter(word: str) -> tuple[str, Parameter]:
    """`NAME=VALUE`: a JSON number, true or false; anything else is text, bare or as a JSON string."""
    name, equals, value = word.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {word!r}")
    try:
        found = json.loads(value)
    except ValueError:
        return name, value
    is_one = isinstance(found, str | bool | int) or (isinstance(found, float) and math.isfinite(found))
    return name, found if is_one else value


def levels(text: str) -> tuple[int, ...]:
    """ "1:32" doubles from 1 to 32; "1,8" is a list."""
    first, colon, last = text.partition(":")
    try:
        found = [int(part) for part in ([first, last] if colon else text.split(","))]
    except ValueError:
        found = []
    if not found or min(found) < 1 or max(found) > CONCURRENCY_MAX or (colon and found[0] > found[1]):
        raise argparse.ArgumentTypeError(f"expected FROM:TO or N,M,... from 1 to {CONCURRENCY_MAX}, got {text!r}")
    if not colon:
        return tuple(found)
    chosen = []
    level = found[0]
    while level < found[1]:
        chosen.append(level)
        level *= 2
    return (*chosen, found[1])


def seconds(text: str) -> float:
    """More than 0, at most an hour."""
    return _number_up_to(text, 3600)


def positive(text: str) -> float:
    """More than 0, at most a billion."""
    return _number_up_to(text, 1_000_000_000)


def _number_up_to(text: str, most: int) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= most:
        raise argparse.ArgumentTypeError(f"expected a number above 0, at most {most}, got {text!r}")
    return found


def model_time(text: str) -> tuple[str, float]:
    """MODEL=MS, such as detect=3.5."""
    name, equals, ms = text.rpartition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected MODEL=MS, got {text!r}")
    return name, positive(ms)


def profile(text: str) -> Mapping[str, tuple[Shape, Shape, Shape]]:
    """ "X:1x4:8x4:16x4,Z:1:8:16": the smallest, best and largest shape of each varying input."""
    ranges: dict[str, tuple[Shape, Shape, Shape]] = {}
    for part in text.split(","):
        name, *written = part.rsplit(":", 3)
        try:
            smallest, best, largest = (tuple(int(size) for size in shape.split("x")) for shape in written)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"expected NAME:MIN:OPT:MAX[,...], as X:1x4:8x4:16x4, got {text!r}"
            ) from None
        is_ordered = all(0 <= low <= at <= high for low, at, high in zip(smallest, best, largest, strict=False))
        if not (name and is_ordered and len(smallest) == len(best) == len(largest)):
            raise argparse.ArgumentTypeError(f"the shapes of {part!r} do not grow from the smallest to the largest")
        ranges[name] = smallest, best, largest
    return ranges
