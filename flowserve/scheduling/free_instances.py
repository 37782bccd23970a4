"""The free instances of a model whose instances take several batches at once.

Decides which instance is next: one that runs the fewest batches, and among these the one that has waited longest, so
that no batch waits behind another while an instance is idle. Reads like the deque of free instances of other models
(`ModelQueue`), and has an entry for each batch that an instance can take. Every call takes the same time for any number
of instances.

Does not know batches. Used by `model_queue.ModelQueue`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any


class FreeInstances:
    """`instances` contains each instance once for each batch that it takes at a time; all are free."""

    __slots__ = ("_by_count", "_counts", "_length")

    def __init__(self, instances: Sequence[Any]) -> None:
        self._counts: Counter[Any] = Counter()
        # `[n]`: the instances with n entries, in the order in which they reached that number. Index 0 is not used.
        self._by_count: list[dict[Any, None]] = [{} for _ in range(max(Counter(instances).values(), default=0) + 1)]
        self._length = 0
        for instance in instances:
            self.append(instance)

    def append(self, instance: Any) -> None:
        """This instance can take one more batch."""
        self._move(instance, 1)

    def popleft(self) -> Any:
        """Take an entry of the next instance. Raises IndexError if there is none."""
        for waiting in reversed(self._by_count):
            if waiting:
                instance = next(iter(waiting))
                self._move(instance, -1)
                return instance
        raise IndexError("no instance is free")

    def remove(self, instance: Any) -> None:
        """Take an entry of this instance. Raises ValueError if it has none."""
        if not self._counts[instance]:
            raise ValueError("the instance is not free")
        self._move(instance, -1)

    def count(self, instance: Any) -> int:
        """The entries of this instance: how many more batches it can take."""
        return self._counts[instance]

    def _move(self, instance: Any, by: int) -> None:
        count = self._counts[instance]
        if count:
            del self._by_count[count][instance]
        count += by
        self._counts[instance] = count
        if count:
            self._by_count[count][instance] = None
        self._length += by

    def __getitem__(self, index: int) -> Any:
        return [*self][index]

    def __contains__(self, instance: object) -> bool:
        return self._counts[instance] > 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return iter(
            [
                instance
                for waiting in reversed(self._by_count)
                for instance in waiting
                for _ in range(self._counts[instance])
            ]
        )
