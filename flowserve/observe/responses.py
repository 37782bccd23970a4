"""What the responses of a decoupled model came to, each by its place in its request: Triton's `response_stats`.

Decided here: what is counted of the first response to any request, of the second, and so on, and up to which place:
a request may have any number of them. Durations are nanoseconds; those of a response begin where the one before it
ended. Who measures them, and when, is the runtime's.
"""

from __future__ import annotations

from typing import Any, Final

# Of later responses nothing is counted. They are many in few requests, and each place would be kept for ever.
RESPONSES_MAX: Final = 1024


class Response:
    """All responses at one place. Each pair is a count and the durations together."""

    __slots__ = ("cancelled", "empty", "failed", "infer", "output", "succeeded")

    def __init__(self) -> None:
        self.infer = [0, 0]
        self.output = [0, 0]
        self.succeeded = [0, 0]
        self.failed = [0, 0]
        self.empty = [0, 0]
        self.cancelled = [0, 0]

    def as_json(self) -> dict[str, Any]:
        return {
            "compute_infer": _sum(self.infer),
            "compute_output": _sum(self.output),
            "success": _sum(self.succeeded),
            "fail": _sum(self.failed),
            "empty_response": _sum(self.empty),
            "cancel": _sum(self.cancelled),
        }


class Responses:
    """Those of one deployment. `place` counts from 0."""

    __slots__ = ("_places",)

    def __init__(self) -> None:
        self._places: list[Response] = []

    def answered(self, place: int, infer_ns: int, output_ns: int) -> None:
        """The model took `infer_ns` for it, and `output_ns` went into taking it over."""
        response = self._at(place)
        _add(response.infer, infer_ns)
        _add(response.output, output_ns)
        _add(response.succeeded, infer_ns + output_ns)

    def failed(self, place: int, infer_ns: int) -> None:
        """It was an error."""
        response = self._at(place)
        _add(response.infer, infer_ns)
        _add(response.output, 0)
        _add(response.failed, infer_ns)

    def was_empty(self, place: int, infer_ns: int) -> None:
        """In its place the model said that there are no more."""
        response = self._at(place)
        _add(response.infer, infer_ns)
        _add(response.empty, infer_ns)

    def cancelled(self, place: int, infer_ns: int) -> None:
        """Nobody wanted it any more; so long the model had been at it."""
        _add(self._at(place).cancelled, infer_ns)

    def as_json(self) -> dict[str, Any]:
        return {str(place): response.as_json() for place, response in enumerate(self._places)}

    def _at(self, place: int) -> Response:
        places = self._places
        if place >= RESPONSES_MAX:
            return Response()
        while len(places) <= place:
            places.append(Response())
        return places[place]


def _add(pair: list[int], ns: int) -> None:
    pair[0] += 1
    pair[1] += ns


def _sum(pair: list[int]) -> dict[str, int]:
    return {"count": pair[0], "ns": pair[1]}
