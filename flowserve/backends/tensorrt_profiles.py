"""Optimisation profiles: which shapes a plan was built for, and which of them runs a batch.

Decided here: that a batch runs with the profile whose best shapes are nearest to its own among those that allow it, the
first of equals; and what is said where none does. It knows shapes and numbers, and nothing of TensorRT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from flowserve.backends.shapes import shown
from flowserve.errors import Invalid

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """`ranges`: the smallest, best and largest shape of every input, batch dimension included."""

    index: int
    ranges: Mapping[str, tuple[Shape, Shape, Shape]]

    def allows(self, shapes: Mapping[str, Shape]) -> bool:
        return all(
            name not in shapes or _within(smallest, shapes[name], largest)
            for name, (smallest, _, largest) in self.ranges.items()
        )

    def distance(self, shapes: Mapping[str, Shape]) -> int:
        """How many elements the inputs have more or fewer than what it is best at."""
        return sum(abs(prod(shapes[name]) - prod(best)) for name, (_, best, _) in self.ranges.items() if name in shapes)

    @property
    def rows_max(self) -> int:
        """The most rows that it takes."""
        return min((largest[0] for _, _, largest in self.ranges.values() if largest), default=0)


def choose(profiles: Sequence[Profile], shapes: Mapping[str, Shape], model: str) -> Profile:
    """The profile for a batch of these shapes. Raises Invalid, naming what the profiles allow."""
    fitting = [profile for profile in profiles if profile.allows(shapes)]
    if fitting:
        return min(fitting, key=lambda profile: profile.distance(shapes))
    wanted = ", ".join(f"'{name}' {shown(shape)}" for name, shape in shapes.items())
    allowed = "; ".join(
        f"profile {profile.index}: "
        + ", ".join(f"'{name}' {shown(low)} to {shown(high)}" for name, (low, _, high) in profile.ranges.items())
        for profile in profiles
    )
    raise Invalid(f"no optimisation profile of model '{model}' takes inputs {wanted}; it has {allowed}")


def _within(smallest: Shape, shape: Shape, largest: Shape) -> bool:
    return len(shape) == len(smallest) and all(
        low <= size <= high for low, size, high in zip(smallest, shape, largest, strict=True)
    )
