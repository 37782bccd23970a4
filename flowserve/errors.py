"""What can go wrong, said once.

Decided here: the closed family of failures. The *class* says what happened, the message says where and
what to try. Which HTTP or gRPC status a class becomes is decided at that border, never here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


class FlowserveError(Exception):
    """Base of every error flowserve raises on purpose. `str(error)` is the text a client reads."""

    kind: ClassVar[str] = "internal"
    lineage: str = ""  # which step of a graph it happened in, as it stands behind the message
    place: Place | None = None  # what in the user's files it is about, where that is known


class Invalid(FlowserveError):
    """The request, file or option is wrong; sending it again unchanged cannot succeed."""

    kind = "invalid"


class AlreadyExists(Invalid):
    """What is to be made is there already."""

    kind = "already_exists"


class TooLarge(Invalid):
    """The request is larger than a limit the operator set."""

    kind = "too_large"


class Forbidden(FlowserveError):
    """It belongs to a group of calls that need a key, and came without it."""

    kind = "forbidden"


class NotFound(FlowserveError):
    """No model, version or route of that name."""

    kind = "not_found"


class Unavailable(FlowserveError):
    """Right in itself, but not now: not ready, queue full, deadline passed, draining."""

    kind = "unavailable"


class Unsupported(FlowserveError):
    """Understood, and not something this server (or this version of it) does."""

    kind = "unsupported"


class Cancelled(FlowserveError):
    """The caller left; nobody reads the answer."""

    kind = "cancelled"


class Internal(FlowserveError):
    """A model or the server itself failed. Never the client's fault."""

    kind = "internal"


class ModelFailed(Internal):
    """A model raised, or answered with something its own configuration forbids."""


class ModelRaised(ModelFailed):
    """A model's own code raised what is this error's cause. Its traceback is not in the log yet: whoever gives up on
    what ran, and runs no part of it again, writes it there.
    """

    def as_told(self) -> ModelFailed:
        """What callers read: without the cause, whose frames hold what ran."""
        return ModelFailed(str(self))


class InstanceDied(ModelFailed):
    """The process that ran a model ended. What it was running is never tried again: that may be what it died of."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where something was written. `file` is relative to the repository; lines and columns count from 1. `path`: the
    field that it is ("input[0].dims"), which is said instead of them where a program wrote the text.
    """

    file: str
    line: int = 0
    column: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"{self.file}: {self.path}"
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in something the user wrote: a numbered rule, where it was broken, what to do.

    `rule` is the stable id ("C12", "G7") under which docs and tests know the rule; "" where a parser or
    the operating system complained rather than a rule of ours.
    """

    message: str
    place: Place | None = None
    rule: str = ""
    hint: str = ""

    def __str__(self) -> str:
        where = f"{self.place}: " if self.place else ""
        rule = f" [{self.rule}]" if self.rule else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{where}{self.message}{hint}{rule}"


class Problems(Invalid):
    """All the mistakes found in one go, so that nobody fixes a file one error at a time.

    The text starts with the first problem's own message (clients match on Triton's wording), the rest follow
    on lines of their own.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        if not problems:
            raise ValueError("Problems needs at least one problem")
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))
