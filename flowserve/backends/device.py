"""What instances on a GPU have and are told besides what every instance is (base.py).

Decided here: an instance that computes on a device takes tensors where they lie, on the host or on any device, and
leaves its outputs where they are read next. Such an instance runs on its thread, never on the event loop. All others
see tensors on the host only, and nothing of this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from flowserve.backends.base import Work
from flowserve.values import MemoryPlace


@dataclass(slots=True, eq=False)
class DeviceWork(Work):
    """A batch for an instance on a device: its inputs may be `DeviceTensor`s and `Mirror`s.

    `read_at[j][m]` says who reads output j of member m (memory/delivery.py's ON_HOST, ON_DEVICE or both); None: all is
    read on the host. What is read there is on the host when `run` returns, what is not may still be being made.
    """

    read_at: Sequence[Sequence[int]] | None = None


@runtime_checkable
class OnDevice(Protocol):
    """What an `Instance` has besides where it computes on a GPU and takes `DeviceWork`. `is_of_any_thread`: runs may
    come from one thread after the other, as long as it is one at a time; else all come from the one that opened it.
    """

    @property
    def place(self) -> MemoryPlace: ...

    @property
    def is_of_any_thread(self) -> bool: ...
