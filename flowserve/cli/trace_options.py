"""What `--trace-config` can say: tritonserver's settings, global ones and those of a mode.

Decided here: how a setting is written, which there are and what each may be. What they mean is decided in
observe/trace_settings.py and runtime/traces.py.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Final

from flowserve.cli.option_values import whole_number
from flowserve.observe.trace_settings import LEVELS, MODES, OFF, OPENTELEMETRY, TRITON, TraceChoice

# Mode ("" for global), name, value.
TraceSetting = tuple[str, str, str]
KNOWN: Final = {
    "": ("level", "rate", "count", "mode"),
    TRITON: ("file", "log-frequency"),
    OPENTELEMETRY: (
        "url",
        "resource",
        "bsp_max_queue_size",
        "bsp_schedule_delay",
        "bsp_max_export_batch_size",
    ),
}
_NUMBERS: Final = {"rate": (0, 2**32 - 1), "count": (-1, 2**31 - 1), "log-frequency": (0, 2**32 - 1)}
_BSP_MOST: Final = 2**31 - 1


def trace_setting(text: str) -> TraceSetting:
    """SETTING=VALUE or MODE,SETTING=VALUE."""
    found = re.fullmatch(r"(?:([a-z]+),)?([a-z_-]+)=(.+)", text, re.ASCII | re.DOTALL)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected SETTING=VALUE or MODE,SETTING=VALUE, got {text!r}")
    mode, name, value = found[1] or "", found[2], found[3]
    if mode not in KNOWN:
        raise argparse.ArgumentTypeError(f"expected the mode triton or opentelemetry, got {mode!r}")
    if name not in KNOWN[mode]:
        where = f"mode {mode} has" if mode else "without a mode there is"
        raise argparse.ArgumentTypeError(f"{where} no setting {name!r}; there are {', '.join(KNOWN[mode])}")
    _check(name, value)
    return mode, name, value


def _check(name: str, value: str) -> None:
    if name in _NUMBERS:
        whole_number(*_NUMBERS[name])(value)
    elif name.startswith("bsp_"):
        whole_number(1, _BSP_MOST)(value)
    elif name == "level" and value not in LEVELS:
        raise argparse.ArgumentTypeError(f"expected the level {', '.join(LEVELS)}, got {value!r}")
    elif name == "mode" and value not in MODES:
        raise argparse.ArgumentTypeError(f"expected the mode {' or '.join(MODES)}, got {value!r}")
    elif name == "resource" and not re.fullmatch(r"[^=]+=.*", value, re.DOTALL):
        raise argparse.ArgumentTypeError(f"expected resource=KEY=VALUE, got {value!r}")


def trace_choice(settings: Sequence[TraceSetting]) -> TraceChoice:
    """What the settings come to; the last one wins where one is given twice, but for levels, which add up."""
    last = {(mode, name): value for mode, name, value in settings}
    levels = {value for mode, name, value in settings if (mode, name) == ("", "level")} - {OFF}
    return TraceChoice(
        trace_file=last.get((TRITON, "file"), ""),
        trace_level=tuple(level for level in LEVELS if level in levels) or (OFF,),
        trace_rate=int(last.get(("", "rate"), 1000)),
        trace_count=int(last.get(("", "count"), -1)),
        log_frequency=int(last.get((TRITON, "log-frequency"), 0)),
        trace_mode=last.get(("", "mode"), TRITON),
    )


def opentelemetry_settings(settings: Sequence[TraceSetting]) -> dict[str, tuple[str, ...]]:
    """Those of that mode, each as often as it was given."""
    given: dict[str, tuple[str, ...]] = {}
    for mode, name, value in settings:
        if mode == OPENTELEMETRY:
            given[name] = (*given.get(name, ()), value)
    return given
