"""Rate limiting: how much of each resource there is, who holds it, and whose turn it is.

Decided here: what a resource is (a name on one device, or a name that the whole server shares), how many copies there
are, and how executions and priorities become turns. The copies are, unless somebody said otherwise, the most that any
instance asks for. It does not know queues, batches or time; who is looked at, and when, is limited.py's.

Always true: what is held is what executions under way hold, no more and no less (see `check`); and an execution for
which there is no room is not begun (its caller sees to it, by `has_room`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from flowserve.config.types import RateLimiter
from flowserve.errors import Problem

EVERYWHERE: Final = -1  # the device of a resource that the whole server shares

# So many executions may an instance make up for that others made while it was busy or skipped, and no more: what was
# never contended for is nobody's debt.
BEHIND_MAX: Final = 16

Resource = tuple[str, int]  # a name and the device it is on, or EVERYWHERE


@dataclass(frozen=True, slots=True)
class Available:
    """What the operator gives: `count` copies of `name` on one device, or on every one (None)."""

    name: str
    count: int
    device: int | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """What one instance holds while it runs, and how much one execution weighs: at 2 it gets half as many as at 1."""

    amounts: Mapping[Resource, int]
    priority: int = 1

    @classmethod
    def of(cls, limits: RateLimiter, device: int) -> Needs:
        """The needs of an instance on `device` whose group says `limits`. What is listed twice is needed twice."""
        amounts: dict[Resource, int] = {}
        for wanted in limits.resources:
            if wanted.count:
                resource = (wanted.name, EVERYWHERE if wanted.is_global else device)
                amounts[resource] = amounts.get(resource, 0) + wanted.count
        return cls(amounts, limits.priority)


class Account:
    """One instance at the limiter. `turn` is where its executions have brought it: the lowest goes first."""

    __slots__ = ("needs", "turn")

    def __init__(self, needs: Needs) -> None:
        self.needs = needs
        self.turn = 0


class Limiter:
    """The resources of a server. `given`: what the operator said there is; then there is nothing else."""

    def __init__(self, given: Sequence[Available] = ()) -> None:
        self._given = tuple(given)
        self._accounts: list[Account] = []
        self._total: dict[Resource, int] = {}
        self._held: dict[Resource, int] = {}
        self._turn = 0  # of the execution that began last

    def refusal(self, needs: Needs, beside: Iterable[Needs] = ()) -> Problem | None:
        """Why an instance with these needs could never run here, with those that are `beside` it."""
        scopes = {name: device == EVERYWHERE for name, device in self._total}
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
        """Take in instances that `refusal` has nothing against. They come to their turns as if they had been here."""
        added = [Account(one) for one in needs]
        self._accounts += added
        self.catch_up(added)
        self._count()
        return added

    def remove(self, accounts: Collection[Account]) -> None:
        """Instances are gone; they hold nothing."""
        self._accounts = [account for account in self._accounts if account not in accounts]
        self._count()

    def counts(self) -> dict[Resource, int]:
        """How many copies there are of every resource that some instance names."""
        return dict(self._total)

    def held(self) -> dict[Resource, int]:
        """How many copies are in somebody's hands; resources of which none is are left out."""
        return {resource: count for resource, count in self._held.items() if count}

    def catch_up(self, accounts: Iterable[Account]) -> None:
        """Whoever did not want to run is not owed the turns it let go by."""
        for account in accounts:
            account.turn = max(account.turn, self._turn)

    def has_room(self, needs: Needs, withheld: Mapping[Resource, int]) -> bool:
        """Whether an instance could run now and leave `withheld` untouched."""
        return all(
            self._total[resource] - self._held.get(resource, 0) - withheld.get(resource, 0) >= count
            for resource, count in needs.amounts.items()
        )

    def begin(self, account: Account) -> None:
        """An execution begins: its resources are held, and it was this instance's turn."""
        priority = account.needs.priority
        account.turn = max(account.turn, self._turn - BEHIND_MAX * priority)
        self._turn = max(self._turn, account.turn)
        account.turn += priority
        for resource, count in account.needs.amounts.items():
            self._held[resource] = self._held.get(resource, 0) + count

    def end(self, account: Account) -> None:
        """An execution is over, however it ended."""
        for resource, count in account.needs.amounts.items():
            self._held[resource] -= count

    def _count(self) -> None:
        self._total = {}
        for account in self._accounts:
            for resource, count in account.needs.amounts.items():
                limit = self._given_count(resource) if self._given else count
                self._total[resource] = max(self._total.get(resource, 0), limit)

    def _given_count(self, resource: Resource) -> int:
        name, device = resource
        counts = [
            given.count
            for given in self._given
            if given.name == name and (device == EVERYWHERE or given.device in (None, device))
        ]
        return max(counts, default=0)

    def check(self, running: Iterable[Account]) -> None:
        """Assert the promise; `running` are the accounts of the executions under way. For tests and simulation."""
        expected: dict[Resource, int] = {}
        for account in running:
            for resource, count in account.needs.amounts.items():
                expected[resource] = expected.get(resource, 0) + count
        assert self.held() == expected, "something is held that nobody has, or the other way round"
