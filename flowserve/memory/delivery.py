"""Whose rows of an output go where.

Decided here: which runs of a batch's rows somebody reads on the host, and that neighbours among them cross together;
what each member then holds: rows on the device, rows on the host, or both. Copying is stream.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from flowserve.memory.device_tensor import DeviceArray, DeviceTensor, Mirror
from flowserve.memory.tensor import Tensor
from flowserve.values import Array

# Who reads an output of a member: bits.
ON_HOST: Final = 1
ON_DEVICE: Final = 2


class Output:
    """One output of a batch; `runs` are the rows, from and to, that somebody reads on the host."""

    def __init__(self, array: DeviceArray, rows: Sequence[int] | None, read_at: Sequence[int] | None) -> None:
        self.array = array
        self._read_at = read_at
        self._rows = rows
        stops = [*accumulate(rows)] if rows is not None else []
        self._bounds = [*zip([0, *stops], stops, strict=False)]
        self.runs = self._host_runs()

    def members(self, landed: Sequence[Array]) -> list[Tensor]:
        """The members' tensors, where their readers look for them; `landed` are the runs."""
        if self._rows is None:
            host = Tensor(landed[0]) if landed else None
            return [self._member(host, DeviceTensor(self.array), 0)]
        tensors: list[Tensor] = []
        run = 0
        for m, (start, stop) in enumerate(self._bounds):
            while run < len(self.runs) and self.runs[run][1] < stop:
                run += 1
            host = None
            if self._is_read_on_host(m):
                first = self.runs[run][0]
                host = Tensor(landed[run], start - first, stop - first)
            tensors.append(self._member(host, DeviceTensor(self.array, start, stop), m))
        return tensors

    def _member(self, host: Tensor | None, copy: DeviceTensor, m: int) -> Tensor:
        if host is None:
            return copy
        if self._read_at is None or not self._read_at[m] & ON_DEVICE or not self.array.place.is_gpu:
            return host
        return Mirror(host, copy)

    def _is_read_on_host(self, m: int) -> bool:
        return self._read_at is None or bool(self._read_at[m] & ON_HOST) or not self.array.place.is_gpu

    def _host_runs(self) -> list[tuple[int, int]]:
        if self._rows is None:
            return [(0, 0)] if self._is_read_on_host(0) else []
        runs: list[tuple[int, int]] = []
        for m, (start, stop) in enumerate(self._bounds):
            if not self._is_read_on_host(m):
                continue
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))
        return runs
