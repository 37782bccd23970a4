"""Python models of iterative sequences: requests that a model gives back, to be run again.

Decided here: what a request that is given back may be answered with (nothing; its states, where the server keeps
them), and that it finds the response sender that it had before. How often a request runs, and with whom, is not
known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowserve.backends.base import Results, Work
from flowserve.backends.python import PythonInstance
from flowserve.backends.python_requests import GivenRequest
from flowserve.backends.python_sender import Executed, answer_the_forgotten, refuse_returned
from flowserve.backends.triton_objects import InferenceResponse, TritonError


class IterativeInstance(PythonInstance):
    """One object of the model's class."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        sequence = self._source.config.sequence
        self._states = frozenset(state.output for state in sequence.states) if sequence is not None else frozenset()

    def _results(
        self, requests: Sequence[Executed], responses: list[Any], work: Work, gathered_ns: int, computed_ns: int
    ) -> Results:
        again = [m for m, request in enumerate(requests) if request._is_rescheduled]
        if work.senders is not None:
            refuse_returned(responses, work.senders, self._about.name)
            self._keep_senders(requests, work, again)
            return Results([], gathered_ns=gathered_ns, computed_ns=computed_ns, rescheduled=again)
        for m in again[: len(responses)]:
            responses[m] = self._of_one_that_goes_on(responses[m])
        results = super()._results(requests, responses, work, gathered_ns, computed_ns)
        results.rescheduled = [m for m in again if m not in results.errors]
        return results

    def _request_class(self, work: Work) -> type[GivenRequest]:
        return GivenRequest  # who lets go of one may get it again

    def _make_sender(self, work: Work, member: int) -> Any:
        kept = None if work.senders is None else work.senders[member].kept
        return super()._make_sender(work, member) if kept is None else kept

    def _keep_senders(self, requests: Sequence[Any], work: Work, again: Sequence[int]) -> None:
        """Whoever runs again keeps its sender, asked for or not; of the others, only the model does."""
        assert work.senders is not None
        for m, (request, sender) in enumerate(zip(requests, work.senders, strict=True)):
            kept = request._sender or sender.kept
            sender.kept = kept if m in again and not sender.is_cancelled() else None
            if kept is None and m not in again:
                answer_the_forgotten([request], [sender], self._about.name)

    def _of_one_that_goes_on(self, response: Any) -> InferenceResponse:
        if response is None:
            return InferenceResponse()
        if isinstance(response, InferenceResponse):
            if response.has_error():
                return response
            if self._states:
                return InferenceResponse([one for one in response._outputs if one._name in self._states])
        # Triton's words, spelling included: clients look for them.
        text = "Expected a None object in the execute function return list for reschduled request"
        return InferenceResponse(
            error=TritonError(f"{text}, found type '{type(response)}' (model '{self._about.name}')")
        )
