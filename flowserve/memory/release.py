"""Returns idle memory of a process to the operating system and to its GPUs, in two steps.

`collect` takes memory that is idle (pool, arenas) out of use, on the thread that owns the arenas; it is quick.
`Idle.release` returns it, on any thread; it takes about 0.4 ms for each MiB. It also trims malloc's heap (`TrimRule`).
Reads no clock: the caller passes the time, and calls `collect` again while memory `is_warm`.

Callers: runtime/release in a server, backends/worker in a worker process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flowserve.memory.arena import Arena
from flowserve.memory.device_memory import BlockPool
from flowserve.memory.devices import pools
from flowserve.memory.heap import TrimRule, free_bytes, trim
from flowserve.memory.pool import HOST, Buffer
from flowserve.memory.segment import Lease


class ProcessMemory:
    """The memory of this process. `is_warm`: a later call of `collect` may find idle memory even if nothing is used in
    between.
    """

    def __init__(self) -> None:
        self._trim_rule = TrimRule()
        self._must_look = False  # whether to look at malloc's heap
        self.is_warm = False

    def used(self) -> None:
        """Memory was used since the last `collect`, which may have left free memory on the heap."""
        self._must_look = True

    def collect(self, now_ns: int, arenas: Iterable[Arena], *, is_quiet: bool) -> Idle | None:
        """Take idle memory out of use; None if there is none. `is_quiet`: no request is running."""
        buffers = HOST.take_idle(now_ns)
        leases = []
        is_warm = HOST.kept_bytes > 0
        for arena in arenas:
            leases += arena.take_idle(now_ns)
            is_warm = is_warm or arena.is_warm
        device_pools = [pool for pool in pools() if pool.statistics().kept_bytes]
        if buffers:
            self._must_look = True
        trim_rule = None
        if self._must_look and self._trim_rule.may_look(now_ns, is_quiet=is_quiet):
            trim_rule, self._must_look = self._trim_rule, False
        self.is_warm = is_warm or bool(device_pools) or self._must_look
        if not (buffers or leases or device_pools or trim_rule):
            return None
        return Idle(now_ns, buffers, leases, device_pools, trim_rule, is_quiet=is_quiet)


class Idle:
    """Memory that is out of use. It counts as lent until `release` has run."""

    def __init__(
        self,
        now_ns: int,
        buffers: list[Buffer],
        leases: list[Lease],
        device_pools: Sequence[BlockPool],
        trim_rule: TrimRule | None,
        *,
        is_quiet: bool,
    ) -> None:
        self._now_ns = now_ns
        self._buffers = buffers
        self._leases = leases
        self._device_pools = device_pools
        self._trim_rule = trim_rule
        self._is_quiet = is_quiet

    def release(self) -> None:
        """Return it. Blocks; called once, on any thread. The interpreter lock is free meanwhile."""
        while self._buffers:
            self._buffers.pop().discard()
        while self._leases:
            lease = self._leases.pop()
            lease.segment.empty(lease.offset, lease.offset + lease.nbytes)
        for pool in self._device_pools:
            pool.release_idle(self._now_ns)
        rule = self._trim_rule
        if rule is not None and rule.must_trim(self._now_ns, free_bytes(), is_quiet=self._is_quiet):
            trim()
