"""Parameters of responses.

Decides which parameters of a model's response reach the client and later steps. Those of a plain model reach its
client. Of a step of an ensemble only the sequence parameters do, as on Triton: they apply to the steps after it and to
the response, and flags that are not in the response are off. So the response of every ensemble contains the id of its
sequence, 0 for none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from flowserve.errors import FlowserveError, Invalid, ModelFailed
from flowserve.scheduling.batch import Batch
from flowserve.scheduling.frames.borders import RegionFrame
from flowserve.scheduling.frames.frame import Frame, Ticket
from flowserve.values import Parameter, Request, fits_64_bits

# For an ensemble's request without a sequence; always this object, so that encoders can compare by identity.
STATELESS: Final[Mapping[str, Parameter]] = {"sequence_id": 0, "sequence_start": False, "sequence_end": False}
NONE: Final[Mapping[str, Parameter]] = {}

Said = Mapping[int, Mapping[str, Any]]


def take_parameters(batch: Batch, said: Said, errors: Mapping[int, FlowserveError]) -> Mapping[int, FlowserveError]:
    """Set the response parameters of the members of a batch. Returns `errors` and the errors of members with invalid
    parameters.
    """
    found = {**errors}
    for m, parameters in said.items():
        ticket = batch.tickets[m]
        try:
            take_parameters_of(ticket, parameters)
        except FlowserveError as error:
            found.setdefault(m, ticket.copy_located(error, batch.instance))
    return found


def take_parameters_of(ticket: Ticket, parameters: Mapping[str, Any]) -> None:
    """Set the response parameters of one step. Raises as `request_after` does."""
    frame = ticket.frame
    request = request_after(frame, ticket.node.model.name, parameters)
    if request is None:
        frame.parameters = parameters
    elif isinstance(frame, RegionFrame):
        frame.replace_request(request)
    else:
        frame.request = request


def request_after(frame: Frame, model: str, parameters: Mapping[str, Any]) -> Request | None:
    """The request of an ensemble for the steps after one that returned these parameters; None if the request is of one
    model, whose parameters are those of the response. Raises ModelFailed or Invalid for invalid parameters.
    """
    for key, value in parameters.items():
        if not isinstance(value, (str, int, float)):
            raise ModelFailed(f"model '{model}': response parameters are strings, numbers, booleans")
        if not _can_travel(key) or not _can_travel(value):
            raise ModelFailed(
                f"model '{model}': response parameter {key!r} is {value!r:.100}, which no answer can say; numbers have "
                "at most 64 bits, and strings are Unicode text"
            )
    request: Request = frame.request
    if not frame.plan.graph.is_ensemble:
        return None
    if not STATELESS.keys() & parameters.keys():
        return request
    sequence_id = parameters.get("sequence_id", request.sequence_id)
    start, end = (parameters.get(key, False) for key in ("sequence_start", "sequence_end"))
    if isinstance(sequence_id, bool) or not isinstance(sequence_id, (int, str)):
        raise Invalid(f"expected parameter 'sequence_id' to be an integer or a string, got {sequence_id!r}")
    for key, flag in (("sequence_start", start), ("sequence_end", end)):
        if not isinstance(flag, bool):
            raise Invalid(f"expected parameter '{key}' to be true or false, got {flag!r}")
    return replace(request, sequence_id=sequence_id, sequence_start=start, sequence_end=end)


def _can_travel(value: Parameter) -> bool:
    """Whether both protocols can represent the value."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            return False
        return True
    return not isinstance(value, int) or fits_64_bits(value)


def of_ensemble(request: Request) -> Mapping[str, Parameter]:
    """The parameters of an ensemble's response: the sequence of its request, or the one that the last step set."""
    if not (request.sequence_id or request.sequence_start or request.sequence_end):
        return STATELESS
    return {
        "sequence_id": request.sequence_id,
        "sequence_start": request.sequence_start,
        "sequence_end": request.sequence_end,
    }
