"""Error hierarchy.

Decides the closed set of failure kinds. The *class* is the kind of failure, the message has the location and a remedy.
Does not know HTTP or gRPC status codes: `http` and `grpc` map each class to one. Callers: every package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from traceback import format_exception
from typing import ClassVar, Final

TRACEBACK_CHARACTERS_MAX: Final = 16_384
NO_PERMISSION: Final = "the user that flowserve runs as must be allowed to read it"  # a hint


class FlowserveError(Exception):
    """Base of every error that flowserve raises deliberately. `str(error)` is the text for clients."""

    kind: ClassVar[str] = "internal"
    lineage: str = ""  # the step of a graph in which it occurred, as text appended to the message
    place: Place | None = None  # the place in the user's files, if known
    raised: Raised | None = None  # the exception of a model's code that is the cause, for the log
    is_refusal: bool = False  # the queue of a model did not take the request
    version: int = 0  # the version of a model that could not be loaded, if it is one


class Invalid(FlowserveError):
    """The request, file or option is invalid; a retry without a change cannot succeed."""

    kind = "invalid"


class AlreadyExists(Invalid):
    """The object to be created exists already."""

    kind = "already_exists"


class TooLarge(Invalid):
    """The request exceeds a size limit set by the operator."""

    kind = "too_large"


class Forbidden(FlowserveError):
    """The call belongs to a restricted API group and has no valid key."""

    kind = "forbidden"


class NotFound(FlowserveError):
    """There is no model, version or route of that name."""

    kind = "not_found"


class Unavailable(FlowserveError):
    """The request is valid but cannot be served now: not ready, queue full, draining."""

    kind = "unavailable"


class Overloaded(Unavailable):
    """A limit on the work in the server at once is reached, or memory or descriptors are used up: the same request may
    succeed a moment later.
    """


class DeadlineExceeded(Unavailable):
    """The deadline of a request passed."""

    kind = "deadline_exceeded"


class Unsupported(FlowserveError):
    """The request is valid but not supported by this server or version."""

    kind = "unsupported"


class Cancelled(FlowserveError):
    """The caller left; the response has no reader."""

    kind = "cancelled"


class Internal(FlowserveError):
    """A model or the server itself failed. Never a fault of the client."""

    kind = "internal"


class ModelFailed(Internal):
    """A model raised, or returned an output that contradicts its own configuration."""


class ModelUnknown(ModelFailed):
    """A model reported a failure of a kind that it does not know (TritonError.UNKNOWN)."""

    kind = "unknown"


class Raised:
    """The traceback of an exception of a model's code, as text: its frames would hold the batch. The errors of all
    requests that fail by it share this object, and the first line of the log about one of them takes the text. The
    text is "" if the model broke a rule without raising.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        if len(text) > TRACEBACK_CHARACTERS_MAX:
            half = TRACEBACK_CHARACTERS_MAX // 2
            text = f"{text[:half]}\n... (cut)\n{text[-half:]}"
        self._text: str | None = text.removesuffix("\n")

    def take(self) -> str | None:
        """The text; None if it was taken before."""
        text, self._text = self._text, None
        return text


def told(error: BaseException, text: str, members: int) -> str:
    """The text about an exception of a model for the clients of its batch, which has so many `members`. `text` has the
    exception's message, and is for the client of the only one: the message may contain values of any member, so that
    the clients of several get the exception's type. The log has the message (`model_raised`).
    """
    if members == 1:
        return text
    return f"{type(error).__name__} in a batch of {members} requests; its text is in the server's log"


def model_raised(text: str, error: BaseException) -> ModelFailed:
    """The error of a batch whose model raised `error`. `text`: for the clients."""
    failed = ModelFailed(text)
    failed.raised = Raised("".join(format_exception(error)))
    return failed


class InstanceDied(ModelFailed):
    """The process that ran a model ended. Its batch is never retried, because it may have caused the end."""


class MachineLost(Unavailable):
    """The machine on which a model ran is lost, with everything that ran there. A batch of a pure model may run once
    more.
    """


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A position in a user's file. `file` is relative to the repository; lines and columns count from 1. `path`: the
    field ("input[0].dims"), shown instead of line and column if a program generated the text.
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
    """One mistake in a user's file or graph: message, place, number of the broken rule, hint.

    `rule` is the stable id ("M12", "G7") that docs and tests use for the rule; "" if a parser or the operating system
    reported the problem. `depends_on`: the deployment whose own problems are the cause, "" if there is none.
    """

    message: str
    place: Place | None = None
    rule: str = ""
    hint: str = ""
    depends_on: str = ""

    def __str__(self) -> str:
        where = f"{self.place}: " if self.place else ""
        rule = f" [{self.rule}]" if self.rule else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{where}{self.message}{hint}{rule}"


class Problems(Invalid):
    """All mistakes found together, so that a user need not fix a file one error at a time.

    The text starts with the first problem's own message, because clients match on Triton's wording; the others follow,
    one per line.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        if not problems:
            raise ValueError("Problems needs at least one problem")
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def problems_of(error: FlowserveError) -> Sequence[Problem]:
    """The problems that an error consists of; any other error is one problem, at the error's own place."""
    return error.problems if isinstance(error, Problems) else (Problem(str(error), error.place),)
