"""The resources of a rate limiter: their counts, the instances that hold them, and the turn of each instance.

Decides what a resource is (a name on one device, or a name that the whole server shares), how many copies exist, and
how executions and priorities determine turns. By default there are as many copies as the most demanding instance needs.
Does not know queues, batches or time; order.py decides when a queue is considered.

Always true (see `check`): the held copies are those of the running executions. The caller checks `has_room` before
`begin`, so an execution without enough free copies does not begin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from flowserve.config.types import RateLimiter
from flowserve.errors import Problem

EVERYWHERE: Final = -1  # the device of a resource that the whole server shares

# The largest number of executions by which an instance may lag behind the others, and may then make up for.
BEHIND_MAX: Final = 16

Resource = tuple[str, int]  # a name and the device it is on, or EVERYWHERE


@dataclass(frozen=True, slots=True)
class Available:
    """A resource as configured: `count` copies of `name` on one device, or on every device (None)."""

    name: str
    count: int
    device: int | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """The resources an instance holds while it runs, and its priority: at 2 it runs half as often as at 1."""

    amounts: Mapping[Resource, int]
    priority: int = 1

    @classmethod
    def of(cls, limits: RateLimiter, device: int) -> Needs:
        """The needs of an instance on `device` whose group has these `limits`. Repeated resources are added."""
        amounts: Counter[Resource] = Counter()
        for wanted in limits.resources:
            if wanted.count:
                amounts[wanted.name, EVERYWHERE if wanted.is_global else device] += wanted.count
        return cls(amounts, limits.priority)


@dataclass(slots=True, eq=False)
class Account:
    """One instance at the limiter. `turn` grows by its priority with each execution; the lowest turn is next."""

    needs: Needs
    turn: int = 0


class Limiter:
    """The resources of a server. `given`: the configured resources; if there are any, no other resource exists.
    `total`: the number of copies of every resource that an instance needs.
    """

    def __init__(self, given: Sequence[Available] = ()) -> None:
        self._given = tuple(given)
        self._accounts: list[Account] = []
        self.total: dict[Resource, int] = {}
        self._held: Counter[Resource] = Counter()
        self._turn = 0  # the turn of the last execution

    def refusal(self, needs: Needs, beside: Iterable[Needs] = ()) -> Problem | None:
        """Why an instance with these needs could never run, together with those of `beside`; None if it could."""
        scopes = {name: device == EVERYWHERE for name, device in self.total}
        for one in (*beside, needs):
            for name, device in one.amounts:
                if scopes.setdefault(name, device == EVERYWHERE) != (device == EVERYWHERE):
                    text = f'Resource "{name}" is present as both global and device-specific resource in the model'
                    hint = "write `global: true` beside it everywhere, or nowhere, also in the models that are loaded"
                    return Problem(f"{text} configuration.", hint=hint)
        for resource, count in needs.amounts.items():
            limit = self._given_count(resource) if self._given else count
            if limit < count:
                text = (
                    f'Resource count for "{resource[0]}" is limited to {limit} which will prevent scheduling of one or'
                    f" more model instances, the minimum required count is {count}"
                )
                return Problem(text, hint=f"start with --rate-limit-resource={resource[0]}:{count}, or ask for less")
        return None

    def add(self, needs: Iterable[Needs]) -> list[Account]:
        """Add instances that `refusal` accepts. Their turns begin at the current turn."""
        added = [Account(one) for one in needs]
        self._accounts += added
        self.catch_up(added)
        self._count()
        return added

    def remove(self, accounts: Collection[Account]) -> None:
        """Remove instances, which hold no resources."""
        self._accounts = [account for account in self._accounts if account not in accounts]
        self._count()

    def held(self) -> dict[Resource, int]:
        """The number of held copies of each resource, without those of which none is held."""
        return {resource: count for resource, count in self._held.items() if count}

    def catch_up(self, accounts: Iterable[Account]) -> None:
        """Advance the turns of instances that were idle, so that they do not make up for the turns they missed."""
        for account in accounts:
            account.turn = max(account.turn, self._turn)

    def has_room(self, needs: Needs, withheld: Mapping[Resource, int]) -> bool:
        """Whether an instance could run now without using the `withheld` copies."""
        return all(
            self.total[resource] - self._held[resource] - withheld.get(resource, 0) >= count
            for resource, count in needs.amounts.items()
        )

    def begin(self, account: Account) -> None:
        """An execution begins: hold its resources, and advance the instance's turn."""
        priority = account.needs.priority
        account.turn = max(account.turn, self._turn - BEHIND_MAX * priority)
        self._turn = max(self._turn, account.turn)
        account.turn += priority
        for resource, count in account.needs.amounts.items():
            self._held[resource] += count

    def end(self, account: Account) -> None:
        """An execution is over: free its resources."""
        for resource, count in account.needs.amounts.items():
            self._held[resource] -= count

    def _count(self) -> None:
        self.total = {}
        for account in self._accounts:
            for resource, count in account.needs.amounts.items():
                limit = self._given_count(resource) if self._given else count
                self.total[resource] = max(self.total.get(resource, 0), limit)

    def _given_count(self, resource: Resource) -> int:
        name, device = resource
        counts = [
            given.count
            for given in self._given
            if given.name == name and (device == EVERYWHERE or given.device in (None, device))
        ]
        return max(counts, default=0)

    def check(self, running: Iterable[Account]) -> None:
        """Assert the invariant; `running` are the accounts of the running executions. For tests and simulation."""
        expected: Counter[Resource] = Counter()
        for account in running:
            expected.update(account.needs.amounts)
        assert self.held() == expected, "the held copies are not those of the running executions"
