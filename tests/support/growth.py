"""How the work of the code grows with its input: executed bytecode instructions, counted.

Decides that work is the number of instructions that the interpreter executes in all Python frames of a call: the same
in each run, on any machine. Loops inside C functions count as one instruction.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

QUADRATIC_FROM: Final = 6.0  # linear work grows fourfold from n to 4 n, quadratic work sixteenfold


def instructions(work: Callable[[], object]) -> int:
    """The number of bytecode instructions that `work()` executes."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def growth(prepare: Callable[[int], Callable[[], object]], n: int) -> float:
    """The instructions of the work that `prepare(4 * n)` returns, divided by those of `prepare(n)`."""
    return instructions(prepare(4 * n)) / instructions(prepare(n))
