"""What a word on the command line may be: parsers that argparse calls, one for each kind of value.

Decided here: how booleans, numbers, resources, restrictions and the like are written, and what is said of a word that
is none. Which option takes which kind, options.py decides.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from flowserve.errors import Invalid

if TYPE_CHECKING:
    from flowserve.runtime.restriction import Restriction

# Settings of the onnxruntime backend for all its models, each with the least it may be. Other backends know their own.
ONNXRUNTIME_SETTINGS: Final[Mapping[str, int]] = {
    "default-max-batch-size": 1,
    "intra_op_thread_count": 0,
    "inter_op_thread_count": 0,
    "execution_mode": 0,
    "enable_mem_arena": 0,
    "enable_mem_pattern": 0,
}


def boolean(text: str) -> bool:
    """true, false, 1 or 0, in any case, as tritonserver takes them."""
    known = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"expected true, false, 1 or 0, got {text!r}")
    return known[text.lower()]


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
    from flowserve.runtime.restriction import parse_restriction  # not before it is needed: help should be quick

    try:
        return parse_restriction(text)
    except Invalid as error:
        raise argparse.ArgumentTypeError(f"{error}, got {text!r}") from None


def backend_setting(text: str) -> tuple[str, str, str]:
    """BACKEND,KEY=VALUE; without a backend, for all that know the key."""
    found = re.fullmatch(r"(?:([a-z0-9_]*),)?([A-Za-z0-9_-]+)=(.+)", text, re.ASCII)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected BACKEND,KEY=VALUE, got {text!r}")
    backend, key, value = found[1] or "onnxruntime", found[2], found[3]
    if backend == "onnxruntime":
        if key not in ONNXRUNTIME_SETTINGS:
            known = ", ".join(ONNXRUNTIME_SETTINGS)
            raise argparse.ArgumentTypeError(f"onnxruntime has no setting {key!r}; it has {known}")
        whole_number(ONNXRUNTIME_SETTINGS[key], 2**31 - 1)(value)
    return backend, key, value


def file_stem(text: str) -> str:
    """The name of a file, without a folder and without what says its kind."""
    if not re.fullmatch(r"[^\s/\\\x00]+", text) or text in (".", ".."):
        raise argparse.ArgumentTypeError(f"expected a name without slashes and spaces, got {text!r}")
    return text


def pattern(text: str) -> re.Pattern[str]:
    """A regular expression for the names of headers."""
    try:
        return re.compile(text, re.IGNORECASE | re.ASCII)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, got {text!r}: {error}") from None
